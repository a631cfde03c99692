"""The plan of `outrider auto`, computed from its minutes, the machine, and the speed of the target's first answers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from outrider.base.errors import require
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.targets.model_spec import UNLIMITED
from outrider.draft_models.targets.vocabulary import KWARGS
from outrider.inference.measure.statistics import MIN_PROMPTS
from outrider.inference.settings.kinds import EAGLE3, EARLY_EXIT, NGRAMS, PROMPT_LOOKUP, SMALL_LM
from outrider.train.pipeline_run import fitted
from outrider.train.pipeline_settings import HERE, STEPS, TARGET, TIME, PipelineConfig
from outrider.train.settings.auto import TRAINABLE, AutoConfig

Device = Literal["cpu", "cuda"]
# Tokens of a target's answers from which a drafter learns enough to pay: none of three drafters did from 281,548
# (benchmarks/results/drafters_smollm2_cpu.json), and two did from 360,000 (1.19 and 1.12 times, answers_smollm2.json).
ENOUGH_TOKENS = 300_000
# Drafters, the one that gains most for its minutes first. On a CPU an EAGLE-3 head learns from 196 tokens a second,
# an early exit from 1,090 and a small LM from 2,490 (drafters_smollm2_cpu.json); on a GPU the head guesses best in
# equal time (drafters_trainings_cuda.json).
ORDER: Mapping[Device, tuple[str, ...]] = {
    "cpu": (EARLY_EXIT.name, SMALL_LM.name),
    "cuda": (EAGLE3.name, EARLY_EXIT.name, SMALL_LM.name),
}
LEAST: Mapping[Device, float] = {"cpu": 4.0, "cuda": 0.75}  # minutes of a training: those of the records that paid
_SHORTEST, _LONGEST = 64, 256  # tokens of a measured text, which is as long as the target's answers between these
_ROWS: Mapping[Device, int] = {"cpu": 40, "cuda": 256}  # prompts that are answered together at most
_PARAMETERS = 5e8  # of a target: above it a CPU answers fewer at once, to keep the time of a batch
_ALWAYS = (NGRAMS.name, PROMPT_LOOKUP.name)
# Shares of answers, trainings and report in the minutes that loading leaves.
_WITH_TRAINING, _WITHOUT = (0.47, 0.36, 0.17), (0.7, 0.0, 0.3)
_MORE = 1.2  # minutes given for the answers, over those expected from the speed of the first answers
_HELDOUT = 8  # least number of answers that a training holds out
_QUICK = 1.5  # minutes of the steps without a target and without a limit: prompts, table, pages, exports
_FEWEST = 2.0  # minutes that answers and report need at least: no `minutes` is below the sum of the two
_REPORT_LOADS = 3.0  # loading times before a report measures: it compares, lays out and tunes models
LOOK = (0.05, 0.5, 3.0)  # share of all minutes for the first answers, and its bounds
_OWN_PROMPTS = 0.12  # share of all minutes in which the target writes prompts
_FEWEST_TEXTS, _MOST_TEXTS = 40, 50_000  # that it writes for them
_LARGER = {"fit.batch_rows": 32, "fit.micro_batch_rows": 16, "fit.epochs": 20}  # of a training on a GPU
_ANSWERS = {"data": "responses", "data.path": f"{HERE}/responses/responses-*.jsonl"}
_TRAINING = {
    "draft_vocabulary": 8192, "decode_prompts": 8, "decode_tokens": 48, "fit.optimizer": "muon", "fit.muon_lr": 0.02,
    "fit.schedule": "linear", "fit.save_every": 50, "fit.wandb.mode": "disabled",
}  # fmt: skip
_SHORT = {"teacher": "cached", "frozen_dtype": "fast", "fit.precision": "fast", "seq_len": 512, "fit.lr": 0.004,
          "fit.warmup": 0, "fit.eval_every": None}  # fmt: skip
_EXPECTED = {"prompts": 0.2, "trigrams": 1.0}  # minutes of the steps that have no limit


def options_of(config: AutoConfig, choice: "Choice", look: "Look") -> dict[str, dict[str, object]]:
    """The options of every step of `choice`, without the minutes."""
    size = _LARGER if look.device == "cuda" else {}
    share = min(0.5, _HELDOUT / look.prompts) if look.prompts else 0.0
    heldout = {"data.heldout_fraction": float(f"{share:.3g}")} if share > DataConfig.heldout_fraction else {}
    template: dict[str, object] = {} if config.template == "auto" else {"template": config.template}
    template |= {KWARGS: config.chat_template_kwargs} if config.chat_template_kwargs else {}
    of_data = {f"data.{key}": value for key, value in template.items()}
    training = {**_ANSWERS, **of_data, **_TRAINING, **heldout}
    trained: dict[str, dict[str, object]] = {
        EARLY_EXIT.name: {
            "objective": "forward_kl", "train_head": False, "eval_rows": 16, "fit.epochs": 3, "fit.batch_rows": 2,
            **_SHORT, **size,
        },
        SMALL_LM.name: {
            "drafter": "tiny", "drafter.layers": 2, "drafter.hidden": 256, "drafter.intermediate": 704,
            "drafter.tied": True, "objective": "forward_kl", "fit.epochs": 4, "fit.batch_rows": 4, **_SHORT, **size,
        },
        EAGLE3.name: {
            "seq_len": 1024, "eval_rows": 32, "eval_batch_rows": 16, "fit.epochs": 40, "fit.batch_rows": 16,
            "fit.lr": 0.002, "fit.warmup": 0.02, "fit.max_grad_norm": 1.0, "fit.eval_every": 500,
        },
    }  # fmt: skip
    return {
        "prompts": _prompts(config, look, template),
        "responses": {
            "data": "local", "data.path": f"{HERE}/prompts/train.jsonl", "data.layout": "prompts", "dtype": "fast",
            "max_new_tokens": 160, "temperature": 0.7, "top_k_logits": 16, "batch_size": look.rows,
            "shard_size": 2 * look.rows, **of_data,
        },
        **{TRAINABLE[kind].step: {**training, **trained[kind]} for kind in choice.kinds},
        "trigrams": {**_ANSWERS, **of_data, "orders": [2, 3, 4]},
        "report": {
            "method": [*(method for kind in choice.kinds for method in TRAINABLE[kind].methods), *_ALWAYS],
            "target": TARGET, "prompts": f"{HERE}/prompts/heldout.jsonl", "dtype": "fast", "num_prompts": 12,
            "card": True, "max_new_tokens": look.length(choice.kinds, choice.minutes.get("report", 0.0)), **template,
        },
    }  # fmt: skip


def _prompts(config: AutoConfig, look: "Look", template: dict[str, object]) -> dict[str, object]:
    """The options of the step that writes prompts."""
    if config.prompts is not None:
        return {"file": config.prompts}
    written = {"count": _MOST_TEXTS, "dtype": "fast", "batch_size": max(_FEWEST_TEXTS, look.rows), **template}
    return {"target": TARGET, TIME: float(f"{_OWN_PROMPTS * config.minutes:.3g}"), **written}


@dataclass(frozen=True)
class Look:
    """Facts about the machine, and about a target from its first answers (0 before these).

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

    @property
    def in_a_minute(self) -> float:
        """Tokens of answers."""
        return 60 * self.tokens_per_second

    def untimed(self, kinds: Sequence[str]) -> float:
        """The minutes that are spent, and those of all that has no limit if drafters of such kinds are trained."""
        return self.spent + _QUICK + self.loading * (2 + len(kinds))

    def report(self, kinds: Sequence[str], tokens: float) -> float:
        """An estimate of the minutes of a report on the fewest prompts for a verdict, with `tokens` tokens each.

        A text alone is faster than its share of a batch's tokens a second, and slower than the whole batch.
        """
        a_minute = self.in_a_minute / math.sqrt(max(1, min(self.rows, self.prompts)))
        arms = 2 + len(_ALWAYS) + sum(len(TRAINABLE[kind].methods) for kind in kinds)  # two decode plainly
        return _REPORT_LOADS * self.loading + MIN_PROMPTS * arms * tokens / a_minute

    def length(self, kinds: Sequence[str], minutes: float) -> int:
        """The tokens of a measured text: as many as an answer has, fewer where the report's minutes hold no more."""
        held = math.inf
        if minutes and self.tokens_per_second:
            before = self.report(kinds, 0)
            held = (minutes - before) / (self.report(kinds, 1) - before)
        return round(min(self.longest, max(_SHORTEST, min(self.answer_tokens, held))))


