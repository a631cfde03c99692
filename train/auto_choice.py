"""The plan of `outrider auto`, computed from its minutes, the machine, and the speed of the target's first answers.

`auto` is a pipeline of steps, each of which runs a command. The step "prompts" writes prompts, "responses" lets the
target answer them, a step for each kind of drafter trains on the answers, "trigrams" counts an n-gram table of them,
and "report" measures all drafters. A corpus is text that the user gives: a table and a small LM read it before the
answers.

`choose_rows` says how many prompts are answered together. After the first answers `choose_trainings` chooses drafters
and minutes, and `configure_pipeline` turns the choice into options of the pipeline's steps. Example, minutes=20 on a
GPU, when the first answers took 1 minute and a step loads for 0.1 minutes:

    no limit         3.0    1.0 spent, 1.5 for short steps, 0.5 of loading
    shared          17.0    answers 47 % (8.0), three trainings 36 % (2.04 each), the report 17 % (2.9)

The step of the answers has 8.5 minutes, because 0.5 of them were spent on the first answers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from outrider.base.errors import require
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.targets.model_spec import UNLIMITED
from outrider.draft_models.targets.vocabulary import KWARGS
from outrider.inference.measure.statistics import MIN_PROMPTS
from outrider.inference.settings.kinds import EAGLE3, EARLY_EXIT, KINDS, NGRAMS, PROMPT_LOOKUP, SMALL_LM
from outrider.train.settings.auto import TRAINABLE, AutoConfig
from outrider.train.settings.pipeline import CORPUS_LM, CORPUS_TABLE, MINUTES, STEPS, PipelineConfig
from outrider.train.steps import ConfigFor

Device = Literal["cpu", "cuda"]
# Tokens of a target's answers from which a drafter learns enough to pay: none of three drafters did from 281,548
# (benchmarks/results/drafters_smollm2_cpu.json), and two did from 360,000 (1.19 and 1.12 times, answers_smollm2.json).
# A small LM that had read source code for ten minutes did from 60,000 (user_size.md).
ENOUGH_TOKENS, ENOUGH_AFTER_CORPUS = 300_000, 60_000
# Kinds of drafters, those that gain most for their minutes first. On a CPU an EAGLE-3 head learns from 196 tokens a
# second, an early exit from 1,090 and a small LM from 2,490 (drafters_smollm2_cpu.json). On a GPU the head guesses best
# in equal time (drafters_trainings_cuda.json).
ORDER: Mapping[Device, tuple[str, ...]] = {
    "cpu": (EARLY_EXIT.name, SMALL_LM.name),
    "cuda": (EAGLE3.name, EARLY_EXIT.name, SMALL_LM.name),
}
LEAST_MINUTES: Mapping[Device, float] = {"cpu": 4.0, "cuda": 0.75}  # of a training: those of the records that paid
_SHORTEST, _LONGEST = 64, 256  # bounds of the tokens of a measured text, which is as long as the target's answers
_BATCH_ROWS: Mapping[Device, int] = {"cpu": 40, "cuda": 256}  # prompts that are answered together at most
_MAX_PARAMS = 1.25e9  # of a target: above it a CPU answers fewer at once, to keep the time of a batch
_FEWEST_ROWS = 8  # prompts: up to as many, further ones cost a CPU's pass little (passes_user_size_cpu.json)
_UNTRAINED = (NGRAMS.name, PROMPT_LOOKUP.name)  # methods that are always measured
# Shares of answers, trainings and report in the minutes that loading leaves.
_WITH_TRAINING, _WITHOUT_TRAINING = (0.47, 0.36, 0.17), (0.7, 0.0, 0.3)
_TIME_MARGIN = 1.2  # minutes given for the answers, over those expected from the speed of the first answers
_MIN_HELDOUT = 8  # least number of answers that a training holds out
_QUICK_STEPS = 1.5  # minutes of the steps without a target and without a limit: prompts, table, pages, exports
_FEWEST_MINUTES = 2.0  # minutes that answers and report need at least: no `minutes` is below the sum of the two
_REPORT_LOADS = 3.0  # loading times before a report measures: it compares, lays out and tunes models
FIRST_MINUTES = (0.05, 0.5, 3.0)  # share of all minutes for the first answers; bounds in minutes
_WRITE_SHARE = 0.12  # share of all minutes in which the target writes prompts
TOP_K = 16  # log-probabilities of a token in the answers: those of experiment=auto
_FEWEST_PROMPTS = 40  # that the target writes together
TOKENISED_BYTES = 1.2e6  # of text that a core tokenises in a second
# Bytes of text in a second that the small LM learns from at most: seven times the 12,000 of two cores (user_size.md).
_LEARNT_BYTES: Mapping[Device, float] = {"cpu": 8e4, "cuda": 2e6}
# The small LM with a corpus is wider unless the target is known to have fewer than `_LARGE` parameters: it learns from
# more text, and costs little beside a large target (benchmarks/results/user_size.md).
_LARGE = 5e8
_WIDER = {"drafter.layers": 3, "drafter.hidden": 384, "drafter.heads": 6, "drafter.kv_heads": 2,
          "drafter.intermediate": 1024, "draft_vocabulary": 12288}  # fmt: skip
_AFTER_CORPUS: Mapping[str, object] = {"drafter": "pretrained", "fit.lr": 0.002, "fit.epochs": 40}  # on the answers
_ON_GPU = {"fit.batch_rows": 32, "fit.micro_batch_rows": 16, "fit.epochs": 20}  # of the trainings of short rows


@dataclass(frozen=True)
class FirstAnswers:
    """Facts about the machine, and about a target from its first answers (0 before these)."""

    device: Device
    rows: int  # prompts that are answered together
    tokens_per_second: float = 0.0  # of all answers that are written together
    answer_tokens: float = 0.0  # the mean of an answer
    prompts: int = 0  # all prompts
    context: int = UNLIMITED  # of the target, in tokens
    loading: float = 0.0  # minutes in which a step starts and loads the target
    spent: float = 0.0  # minutes so far
    answered: int = 0  # prompts that have an answer
    top_k: int = TOP_K  # log-probabilities of each token that the answers have
    parameters: float = 0.0  # of the target; 0: unknown
    tokenising_minutes: float = 0.0  # for the whole corpus, once
    corpus_share: float = 1.0  # the part of the corpus that a small LM reads

    @property
    def longest_text(self) -> int:
        """The most tokens of a measured text: half of a short context."""
        return min(_LONGEST, self.context // 2)

    @property
    def tokens_per_minute(self) -> float:
        """Tokens of answers."""
        return 60 * self.tokens_per_second

    def unlimited_minutes(self, kinds: Sequence[str]) -> float:
        """The minutes that are spent, and those of all that has no limit if drafters of these kinds are trained."""
        corpus_reads = 1 + self.corpus_share * (SMALL_LM.name in kinds)  # by the table, and by the small LM
        # The target is loaded for the answers, the report and each training.
        return self.spent + _QUICK_STEPS + self.loading * (2 + len(kinds)) + self.tokenising_minutes * corpus_reads

    def report_minutes(self, kinds: Sequence[str], text_tokens: float) -> float:
        """An estimate of the minutes of a report on the fewest prompts for a verdict, with `text_tokens` tokens each.

        A text alone is faster than its share of a batch's tokens a second, and slower than the whole batch.
        """
        alone_tokens_per_minute = self.tokens_per_minute / math.sqrt(max(1, min(self.rows, self.prompts)))
        arm_count = 2 + len(_UNTRAINED) + sum(len(TRAINABLE[kind].methods) for kind in kinds)  # two decode plainly
        return _REPORT_LOADS * self.loading + MIN_PROMPTS * arm_count * text_tokens / alone_tokens_per_minute

    def text_tokens(self, kinds: Sequence[str], minutes_limit: float) -> int:
        """The tokens of a measured text: as many as an answer has, fewer where the report's minutes hold no more."""
        max_tokens = math.inf
        if minutes_limit and self.tokens_per_second:
            loading_minutes = self.report_minutes(kinds, 0)
            max_tokens = (minutes_limit - loading_minutes) / (self.report_minutes(kinds, 1) - loading_minutes)
        return round(min(self.longest_text, max(_SHORTEST, min(self.answer_tokens, max_tokens))))


