"""Targets as they are published, made into what every tool reads."""