@dataclass(frozen=True)
class Choice:
    """The kinds of drafters to train, reasons against the other kinds, and the minutes of every step with a limit."""

    kinds: tuple[str, ...]
    not_tried: Mapping[str, str]
    minutes: Mapping[str, float]


def rows_of(device: Device, parameters: float, text_bytes: float, free_bytes: float) -> int:
    """The number of prompts to answer together: limited by memory, and on a CPU to about a minute.

    text_bytes: cache of a prompt and its answer. free_bytes: memory left by the target's weights.
    """
    quick = _ROWS[device] if device == "cuda" else _ROWS[device] * min(1.0, _PARAMETERS / parameters)
    return max(1, min(int(quick), int(free_bytes / 2 / text_bytes)))


def choose(config: AutoConfig, look: Look, unfit: Mapping[str, str]) -> Choice:
    """The trainings and their minutes.

    unfit: why the target cannot have a drafter of some kind. Raises `UserError` if loading alone takes all minutes.
    """
    if config.train != "auto":
        return _with_minutes(config, look, config.train, {})
    fits = [kind for kind in ORDER[look.device] if kind not in unfit]
    slow = [kind for kind in TRAINABLE if kind not in ORDER[look.device]]
    reasons = {kind: f"it learns too slowly here; train=[{kind}] trains it nevertheless" for kind in slow} | {**unfit}
    answers, training, _ = _WITH_TRAINING
    before = look.untimed(fits[:1])  # which the first drafter needs as well
    by_prompts, by_time = look.prompts * look.answer_tokens, answers * (config.minutes - before) * look.in_a_minute
    count = int(training * (config.minutes - before) / LEAST[look.device]) if by_time >= ENOUGH_TOKENS else 0
    for number, kind in enumerate(fits, 1):
        if by_prompts < ENOUGH_TOKENS:
            shortage = f"all prompts make {by_prompts:,.0f} tokens of answers; it learns enough from {ENOUGH_TOKENS:,}"
            reasons[kind] = f"{shortage}: give more {'minutes' if config.prompts is None else 'prompts'}"
        elif number > count:
            needed = max(ENOUGH_TOKENS / look.in_a_minute / answers, number * LEAST[look.device] / training) + before
            reasons[kind] = f"it pays from about {needed:.0f} minutes, with which it learns enough"
    return _with_minutes(config, look, tuple(kind for kind in fits if kind not in reasons), reasons)


