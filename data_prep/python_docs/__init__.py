"""Chat prompts about what Python and its packages document."""
