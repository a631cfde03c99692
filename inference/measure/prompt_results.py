"""An evaluation's results, stored prompt by prompt: a killed run loses no finished prompt.

    run.json              the settings that determine the results, and the data prepared once for all prompts
    results-00000.jsonl   one `Measured` a line, appended by one process of one run

Only complete lines count: an unfinished line of a killed process is ignored. Every process of every run has its own
file, so nothing is written after such a line. Every line, and run.json, contains its own digest.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from inference.measure.results import PromptResult, Skipped
from outrider.errors import UserError
from outrider.files import parse_json, read_json, sealed, unsealed, write_json
from outrider.run_dirs import check_identity
from outrider.settings import Settings, construct

Record = TypeVar("Record")
REPORT_FILE = "report.json"
RUN_FILE = "run.json"
_FILE = re.compile(r"results-(\d{5,})\.jsonl")


@dataclass(frozen=True)
class Measured:
    """A measured prompt: its turns, the skipped ones separately, and the number of processes that were running.

    position: the prompt's index in the run, the key of its results. threads: CPU threads used; 0: not recorded. spent:
    seconds of all runs until it was done. peak_bytes: its process's peak memory until then, on the GPU if it used one;
    0: not recorded. cpu_share, load: for `machine_load`; None: not recorded.
    """

    position: int
    processes: int
    turns: tuple[PromptResult, ...]
    skipped: tuple[Skipped, ...] = ()
    threads: int = 0
    spent: float = 0.0
    peak_bytes: int = 0
    cpu_share: float | None = None
    load: float | None = None


def open_run(folder: Path, settings: Mapping[str, object], resume: bool, config: Settings | None = None) -> object:
    """The `prepared` data (see `begin_run`) of the run to continue in `folder`; None if there is none.

    config: the current settings, for options that are newer than the run (see `check_identity`).

    Raises `UserError` if `folder` holds results that must not be continued, or were made with other settings.
    """
    path, results = folder / RUN_FILE, read_results(folder)
    if not resume and (results or (folder / REPORT_FILE).exists()):
        raise UserError(
            f"out_dir={folder}: holds results already; resume=true continues them, another out_dir keeps both"
        )
    if results and not path.exists():
        raise UserError(f"resume=true: {folder} holds results, but no {RUN_FILE} that says how they were made")
    if not (resume and path.exists()):
        return None
    what, remedy = "record of a run", "measure again in another out_dir"
    before = read_json(path, what, remedy)
    try:
        run = unsealed(before)
    except UserError as error:
        raise UserError(f"{path}: damaged {what} ({error}); {remedy}") from None
    check_identity(run["settings"], settings, folder, config)
    return run["prepared"]


def begin_run(folder: Path, settings: Mapping[str, object], prepared: object) -> None:
    """Record the settings that determine the results. `prepared`: JSON-able data shared by all prompts."""
    write_json(folder / RUN_FILE, sealed({"settings": settings, "prepared": prepared}))


def next_number(folder: Path) -> int:
    """The first unused number of a results file."""
    matches = [_FILE.fullmatch(path.name) for path in folder.iterdir()]
    return 1 + max((int(match[1]) for match in matches if match), default=-1)


def append_result(folder: Path, number: int, measured: Measured) -> None:
    """Add a line to file `number`; it is on the disk when this returns. Raises `UserError`."""
    append_line(folder / f"results-{number:05d}.jsonl", asdict(measured))


def append_line(path: Path, record: Mapping[str, object]) -> None:
    """Add `record` as a sealed line of JSON; it is on the disk when this returns. Raises `UserError`."""
    try:
        with open(path, "ab") as file:
            file.write(json.dumps(sealed(record)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); free space and resume=true") from None


def read_results(folder: Path) -> dict[int, Measured]:
    """All results in `folder` by position, from all processes. Raises `UserError` for a damaged file."""
    paths = sorted(path for path in folder.iterdir() if _FILE.fullmatch(path.name))
    return {one.position: one for path in paths for one in read_lines(path, Measured)}


def read_lines(path: Path, kind: type[Record]) -> Iterator[Record]:
    """The whole lines of `append_line`. Raises `UserError` for a damaged one."""
    *lines, _torn = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            yield construct(kind, unsealed(parse_json(line)))
        except UserError as error:
            raise UserError(
                f"{path}:{number}: not a result of this version ({error}); remove the file and "
                "resume=true measures what was in it again"
            ) from None
