"""Counting a corpus into an n-gram table."""
