"""Run the pipeline: each step in a separate process, skipped if it is done; then write a summary of all steps.

A step is a process because it leaves memory, threads and the launcher's state as it found them, on a GPU too, and may
be killed or repeated by its line in the log. This is not a Makefile: that neither knows the options that a product was
made with, nor detects early that a step cannot read an input that it gets hours later.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from outrider.base.errors import UserError
from outrider.base.files import read_mapping, require_writable, write_json
from outrider.base.progress import RELAY, Stage, relayed
from outrider.base.run_dirs import check_identity, clear, only_run, rehearsal_folder, require_rehearsal
from outrider.base.settings import ABSENT, Settings, differences, read_as
from outrider.base.words import Table, clean, in_words, option, quoted
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.open_target import open_target
from outrider.inference.loading.rehearsal import read_some, small
from outrider.inference.measure.time_limit import TimeLimit
from outrider.train.pipeline_settings import HERE, MAKERS, ROOT, STEPS, TIME, PipelineConfig, key_of

IMPORTED = Path(__file__).parents[2]  # where steps import this project from
LOGS = "logs"  # <step>.log: its output; .json: the record of a finished step; .seconds.json: time of interrupted runs
SUMMARY = "pipeline.json"
FIGURES = ("tau", "acceptance_rate", "draft_share", "lossless", "tokens_per_second", "speedup", "verdict")
_AGAIN = "remove it, and resume=true does the step again"
FACTS = ("parameters", "steps", "bits_per_byte", "made_of")  # of a target, by the step that made it
_SHARED = ("machine", "made_with", "dtype", "device", "runtime", "prompts", "max_new_tokens", "temperature")


@dataclass(frozen=True)
class Record:
    """A finished step: its options, seconds and end time, and the end times of the steps whose products it read."""

    options: list[str]
    seconds: float
    finished: float
    made_from: dict[str, float]


ConfigFor = Callable[[str, Sequence[str]], Any]  # the settings of a script, by its options
Words = Mapping[str, Sequence[str]]  # options by step


def fitted(config: PipelineConfig) -> PipelineConfig:
    """`config`, with numbers of its experiment cut to what the target has. Yours stay, and are refused by the steps."""
    if config.target is None:  # a step makes it, for which the numbers are
        return config
    try:
        target = open_target(config.target, by_layers=False).config
    except UserError:  # which the checks of the steps raise, with the step's name
        return config
    context = context_limit(target)
    most = {"draft_vocabulary": target.vocab_size, "seq_len": context, "decode_tokens": context // 2}

    def cut(option: str) -> str:
        key, _, value = option.partition("=")
        return f"{key}={min(int(value), most[key])}" if key in most and value.isdecimal() else option

    steps = {name: replace(step, overrides=[*map(cut, step.overrides)]) for name, step in config.steps.items()}
    return replace(config, steps=steps)


def check_steps(config: PipelineConfig, config_for: ConfigFor) -> Words:
    """Raise `UserError`, naming the step, for options that a command refuses and for inputs that it cannot read.

    Inputs are files, a target with its tokenizer, and records, unless an earlier step writes them. Finished steps are
    skipped. Returns the options that make each step small with debug=true, and otherwise none.
    """
    config, found = _placed(config), {}
    for name in config.to_do:
        if not config.debug and (Path(config.out_dir) / STEPS[name].product).exists():
            continue
        options = config.options(name)
        left = {key_of(option) for option in options if HERE in option}

        def wanted(key: str, left: set[str] = left) -> bool:
            return key not in left

        try:
            settings = given = config_for(STEPS[name].script, config.placed(options))
            if config.debug:
                settings = small(given, Path(config.out_dir))
                found[name] = words_between(given, settings)
            settings.require_places(wanted)
            read_some(settings, wanted)
        except UserError as error:
            raise UserError(f"step {name}, before any has run: {error}") from None
    return found


def words_between(before: Settings, after: Settings) -> list[str]:
    """The options that make `after` of `before`."""
    changed = differences(asdict(before), asdict(after))
    return [f"~{key}" if new is ABSENT else f"{key}={_value(new)}" for key, _, new in changed]


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_value, value))}]"
    return quoted(value) if isinstance(value, str) else "null" if value is None else str(value).lower()


def _placed(config: PipelineConfig) -> PipelineConfig:
    """`config`, of a rehearsal in the directory where it lies."""
    return replace(config, out_dir=str(rehearsal_folder(config.out_dir))) if config.debug else config


def run_pipeline(config: PipelineConfig, limit: TimeLimit | None = None, more: Words | None = None) -> None:
    """Run the unfinished steps, in order, and write `SUMMARY`.

    A step is done when its product exists and was made from the current products of earlier steps. limit: for all
    steps, of all runs; what they leave of it goes to the last one with a time limit. more: see `check_steps`.

    Raises `UserError` if the directory holds a run and resume is off, or a run with other options. Also raises it for a
    step that fails, naming it and its log; the summary then covers the finished steps.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("pipeline: started as several processes; start one, its steps are processes of their own")
    config = _placed(config)
    starts_over = config.debug and not config.resume
    if starts_over:
        require_rehearsal(Path(config.out_dir), LOGS)
    out_dir = require_writable(config.out_dir)
    with only_run(out_dir, "the products of a pipeline"):
        if starts_over:
            clear(out_dir)
        if (out_dir / LOGS).exists() and not config.resume:
            raise UserError(
                f"out_dir={out_dir}: holds an earlier run; resume=true continues it, another out_dir keeps both"
            )
        (out_dir / LOGS).mkdir(exist_ok=True)
        records = _records(config)
        if limit is not None:
            cut = sum(_seconds_cut(out_dir, name) for name in config.to_do)
            limit = replace(limit, earlier=limit.earlier + _seconds(records) + cut)
        try:
            for name in config.to_do:
                _do_step(config, name, records, limit, (more or {}).get(name, ()))
        finally:
            done = summary(config, records)
            write_json(out_dir / SUMMARY, done)
    print(steps_table(done["steps"]), flush=True)
    print(f"pipeline seconds={_seconds(records):.1f} state=complete summary={out_dir / SUMMARY}", flush=True)


