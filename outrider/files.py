"""Files: written so that a crash or a full disk never leaves half of one; JSON read so that damage has a name."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from outrider.errors import UserError

_LARGEST = 2**28  # bytes of a JSON file that describes something; data is read line by line
_DEEPEST = 64  # containers within each other: deeper ones would overflow the stack of whoever walks them
_SEAL = "sha256"


def write_atomically(path: Path, content: bytes, remedy: str = "free space or choose another place") -> None:
    """Write a file so that at any moment `path` is the old content or all of the new. Raises `UserError`."""
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
    """What a JSON file holds. Raises `UserError` naming the file, `what` it should be, and the `remedy`."""
    try:
        with open(path, "rb") as handle:
            content = handle.read(_LARGEST + 1)
    except OSError as error:
        raise UserError(f"{path}: no readable {what} ({error.strerror}); {remedy}") from None
    if len(content) > _LARGEST:
        raise UserError(f"{path}: damaged {what} (more than {_LARGEST} bytes); {remedy}")
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
    """The value of a JSON text. Raises `UserError` for what is not JSON, also where it is nested too deep.

    NaN and Infinity are let through, as Python writes them; `outrider.settings.construct` refuses them for numbers.
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
    """`value` with a digest of itself, by which `unsealed` tells damage. Sets in it become sorted lists."""
    plain = json.loads(json.dumps(dict(value), default=sorted))
    return {**plain, _SEAL: _digest(plain)}


def unsealed(value: object) -> dict[str, object]:
    """What was `sealed`. Raises `UserError` where anything in it is no longer as it was."""
    if not isinstance(value, dict) or _SEAL not in value:
        raise UserError(f"no mapping with a {_SEAL}")
    plain = {key: inner for key, inner in value.items() if key != _SEAL}
    if value[_SEAL] != _digest(plain):
        raise UserError(f"its {_SEAL} does not fit the rest")
    return plain


def _digest(plain: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def is_text(value: str) -> bool:
    """Whether UTF-8 can hold a string: JSON escapes and odd file names may bring lone surrogates, which it cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_local(source: str) -> bool:
    """Whether `source` is meant as a place on this machine; else it is a name on the Hub, OWNER/NAME."""
    path = Path(source)
    return path.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1 or path.parent.is_dir()


def require_writable(directory: Path | str, option: str = "out_dir") -> Path:
    """Make `directory` and prove that a file can be written there, before any work.

    Raises `UserError`, naming the `option` that said where.
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