@dataclass(frozen=True)
class Choice:
    """What is trained, and for how long."""

    kinds: tuple[str, ...]  # of drafters to train
    not_tried: Mapping[str, str]  # by another kind, the reason against it
    minutes: Mapping[str, float]  # by step, its limit; steps without a limit are missing
    finished: Mapping[str, str] = field(default_factory=dict)  # by kind, the folder of an earlier drafter to measure


NO_CHOICE = Choice((), {}, {})


def choose_rows(device: Device, parameter_count: float, cache_bytes: float, free_bytes: float) -> int:
    """The number of prompts to answer together: limited by memory, and on a CPU to about a minute.

    cache_bytes: cache of a prompt and its answer. free_bytes: memory left by the weights, of which caches take half.
    """
    batch_factor = 1.0 if device == "cuda" else min(1.0, _MAX_PARAMS / parameter_count)
    row_count = max(_FEWEST_ROWS, _BATCH_ROWS[device] * batch_factor)
    return max(1, min(int(row_count), int(free_bytes / 2 / cache_bytes)))


def choose_corpus_share(config: AutoConfig, device: Device, corpus_bytes: float) -> float:
    """The share of a corpus of so many bytes that the small LM can learn from in its minutes at most."""
    _, training_share, _ = _WITH_TRAINING
    learnt_bytes = _LEARNT_BYTES[device] * 60 * config.minutes * training_share / 2  # answers take the other half
    return float(f"{min(1.0, learnt_bytes / max(1.0, corpus_bytes)):.2g}")


