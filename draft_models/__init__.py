"""The trainable parts of a drafter and their checkpoint format. Nothing here decodes."""
