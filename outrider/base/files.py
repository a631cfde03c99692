"""Files: atomic writing, locks, JSON with errors that name the file and the damage, its differences, and caches."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

from filelock import FileLock

from outrider.base.errors import UserError

MOST_BYTES = 2**28  # of a JSON file or reply that is read as a whole; data is read line by line
REMEDY = "free space or choose another place"  # for an error of writing


def lock(path: Path) -> FileLock:
    """The operating system's lock on `path`, which is released when its process ends.

    Newer versions of filelock fall back to a plain file if there is no flock. That file would outlive a killed run.
    """
    try:
        return FileLock(path, fallback_to_soft=False)
    except TypeError:  # older versions lack the option: they have no fallback, and raise on acquire
        return FileLock(path)


def write_atomically(path: Path, content: bytes, remedy: str = REMEDY) -> None:
    """Write a file atomically: `path` always has the old or the complete new content. Raises `UserError`."""
    temporary_path = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary_path, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary_path, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); {remedy}") from None
    finally:
        temporary_path.unlink(missing_ok=True)


def reserve_space(file: IO[bytes], size: int) -> None:
    """Make `file` `size` bytes long. Raises `OSError` on a full disk, where writing to its map kills a process."""
    if size and hasattr(os, "posix_fallocate"):  # macOS has none
        os.posix_fallocate(file.fileno(), 0, size)
    else:
        file.truncate(size)


def as_json_lines(records: Iterable[Mapping[str, object]]) -> bytes:
    """JSON with a record a line, in UTF-8; lone surrogates, which UTF-8 cannot encode, become question marks."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode("utf-8", "replace")


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON, atomically."""
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path | str, content_name: str, remedy: str) -> object:
    """The content of a JSON file. Raises `UserError` naming the file, `content_name` it should be, and the `remedy`."""
    try:
        with open(path, "rb") as handle:
            content = handle.read(MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: no readable {content_name} ({error.strerror}); {remedy}") from None
    if len(content) > MOST_BYTES:
        raise UserError(f"{path}: damaged {content_name} (more than {MOST_BYTES} bytes); {remedy}")
    try:
        return parse_json(content)
    except UserError as error:
        raise UserError(f"{path}: damaged {content_name} ({error}); {remedy}") from None


def read_mapping(path: Path | str, content_name: str, remedy: str) -> dict[str, object]:
    """The mapping that a JSON file holds. Raises `UserError` as `read_json` does, also where it holds anything else."""
    value = read_json(path, content_name, remedy)
    if not isinstance(value, dict):
        raise UserError(f"{path}: damaged {content_name} (found no mapping); {remedy}")
    return value


def parse_json(content: bytes | str) -> object:
    """The value of a JSON text. Raises `UserError` for invalid JSON, and for containers nested too deeply.

    NaN and Infinity are accepted, as Python writes them; `outrider.base.settings.construct` refuses them for numbers.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise UserError("not valid JSON (nested too deeply)") from None
    except ValueError as error:  # also bytes that are not UTF-8, and integers of thousands of digits
        raise UserError(f"not valid JSON ({error})") from error


def digest_of(value: object) -> str:
    """sha256 of a value as JSON; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def is_local(source: str) -> bool:
    """Whether `source` is a local path; otherwise it is a Hub name, OWNER/NAME."""
    path = Path(source)
    return path.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1 or os.path.isdir(path.parent)


def require_writable(directory: Path | str, option_name: str = "out_dir") -> Path:
    """Make `directory` and check that a file can be written there, before any work.

    Raises `UserError`, naming the `option_name` that gave the directory.
    """
    probe = (path := Path(directory)) / f".probe.{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(b"\0" * 4096)
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{option_name}={directory}: cannot be written ({error.strerror}); {REMEDY}") from None
    return path


def user_cache() -> Path:
    """The user's folder of caches: $XDG_CACHE_HOME/outrider, or ~/.cache/outrider; ~ is / for a user without a home."""
    home = os.path.expanduser("~")
    folder = os.environ.get("XDG_CACHE_HOME") or Path("/" if home == "~" else home, ".cache")
    return Path(folder).absolute() / "outrider"


def package_version() -> str:
    try:
        return version("outrider")
    except PackageNotFoundError:
        return "source tree"


ABSENT = object()  # stands for the value of a missing key, as None is a value


def differences(old: object, new: object, key: str = "") -> list[tuple[str, object, object]]:
    """All differences of two values of JSON, as (dotted key, old value, new value); a missing value is `ABSENT`.

    A mapping that only one side has counts as one difference.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        pairs = ((key, old.get(key, ABSENT), new.get(key, ABSENT)) for key in sorted(old.keys() | new.keys(), key=str))
        return [change for inner, a, b in pairs for change in differences(a, b, f"{key}.{inner}" if key else inner)]
    return [] if _write_sorted(old) == _write_sorted(new) else [(key, old, new)]


def _write_sorted(value: object) -> str:
    return repr(value) if value is ABSENT else json.dumps(value, sort_keys=True)
