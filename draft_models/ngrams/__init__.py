"""The n-gram table: its arrays on disk, the compiled look-up, and n-grams learnt from a text."""
