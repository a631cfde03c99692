"""Whether answers that were decoded elsewhere are a target's: what is read, tested, and said of it."""
