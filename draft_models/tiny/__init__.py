"""Random models so small that a command can be rehearsed with them."""
