"""Chat prompts about documented objects of Python and its packages."""
