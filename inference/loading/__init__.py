"""Finding and loading a target and its drafters, before anything decodes."""
