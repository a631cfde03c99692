"""One file per kind of trained model: building, evaluation and saving. The rest is in train/core."""
