"""The error that users see without a traceback, and warnings."""

import os
import sys
from functools import cache
from importlib import import_module


class UserError(Exception):
    """Bad input: what was given, what was expected and what to do.

    The message is stored as `make_legible` returns it: without secrets and control characters, and not too long.
    A command prints the message in a line on stderr and exits with status 2. Every other error is a bug and keeps its
    traceback.
    """

    def __init__(self, message: str):
        super().__init__(import_module("outrider.base.words").make_legible(message))  # late: it imports this module


def warn(message: str) -> None:
    """Print a warning as one line on stderr, only in the first of a launcher's processes (RANK 0)."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"warning: {UserError(message)}", file=sys.stderr, flush=True)


warn_once = cache(warn)


def require(condition: bool, key: str, setting: object, expected: str) -> None:
    """Raise `UserError` naming the config `key` unless `condition` holds; for checks of settings."""
    if not condition:
        raise UserError(f"{key}={setting!r}: expected {expected}")


def reason(error: BaseException) -> str:
    """The message of a third-party error on one line, or its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
