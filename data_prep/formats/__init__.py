"""Formats that models come in: each ends here as safetensors, which everything else reads."""