def _records(config: PipelineConfig) -> dict[str, Record]:
    """The records of finished steps. Raises `UserError` if one was done with other options."""
    found = {}
    for name in config.to_do:
        path = Path(config.out_dir) / LOGS / f"{name}.json"
        if path.exists():
            found[name] = read_as(Record, path, "record of a step", _AGAIN)
            check_identity(_by_key(found[name].options), _by_key(config.options(name)), path)
    return found


def _do_step(
    config: PipelineConfig, name: str, records: dict[str, Record], limit: TimeLimit | None, more: Sequence[str]
) -> None:
    """Run a step unless it is done, and put its record into `records`, where those of earlier steps are final."""
    out_dir, made_from = Path(config.out_dir), _finish_times(name, records)
    before = records.pop(name, None)
    if before is not None and (out_dir / STEPS[name].product).exists() and before.made_from == made_from:
        records[name] = before
        print(f"pipeline step={name} seconds={before.seconds:.1f} state=done-before", flush=True)
        if name == "report":  # running the step would have shown it
            print((out_dir / name / "report.md").read_bytes().decode(errors="replace"), flush=True)
        return
    known = {} if before is None else before.made_from
    if any(known.get(step, finished) != finished for step, finished in made_from.items()):
        # Made from a product that has been made anew: its command would refuse to continue from it.
        with only_run(require_writable(out_dir / name), f"the product of step {name}"):
            shutil.rmtree(out_dir / name, ignore_errors=True)
            _cut(out_dir, name).unlink(missing_ok=True)
    records[name] = _run_step(config, name, records, limit, more)


def _finish_times(name: str, records: Mapping[str, Record]) -> dict[str, float]:
    return {before: records[before].finished for before in STEPS[name].after if before in records}


def step_stage(
    config: PipelineConfig, name: str, done: Collection[str], spent: float = 0.0, limit: TimeLimit | None = None
) -> Stage:
    """The progress stage of a step, with the time left of all steps not `done`: that of `limit` if there is one.

    spent: seconds of its earlier runs.
    """
    own = config.expected_minutes(name)
    later = [config.expected_minutes(step) for step in config.to_do if step not in (*done, name)]
    known = not config.debug and None not in later

    def left() -> float | None:
        if limit is not None:
            return limit.left(limit.spent())
        return 60 * sum(filter(None, later)) + max(0.0, 60 * own - spent - stage.spent) if known and own else None

    stage = Stage(f"step {config.to_do.index(name) + 1}/{len(config.to_do)} {name}", left=left)
    return stage


