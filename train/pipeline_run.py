"""The pipeline: from a target over its answers, drafters and a table to one report."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from outrider.base.errors import UserError
from outrider.base.files import require_writable
from outrider.base.run_dirs import clear, only_run, require_free, require_rehearsal
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.open_target import open_target
from outrider.draft_models.targets.settings import EAGLE3, SMALL_LM
from outrider.inference.loading.rehearsal import check_inputs, shrink
from outrider.inference.measure.threads import warn_if_busy
from outrider.inference.measure.time_limit import TimeLimit
from outrider.train.settings.pipeline import LOGS, MINUTES, REMOVED, PipelineConfig
from outrider.train.steps import ROOT, ConfigFor, Records, Step, read_records, run_step, write_words

HERE = "{out_dir}"  # in the recorded options: the pipeline's directory, which may be moved
REPOSITORY = "{repository}"  # in an experiment: the directory of this project
Links = Mapping[str, str | None]  # the options of a step that name the target and products; None: no step makes it
# The option that names the target's answers, by the value of `data` in the options of a step that reads them.
_READERS = {"responses": "data.path", "self_distillation": "data.mix.generated.path"}


def plan_steps(config: PipelineConfig, config_for: ConfigFor) -> list[Step]:
    """The steps of a pipeline in order; small ones with debug=true.

    Raises `UserError`, naming the step, for options that a command refuses.
    """
    steps, largest = list[Step](), size_limits(config)

    def step(name: str, script: str, product: str, links: Links, also_reads: str = "") -> str | None:
        """Add a step if the experiment has it; its directory, or None."""
        if name not in config.to_do:
            return None
        options = merge_options(config, name, links, largest)
        inputs = [earlier.name for earlier in steps if f"{HERE}/{earlier.name}" in str(options)]
        inputs += [earlier.name for earlier in steps if earlier.name == also_reads]
        paths = {key: _fill(value, str(config.folder)) for key, value in options.items()}
        words = write_words({**paths, "out_dir": str(config.folder / name), "resume": True})
        with _naming(name):
            settings = config_for(script, words)
        settings, file = shrink(settings, config.folder) if config.debug else settings, config.folder / name / product
        steps.append(Step(name, script, words, settings, file, write_words(options), inputs, config.expected(name)))
        return f"{HERE}/{name}"

    target = config.target or step("fetch", "data_prep/fetch_target.py", "fetched.json", {})
    target = target or step("target", "train/toy_target.py", "toy_target.json", {})
    writer = None if "file" in config.steps.get("prompts", {}) else target
    prompts = step("prompts", "data_prep/write_prompts.py", "prompts.json", {"target": writer})
    questions, heldout = (prompts and f"{prompts}/{part}.jsonl" for part in ("train", "heldout"))
    question_links: Links = {"target": target, "data.path": questions}
    step("responses", "data_prep/generate_responses.py", "summary.json", question_links)
    early_exit = step("eesd", "train/eesd.py", "drafter.json", {"target": target})
    step("calibrate", "train/calibrate.py", "calibration.json", {"checkpoint": early_exit})
    eagle3 = step(EAGLE3, "train/eagle3.py", "eagle3.json", {"target": target})
    small_lm = step(SMALL_LM, "train/finetune_drafter.py", "finetune_drafter.json", {"target": target})
    table = step("trigrams", "data_prep/build_trigrams.py", "table.safetensors", {"tokenizer": target})
    drafters = {"checkpoint": early_exit, EAGLE3: eagle3, SMALL_LM: small_lm, "table": table}
    report_links: Links = {"target": target, "prompts": heldout, **drafters}
    # The calibration head lies in the directory of the early exit.
    step("report", "inference/evaluate_checkpoint.py", "report.json", report_links, also_reads="calibrate")
    return steps


def size_limits(config: PipelineConfig) -> dict[str, int]:
    """By option, the most that the target allows; nothing for a target that a step makes, or that cannot be opened."""
    try:
        if config.target is None:
            return {}
        target = open_target(config.target, by_layers=False).config
    except UserError:  # the checks of the steps raise it again, with the step's name
        return {}
    context = context_limit(target)
    return {"draft_vocabulary": target.vocab_size, "seq_len": context, "decode_tokens": context // 2}


def merge_options(config: PipelineConfig, name: str, links: Links, largest: Mapping[str, int]) -> dict[str, object]:
    """The options of a step: the experiment's, with numbers of at most `largest`, and the user's."""
    experiment, more = {**config.steps[name]}, config.more.get(name, {})
    for key, value in config.steps[name].items():
        if key in largest and isinstance(value, int):
            experiment[key] = min(value, largest[key])
    if config.minutes is not None and config.limit(name):
        experiment[MINUTES] = config.limit(name)
    reader = _READERS.get(str({**experiment, **more}.get("data")))
    answers = {reader: f"{HERE}/responses/responses-*.jsonl"} if reader else {}
    options = {key: path for key, path in links.items() if path} | answers | experiment | more
    return {key: value for key, value in options.items() if value != REMOVED}


def _fill(value: object, folder: str) -> object:
    """The value of an option with paths in place of `HERE` and `REPOSITORY`."""
    return value.replace(HERE, folder).replace(REPOSITORY, str(ROOT)) if isinstance(value, str) else value


def check_steps(config: PipelineConfig, steps: Sequence[Step]) -> None:
    """Raise `UserError`, naming the step, for inputs that a step cannot read: files, a target with its tokenizer, and
    records. Those that earlier steps write are not read, nor those of a finished step."""
    for step in steps:
        if config.debug or not step.product.exists():
            with _naming(step.name):
                _read_inputs(step)


def _read_inputs(step: Step) -> None:
    written_keys = {word.partition("=")[0] for word in step.options if HERE in word}  # by earlier steps

    def is_input(key: str) -> bool:
        return key not in written_keys

    step.settings.require_paths(is_input)
    check_inputs(step.settings, is_input)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Context manager: a `UserError` names the step."""
    try:
        yield
    except UserError as error:
        raise UserError(f"step {name}, before any has run: {error}") from None


