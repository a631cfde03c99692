"""Sizes that choose themselves: what passes cost, what a size would gain, the measurement at the start."""
