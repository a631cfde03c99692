"""Steps: commands of this project, each in a process of its own, skipped if it is done.

A step is a process for two reasons. When it ends, all its memory and threads are free again, also on a GPU. And it can
be killed, or repeated by its line in the log. A Makefile is not enough: it does not compare the options of a product
with those of today, and it does not check the inputs of later steps before hours of work.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from outrider.base.errors import UserError
from outrider.base.files import require_writable, write_json
from outrider.base.progress import RELAY, Stage, relay_progress
from outrider.base.run_dirs import check_identity, only_run
from outrider.base.settings import RunConfig, read_as
from outrider.base.words import format_seconds, remove_secrets, write_option
from outrider.train.settings.pipeline import LOGS, Options

ROOT = Path(__file__).resolve().parent.parent
_IMPORT_ROOT = Path(__file__).parents[2]  # where steps import this project from
_SAVING = 20.0  # seconds that an interrupted step has to save what it has
ConfigFor = Callable[[str, Sequence[str]], RunConfig]  # the settings of a script, by its options
Records = dict[str, "Record"]  # by step


@dataclass(frozen=True)
class Step:
    """A command of this project: its script, its settings, and the words on its command line.

    product: the file that the command writes last, in a directory named after the step. options: words with the
    pipeline's directory left open, on which a resumed run must agree. inputs: the earlier steps whose products are
    read. expected: minutes; None: unknown.
    """

    name: str
    script: str
    words: list[str]
    settings: RunConfig
    product: Path
    options: list[str]
    inputs: list[str]
    expected: float | None = None

    @property
    def record_file(self) -> Path:
        """The file of its `Record`."""
        return self.product.parent.parent / LOGS / f"{self.name}.json"


@dataclass(frozen=True)
class Record:
    """The record of a step that was begun.

    seconds: of all runs since the step was begun. finished: its end time; 0 before. made_from: the end times of the
    steps whose products it read.
    """

    options: list[str]
    seconds: float
    finished: float
    made_from: dict[str, float]


def write_words(options: Options) -> list[str]:
    """`options` as on a command line, with a dotted key for each value of a mapping."""
    words: list[str] = []
    for key, value in options.items():
        if isinstance(value, Mapping) and value:
            words += write_words({f"{key}.{inner}": nested for inner, nested in value.items()})
        else:
            words.append(write_option(key, value))
    return words


def read_records(steps: Sequence[Step]) -> Records:
    """The records of the steps that were begun. Raises `UserError` if one was finished with other options."""
    records = Records()
    for step in steps:
        path = step.record_file
        if path.exists():
            record = read_as(Record, path, "record of a step", "remove it, and resume=true does the step again")
            if record.finished:
                check_identity(_by_key(record.options), _by_key(step.options), path)
            records[step.name] = record
    return records


def _by_key(options: list[str]) -> dict[str, str]:
    return {key: value for key, _, value in (word.partition("=") for word in options)}


def run_step(step: Step, records: Records, title: str, seconds_left: Callable[[float], float | None]) -> bool:
    """Run a step unless it is done, with its output on the screen and in its log; its record goes into `records`.

    A step is done if its product exists and was made from the current products of earlier steps. A step that was made
    from others is begun anew. seconds_left(seconds of this step so far) gives the seconds left of all steps.
    Returns whether the step ran. Raises `UserError` if it fails.
    """
    record, log, folder = records.get(step.name), step.record_file.with_suffix(".log"), step.product.parent
    made_from = {name: records[name].finished for name in step.inputs if name in records}
    if record and not made_from.items() <= record.made_from.items():  # the command would refuse to continue it
        with only_run(require_writable(folder), f"the product of step {step.name}"):
            shutil.rmtree(folder, ignore_errors=True)
        record = None
    if record and record.finished and step.product.exists():
        print(f"pipeline step={step.name} seconds={record.seconds:.1f} state=done-before", flush=True)
        return False
    earlier_seconds, began = record.seconds if record and not record.finished else 0.0, time.time()
    record = _write_record(step, records, Record(step.options, earlier_seconds, 0.0, made_from))
    try:
        with Stage(title, estimate=lambda: seconds_left(earlier_seconds + time.time() - began)) as stage:
            time_left = "unknown" if stage.seconds_left is None else format_seconds(stage.seconds_left)
            print(f"pipeline step={step.name} state=started log={log} left={time_left!r}", flush=True)
            status = run_command(step.script, step.words, step.settings, log)
    finally:  # also if interrupted: a resumed step keeps its training, so its time is summed over all its runs
        record = _write_record(step, records, replace(record, seconds=earlier_seconds + time.time() - began))
    failed = status != 0 or not step.product.exists()
    print(f"pipeline step={step.name} seconds={record.seconds:.1f} state={'failed' if failed else 'done'}", flush=True)
    if failed:
        reason = f"exit status {status}" if status else f"it left no {step.name}/{step.product.name}"
        raise UserError(f"step {step.name} failed ({reason}); see {log}; resume=true continues from this step")
    _write_record(step, records, replace(record, finished=time.time()))
    return True


def _write_record(step: Step, records: Records, record: Record) -> Record:
    records[step.name] = record
    write_json(step.record_file, asdict(record))
    return record


def run_command(script: str, words: list[str], settings: RunConfig, log: Path) -> int:
    """Run a script in a process of its own and return its exit status. Its output goes to stdout and `log`.

    words: the options of which `settings` were made.
    """
    file = log.with_suffix(".settings.json")
    write_json(file, {"words": words, "settings": asdict(settings)})
    return run_logged([sys.executable, str(ROOT / script), "--settings", str(file)], log)


def run_logged(words: list[str], log: Path) -> int:
    """Run a command line and return its exit status; its output is streamed to stdout and appended to `log`."""
    environment = os.environ | {
        "PYTHONUNBUFFERED": "1",
        RELAY: "1",  # it prints its progress as lines, which `relay_progress` shows here
        "PYTHONIOENCODING": "utf-8",  # of the log, whatever this terminal is
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_IMPORT_ROOT), os.environ.get("PYTHONPATH")])),
    }
    with log.open("ab") as file:
        file.write(remove_secrets(f"$ {shlex.join(words)}\n").encode())
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if relay_progress(line.decode(errors="replace")):
                    continue
                file.write(line)
                file.flush()
                print(line.decode(errors="replace"), end="", flush=True)
            return process.wait()
        except KeyboardInterrupt as error:
            if type(error) is KeyboardInterrupt:  # Ctrl-C, which it got too: it saves what it has
                with suppress(subprocess.TimeoutExpired):
                    file.write(process.communicate(timeout=_SAVING)[0])
            raise
        finally:
            relay_progress("")
            if process.poll() is None:  # interrupted: it must stop writing where a resumed run will write
                process.terminate()
                process.wait()
