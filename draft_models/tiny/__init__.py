"""Tiny random models for rehearsing a command."""
