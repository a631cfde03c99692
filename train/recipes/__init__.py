"""One file for each thing that is trained: what is built, what is evaluated, what is saved. The rest is train/core."""
