"""Decoding on a CPU: compiled passes over few rows, run in parallel by PyTorch's own threads."""
