"""The trainable parts of drafters and their checkpoint formats. Nothing here decodes."""