def _run_step(
    config: PipelineConfig, name: str, records: Mapping[str, Record], limit: TimeLimit | None, more: Sequence[str]
) -> Record:
    """Run one step to its end, with its output on the screen and in its log. Raises `UserError` if it fails."""
    out_dir, options = Path(config.out_dir), config.options(name)
    log, step = out_dir / LOGS / f"{name}.log", STEPS[name]
    (out_dir / LOGS / f"{name}.json").unlink(missing_ok=True)
    words = [*config.placed(options), *more, option("out_dir", out_dir / name), "resume=true"]
    began, cut, before = time.time(), _cut(out_dir, name), _seconds_cut(out_dir, name)
    if limit is not None and [name] == [step for step in config.to_do if config.steps[step].minutes][-1:]:
        loading = (config.steps[name].expected_minutes or 0) - config.steps[name].minutes
        rest = (limit.left(limit.spent()) + before) / 60 - loading  # all that is left, for all of its runs
        words.append(f"{TIME}={max(0.1, rest):.3g}")
    try:
        with step_stage(config, name, records, before, limit) as stage:
            left = "unknown" if stage.left is None else in_words(stage.left)
            print(f"pipeline step={name} state=started log={log} {left=}", flush=True)
            status = run_command(step.script, words, log)
    finally:  # also if interrupted: a resumed step keeps its training, so its time is summed over all its runs
        seconds = before + time.time() - began
        write_json(cut, {"seconds": seconds})
    failed = status != 0 or not (out_dir / step.product).exists()
    print(f"pipeline step={name} seconds={seconds:.1f} state={'failed' if failed else 'done'}", flush=True)
    if failed:
        reason = f"exit status {status}" if status else f"it left no {step.product}"
        raise UserError(f"step {name} failed ({reason}); see {log}; resume=true continues from this step")
    record = Record(options, seconds, time.time(), _finish_times(name, records))
    write_json(out_dir / LOGS / f"{name}.json", asdict(record))
    cut.unlink()
    return record


def _cut(out_dir: Path, name: str) -> Path:
    return out_dir / LOGS / f"{name}.seconds.json"


def _seconds_cut(out_dir: Path, name: str) -> float:
    """Seconds of the runs of a step that did not end."""
    file = _cut(out_dir, name)
    return read_as(dict[str, float], file, "seconds of a step", "remove it")["seconds"] if file.exists() else 0.0


def run_command(script: str, words: Sequence[str], log: Path) -> int:
    """Run a command of this project in a process of its own; its exit status. Its output goes to stdout and `log`."""
    return _tee([sys.executable, str(ROOT / script), *words], log)


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
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` runs
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
            signal.signal(signal.SIGTERM, before)


def summary(config: PipelineConfig, records: Mapping[str, Record]) -> dict[str, Any]:
    """The costs and results of the finished steps, and the `FIGURES` of each compared method; JSON-able."""
    out_dir, steps = Path(config.out_dir), dict[str, dict[str, Any]]()
    for name, record in records.items():
        steps[name] = {"seconds": record.seconds, "options": record.options}
        told = _told(out_dir / STEPS[name].product)
        if "training_seconds" in (training := told.get("training", told)):
            steps[name]["training_seconds"] = training["training_seconds"]
    found: dict[str, Any] = {"complete": set(steps) == set(config.to_do), "debug": config.debug}
    found |= {"seconds": _seconds(records), "steps": steps}
    for name in MAKERS if config.target is None else ():
        if told := _told(out_dir / STEPS[name].product):
            found["target"] = {key: told[key] for key in FACTS if key in told}
    if config.target:
        found["target"] = {"path": config.target}
    report = out_dir / STEPS["report"].product
    if report.exists():  # also a "not lossless" report, with which the step fails
        reports = reports_in(report)
        found |= {key: reports[0][key] for key in _SHARED if key in reports[0]}
        found["methods"] = {one["method"]: {key: one[key] for key in FIGURES} for one in reports}
    return found


def _told(product: Path) -> dict[str, Any]:
    """What the product of a step says in JSON; nothing where it is of another kind, or missing."""
    told = product.suffix == ".json" and product.exists()
    return read_mapping(product, "product of a step", _AGAIN) if told else {}


def steps_table(steps: Mapping[str, Mapping[str, Any]]) -> str:
    """`steps` of a `summary` as a Markdown table: the time of each step, and the training time within it."""
    rows = [
        (name, *(in_words(step[key]) if key in step else "" for key in ("seconds", "training_seconds")))
        for name, step in steps.items()
    ]
    return "\n".join(Table({"step": "", "took": "", "trained": ""}, rows).markdown())


def reports_in(path: Path) -> list[dict[str, Any]]:
    """The reports, one per method, in evaluate-checkpoint's report.json. Raises `UserError` for a damaged file."""
    content: dict[str, Any] = read_mapping(path, "report", _AGAIN)
    reports: list[dict[str, Any]] = content.get("reports") or [content]
    return reports


def _seconds(records: Mapping[str, Record]) -> float:
    return sum(record.seconds for record in records.values())


def _by_key(options: list[str]) -> dict[str, str]:
    return {option.partition("=")[0]: option.partition("=")[2] for option in options}
