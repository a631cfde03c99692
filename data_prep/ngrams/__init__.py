"""Building an n-gram table from a corpus."""