def _with_minutes(config: AutoConfig, look: Look, kinds: tuple[str, ...], why: Mapping[str, str]) -> Choice:
    answers, training, _ = _WITH_TRAINING if kinds else _WITHOUT
    untimed = look.untimed(kinds)
    timed = config.minutes - untimed
    least = untimed + _FEWEST
    require(timed >= _FEWEST, "minutes", f"{config.minutes:g}", f"{least:.0f} or more: loading takes {untimed:.1f}")
    least = min(timed, look.report(kinds, _SHORTEST))  # of the report, which then has a verdict
    answering = _MORE * (look.prompts - look.answered) * look.answer_tokens / look.in_a_minute
    answering = min(answering, answers * timed, max(0.0, (1 - training) * timed - least))
    looked = look.answered * look.answer_tokens / look.in_a_minute
    minutes = {"responses": answering + looked, "report": (1 - training) * timed - answering}
    minutes |= {TRAINABLE[kind].step: training * timed / len(kinds) for kind in kinds}
    return Choice(kinds, why, minutes)


def pipeline_of(config: AutoConfig, choice: Choice, look: Look) -> PipelineConfig:
    """The pipeline that carries out `choice`: a step for each kind that it trains, and prompts, answers and report."""
    steps, minutes = options_of(config, choice, look), {} if config.debug else choice.minutes
    for name, limit in minutes.items():
        steps[name][TIME] = float(f"{limit:.3g}")
    expected = _EXPECTED | {name: limit + look.loading for name, limit in minutes.items()}
    pipeline = PipelineConfig(steps=steps, target=config.target, out_dir=config.out_dir, debug=config.debug)
    resume = config.resume or not config.debug  # the steps go on from what the look began; a rehearsal starts over
    return fitted(replace(pipeline, expected_minutes=expected, resume=resume))


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
    """The part of the plan that is known before anything has run, as text."""
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
    """The minutes for the first answers; those in progress are finished."""
    share, least, most = LOOK
    return min(most, max(least, share * config.minutes))
