"""Decoding on a CPU: compiled passes over few rows, shared by PyTorch's own threads."""
