"""Chat prompts about documented objects of Python's standard library."""
