"""A terminal chat with a target, accelerated by a drafter."""
