"""What tests have numba compile is kept from one run to the next, as long as no source that it is of has changed."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import numba

ROOT = Path(__file__).parents[1]
Function = TypeVar("Function", bound=Callable[..., object])


def kept_folder(name: str, *sources: str) -> Path:
    """Where it is kept. Its name says the sources, patterns from the root, as numba looks at no file of what it calls.

    What was kept of earlier sources is removed.
    """
    files = sorted(path for pattern in sources for path in ROOT.glob(pattern))
    said = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
    kept = ROOT / "tests" / "__pycache__" / f"{name}-{said}"
    for other in set(kept.parent.glob(f"{name}-*")) - {kept}:
        shutil.rmtree(other, ignore_errors=True)
    return kept


def kernel_of_a_test(function: Function) -> Function:
    """`function`, compiled with what it calls of the CPU engine."""
    folder = kept_folder("cpu_kernels", "inference/engines/cpu/*.py", "tests/inference/engines/cpu/*.py")
    with patch.object(numba.config, "CACHE_DIR", str(folder)):
        compiled: Function = numba.njit(cache=True)(function)
    return compiled
