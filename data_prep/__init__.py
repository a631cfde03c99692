"""Text and conversations in, token rows and prompts out."""
