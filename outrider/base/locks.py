"""Locks between processes."""

from pathlib import Path

from filelock import FileLock


def system_lock(path: Path) -> FileLock:
    """The operating system's lock on `path`, which is released when its process ends.

    Newer versions of filelock fall back to a plain file if there is no flock. That file would outlive a killed run.
    """
    try:
        return FileLock(path, fallback_to_soft=False)
    except TypeError:  # older versions lack the option: they have no fallback, and raise on acquire
        return FileLock(path)
