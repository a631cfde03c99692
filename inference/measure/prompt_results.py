"""An evaluation's results prompt by prompt, kept as they come in: a killed run loses no prompt that was finished.

    run.json              the settings that decide the results, and what was prepared with them, once for all prompts
    results-00000.jsonl   one `Measured` a line, appended by one process of one run

A line counts once it ends: what a killed process left half-written is no result. Nobody writes after it, since every
process of every run has a file of its own. Every line, and run.json, carries a digest of itself.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from inference.measure.results import PromptResult, Skipped
from outrider.errors import UserError
from outrider.files import parse_json, read_json, sealed, unsealed, write_json
from outrider.run_dirs import check_identity
from outrider.settings import Settings, construct

REPORT_FILE = "report.json"
RUN_FILE = "run.json"
_FILE = re.compile(r"results-(\d{5,})\.jsonl")


@dataclass(frozen=True)
class Measured:
    """One prompt, measured: every turn of it, those left out apart, and how many processes were at work.

    position: the prompt's in the run's list, by which results are found again. threads: of the CPU, used for it; 0: not
    recorded. spent: seconds that all runs had taken when it was done. peak_bytes: the most memory that its process had
    had by then, of the GPU where it ran on one; 0: not recorded. cpu_share, load: for
    `machine_load`; None: not recorded.
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
    """What was prepared (see `begin_run`) by the run that is to be continued in `folder`; None where there is none.

    config: the run's own, for options that are newer than the run (see `check_identity`).

    Raises `UserError` where `folder` holds results that are not to be continued, or were made with other settings.
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
    """Say what decides the results to come. `prepared`: JSON-able; measured once, so that all prompts share it."""
    write_json(folder / RUN_FILE, sealed({"settings": settings, "prepared": prepared}))


def next_number(folder: Path) -> int:
    """The first number that no file of results has."""
    matches = [_FILE.fullmatch(path.name) for path in folder.iterdir()]
    return 1 + max((int(match[1]) for match in matches if match), default=-1)


def append_result(folder: Path, number: int, measured: Measured) -> None:
    """Add a line to file `number`; it is on the disk when this returns. Raises `UserError`."""
    path = folder / f"results-{number:05d}.jsonl"
    try:
        with open(path, "ab") as file:
            file.write(json.dumps(sealed(asdict(measured))).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); free space and resume=true") from None


def read_results(folder: Path) -> dict[int, Measured]:
    """All results in `folder` by position, of whatever process. Raises `UserError` for a damaged file."""
    found: dict[int, Measured] = {}
    for path in sorted(path for path in folder.iterdir() if _FILE.fullmatch(path.name)):
        *lines, _torn = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                measured = construct(Measured, unsealed(parse_json(line)))
                found[measured.position] = measured
            except UserError as error:
                raise UserError(
                    f"{path}:{number}: not a result of this version ({error}); remove the file and "
                    "resume=true measures its prompts again"
                ) from None
    return found