def choose_trainings(
    config: AutoConfig, answers: FirstAnswers, unfit_reasons: Mapping[str, str],
    finished: Mapping[str, str] = NO_CHOICE.finished,
) -> Choice:  # fmt: skip
    """The trainings and their minutes. With train=auto no kind in `finished` (see `Choice`) is trained again.

    unfit_reasons: why the target cannot have a kind of drafter. Raises `UserError` if loading alone takes all minutes.
    """
    if config.train != "auto":
        return _share_minutes(config, answers, config.train, {}, {})
    candidates = [kind for kind in ORDER[answers.device] if kind not in {*unfit_reasons, *finished}]
    slow_kinds = [kind for kind in TRAINABLE if kind not in ORDER[answers.device]]
    reasons = {kind: f"it learns too slowly here; train=[{kind}] trains it nevertheless" for kind in slow_kinds}
    reasons |= unfit_reasons
    reasons |= _find_shortages(config, answers, candidates)
    for kind, folder in finished.items():
        reasons[kind] = f"{folder} was trained for this target and is measured; train=[{kind}] trains another"
    return _share_minutes(config, answers, tuple(kind for kind in candidates if kind not in reasons), reasons, finished)


def _find_shortages(config: AutoConfig, answers: FirstAnswers, candidate_kinds: Sequence[str]) -> dict[str, str]:
    """By kind of drafter, which prompts or minutes are missing for its training, if any are."""
    answer_tokens, shortages = answers.prompts * answers.answer_tokens, dict[str, str]()
    answer_share, training_share, _ = _WITH_TRAINING
    for kind in candidate_kinds:
        enough_tokens = ENOUGH_AFTER_CORPUS if config.corpus and kind == SMALL_LM.name else ENOUGH_TOKENS
        if answer_tokens < enough_tokens:
            remedy = f"give more {'minutes' if config.prompts is None else 'prompts'}"
            shortage = f"all prompts make {answer_tokens:,.0f} tokens of answers"
            shortages[kind] = f"{shortage}; it learns enough from {enough_tokens:,}: {remedy}"
            continue
        training_count = 1 + candidate_kinds.index(kind) - len(shortages)  # with those before it that are trained
        training_minutes = training_count * LEAST_MINUTES[answers.device] / training_share
        answering_minutes = enough_tokens / answers.tokens_per_minute / answer_share
        needed_minutes = max(answering_minutes, training_minutes) + answers.unlimited_minutes([kind])
        if needed_minutes > config.minutes:
            shortages[kind] = f"it pays from about {needed_minutes:.0f} minutes, with which it learns enough"
    return shortages


def _share_minutes(
    config: AutoConfig, answers: FirstAnswers, kinds: tuple[str, ...], skip_reasons: Mapping[str, str],
    finished_dirs: Mapping[str, str],
) -> Choice:  # fmt: skip
    """The choice of these kinds, with the minutes of each step (as in the module's example).

    The answers get no more minutes than all prompts need, and leave the report the fewest prompts for a verdict.
    """
    answer_share, training_share, _ = _WITH_TRAINING if kinds else _WITHOUT_TRAINING
    unlimited_minutes = answers.unlimited_minutes(kinds)
    budget, min_minutes = config.minutes - unlimited_minutes, math.ceil(unlimited_minutes + _FEWEST_MINUTES)
    expected = f"{min_minutes} or more: loading takes {unlimited_minutes:.1f}"
    require(budget >= _FEWEST_MINUTES, MINUTES, f"{config.minutes:g}", expected)
    min_report = min(budget, answers.report_minutes((*kinds, *finished_dirs), _SHORTEST))
    unanswered_tokens = (answers.prompts - answers.answered) * answers.answer_tokens
    full_minutes = _TIME_MARGIN * unanswered_tokens / answers.tokens_per_minute
    answer_minutes = min(full_minutes, answer_share * budget, max(0.0, (1 - training_share) * budget - min_report))
    answered_minutes = answers.answered * answers.answer_tokens / answers.tokens_per_minute
    report_minutes = (1 - training_share) * budget - answer_minutes
    limits = {"responses": answer_minutes + answered_minutes}
    # A server answers the held-out prompts, and a replay of these answers is the report.
    limits |= dict.fromkeys(("heldout", "replay"), report_minutes / 2) if config.server else {"report": report_minutes}
    limits |= {TRAINABLE[kind].step: training_share * budget / len(kinds) for kind in kinds}
    if config.corpus and SMALL_LM.name in kinds:
        limits |= dict.fromkeys((CORPUS_LM, SMALL_LM.name), limits[SMALL_LM.name] / 2)
    return Choice(kinds, skip_reasons, limits, finished_dirs)


