"""Exclusive use of an out_dir: one run at a time, resumed only with the same settings; the version of the sources."""

import functools
import hashlib
import json
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from outrider.base.errors import UserError
from outrider.base.files import lock, package_version, read_mapping, require_writable, write_json
from outrider.base.settings import ABSENT, differences, read_as
from outrider.base.words import legible, listed

LOCK_FILE, HOLDER_FILE, TIME_FILE = ".lock", ".lock.json", "time.json"
FOLDERS = ("data_prep", "draft_models", "inference", "train")  # packages of outrider; in a clone links to the top level
RUNS: list[Callable[[], datetime]] = []  # `begin_time` of this process's run, recorded once it is read
_NAMED = 12  # differences that an error shows


@contextmanager
def only_run(folder: Path, what: str) -> Iterator[None]:
    """Lock the existing directory `folder` against other runs while the context is active.

    The operating system releases the lock when the process ends, even if killed. A directory of a killed run is taken
    over, and one line names that run. Raises `UserError` if another run is writing `what` there, naming its process and
    host, and if the file system does not support locks.
    """
    acquired, holder = _acquire(folder, what), folder / HOLDER_FILE
    try:
        if holder.exists():
            print(f"out_dir={folder}: taken over from a run that did not end by itself: {_held_by(holder)}", flush=True)
        started, job = time.strftime("%Y-%m-%d %H:%M:%S %z"), os.environ.get("SLURM_JOB_ID")
        process = {"process": os.getpid(), "host": socket.gethostname(), "started": started, "slurm_job": job}
        write_json(holder, {**process, "command": legible(shlex.join(sys.argv))})
        yield
    finally:
        with suppress(OSError):
            holder.unlink()
        acquired.release()


def require_free(folder: Path, leaves: Sequence[str], resume: bool) -> None:
    """Raise `UserError` if `folder` has a file of an earlier run, as one of the patterns says, and resume is off."""
    names = sorted(path.name for pattern in leaves for path in folder.glob(pattern))
    if names and not resume:
        held = f"out_dir={folder}: holds an earlier run ({names[-1]})"
        raise UserError(f"{held}; resume=true continues it, another out_dir keeps both")


def look_at(folder: Path) -> None:
    """Make `folder`. Raise `UserError` if it cannot be written, or another run holds it."""
    if (require_writable(folder) / LOCK_FILE).exists():
        _acquire(folder, "files").release()


def _acquire(folder: Path, what: str) -> FileLock:
    """The lock of `folder`, held (see `only_run`)."""
    held = lock(folder / LOCK_FILE)
    try:
        held.acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"out_dir={folder}: another run is writing {what} there: {_held_by(folder / HOLDER_FILE)}; wait for it, or "
            "give another out_dir"
        ) from None
    except (OSError, NotImplementedError) as error:  # older versions of filelock raise the latter without flock
        raise UserError(f"out_dir={folder}: cannot be locked against other runs ({error}); choose another") from None
    return held


def begin_time(folder: Path, resume: bool, start: datetime) -> datetime:
    """The time that texts of the run in `folder` show: that on record if it goes on, else `start`, now on record."""
    if not (resume and (folder / TIME_FILE).exists()):
        write_json(folder / TIME_FILE, start.isoformat())
    return read_as(datetime, folder / TIME_FILE, "time of a run", "give another out_dir")


def run_time() -> datetime | None:
    """The time that texts of this process's run show; None outside a run."""
    return RUNS[-1]() if RUNS else None


@contextmanager
def made_for_something(folder: Path) -> Iterator[None]:
    """Context manager: remove a `folder` that this command made, if it fails before anything is written there."""
    new = not folder.exists()
    try:
        yield
    except BaseException:
        with suppress(OSError):
            if new and {path.name for path in folder.iterdir()} <= {LOCK_FILE}:
                shutil.rmtree(folder)
        raise


def clear(folder: Path) -> None:
    """Remove everything in a directory that `only_run` holds, except its lock."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in (LOCK_FILE, HOLDER_FILE):
            path.unlink()


def rehearsal_folder(out_dir: str) -> Path:
    """The directory that debug=true uses instead of `out_dir`."""
    return Path(f"{Path(out_dir)}-debug")


def require_rehearsal(folder: Path, mark: str) -> None:
    """Raise `UserError` if `folder`, about to be cleared, holds files but no `mark`, the file of every rehearsal."""
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if names - {LOCK_FILE, HOLDER_FILE} and mark not in names:
        raise UserError(f"{folder}: debug=true runs there, and it holds something else; choose another out_dir")


def _held_by(holder: Path) -> str:
    """The process that the holder's file names, in words."""
    try:
        who = read_mapping(holder, "record of a run", "remove it")
        job = f", Slurm job {who['slurm_job']}" if who["slurm_job"] else ""
        return f"process {who['process']} on {who['host']}{job}, since {who['started']} ({who['command']})"
    except (UserError, KeyError):
        return f"a process that {holder.name} does not name"


def check_identity(before: object, identity: Mapping[str, object], where: Path) -> None:
    """Raise `UserError` naming every entry in which `identity` differs from `before`, JSON that was read from `where`.

    "code", the version that wrote the record, may differ: a run of a week must survive a fix of code that it does not
    use.
    """
    if not isinstance(before, Mapping):
        raise UserError(f"resume=true: {where} does not say how it was made; give another out_dir")
    before = {key: value for key, value in before.items() if key != "code"}
    changes = differences(before, json.loads(json.dumps(identity)))
    wrong = [f"{key}={_show(new)} (was {_show(old)})" for key, old, new in changes]
    if wrong:
        raise UserError(
            f"resume=true: {where} was made with other settings: {listed(wrong, _NAMED)}; "
            "give the same ones, or another out_dir"
        )


def finished(record: Path, identity: Mapping[str, object], resume: bool) -> bool:
    """Whether a run of the same `identity` is finished, as its `record` shows.

    record: the JSON file that a run writes last, whose "made_of" is its identity.

    Raises `UserError` if a finished run was another one, or `resume` is off.
    """
    if not record.exists():
        return False
    require_free(record.parent, (record.name,), resume)
    report = read_mapping(record, "report of a run", "remove it, or give another out_dir")
    check_identity(report.get("made_of"), identity, record)
    return True


def _show(value: object) -> str:
    if value is ABSENT:
        return "absent"
    return "given" if isinstance(value, Mapping) else json.dumps(value)


@functools.cache
def code_version() -> str:
    """The package's version and a digest of every Python source, as this process found them."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted({path for folder in (".", *FOLDERS) for path in (root / folder).rglob("*.py")}):
        digest.update(path.relative_to(root).as_posix().encode() + hashlib.sha256(path.read_bytes()).digest())
    return f"{package_version()}+{digest.hexdigest()[:12]}"
