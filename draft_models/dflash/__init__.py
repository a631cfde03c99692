"""Block drafters, DFlash and DSpark: how to read one, the module, and its storage formats."""
