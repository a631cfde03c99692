"""Talking to a target in a terminal, with a drafter before it."""
