"""Passes of fixed shape, captured as CUDA graphs."""
