"""Steps: commands of this project, each in a process of its own, skipped if it is done. A pipeline runs steps in turn.

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
_SAVE_SECONDS = 20.0  # seconds that an interrupted step has to save its work
ConfigFor = Callable[[str, Sequence[str]], RunConfig]  # the settings of a script, by its options
Records = dict[str, "Record"]  # by the step's name


@dataclass(frozen=True)
class Step:
    """A command of this project: its script, its settings, and the words on its command line.

    product: the file that the command writes last, in a directory named after the step. options: words KEY=VALUE with a
    placeholder for the pipeline's directory, on which a resumed run must agree. inputs: the earlier steps whose
    products are read. expected: minutes; None: unknown.
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

    seconds: of all runs since the step was begun. finished: the time of its end, in seconds since 1970; 0 before.
    made_from: the same of the steps whose products it read, by name.
    """

    options: list[str]
    seconds: float
    finished: float
    made_from: dict[str, float]


def write_words(options: Options) -> list[str]:
    """`options` as words KEY=VALUE of a command line, with a dotted key for each value of a mapping."""
    argv: list[str] = []
    for key, value in options.items():
        if isinstance(value, Mapping) and value:
            argv += write_words({f"{key}.{subkey}": subvalue for subkey, subvalue in value.items()})
        else:
            argv.append(write_option(key, value))
    return argv


def read_records(steps: Sequence[Step]) -> Records:
    """The records of the steps that were begun. Raises `UserError` if one was finished with other options."""
    records = Records()
    for step in steps:
        if (path := step.record_file).exists():
            record = read_as(Record, path, "record of a step", "remove it, and resume=true does the step again")
            if record.finished:
                check_identity(_by_key(record.options), _by_key(step.options), path)
            records[step.name] = record
    return records


def _by_key(options: list[str]) -> dict[str, str]:
    """The values of words KEY=VALUE by their keys."""
    return {key: value for key, _, value in (word.partition("=") for word in options)}


def run_step(step: Step, records: Records, title: str, seconds_left: Callable[[float], float | None]) -> bool:
    """Run a step unless it is done, with its output on the screen and in its log; its record goes into `records`.

    A step is done if its product exists and was made from the current products of earlier steps. A step that was made
    from others is begun anew. seconds_left(seconds of this step so far) gives the seconds left of all steps.
    Returns whether the step ran. Raises `UserError` if it fails.
    """
    record, log_file, folder = records.get(step.name), step.record_file.with_suffix(".log"), step.product.parent
    made_from = {name: records[name].finished for name in step.inputs if name in records}
    if record and not made_from.items() <= record.made_from.items():  # the command would refuse to continue it
        with only_run(require_writable(folder), f"the product of step {step.name}"):
            shutil.rmtree(folder, ignore_errors=True)
        record = None
    if record and record.finished and step.product.exists():
        print(f"pipeline step={step.name} seconds={record.seconds:.1f} state=done-before", flush=True)
        return False
    earlier_seconds, start_time = record.seconds if record and not record.finished else 0.0, time.time()
    record = _write_record(step, records, Record(step.options, earlier_seconds, 0.0, made_from))
    try:
        with Stage(title, estimate=lambda: seconds_left(earlier_seconds + time.time() - start_time)) as stage:
            left_text = "unknown" if stage.seconds_left is None else format_seconds(stage.seconds_left)
            print(f"pipeline step={step.name} state=started log={log_file} left={left_text!r}", flush=True)
            exit_status = run_command(step.script, step.words, step.settings, log_file)
    finally:  # also if interrupted: a resumed step keeps its training, so its time is summed over all its runs
        record = _write_record(step, records, replace(record, seconds=earlier_seconds + time.time() - start_time))
    failed = exit_status != 0 or not step.product.exists()
    print(f"pipeline step={step.name} seconds={record.seconds:.1f} state={'failed' if failed else 'done'}", flush=True)
    if failed:
        reason = f"exit status {exit_status}" if exit_status else f"it left no {step.name}/{step.product.name}"
        raise UserError(f"step {step.name} failed ({reason}); see {log_file}; resume=true continues from this step")
    _write_record(step, records, replace(record, finished=time.time()))
    return True


def _write_record(step: Step, records: Records, record: Record) -> Record:
    """Put `record` into `records` and into its file; returns it."""
    records[step.name] = record
    write_json(step.record_file, asdict(record))
    return record


def run_command(script: str, argv: list[str], settings: RunConfig, log_path: Path) -> int:
    """Run a script in a process of its own and return its exit status. Its output goes to stdout and `log_path`.

    argv: the options of which `settings` were made.
    """
    settings_file = log_path.with_suffix(".settings.json")
    write_json(settings_file, {"words": argv, "settings": asdict(settings)})
    return run_logged([sys.executable, str(ROOT / script), "--settings", str(settings_file)], log_path)


def run_logged(argv: list[str], log_path: Path) -> int:
    """Run a command line and return its exit status; its output is streamed to stdout and appended to `log_path`."""
    environment = os.environ | {
        "PYTHONUNBUFFERED": "1",
        RELAY: "1",  # it prints its progress as lines, which `relay_progress` shows here
        "PYTHONIOENCODING": "utf-8",  # of the log, whatever this terminal is
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_IMPORT_ROOT), os.environ.get("PYTHONPATH")])),
    }
    with log_path.open("ab") as log_file:
        log_file.write(remove_secrets(f"$ {shlex.join(argv)}\n").encode())
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if relay_progress(line.decode(errors="replace")):
                    continue
                log_file.write(line)
                log_file.flush()
                print(line.decode(errors="replace"), end="", flush=True)
            return process.wait()
        except KeyboardInterrupt as error:
            if type(error) is KeyboardInterrupt:  # Ctrl-C (SIGTERM is a subclass): the process got it too, and saves
                with suppress(subprocess.TimeoutExpired):
                    log_file.write(process.communicate(timeout=_SAVE_SECONDS)[0])
            raise
        finally:
            relay_progress("")
            if process.poll() is None:  # interrupted: the process must stop writing where a resumed run will write
                process.terminate()
                process.wait()
