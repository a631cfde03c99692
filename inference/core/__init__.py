"""Decoding: the loop, the sequence inside a target, trees, verification, sampling. It needs torch alone."""
