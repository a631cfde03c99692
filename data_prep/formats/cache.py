"""Cache of converted models: directories of safetensors, converted once, and found by the content of their source.

.lock        held while anything is created or removed
known/       maps paths, sizes and times of a model's files to the key of their content
KEY/         a converted model, or its config and tokenizer alone; KEY.part: one in progress or interrupted
"""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from data_prep.formats.convert import write_safetensors
from data_prep.formats.original import Original
from outrider.caches import user_cache
from outrider.errors import UserError, warn
from outrider.files import read_mapping, require_writable, write_atomically, write_json
from outrider.progress import Stage, counted
from outrider.run_dirs import system_lock

PLACE, SIZE = "OUTRIDER_CACHE", "OUTRIDER_CACHE_GB"  # its location, and its maximum size
RECORD_FILE = "converted.json"
_FORM = 1  # version of a conversion's output; part of the key
_DESCRIBED = "-described"  # in the stamp and key of a model without its weights
_GB = 100.0
_RECENT = 3600  # seconds after its last use in which a model may still be in use
_REMEDY = f"free space, or say by {PLACE} where there is more"


def cache_folder() -> Path:
    """The directory of converted models."""
    return Path(os.environ.get(PLACE) or user_cache() / "targets").expanduser().absolute()


def cached(original: Original, *, weights: bool = True) -> Path:
    """The directory that holds `original` as safetensors, converted now or earlier.

    weights: off if everything else of it is enough. One process converts it, and others wait. Raises `UserError` if it
    cannot be converted, or, naming the remedy, if it cannot be written.
    """
    folder, stamp = cache_folder(), _stamp(original.files)
    found = _find(folder, stamp)
    if found is None and not weights:
        stamp += _DESCRIBED
        found = _find(folder, stamp)
    if found is not None:
        return found
    require_writable(folder / "known", PLACE)
    lock = system_lock(folder / ".lock")
    with Stage(f"{'converting' if weights else 'describing'} {original.source} once"):
        try:
            lock.acquire()
        except (OSError, NotImplementedError) as error:
            raise UserError(f"{PLACE}={folder}: cannot be locked ({error}); choose another") from None
        try:
            return _find(folder, stamp) or _make(folder, stamp, original)
        except OSError as error:
            raise UserError(f"{original.source}: cannot be converted ({error}); {_REMEDY}") from None
        finally:
            lock.release()


def content_key(original: Original) -> str:
    """sha256 over all files of a model, with their names in it."""
    digest = hashlib.sha256(f"{type(original).__name__} {_FORM}".encode())
    for name, path in counted(sorted(original.files.items()), f"hashing {original.source}", "files"):
        digest.update(f"{name} {_sha256(path)}".encode())
    return digest.hexdigest()[:32]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp(files: Mapping[str, Path]) -> str:
    """A digest that changes with any of the files, from their paths, sizes and times alone."""
    found = [(name, str(path.resolve()), path.stat()) for name, path in sorted(files.items())]
    said = [_FORM, *((name, path, stat.st_size, stat.st_mtime_ns) for name, path, stat in found)]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


def _find(folder: Path, stamp: str) -> Path | None:
    """The finished conversion of files with this stamp, marked as most recently used; None if there is none."""
    with suppress(OSError):
        entry = folder / (folder / "known" / stamp).read_text("utf-8")
        if (entry / RECORD_FILE).exists():
            with suppress(OSError):  # in a cache written by another user
                os.utime(entry)
            return entry
    return None


def _make(folder: Path, stamp: str, original: Original) -> Path:
    """Convert `original`, unless the same content was converted under another name. The caller holds the lock."""
    most, described = _most(), stamp.endswith(_DESCRIBED)
    for part in folder.glob("*.part"):  # left by killed processes
        shutil.rmtree(part, ignore_errors=True)
    key = stamp if described else content_key(original)
    entry, part = folder / key, folder / f"{key}.part"
    if not (entry / RECORD_FILE).exists():
        try:
            if described:
                part.mkdir()
                original.describe(part)
            else:
                write_safetensors(original, part, remedy=_REMEDY)
            if _stamp(original.files) != stamp.removesuffix(_DESCRIBED):
                raise UserError(f"{original.source}: changed while it was converted; start again when it is whole")
            write_json(part / RECORD_FILE, {"made_of": original.source})
            shutil.rmtree(entry, ignore_errors=True)  # an entry of which somebody removed a part
            os.rename(part, entry)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        if not described:
            said = f"converted {original.source} once: {_size(entry) / 1e9:.1f} GB in {entry} ({PLACE} says where)"
            print(said, file=sys.stderr, flush=True)
    write_atomically(folder / "known" / stamp, key.encode(), _REMEDY)
    _remove_oldest(folder, entry, most)
    return entry


def _remove_oldest(folder: Path, kept: Path, most: float) -> None:
    """Keep the cache within `most` bytes: remove least recently used entries, but none used in the last hour."""
    sizes = {file.parent: _size(file.parent) for file in folder.glob(f"*/{RECORD_FILE}")}
    used = {entry: entry.stat().st_mtime for entry in sizes}
    total = sum(sizes.values())
    for entry in sorted(sizes, key=lambda entry: used[entry]):
        if total <= most or entry == kept or time.time() - used[entry] < _RECENT:
            continue
        made_of = read_mapping(entry / RECORD_FILE, "record of a conversion", f"remove {entry}")["made_of"]
        os.rename(entry, entry.with_suffix(".part"))
        shutil.rmtree(entry.with_suffix(".part"), ignore_errors=True)
        total -= sizes[entry]
        freed = f"{sizes[entry] / 1e9:.1f} GB"
        warn(f"{folder}: removed the conversion of {made_of} ({freed}), to keep {SIZE}={most / 1e9:g}")
    for note in (folder / "known").iterdir():
        if not (folder / note.read_text("utf-8") / RECORD_FILE).exists():
            note.unlink()


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _most() -> float:
    """The maximum size of the cache in bytes."""
    given = os.environ.get(SIZE) or str(_GB)
    with suppress(ValueError):
        if (most := 1e9 * float(given)) >= 0:  # not nan
            return most
    raise UserError(f"{SIZE}={given}: expected a number of gigabytes, 0 or more")
