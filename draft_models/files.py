"""Writing files so that a crash or a full disk never leaves half of one."""

import json
import os
from pathlib import Path

from draft_models.errors import UserError


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that at any moment `path` is the old content or all of the new. Raises `UserError`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); free space or choose another place") from None
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON, atomically."""
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


def require_writable(directory: Path | str) -> Path:
    """Make `directory` and prove that a file can be written there, before any work. Raises `UserError`."""
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
            f"out_dir={directory}: cannot be written ({error.strerror}); free space or choose another"
        ) from None
    return path
