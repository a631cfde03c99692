"""Decoding: the loop, a target's session, trees, verification, sampling. The only dependency is torch."""
