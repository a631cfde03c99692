"""An out_dir in the hands of one run after the other: one at a time, and resumed only with the same settings."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from draft_models.errors import UserError


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


def check_identity(before: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    """Raise `UserError` naming every entry in which `now` differs from `before`, read from `where`."""
    old, new = _flatten(before), _flatten(json.loads(json.dumps(now)))
    differences = [
        f"{key}={_show(new, key)} (was {_show(old, key)})"
        for key in sorted(old.keys() | new.keys())
        if _show(old, key) != _show(new, key)
    ]
    if differences:
        raise UserError(
            f"resume=true: {where} was made with other settings: {', '.join(differences)}; "
            "give the same ones, or another out_dir"
        )


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flatten(inner, f"{prefix}.{key}" if prefix else key)
    return flat


def _show(flat: Mapping[str, Any], key: str) -> str:
    return json.dumps(flat[key]) if key in flat else "absent"
