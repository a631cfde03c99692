"""The pipeline: from a target over its answers, drafters and an n-gram table to one report.

A step is one command, in a process of its own; its product is the file that the command writes last. `plan_steps` makes
the `Step`s, `check_steps` reads the inputs of all steps, `run_pipeline` runs them.

An option that names the product of an earlier step is recorded with `HERE` in place of the pipeline's directory, as in
checkpoint={out_dir}/eesd. So a pipeline can be moved, and a resumed run still agrees with its records. On the command
line of the step the path is written out: checkpoint=runs/demo/eesd.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from outrider.base.errors import UserError
from outrider.base.files import require_writable
from outrider.base.run_dirs import clear, only_run, require_free, require_rehearsal
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.open_target import open_target
from outrider.draft_models.targets.settings import TARGET
from outrider.draft_models.targets.unseen_target import open_unseen
from outrider.inference.loading.rehearsal import check_inputs, shrink
from outrider.inference.measure.threads import warn_if_busy
from outrider.inference.measure.time_limit import TimeLimit
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.train.settings.pipeline import LOGS, MINUTES, REMOVED, STEPS, TARGET_STEPS, PipelineConfig
from outrider.train.steps import ROOT, ConfigFor, Records, Step, read_records, run_step, write_words

HERE = "{out_dir}"
REPOSITORY = "{repository}"  # in an experiment (a file in conf/): the directory of this project
# The option that names the target's answers, by the value of `data` in the options of a step that reads them.
_READERS = {"responses": "data.path", "self_distillation": "data.mix.generated.path"}


def plan_steps(config: PipelineConfig, config_for: ConfigFor) -> list[Step]:
    """The steps of a pipeline in order; small ones with debug=true. config_for: from a script and options to settings.

    Raises `UserError`, naming the step, for options that a command refuses.
    """
    option_limits = size_limits(config)
    return [plan_step(config, name, option_limits, config_for) for name in config.to_do]


def size_limits(config: PipelineConfig) -> dict[str, int]:
    """The most that the target allows, by option; nothing for a target that a step makes, or that cannot be opened."""
    tokenizer_path = config.steps.get("responses", {}).get("tokenizer")  # of a target whose weights are elsewhere
    try:
        if config.target is None and tokenizer_path is None:
            return {}
        target = open_target(config.target, by_layers=False) if config.target else open_unseen(str(tokenizer_path))
        target_config = target.config  # by_layers=False, above: a target of any architecture
    except UserError:  # the checks of the steps raise it again, with the step's name
        return {}
    max_context = context_limit(target_config)  # decode_tokens leave half of it for the prompts
    return {"draft_vocabulary": target_config.vocab_size, "seq_len": max_context, "decode_tokens": max_context // 2}


def plan_step(config: PipelineConfig, step_name: str, option_limits: Mapping[str, int], config_for: ConfigFor) -> Step:
    """The step `step_name`. option_limits: see `size_limits`."""
    options, command = merge_options(config, step_name, option_limits), STEPS[step_name]
    input_names = [step for step in config.to_do if f"{HERE}/{step}" in str(options)]
    if step_name == "report" and "calibrate" in config.to_do:  # which writes to the directory of the early exit
        input_names.append("calibrate")
    filled_options = {key: _fill_paths(value, str(config.folder)) for key, value in options.items()}
    argv = write_words({**filled_options, "out_dir": str(config.folder / step_name), "resume": True})
    with _name_step(step_name):
        settings = config_for(command.script, argv)
    settings = shrink(settings, config.folder) if config.debug else settings  # a rehearsal with everything small
    product_file, minutes = config.folder / step_name / command.product, config.estimate_minutes(step_name)
    return Step(step_name, command.script, argv, settings, product_file, write_words(options), input_names, minutes)


def merge_options(config: PipelineConfig, step_name: str, option_limits: Mapping[str, int]) -> dict[str, object]:
    """The options of a step: the products that it reads, the experiment's options, and the user's, which replace them.

    A number in the experiment is at most that of `option_limits`.
    """
    base_options, user_options = {**config.steps[step_name]}, config.more.get(step_name, {})
    for key, value in config.steps[step_name].items():
        if key in option_limits and isinstance(value, int):
            base_options[key] = min(value, option_limits[key])
    if config.minutes is not None and config.scaled_minutes(step_name):
        base_options[MINUTES] = config.scaled_minutes(step_name)
    # A target writes prompts only without a file of them.
    links = {} if step_name == "prompts" and "file" in base_options else STEPS[step_name].links
    options: dict[str, object] = {option: path for option in links if (path := _find_product(config, links[option]))}
    answers_option = _READERS.get(str({**base_options, **user_options}.get("data")))
    answer_options = {answers_option: f"{HERE}/responses/responses-*.jsonl"} if answers_option else {}
    options |= answer_options | base_options | user_options
    return {key: value for key, value in options.items() if value != REMOVED}


def _find_product(config: PipelineConfig, product_name: str) -> str | None:
    """The path of a product (see `StepCommand.links`); None if no step makes it.

    Example: {out_dir}/prompts/train.jsonl for the product prompts/train.jsonl, which the step prompts makes.
    """
    if product_name != TARGET:
        return f"{HERE}/{product_name}" if product_name.partition("/")[0] in config.to_do else None
    if config.target:
        return config.target
    return next((f"{HERE}/{step}" for step in TARGET_STEPS if step in config.to_do), None)


def _fill_paths(value: object, folder: str) -> object:
    """The value of an option with paths in place of `HERE` and `REPOSITORY`."""
    return value.replace(HERE, folder).replace(REPOSITORY, str(ROOT)) if isinstance(value, str) else value


def check_steps(config: PipelineConfig, steps: Sequence[Step]) -> None:
    """Raise `UserError`, naming the step, for inputs that a step cannot read: files, a target with its tokenizer, and
    records. The inputs of a finished step are not read."""
    for step in steps:
        if config.debug or not step.product.exists():
            with _name_step(step.name):
                _read_inputs(step)


def _read_inputs(step: Step) -> None:
    """Read the inputs of a step, except products of other steps."""
    product_options = {word.partition("=")[0] for word in step.options if HERE in word}

    def is_input(key: str) -> bool:
        return key not in product_options

    step.settings.require_paths(is_input)
    check_inputs(step.settings, is_input)


@contextmanager
def _name_step(step_name: str) -> Iterator[None]:
    """Context manager: a `UserError` inside names the step."""
    try:
        yield
    except UserError as error:
        raise UserError(f"step {step_name}, before any has run: {error}") from None


def require_one_process(command: str) -> None:
    """Raise `UserError` if a launcher started several processes."""
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
        require_rehearsal(config.folder, LOGS)  # what is there must be a rehearsal's, as `LOGS` shows
    out_dir = require_writable(config.folder)
    with only_run(out_dir, "the products of a pipeline"):
        if starts_over:
            clear(out_dir)
        require_free(out_dir, config.run_files, config.resume)
        (out_dir / LOGS).mkdir(exist_ok=True)
        records = read_records(steps)
        if limit is not None:
            limit = replace(limit, earlier=limit.earlier + _sum_seconds(records))
        for number, step in enumerate(steps, 1):
            limited_step = _limit_last(step, records, limit) if limit is not None and number == len(steps) else step
            seconds_left_of = estimate_left(step, steps[number:], records, limit)
            has_run = run_step(limited_step, records, f"step {number}/{len(steps)} {step.name}", seconds_left_of)
            if step.name == "report" and not has_run:  # a step that runs shows its own
                print(step.product.with_suffix(".md").read_bytes().decode(errors="replace"), flush=True)
    print(f"pipeline seconds={_sum_seconds(records):.1f} state=complete out_dir={out_dir}", flush=True)


def _sum_seconds(records: Records) -> float:
    return sum(record.seconds for record in records.values())


def _limit_last(step: Step, records: Records, limit: TimeLimit) -> Step:
    """`step` with the time left, without the minutes of its loading, as its limit if it is a report."""
    record, settings = records.get(step.name), step.settings
    if not isinstance(settings, EvaluateConfig):
        return step
    # A report's limit is for all its runs: add the seconds of its stopped runs, which `limit` has counted as spent.
    earlier_seconds = record.seconds if record and not record.finished else 0.0
    loading_minutes = (step.expected or 0.0) - (settings.minutes or 0.0)
    minutes_limit = (limit.left() + earlier_seconds) / 60 - loading_minutes
    return replace(step, settings=replace(settings, minutes=max(0.1, minutes_limit)))


def estimate_left(
    step: Step, later_steps: Sequence[Step], records: Records, limit: TimeLimit | None = None
) -> Callable[[float], float | None]:
    """A function from the seconds that a step has taken to those left of it and of the `later_steps`; None: unknown."""
    if limit is not None:
        return lambda _: limit.left()
    finished_names = {name for name, record in records.items() if record.finished}
    expected_minutes = [step.expected, *(later.expected for later in later_steps if later.name not in finished_names)]
    if None in expected_minutes:
        return lambda _: None
    step_seconds, *later_seconds = (60 * (expected or 0.0) for expected in expected_minutes)
    return lambda spent_seconds: max(0.0, step_seconds - spent_seconds) + sum(later_seconds)
