"""Where this user's caches are."""

import os
from pathlib import Path


def user_cache() -> Path:
    """$XDG_CACHE_HOME/outrider, or ~/.cache/outrider."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "outrider"
