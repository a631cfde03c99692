"""Drafting from n-grams of a corpus, the current text and earlier target outputs, with or without a draft model."""
