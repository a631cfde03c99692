"""The plumbing that every folder stands on: errors, settings, files, run directories, processes, random streams."""
