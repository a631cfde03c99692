"""What all trainings share: the driver, the fit, the loop, checkpoints. Nothing here depends on the trained model."""
