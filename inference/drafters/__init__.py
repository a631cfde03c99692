"""Who drafts: an early exit, a small LM, the target without some layers, n-grams, the prompt itself."""
