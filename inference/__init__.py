"""The speculative runtime and the evaluate-checkpoint command."""
