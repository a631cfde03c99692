"""What `outrider auto` does in its minutes: which drafters it trains, by measurement, and the minutes of each step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from data_prep.text.settings import DataConfig
from draft_models.targets.model_spec import UNLIMITED
from inference.measure.statistics import MIN_PROMPTS
from outrider.errors import require
from outrider.words import option
from train.pipeline_settings import STEPS, TIME, PipelineConfig, StepConfig
from train.settings.auto import TRAINED, AutoConfig, Trained

Device = Literal["cpu", "cuda"]
# Tokens of a target's answers from which a drafter learns enough to pay: none of three drafters did from 281,548
# (benchmarks/results/drafters_smollm2_cpu.json), and two did from 360,000 (1.19 and 1.12 times, answers_smollm2.json).
ENOUGH_TOKENS = 300_000
# Drafters in the order in which they are worth their minutes. On a CPU an EAGLE-3 head learns from 196 tokens a second,
# an early exit from 1,090 and a small LM from 2,490 (drafters_smollm2_cpu.json); on a GPU the head guesses best in
# equal time (drafters_trainings_cuda.json).
ORDER: Mapping[Device, tuple[Trained, ...]] = {
    "cpu": ("early_exit", "small_lm"),
    "cuda": ("eagle3", "early_exit", "small_lm"),
}
LEAST: Mapping[Device, float] = {"cpu": 4.0, "cuda": 0.75}  # minutes of a training: those of the records that paid
_SHORTEST, _LONGEST = 64, 256  # tokens of a measured text, which is as long as the target's answers between these
_ROWS: Mapping[Device, int] = {"cpu": 40, "cuda": 256}  # prompts that are answered together at most
_PARAMETERS = 5e8  # of a target on a CPU, from which on they are fewer, so that a batch takes about as long
_STEPS: Mapping[Trained, str] = {"early_exit": "eesd", "small_lm": "small_lm", "eagle3": "eagle3"}
_METHODS: Mapping[Trained, tuple[str, ...]] = {
    "early_exit": ("eesd_survival", "early_exit/opt_tree_auto"),
    "small_lm": ("small_lm/survival", "opt_tree_auto"),
    "eagle3": ("eagle3/auto", "eagle3/opt_tree_auto"),
}
_ALWAYS = ("ngrams", "prompt_lookup")
# Shares of answers, trainings and report in the minutes that loading leaves.
_WITH_TRAINING, _WITHOUT = (0.47, 0.36, 0.17), (0.7, 0.0, 0.3)
_MORE = 1.2  # times the minutes in which all prompts are answered at the rate of the first ones
_HELDOUT = 8  # answers that a training holds out at least, of so many prompts
_QUICK = 1.5  # minutes of all that neither loads a target nor has a limit: prompts, table, pages, exports
_FEWEST = 2.0  # minutes that answers and report need at least: no `minutes` is below the sum of the two
_REPORT_LOADS = 3.0  # times the loading of a step, after which a report has compared, laid out and tuned its models
LOOK = (0.05, 0.5, 3.0)  # share of all minutes in which the target is looked at, and their bounds
_LARGER: Mapping[str, list[str]] = {  # on a GPU
    "eesd": ["fit.batch_rows=32", "fit.micro_batch_rows=16", "fit.epochs=20"],
    "small_lm": ["fit.batch_rows=32", "fit.micro_batch_rows=16", "fit.epochs=20"],
}


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

    def report(self, kinds: Sequence[Trained], tokens: float) -> float:
        """The minutes of a report on the fewest prompts that have a verdict, of so many tokens each; an estimate.

        Alone, a text has more than its share of the tokens a second that texts together have, and less than all.
        """
        a_second = self.tokens_per_second / math.sqrt(max(1, min(self.rows, self.prompts)))
        arms = 2 + len(_ALWAYS) + sum(len(_METHODS[kind]) for kind in kinds)  # two decode plainly
        return _REPORT_LOADS * self.loading + MIN_PROMPTS * arms * tokens / a_second / 60

    def length(self, kinds: Sequence[Trained], minutes: float) -> int:
        """The tokens of a measured text: as many as an answer has, fewer where the report's minutes hold no more."""
        held = math.inf
        if minutes and self.tokens_per_second:
            before = self.report(kinds, 0)
            held = (minutes - before) / (self.report(kinds, 1) - before)
        return round(min(self.longest, max(_SHORTEST, min(self.answer_tokens, held))))


