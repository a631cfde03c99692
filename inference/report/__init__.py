"""Reports of measurements: JSON, Markdown, HTML, W&B, and comparisons of two reports."""
