"""Settings of the training commands, light: a mistake shows before torch is imported."""
