"""What was measured, for people and for machines: JSON, Markdown, W&B, and two reports side by side."""
