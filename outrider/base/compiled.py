"""Functions that numba compiles once. Their code is cached in the user's folder of caches, or in NUMBA_CACHE_DIR.

numba itself would cache the code beside the source.
"""

import atexit
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from tempfile import TemporaryDirectory
from typing import Literal, TypeVar

import numba
from numba.core import event
from numba.core.ccallback import CFunc

from outrider.base.errors import UserError, reason, warn
from outrider.base.files import package_version, require_writable, user_cache
from outrider.base.progress import shows_progress

Function = TypeVar("Function", bound=Callable[..., object])
_settings = vars(numba.config)  # of numba, among them the folder of its cache
LONG = 0.5  # seconds of compiling after which a line says so
_TYPES = 2  # version of the names of types in cached code, which numba cannot read under other names


def compile_function(
    function: Function, *, inline: Literal["never", "always"] = "never", counts_references: bool = True
) -> Function:
    """`function`, compiled by `njit` at its first call and cached on disk; it releases the GIL while it runs.

    counts_references: whether its code counts references to arrays; without these it cannot create arrays.
    """
    with _in_our_folder():
        compiled: Function = numba.njit(cache=True, nogil=True, inline=inline, _nrt=counts_references)(function)  # type: ignore[call-overload]
    _clock.timed.add(compiled)
    return compiled


def compile_entry(function: Callable[..., None], signature: str, fastmath: set[str]) -> CFunc:
    """`function` with a C entry of this `signature`, compiled now by `cfunc` and cached on disk.

    fastmath: LLVM's flags for floating-point rules that it may break.
    """
    old_seconds, start_time = _clock.seconds, time.perf_counter()
    with _in_our_folder():
        compiled = numba.cfunc(signature, cache=True, fastmath=fastmath, error_model="numpy")(function)  # x/0 is inf
    if not compiled.cache_hits:  # these seconds include the functions that it calls, which `_clock` counted too
        _clock.seconds = old_seconds
        _clock.add(time.perf_counter() - start_time)
    return compiled


@lru_cache(1)
def _own_folder() -> str:
    """The folder of this package's version; if it cannot be written, one that lives as long as this process."""
    folder = user_cache() / "kernels" / f"{package_version()}-{_TYPES}"
    try:
        return str(require_writable(folder))
    except UserError as error:
        warn(f"CPU kernels are compiled in every run ({reason(error)}); NUMBA_CACHE_DIR=FOLDER keeps them")
        temporary_dir = TemporaryDirectory(prefix="outrider-")
        atexit.register(temporary_dir.cleanup)
        return temporary_dir.name


@contextmanager
def _in_our_folder() -> Iterator[None]:
    """Context manager: code compiled inside is cached in our folder; numba's setting is restored after it.

    Each version of the package has a folder. numba compiles a function again if its file has changed, but not if the
    file of a function that it calls has changed.
    """
    old_cache_dir = _settings["CACHE_DIR"]
    _settings["CACHE_DIR"] = old_cache_dir or _own_folder()
    try:
        yield
    finally:
        _settings["CACHE_DIR"] = old_cache_dir


class _Clock(event.Listener):
    """The seconds in which numba compiled the functions in `timed`, which are the project's, in this process.

    _depth: how many of them are being compiled, as one may call another. _began: when the outermost was begun.
    """

    def __init__(self) -> None:
        self.seconds, self._began, self._depth = 0.0, 0.0, 0
        self.timed: set[object] = set()
        self._is_reported = False

    def add(self, seconds: float) -> None:
        """Add `seconds` of compiling. Once they are `LONG` in all, a line says what takes so long."""
        self.seconds += seconds
        if self.seconds >= LONG and not self._is_reported and shows_progress():
            self._is_reported = True
            print(f"compiling CPU kernels, once: kept in {_own_folder()}", file=sys.stderr, flush=True)

    def on_start(self, event: event.Event) -> None:
        if event.data["dispatcher"] in self.timed:
            self._began = self._began if self._depth else time.perf_counter()
            self._depth += 1

    def on_end(self, event: event.Event) -> None:
        if event.data["dispatcher"] in self.timed:
            self._depth -= 1
            self.add(0.0 if self._depth else time.perf_counter() - self._began)


_clock = _Clock()
event.register("numba:compile", _clock)
