"""Published targets, converted to the format that every tool reads."""
