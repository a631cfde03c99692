"""Targets of drafters: a target's files and its layers, run by this project, or as a whole by transformers."""
