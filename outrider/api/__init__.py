"""The Python API of Outrider."""
