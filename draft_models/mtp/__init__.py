"""MTP heads, which models bring along for multi-token prediction: how to read one, the module, and where it is."""
