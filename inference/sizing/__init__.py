"""Automatic draft sizes: measured costs of passes, expected gains, and the choice between sizes."""
