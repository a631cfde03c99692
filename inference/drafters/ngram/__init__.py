"""Drafting from n-grams: of a corpus, of the text at hand, of what the target said before; alone or with a model."""
