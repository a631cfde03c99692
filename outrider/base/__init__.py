"""Utilities that import no other folder of the project: errors, settings, files, run directories, progress."""
