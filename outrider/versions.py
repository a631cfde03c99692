"""The version of the running code, from its sources: an edit changes it, a commit of documents does not."""

import functools
import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("conf", "data_prep", "draft_models", "inference", "outrider", "train")


def package_version() -> str:
    """The installed version of this project."""
    try:
        return version("outrider")
    except PackageNotFoundError:
        return "source tree"


@functools.cache
def code_version() -> str:
    """The package's version and a digest of every Python source of `PACKAGES`, as this process found them."""
    root = Path(__file__).resolve().parents[1]
    packages = ["outrider"] if (root / "outrider" / "train").is_dir() else PACKAGES  # a wheel has all under outrider
    digest = hashlib.sha256()
    for path in sorted(path for package in packages for path in (root / package).rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + hashlib.sha256(path.read_bytes()).digest())
    return f"{package_version()}+{digest.hexdigest()[:12]}"
