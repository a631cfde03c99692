"""Drafters: early exit, small LM, EAGLE-3 head, the target with skipped layers, n-grams, prompt lookup."""
