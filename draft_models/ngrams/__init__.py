"""The n-gram table: its arrays on disk, the compiled look-up, what a text adds to it."""
