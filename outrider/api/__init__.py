"""Outrider from Python."""
