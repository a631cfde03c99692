"""EAGLE-3 heads: how to read one, the module, and its storage formats."""
