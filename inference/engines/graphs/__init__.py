"""Fixed-shape passes, captured as CUDA graphs."""