def configure_pipeline(
    config: AutoConfig, choice: Choice, answers: FirstAnswers, config_for: ConfigFor
) -> PipelineConfig:
    """The pipeline that carries out `choice`: experiment=auto, without the drafters that are not trained.

    Its `steps` have the options of each step by dotted key, such as data.heldout_fraction.
    """
    experiment = config_for("train/pipeline.py", ["experiment=auto"])  # settings of the command, composed from files
    assert isinstance(experiment, PipelineConfig)
    training_steps = [TRAINABLE[kind].step for kind in choice.kinds]
    omitted_steps = {kind.step for kind in TRAINABLE.values()} - {*training_steps}
    omitted_steps |= {"report"} if config.server else set()  # it is a replay of the server's answers
    steps = {name: options for name, options in experiment.steps.items() if name not in omitted_steps}
    template_options: dict[str, object] = {} if config.template == "auto" else {"template": config.template}
    template_options |= {KWARGS: config.chat_template_kwargs} if config.chat_template_kwargs else {}
    for name in ("responses", *training_steps, "trigrams"):
        steps[name] |= {f"data.{key}": value for key, value in template_options.items()}
    max_minutes = choice.minutes.get("responses", math.inf)
    max_answers = max_minutes * answers.tokens_per_minute / answers.answer_tokens if answers.answer_tokens else math.inf
    answer_count = max(1.0, min(answers.prompts, max_answers)) if answers.prompts else math.inf
    for name in training_steps:
        steps[name] |= _size_training(name, answers.device, answer_count)
    if config.corpus:
        _read_corpus_first(config.corpus, steps, answers)
    steps["prompts"] = {"file": config.prompts} if config.prompts else steps["prompts"] | template_options
    if config.prompts is None:
        writing_minutes, row_count = float(f"{_WRITE_SHARE * config.minutes:.3g}"), max(_FEWEST_PROMPTS, answers.rows)
        steps["prompts"] |= {MINUTES: writing_minutes, "batch_size": row_count}
    steps["responses"] |= {"batch_size": answers.rows, "shard_size": max(128, 2 * answers.rows)}  # of a file
    if config.server:
        _let_server_answer(config, steps, answers)
    measured_kinds = (*choice.kinds, *choice.finished)
    methods = [*(method for kind in measured_kinds for method in TRAINABLE[kind].methods), *_UNTRAINED]
    tokens_per_text = answers.text_tokens(measured_kinds, choice.minutes.get("report", 0.0))
    if "report" in steps:
        steps["report"] |= {"method": methods, "max_new_tokens": tokens_per_text} | template_options
        steps["report"] |= {str(KINDS[kind].option): folder for kind, folder in choice.finished.items()}
    minutes_by_step = {} if config.debug else choice.minutes
    minutes_by_step = {name: limit for name, limit in minutes_by_step.items() if name in steps}
    for name, limit in minutes_by_step.items():
        steps[name][MINUTES] = float(f"{limit:.3g}")
    expected = experiment.expected_minutes | {name: limit + answers.loading for name, limit in minutes_by_step.items()}
    resume = config.resume or not config.debug  # the steps go on from the first answers; a rehearsal starts over
    target = None if config.server else config.target
    pipeline = PipelineConfig(steps=steps, target=target, out_dir=config.out_dir, debug=config.debug)
    return replace(pipeline, expected_minutes=expected, resume=resume)


