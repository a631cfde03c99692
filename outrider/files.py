"""Atomic writing of files, and reading of JSON with errors that name the file and the damage."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from outrider.errors import UserError

MOST_BYTES = 2**28  # of a JSON file or reply that is read as a whole; data is read line by line
_DEEPEST = 64  # maximum nesting of containers: deeper ones would overflow the stack of recursive functions
_SEAL = "sha256"


def write_atomically(path: Path, content: bytes, remedy: str = "free space or choose another place") -> None:
    """Write a file atomically: `path` always has the old or the complete new content. Raises `UserError`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); {remedy}") from None
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON, atomically."""
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path | str, what: str, remedy: str) -> object:
    """The content of a JSON file. Raises `UserError` naming the file, `what` it should be, and the `remedy`."""
    try:
        with open(path, "rb") as handle:
            content = handle.read(MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: no readable {what} ({error.strerror}); {remedy}") from None
    if len(content) > MOST_BYTES:
        raise UserError(f"{path}: damaged {what} (more than {MOST_BYTES} bytes); {remedy}")
    try:
        value = parse_json(content)
        if not is_text(json.dumps(value, ensure_ascii=False)):
            raise UserError("a lone surrogate in a text")
    except UserError as error:
        raise UserError(f"{path}: damaged {what} ({error}); {remedy}") from None
    return value


def read_mapping(path: Path | str, what: str, remedy: str) -> dict[str, object]:
    """The mapping that a JSON file holds. Raises `UserError` as `read_json` does, also where it holds anything else."""
    value = read_json(path, what, remedy)
    if not isinstance(value, dict):
        raise UserError(f"{path}: damaged {what} (found no mapping); {remedy}")
    return value


def parse_json(content: bytes | str) -> object:
    """The value of a JSON text. Raises `UserError` for invalid JSON, and for containers nested too deeply.

    NaN and Infinity are accepted, as Python writes them; `outrider.settings.construct` refuses them for numbers.
    """
    try:
        value = json.loads(content)
    except RecursionError:
        raise UserError(f"not valid JSON (nested deeper than {_DEEPEST})") from None
    except ValueError as error:  # also bytes that are not UTF-8, and integers of thousands of digits
        raise UserError(f"not valid JSON ({error})") from error
    _require_shallow(value)
    return value


def _require_shallow(value: object) -> None:
    level, depth = [value], 0
    while level:
        if depth > _DEEPEST:
            raise UserError(f"not valid JSON (nested deeper than {_DEEPEST})")
        containers = [one for one in level if isinstance(one, dict | list)]
        level = [inner for one in containers for inner in (one.values() if isinstance(one, dict) else one)]
        depth += 1


def sealed(value: Mapping[str, object]) -> dict[str, object]:
    """`value` with its digest, by which `unsealed` detects damage. Sets in it become sorted lists."""
    plain = json.loads(json.dumps(dict(value), default=sorted))
    return {**plain, _SEAL: _digest(plain)}


def unsealed(value: object) -> dict[str, object]:
    """The value that was `sealed`, without its digest. Raises `UserError` if the digest does not match."""
    if not isinstance(value, dict) or _SEAL not in value:
        raise UserError(f"no mapping with a {_SEAL}")
    plain = {key: inner for key, inner in value.items() if key != _SEAL}
    if value[_SEAL] != _digest(plain):
        raise UserError(f"its {_SEAL} does not fit the rest")
    return plain


def _digest(plain: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def is_text(value: str) -> bool:
    """Whether a string can be encoded as UTF-8: JSON escapes and file names may contain lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_local(source: str) -> bool:
    """Whether `source` is a local path; otherwise it is a Hub name, OWNER/NAME."""
    path = Path(source)
    return path.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1 or os.path.isdir(path.parent)


def require_writable(directory: Path | str, option: str = "out_dir") -> Path:
    """Make `directory` and check that a file can be written there, before any work.

    Raises `UserError`, naming the `option` that gave the directory.
    """
    path = Path(directory)
    probe = path / f".probe.{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(b"\0" * 4096)
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{option}={directory}: cannot be written ({error.strerror}); free space or choose another"
        ) from None
    return path
