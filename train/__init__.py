"""Training: the commands. What they train is in recipes/, how it is done in core/."""
