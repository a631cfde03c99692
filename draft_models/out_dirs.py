"""An out_dir in the hands of one run after the other: one at a time, and resumed only with the same settings."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from draft_models.errors import UserError

_ABSENT = object()


@contextmanager
def only_run(folder: Path, what: str) -> Iterator[None]:
    """Keep other runs out of the directory meanwhile. Raises `UserError` where one is writing `what` there."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"out_dir={folder}: another run is writing {what} there; wait for it, or give another out_dir"
        ) from None
    try:
        yield
    finally:
        lock.release()


def check_identity(before: Any, now: Mapping[str, Any], where: Path) -> None:
    """Raise `UserError` naming every entry in which `now` differs from `before`, JSON that was read from `where`."""
    if not isinstance(before, Mapping):
        raise UserError(f"resume=true: {where} does not say how it was made; give another out_dir")
    differences = _differences(before, json.loads(json.dumps(now)))
    if differences:
        raise UserError(
            f"resume=true: {where} was made with other settings: {', '.join(differences)}; "
            "give the same ones, or another out_dir"
        )


def _differences(old: Any, new: Any, key: str = "") -> list[str]:
    """What differs, by dotted key; a mapping that only one of the two has counts as one difference."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        pairs = ((inner, old.get(inner, _ABSENT), new.get(inner, _ABSENT)) for inner in sorted(old.keys() | new.keys()))
        return [line for inner, a, b in pairs for line in _differences(a, b, f"{key}.{inner}" if key else inner)]
    return [] if _show(old) == _show(new) else [f"{key}={_show(new)} (was {_show(old)})"]


def _show(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    return "given" if isinstance(value, Mapping) else json.dumps(value)