@dataclass(frozen=True)
class Choice:
    """The kinds of drafters to train, why each other one is not, and the minutes of every step that has a limit."""

    kinds: tuple[Trained, ...]
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
    if "eagle3" not in ORDER[look.device]:
        reasons.setdefault("eagle3", "it learns too slowly on a CPU; train=[eagle3] trains it nevertheless")
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


def _minutes_for(look: Look, number: int, fits: list[Trained]) -> float:
    """The minutes in which so many drafters would have enough answers to learn from, and the time for it."""
    answers, training, _ = _WITH_TRAINING
    timed = max(ENOUGH_TOKENS / look.tokens_per_second / 60 / answers, number * LEAST[look.device] / training)
    return timed + look.spent + _untimed(look, fits[:1])


def _untimed(look: Look, kinds: Sequence[Trained]) -> float:
    return _QUICK + look.loading * (2 + len(kinds))


def _with_minutes(config: AutoConfig, look: Look, kinds: tuple[Trained, ...], why: Mapping[str, str]) -> Choice:
    answers, training, _ = _WITH_TRAINING if kinds else _WITHOUT
    untimed = look.spent + _untimed(look, kinds)
    timed = config.minutes - untimed
    least = untimed + _FEWEST
    require(timed >= _FEWEST, "minutes", f"{config.minutes:g}", f"{least:.0f} or more: loading takes {untimed:.1f}")
    least = min(timed, look.report(kinds, _SHORTEST))  # of the report, which then has a verdict
    answering = _MORE * (look.prompts - look.answered) * look.answer_tokens / look.tokens_per_second / 60
    answering = min(answering, answers * timed, max(0.0, (1 - training) * timed - least))
    minutes = {"responses": answering + look.spent, "report": (1 - training) * timed - answering}
    minutes |= {_STEPS[kind]: training * timed / len(kinds) for kind in kinds}
    return Choice(kinds, why, minutes)


def pipeline_of(config: AutoConfig, base: PipelineConfig, choice: Choice, look: Look) -> PipelineConfig:
    """The pipeline that carries out `choice`. base: all steps, as conf/experiment/auto.yaml has them."""
    left_out = {"fetch", "calibrate", *(_STEPS[kind] for kind in TRAINED if kind not in choice.kinds)}
    methods = [*(method for kind in choice.kinds for method in _METHODS[kind]), *_ALWAYS]
    length = look.length(choice.kinds, choice.minutes.get("report", 0.0))
    own: dict[str, list[str]] = {"report": [f"method=[{','.join(methods)}]", f"max_new_tokens={length}"]}
    own["responses"] = [f"batch_size={look.rows}", f"shard_size={2 * look.rows}"]
    if config.prompts is not None:
        own["prompts"] = [option("file", config.prompts)]
    if config.template != "auto":
        own["report"].append(f"template={config.template}")
        for reader in base.steps:
            if any(option.partition("=")[0] == "data" for option in base.steps[reader].overrides):
                own.setdefault(reader, []).append(f"data.template={config.template}")
    share = min(0.5, _HELDOUT / look.prompts) if look.prompts else 0.0
    for name in _STEPS.values() if share > DataConfig.heldout_fraction else ():
        own.setdefault(name, []).append(f"data.heldout_fraction={share:.3g}")
    steps = {}
    for name, step in base.steps.items():
        if name in left_out:
            continue
        more = [*own.get(name, ()), *(_LARGER.get(name, ()) if look.device == "cuda" else ())]
        minutes = choice.minutes.get(name)
        timed = [f"{TIME}={minutes:.3g}"] if minutes and not config.debug else []
        expected = minutes + look.loading if minutes else step.expected_minutes
        debug = [] if name in own and name == "prompts" else step.debug  # which is of prompts that are written here
        steps[name] = StepConfig([*step.overrides, *more, *timed], debug, step.more, expected)
    return replace(base, steps=steps, target=config.target, out_dir=config.out_dir, debug=config.debug, resume=True)


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
