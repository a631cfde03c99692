"""Functions that numba compiles once. The compiled code is kept in the user's folder of caches.

By default numba keeps it beside the source. NUMBA_CACHE_DIR names another folder.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

import numba
from numba.core import event
from numba.core.ccallback import CFunc

from outrider.base.files import package_version, user_cache
from outrider.base.progress import speaks

Function = TypeVar("Function", bound=Callable[..., object])
_settings = vars(numba.config)
LONG = 0.5  # seconds of compiling that are reported
_TYPES = 2  # version of the names of types in compiled code: numba cannot read an index that has an earlier name


def kept(function: Function, *, inline: Literal["never", "always"] = "never", counted: bool = True) -> Function:
    """`function`, compiled by `njit` and kept on disk; other threads run while it does.

    counted: whether numba counts references to arrays; a function without counting cannot create arrays.
    """
    with _in_our_folder():
        compiled: Function = numba.njit(cache=True, nogil=True, inline=inline, _nrt=counted)(function)  # type: ignore[call-overload]
    _clock.timed.add(compiled)
    return compiled


def kept_entry(function: Callable[..., None], signature: str, fastmath: set[str]) -> CFunc:
    """The same by `cfunc`, which compiles at once."""
    before, began = _clock.seconds, time.perf_counter()
    with _in_our_folder():
        compiled = numba.cfunc(signature, cache=True, fastmath=fastmath, error_model="numpy")(function)
    if not compiled.cache_hits:  # with the functions that it calls
        _clock.seconds = before
        _clock.add(time.perf_counter() - began)
    return compiled


@contextmanager
def _in_our_folder() -> Iterator[None]:
    """Context manager: code compiled inside is cached in our folder; numba's setting is restored after it.

    One for each version: numba looks whether the file of a function has changed, but not at those of what it calls.
    """
    folder = _settings["CACHE_DIR"]
    _settings["CACHE_DIR"] = folder or str(user_cache() / "kernels" / f"{package_version()}-{_TYPES}")
    try:
        yield
    finally:
        _settings["CACHE_DIR"] = folder


class _Clock(event.Listener):
    """The seconds in which numba compiled the functions in `timed`, in this process; others' are not ours to tell."""

    def __init__(self) -> None:
        self.seconds, self._began, self._depth = 0.0, 0.0, 0  # a function may need another
        self.timed: set[object] = set()
        self.said = False

    def add(self, seconds: float) -> None:
        """Count them, and say once, while it goes on, what takes so long."""
        self.seconds += seconds
        if self.seconds >= LONG and not self.said and speaks():
            self.said = True
            print(f"compiling CPU kernels, once: kept in {user_cache() / 'kernels'}", file=sys.stderr, flush=True)

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
