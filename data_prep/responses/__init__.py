"""A target's own answers: decoded in batches, kept in a directory."""
