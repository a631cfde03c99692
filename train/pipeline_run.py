"""Run the pipeline: each step in a separate process, skipped if it is done.

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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from outrider.base.errors import UserError
from outrider.base.files import require_writable, write_json
from outrider.base.progress import RELAY, Stage, relayed
from outrider.base.run_dirs import check_identity, clear, only_run, require_free, require_rehearsal
from outrider.base.settings import read_as
from outrider.base.words import clean, in_words, option
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.open_target import open_target
from outrider.inference.loading.rehearsal import check_inputs, shrink
from outrider.inference.measure.threads import warn_if_busy
from outrider.inference.measure.time_limit import TimeLimit
from outrider.train.pipeline_settings import HERE, LOGS, ROOT, STEPS, Options, PipelineConfig

IMPORTED = Path(__file__).parents[2]  # where steps import this project from
_AGAIN = "remove it, and resume=true does the step again"


@dataclass(frozen=True)
class Record:
    """A step that was begun: its options, seconds and end time, and the end times of the steps whose products it read.

    seconds: of all runs since it was begun. finished: the end time; 0 before.
    """

    options: list[str]
    seconds: float
    finished: float
    made_from: dict[str, float]


@dataclass(frozen=True)
class Job:
    """A command of this project that is to run: its script, its settings, and the options that they were made of."""

    script: str
    words: list[str]
    settings: Any


ConfigFor = Callable[[str, Sequence[str]], Any]  # the settings of a script, by its options
Jobs = Mapping[str, Job]  # by step


def require_one_process(command: str) -> None:
    """Raise `UserError` if a launcher started several."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"{command}: started as several processes; start one, its steps are processes of their own")


def words_of(options: Options) -> list[str]:
    """`options` as on a command line, with a dotted key for each value of a mapping."""
    words: list[str] = []
    for key, value in options.items():
        if isinstance(value, Mapping) and value:
            words += words_of({f"{key}.{inner}": nested for inner, nested in value.items()})
        else:
            words.append(option(key, value))
    return words


def job_of(script: str, options: Options, config_for: ConfigFor) -> Job:
    """The job of a script. Raises `UserError` for options that its command refuses."""
    words = words_of(options)
    return Job(script, words, config_for(script, words))


