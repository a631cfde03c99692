"""A small causal LM as a drafter."""
