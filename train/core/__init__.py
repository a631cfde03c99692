"""What every training has in common: the driver, the fit, the loop, checkpoints. Nothing here knows what is trained."""