def _read_corpus_first(corpus_paths: Sequence[str], steps: dict[str, dict[str, object]], answers: FirstAnswers) -> None:
    """Add steps that count the corpus and train a small LM on it; the steps on the answers then go on from these."""
    corpus_options = {"data": "local", "data.path": [*corpus_paths]}
    steps[CORPUS_TABLE] = steps["trigrams"] | corpus_options
    if SMALL_LM.name not in steps:
        return
    options = steps[SMALL_LM.name]
    shape_keys = [name for name in options if name.partition(".")[0] in ("drafter", "draft_vocabulary")]
    shape_options = {name: options.pop(name) for name in shape_keys}
    wider_options = {} if 0 < answers.parameters < _LARGE else _WIDER
    steps[CORPUS_LM] = options | shape_options | wider_options | corpus_options | {"objective": "cross_entropy"}
    for name in ("teacher", "data.heldout_fraction"):  # options for the answers alone
        steps[CORPUS_LM].pop(name, None)
    if answers.corpus_share < 1:
        steps[CORPUS_LM]["data.share"] = answers.corpus_share
    options |= _AFTER_CORPUS


def _let_server_answer(config: AutoConfig, steps: dict[str, dict[str, object]], answers: FirstAnswers) -> None:
    """Change the steps so that the server answers greedily, and nothing of the target but its tokenizer is read."""
    server_options = {"server": config.server, "server_model": config.server_model, "concurrency": answers.rows}
    steps["responses"] |= {**server_options, "temperature": 0, "top_k_logits": answers.top_k}
    steps["responses"].pop("dtype", None)
    steps["heldout"] = steps["responses"] | {"top_k_logits": 0}
    for name in {*steps} - {"prompts"}:
        steps[name]["tokenizer"] = config.tokenizer
    if SMALL_LM.name in steps and not answers.top_k:
        steps[SMALL_LM.name] |= {"objective": "cross_entropy"}
        steps[SMALL_LM.name].pop("teacher", None)


def heldout_share(answer_count: float) -> float:
    """The share of so many answers to hold out, so that there are enough."""
    return max(DataConfig.heldout_fraction, float(f"{min(0.5, _MIN_HELDOUT / answer_count):.3g}"))


def _size_training(step_name: str, device: Device, answer_count: float) -> dict[str, object]:
    """The options of a training that follow from the machine, and from the number of answers to hold some out of."""
    share = heldout_share(answer_count)
    options: dict[str, object] = {"data.heldout_fraction": share} if share > DataConfig.heldout_fraction else {}
    return options | (_ON_GPU if device == "cuda" and step_name != TRAINABLE[EAGLE3.name].step else {})


def describe_choice(choice: Choice, answers: FirstAnswers) -> str:
    """The plan as text."""
    speed = f"{answers.tokens_per_second:.0f} tokens of answers a second, {answers.answer_tokens:.0f} an answer"
    lines = [f"  looked: {speed}, {answers.prompts} prompts; a step loads for {60 * answers.loading:.0f} s"]
    step_names = sorted(choice.minutes, key=[*STEPS, "replay"].index)
    lines += [f"  {name}: {choice.minutes[name]:.1f} minutes" for name in step_names if choice.minutes[name]]
    lines += [f"  not tried: {kind}: {reason}" for kind, reason in choice.not_tried.items()]
    minutes = choice.minutes.get("report", math.inf)
    needed = answers.report_minutes((*choice.kinds, *choice.finished), _SHORTEST)
    if minutes < needed:
        problem = f"its minutes cannot hold the {MIN_PROMPTS} prompts that a verdict needs"
        lines.append(f"  report: {problem}: they take about {needed:.0f}, so give minutes= {needed - minutes:.0f} more")
    return "\n".join(lines)


def describe_outlook(config: AutoConfig, answers: FirstAnswers, unfit: Mapping[str, str]) -> str:
    """The part of the plan that is known before anything has run, as text. answers: the facts so far."""
    kinds = [kind for kind in ORDER[answers.device] if kind not in unfit] if config.train == "auto" else config.train
    first = first_minutes(config)
    unlimited = answers.unlimited_minutes(kinds)
    shared_minutes = max(0.0, config.minutes - first - unlimited)
    lines = [f"  minutes, estimated before anything ran: {first:.1f} to look at the target, {unlimited:.1f} without it"]
    cases = [("without a training", _WITHOUT_TRAINING), (f"if {', '.join(kinds)} can learn enough", _WITH_TRAINING)]
    for case, shares in cases if kinds else cases[:1]:
        answering, training, report = (f"{share * shared_minutes:.1f}" for share in shares)
        lines.append(f"  {case}: {answering} for answers, {training} for trainings, {report} for a report")
    return "\n".join([*lines, *(f"  not tried: {kind}: {reason}" for kind, reason in unfit.items())])


def first_minutes(config: AutoConfig) -> float:
    """The minutes for the first answers; those in progress are finished."""
    share, min_minutes, max_minutes = FIRST_MINUTES
    return min(max_minutes, max(min_minutes, share * config.minutes))