def fitted(config: PipelineConfig) -> PipelineConfig:
    """`config`, with numbers of its experiment reduced to what the target allows. Numbers that the user gave stay;
    steps may refuse them."""
    try:
        target = None if config.target is None else open_target(config.target, by_layers=False).config
    except UserError:  # the checks of the steps raise it again, with the step's name
        target = None
    if target is None:  # a step makes the target, and the numbers are for that
        return config
    context = context_limit(target)
    most = {"draft_vocabulary": target.vocab_size, "seq_len": context, "decode_tokens": context // 2}

    def cut(key: str, value: object) -> object:
        return min(value, most[key]) if key in most and isinstance(value, int) else value

    steps = {name: {key: cut(key, value) for key, value in options.items()} for name, options in config.steps.items()}
    return replace(config, steps=steps)


def jobs_of(config: PipelineConfig, config_for: ConfigFor) -> dict[str, Job]:
    """The steps to do, each checked before any runs; small ones with debug=true.

    Raises `UserError`, naming the step, for options that a command refuses and for inputs that it cannot read. Inputs
    are files, a target with its tokenizer, and records, unless an earlier step writes them. A finished step's inputs
    are not read.
    """
    jobs = dict[str, Job]()
    for name in config.to_do:
        try:
            jobs[name] = _checked_job(config, name, config_for)
        except UserError as error:
            raise UserError(f"step {name}, before any has run: {error}") from None
    return jobs


def _checked_job(config: PipelineConfig, name: str, config_for: ConfigFor) -> Job:
    job, options = job_of(STEPS[name].script, config.arguments(name), config_for), config.options(name)
    if config.debug:
        job = replace(job, settings=shrink(job.settings, config.folder))

    def is_input(key: str) -> bool:
        return HERE not in str(options.get(key))

    if config.debug or not (config.folder / STEPS[name].product).exists():
        job.settings.require_places(is_input)
        check_inputs(job.settings, is_input)
    return job


def run_pipeline(config: PipelineConfig, jobs: Jobs, limit: TimeLimit | None = None) -> None:
    """Run the unfinished steps, in order.

    A step is done when its product exists and was made from the current products of earlier steps. jobs: see `jobs_of`.
    limit: the time of all steps together, over all runs; the last step gets the time that the others leave.

    Raises `UserError` if the directory holds a run and resume is off, or a run with other options. Also raises it for a
    step that fails, naming it and its log.
    """
    require_one_process("pipeline")
    warn_if_busy()
    starts_over = config.debug and not config.resume
    if starts_over:
        require_rehearsal(config.folder, LOGS)
    out_dir = require_writable(config.folder)
    with only_run(out_dir, "the products of a pipeline"):
        if starts_over:
            clear(out_dir)
        require_free(out_dir, config.leaves, config.resume)
        (out_dir / LOGS).mkdir(exist_ok=True)
        records = _records(config)
        if limit is not None:
            limit = replace(limit, earlier=limit.earlier + sum(record.seconds for record in records.values()))
        for name in config.to_do:
            _do_step(config, name, jobs[name], records, limit)
    seconds = sum(record.seconds for record in records.values())
    print(f"pipeline seconds={seconds:.1f} state=complete out_dir={out_dir}", flush=True)


def _record_file(config: PipelineConfig, name: str) -> Path:
    return config.folder / LOGS / f"{name}.json"


def _records(config: PipelineConfig) -> dict[str, Record]:
    """The records of the steps that were begun. Raises `UserError` if one was finished with other options."""
    records = {}
    for name in config.to_do:
        path = _record_file(config, name)
        if path.exists():
            records[name] = read_as(Record, path, "record of a step", _AGAIN)
            if records[name].finished:
                check_identity(_by_key(records[name].options), _by_key(words_of(config.options(name))), path)
    return records


def _by_key(options: list[str]) -> dict[str, str]:
    return {key: value for key, _, value in (option.partition("=") for option in options)}


def _do_step(config: PipelineConfig, name: str, job: Job, records: dict[str, Record], limit: TimeLimit | None) -> None:
    """Run a step unless it is done, with its output on the screen and in its log; its record goes into `records`.

    Records of earlier steps are final. Raises `UserError` if the step fails.
    """
    folder, product, before = config.folder / name, config.folder / STEPS[name].product, records.get(name)
    made_from = {step: records[step].finished for step in config.sources(name) if step in records}
    spent = before.seconds if before and not before.finished else 0.0
    if before and before.finished and product.exists() and made_from.items() <= before.made_from.items():
        print(f"pipeline step={name} seconds={before.seconds:.1f} state=done-before", flush=True)
        if name == "report":  # a step that runs shows its own
            print((folder / "report.md").read_bytes().decode(errors="replace"), flush=True)
        return
    if before and any(before.made_from.get(step, finished) != finished for step, finished in made_from.items()):
        # Made from a product that was replaced since: the command would refuse to continue it.
        with only_run(require_writable(folder), f"the product of step {name}"):
            shutil.rmtree(folder, ignore_errors=True)
        spent = 0.0
    if limit is not None and name == config.to_do[-1]:
        loading = config.expected_minutes.get(name, 0) - config.limit(name)
        minutes = (limit.left(limit.spent()) + spent) / 60 - loading  # the time left for all runs of this step
        job = replace(job, settings=replace(job.settings, minutes=max(0.1, minutes)))

    def keep(record: Record) -> None:
        records[name] = record
        write_json(_record_file(config, name), asdict(record))

    log, began = _record_file(config, name).with_suffix(".log"), time.time()
    record = Record(words_of(config.options(name)), spent, 0.0, made_from)
    keep(record)
    try:
        with step_stage(config, name, [step for step in records if records[step].finished], spent, limit) as stage:
            time_left = "unknown" if stage.left is None else in_words(stage.left)
            print(f"pipeline step={name} state=started log={log} left={time_left!r}", flush=True)
            status = run_command(job, log)
    finally:  # also if interrupted: a resumed step keeps its training, so its time is summed over all its runs
        keep(record := replace(record, seconds=spent + time.time() - began))
    failed = status != 0 or not product.exists()
    state = "failed" if failed else "done"
    print(f"pipeline step={name} seconds={record.seconds:.1f} {state=!s}", flush=True)
    if failed:
        reason = f"exit status {status}" if status else f"it left no {STEPS[name].product}"
        raise UserError(f"step {name} failed ({reason}); see {log}; resume=true continues from this step")
    keep(replace(record, finished=time.time()))


def step_stage(
    config: PipelineConfig, name: str, finished: Collection[str], spent: float = 0.0, limit: TimeLimit | None = None
) -> Stage:
    """The progress stage of a step, with the time left of all steps not `finished`: that of `limit` if there is one.

    spent: seconds of its earlier runs.
    """
    to_do = {step for step in config.to_do if step == name or step not in finished}
    estimable = not config.debug and to_do <= config.expected_minutes.keys()

    def seconds_left() -> float | None:
        if limit is not None:
            return limit.left(limit.spent())
        seconds = {step: 60 * config.expected_minutes[step] for step in to_do} if estimable else {}
        return sum(seconds.values()) - min(seconds[name], spent + stage.spent) if estimable else None

    stage = Stage(f"step {config.to_do.index(name) + 1}/{len(config.to_do)} {name}", left=seconds_left)
    return stage


def run_command(job: Job, log: Path) -> int:
    """Run a command in a process of its own; its exit status. Its output goes to stdout and `log`."""
    held = log.with_suffix(".settings.json")
    write_json(held, {"words": job.words, "settings": asdict(job.settings)})
    return _tee([sys.executable, str(ROOT / job.script), "--settings", str(held)], log)


def _tee(command: list[str], log: Path) -> int:
    """Run `command` and return its exit status; its output is streamed to stdout and appended to `log`."""
    environment = os.environ | {
        "PYTHONUNBUFFERED": "1",
        RELAY: "1",
        "PYTHONIOENCODING": "utf-8",  # of the log, whatever this terminal is
        "PYTHONPATH": os.pathsep.join(filter(None, [str(IMPORTED), os.environ.get("PYTHONPATH")])),
    }
    with log.open("ab") as file:
        file.write(clean(f"$ {shlex.join(command)}\n").encode())
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if relayed(line.decode(errors="replace")):
                    continue
                file.write(line)
                file.flush()
                print(line.decode(errors="replace"), end="", flush=True)
            return process.wait()
        finally:
            relayed("")
            if process.poll() is None:  # interrupted: it must stop writing where a resumed run will write
                process.terminate()
                process.wait()
