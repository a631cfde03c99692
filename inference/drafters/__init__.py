"""Who drafts: an early exit, a small LM, n-grams, the prompt itself."""
