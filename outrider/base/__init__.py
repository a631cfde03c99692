"""The ground, which imports nothing of ours: errors, settings, files, run directories, processes, progress."""