def require_one_process(command: str) -> None:
    """Raise `UserError` if a launcher started several."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"{command}: started as several processes; start one, its steps are processes of their own")


def run_pipeline(config: PipelineConfig, steps: Sequence[Step], limit: TimeLimit | None = None) -> None:
    """Run the unfinished steps, in order (see `run_step`).

    steps: see `plan_steps`. limit: the time of all steps together, over all runs; the last step gets the time that the
    others leave.

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
        records = read_records(steps)
        if limit is not None:
            limit = replace(limit, earlier=limit.earlier + _sum_seconds(records))
        for number, step in enumerate(steps, 1):
            timed = _limit_last(step, records, limit) if limit is not None and number == len(steps) else step
            seconds_left = estimate_left(step, steps[number:], records, limit)
            has_run = run_step(timed, records, f"step {number}/{len(steps)} {step.name}", seconds_left)
            if step.name == "report" and not has_run:  # a step that runs shows its own
                print(step.product.with_suffix(".md").read_bytes().decode(errors="replace"), flush=True)
    print(f"pipeline seconds={_sum_seconds(records):.1f} state=complete out_dir={out_dir}", flush=True)


def _sum_seconds(records: Records) -> float:
    return sum(record.seconds for record in records.values())


def _limit_last(step: Step, records: Records, limit: TimeLimit) -> Step:
    """`step`, whose limit for all of its runs is the time left, without the minutes of its loading."""
    record = records.get(step.name)
    spent = record.seconds if record and not record.finished else 0.0
    loading = (step.expected or 0.0) - (step.settings.minutes or 0.0)
    minutes = (limit.left(limit.spent()) + spent) / 60 - loading
    return replace(step, settings=replace(step.settings, minutes=max(0.1, minutes)))


def estimate_left(
    step: Step, later_steps: Sequence[Step], records: Records, limit: TimeLimit | None = None
) -> Callable[[float], float | None]:
    """The seconds left of a step and of the `later_steps`, by the seconds that the step has taken. None: unknown."""
    if limit is not None:
        return lambda _: limit.left(limit.spent())
    finished = {name for name, record in records.items() if record.finished}
    minutes = [step.expected, *(later.expected for later in later_steps if later.name not in finished)]
    if None in minutes:
        return lambda _: None
    seconds, *later_seconds = (60 * (expected or 0.0) for expected in minutes)
    return lambda spent: max(0.0, seconds - spent) + sum(later_seconds)
