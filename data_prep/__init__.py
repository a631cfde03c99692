"""Data preparation: from text and conversations to token rows and prompts."""
