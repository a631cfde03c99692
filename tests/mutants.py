"""Damaged JSON: what a disk, a kill or a hand makes of a good file."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf import reported
from tests.tiers import as_many

Keys = tuple[str | int, ...]  # where in a JSON file
VALUES: tuple[Any, ...] = (
    None, True, "", "x", "\ud800", -1, 0, 1, 2.5, 10**30, 1e308, float("nan"), float("inf"), [], {}, [None], ["x"],
    {"x": 1}, [[0]], "0", json.loads("[" * 200 + "]" * 200),
)  # fmt: skip


def mutants(content: bytes, count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """(what was done, the file) for damages to the bytes, and for `count` damages to the structure of a JSON file."""
    yield from _damaged_bytes(content)
    value, rng = json.loads(content), np.random.default_rng(seed)
    paths = list(_paths(value))
    whole = [(path, change) for path in paths for change in (*_CHANGES, *(_put(new) for new in VALUES))]
    for index in rng.permutation(len(whole))[:count]:
        path, (name, change) = whole[index]
        damaged = json.loads(content)
        change(_parent(damaged, path), path[-1])
        yield f"{'.'.join(map(str, path))}: {name}", json.dumps(damaged, indent=1).encode()
    for path in paths[: as_many(20)]:
        yield f"{'.'.join(map(str, path))}: twice", _twice(value, path)


def require_named(file: Path, run: Callable[[], Any], capsys: pytest.CaptureFixture[str], count: int) -> None:
    """Damage `file` in many ways, one after the other, and `run` what reads it.

    count: damages to its structure, of which `make test` does a third.
    """
    whole, statuses = file.read_bytes(), set()
    run()
    for name, content in mutants(whole, as_many(count)):
        file.write_bytes(content)
        capsys.readouterr()
        status = 0
        try:
            with reported():
                run()
        except SystemExit as ended:
            status = ended.code
        except Exception as error:
            raise AssertionError(f"{file.name}, {name}: {type(error).__name__}: {error}") from error
        statuses.add(status)
        if status:
            errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
            assert (status, len(errors)) == (2, 1), name
    file.write_bytes(whole)
    run()
    assert 2 in statuses


def _damaged_bytes(content: bytes) -> Iterator[tuple[str, bytes]]:
    yield "empty", b""
    for share in (0.1, 0.5, 0.9):
        yield f"cut at {share}", content[: int(share * len(content))]
    for size in (1, 40):
        yield f"cut by {size}", content[:-size]
    for text in (
        "null",
        "true",
        "3",
        '""',
        '"x"',
        "[]",
        "{}",
        "[[]]",
        "[null]",
        "NaN",
        "1e999",
        "9" * 5000,
        "\0",
        "\n",
    ):
        yield f"only {text[:9]!r}", text.encode()
    yield "200,000 brackets", b"[" * 200_000
    yield "200,000 closed brackets", b"[" * 200_000 + b"]" * 200_000
    yield "100,000 mappings", b'{"a":' * 100_000
    yield "900 brackets", b"[" * 900 + b"]" * 900
    yield "not UTF-8", content[: len(content) // 2] + b"\xff\xfe" + content[len(content) // 2 :]
    yield "UTF-16", content.decode().encode("utf-16")
    yield "Latin-1", '{"ä": "é"}'.encode("latin-1")
    yield "zeros", bytes(len(content))
    yield "two of it", content + content


def _paths(value: Any, path: Keys = ()) -> Iterator[Keys]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _paths(inner, (*path, key))


def _parent(value: Any, path: Keys) -> Any:
    for key in path[:-1]:
        value = value[key]
    return value


def _put(new: Any) -> tuple[str, Callable[[Any, Any], None]]:
    def put(parent: Any, key: Any) -> None:
        parent[key] = new

    return repr(new)[:40], put


def _delete(parent: Any, key: Any) -> None:
    del parent[key]


def _rename(parent: Any, key: Any) -> None:
    if isinstance(parent, dict):
        parent[f"{key}x"] = parent.pop(key)
    else:
        parent.insert(key, parent[key])


def _wrap(parent: Any, key: Any) -> None:
    parent[key] = [parent[key]]


_CHANGES = (("deleted", _delete), ("renamed", _rename), ("wrapped", _wrap))


def _twice(value: Any, path: Keys) -> bytes:
    """With the key at the end of `path` a second time, as a text."""
    marked = json.loads(json.dumps(value))
    parent = _parent(marked, path)
    if not isinstance(parent, dict):
        return json.dumps(value).encode()
    key = path[-1]
    parent["\ue000"] = parent[key]
    text = json.dumps(marked, ensure_ascii=False)
    return text.replace('"\ue000": ', f"{json.dumps(key)}: ", 1).encode()
