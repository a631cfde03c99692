"""A target's own answers: decoded in batches, stored in a directory."""
