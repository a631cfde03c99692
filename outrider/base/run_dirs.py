"""Exclusive use of an out_dir, the folder of a run: one run at a time, resumed only with the same settings.

before the work    `require_usable` and `require_free`: the directory can be written, and holds no earlier run
during the work    `only_run` holds its lock; `begin_time` records the start, the date that chat templates write
with resume=true   `check_identity` compares the settings with those of the earlier run; `is_finished` looks for its end
"""

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
from outrider.base.files import ABSENT, differences, lock, package_version, read_mapping, require_writable, write_json
from outrider.base.settings import read_as
from outrider.base.words import list_words, make_legible

LOCK_FILE, HOLDER_FILE, TIME_FILE = ".lock", ".lock.json", "time.json"
FOLDERS = ("data_prep", "draft_models", "inference", "train")  # packages of outrider; in a clone links to the top level
# A function that returns the start of this process's run, and records it at its first call. The run adds it at its
# start and removes it at its end.
RUN_TIMES: list[Callable[[], datetime]] = []
_MOST_CHANGES = 12  # that an error shows


@contextmanager
def only_run(folder: Path, what: str) -> Iterator[None]:
    """Lock the existing directory `folder` against other runs while the context is active.

    The operating system releases the lock when the process ends, even if killed. A directory of a killed run is taken
    over, and a printed line names that run. Raises `UserError` if another run is writing `what` there, naming its
    process and host, and if the file system does not support locks.
    """
    run_lock, holder_file = _acquire(folder, what), folder / HOLDER_FILE
    try:
        if holder_file.exists():
            process_text = _describe_process(holder_file)
            print(f"out_dir={folder}: taken over from a run that did not end by itself: {process_text}", flush=True)
        start_text, slurm_job = time.strftime("%Y-%m-%d %H:%M:%S %z"), os.environ.get("SLURM_JOB_ID")
        record = {"process": os.getpid(), "host": socket.gethostname(), "started": start_text, "slurm_job": slurm_job}
        write_json(holder_file, {**record, "command": make_legible(shlex.join(sys.argv))})
        yield
    finally:
        with suppress(OSError):
            holder_file.unlink()
        run_lock.release()


def require_free(folder: Path, file_patterns: Sequence[str], resume: bool) -> None:
    """Raise `UserError` if resume is off and `folder` has a file of an earlier run. file_patterns: globs of these."""
    names = sorted(path.name for pattern in file_patterns for path in folder.glob(pattern))
    if names and not resume:
        remedy = "resume=true continues it, another out_dir keeps both"
        raise UserError(f"out_dir={folder}: holds an earlier run ({names[-1]}); {remedy}")


def require_usable(folder: Path) -> None:
    """Make `folder`. Raise `UserError` if it cannot be written, or another run holds it."""
    if (require_writable(folder) / LOCK_FILE).exists():
        _acquire(folder, "files").release()


def _acquire(folder: Path, output: str) -> FileLock:
    """The lock of `folder`, acquired. Raises `UserError` as `only_run` does."""
    run_lock = lock(folder / LOCK_FILE)
    try:
        run_lock.acquire(timeout=0)
    except Timeout:
        problem = f"another run is writing {output} there: {_describe_process(folder / HOLDER_FILE)}"
        raise UserError(f"out_dir={folder}: {problem}; wait for it, or give another out_dir") from None
    except (OSError, NotImplementedError) as error:  # older versions of filelock raise the latter without flock
        raise UserError(f"out_dir={folder}: cannot be locked against other runs ({error}); choose another") from None
    return run_lock


def begin_time(folder: Path, resume: bool, start: datetime) -> datetime:
    """The recorded start of the run in `folder` if it is resumed, else `start`, which is recorded now.

    Chat templates write today's date. With the recorded date, a resumed run's prompts do not change overnight.
    """
    if not (resume and (folder / TIME_FILE).exists()):
        write_json(folder / TIME_FILE, start.isoformat())
    return read_as(datetime, folder / TIME_FILE, "time of a run", "give another out_dir")


def run_time() -> datetime | None:
    """The time that chat templates write as now in this process's run; None outside a run."""
    return RUN_TIMES[-1]() if RUN_TIMES else None


@contextmanager
def remove_if_unused(folder: Path) -> Iterator[None]:
    """Context manager: remove a `folder` that this command made, if it fails before anything is written there."""
    is_new = not folder.exists()
    try:
        yield
    except BaseException:
        with suppress(OSError):
            if is_new and {path.name for path in folder.iterdir()} <= {LOCK_FILE}:
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
    """The directory that debug=true, a rehearsal of the run with small values, uses instead of `out_dir`."""
    return Path(f"{Path(out_dir)}-debug")


def require_rehearsal(folder: Path, mark: str) -> None:
    """Raise `UserError` if `folder`, about to be cleared, holds files but no `mark`, the file of every rehearsal."""
    file_names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if file_names - {LOCK_FILE, HOLDER_FILE} and mark not in file_names:
        raise UserError(f"{folder}: debug=true runs there, and it holds something else; choose another out_dir")


def _describe_process(holder_file: Path) -> str:
    """The process, its host, start and command, as `only_run` wrote them to `holder_file`."""
    try:
        record = read_mapping(holder_file, "record of a run", "remove it")
        job = f", Slurm job {record['slurm_job']}" if record["slurm_job"] else ""
        return f"process {record['process']} on {record['host']}{job}, since {record['started']} ({record['command']})"
    except (UserError, KeyError):
        return f"a process that {holder_file.name} does not name"


def check_identity(old_identity: object, identity: Mapping[str, object], record_path: Path) -> None:
    """Raise `UserError` naming every entry in which `identity` differs from `old_identity`, the JSON in `record_path`.

    identity: what determines the result of a run, such as its settings and the digests of its inputs. "code", the
    version that wrote the record, may differ: a run of a week must survive a fix of unrelated code.
    """
    if not isinstance(old_identity, Mapping):
        raise UserError(f"resume=true: {record_path} does not say how it was made; give another out_dir")
    old_identity = {key: value for key, value in old_identity.items() if key != "code"}
    changes = differences(old_identity, json.loads(json.dumps(identity)))
    changed_settings = [f"{key}={_show(new)} (was {_show(old)})" for key, old, new in changes]
    if changed_settings:
        problem = f"{record_path} was made with other settings: {list_words(changed_settings, _MOST_CHANGES)}"
        raise UserError(f"resume=true: {problem}; give the same ones, or another out_dir")


def is_finished(record_file: Path, identity: Mapping[str, object], resume: bool) -> bool:
    """Whether a run with this `identity` has finished.

    record_file: the JSON file that a run writes last, whose "made_of" is its identity.
    Raises `UserError` if a run with another identity has finished, or if one has and `resume` is off.
    """
    if not record_file.exists():
        return False
    require_free(record_file.parent, (record_file.name,), resume)
    report = read_mapping(record_file, "report of a run", "remove it, or give another out_dir")
    check_identity(report.get("made_of"), identity, record_file)
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
