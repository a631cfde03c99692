"""The report of a method as a type: built from measurements, written by `to_json`, read by `read_reports`.

The fields have the names and the order of report.json. The fields of a `FLAT` field stand beside those of the report:

    MethodReport(method="eesd", conditions=Conditions(target="m", …), …)   →   {"method": "eesd", "target": "m", …}

An arm is a way to decode: a method or a baseline. A round is one pass of the target. A text loops if it repeats a cycle
of tokens. A rounding tie: two texts part where two tokens have the same score up to rounding, which is excused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, cast

from pydantic import Field

from outrider.base.errors import UserError
from outrider.base.files import read_json
from outrider.base.settings import construct
from outrider.inference.doctor.scores import Findings
from outrider.inference.measure import statistics
from outrider.inference.measure.lossless import Judgement
from outrider.inference.measure.results import Skipped
from outrider.inference.measure.statistics import OPTIONAL

FLAT = {"flat": True}  # metadata of a field whose own fields stand beside it
HALF_DTYPES = ("bfloat16", "float16")
TARGET_DIFFERS, NOT_LOSSLESS = "target differs", "not lossless"  # verdicts on texts, beside those on speeds
PLAIN, DRAFTED = "plain", "drafted"  # the arms of an engine
# In the totals of an engine's generation: its text does not tokenise to the ids that were sent, which are unknown.
UNREAD = "unread"
RUN = 8  # words of a run of consecutive words; so long a run rarely occurs twice by chance


@dataclass(frozen=True)
class Overlap:
    """The overlap of prompts and a training text, or `why` it is unknown.

    runs, runs_seen: distinct runs of words in the prompts, and how many of them occur in the text. prompts_seen: the
    prompts with at least one such run. characters: the length of the text searched; complete ("whole" in JSON): whether
    that was all.
    """

    prompts: int | None = field(default=None, metadata=OPTIONAL)
    prompts_seen: int | None = field(default=None, metadata=OPTIONAL)
    runs: int | None = field(default=None, metadata=OPTIONAL)
    runs_seen: int | None = field(default=None, metadata=OPTIONAL)
    characters: int | None = field(default=None, metadata=OPTIONAL)
    complete: Annotated[bool | None, Field(alias="whole")] = field(default=None, metadata=OPTIONAL | {"key": "whole"})
    why: str | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class DraftVocabulary:
    """The size of a draft vocabulary, and its coverage of the target's own text, of "all" and by category."""

    tokens: int
    coverage: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What the methods of a run have in common: the models, the settings, and the conditions of the measurement.

    dtype: of the target's weights; the target computes in `computes_in`. kernels: by what they compute. processes: the
    most that measured at a time. threads: the number of prompts by CPU threads. prompts_given: with those that a time
    limit (`minutes`) left out. overlap, doctor, draft_vocabularies, trained_seconds: by kind of drafter; doctor: the
    findings of an examination of the drafters. origin: what the prompts are to the drafters, as a sentence. digests: of
    the target and the drafters. texts_at_once: the number of texts that are decoded together, if several.
    """

    target: str
    model: str
    drafter: str
    dtype: str
    computes_in: str
    device: str
    runtime: str = "eager"
    kernels: Mapping[str, str] = field(default_factory=dict)
    processes: int = 1
    threads: Mapping[str, int] = field(default_factory=dict)
    prompts_given: int
    template: str | None = None
    peak_memory_bytes: int = 0
    load: statistics.MachineLoad = field(default_factory=statistics.MachineLoad)
    minutes: float | None = None
    trained_seconds: Mapping[str, float] = field(default_factory=dict)
    max_new_tokens: int
    temperature: float
    sampling: Mapping[str, int | float | None]
    generation_config: Mapping[str, object] = field(default_factory=dict)
    cudnn_attention: bool | None = None
    skipped: tuple[Skipped, ...] = ()
    overlap: Mapping[str, Overlap] = field(default_factory=dict)
    origin: str = ""
    doctor: Mapping[str, Findings] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    draft_vocabularies: Mapping[str, DraftVocabulary] = field(default_factory=dict)
    texts_at_once: int | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, kw_only=True)
class PromptCounts:
    """The number of prompts, which are conversations, and of their turns."""

    prompts: int
    turns: int


@dataclass(frozen=True, kw_only=True)
class Figures(statistics.DecodeStatistics, PromptCounts):
    """The figures of a method on some prompts. speedup: over plain decoding, as is the one on texts without loops."""

    speedup: statistics.MedianInterval
    loops: statistics.Loops
    speedup_without_loops: statistics.MedianInterval


@dataclass(frozen=True)
class Lossless:
    """The number of texts compared token by token, and the judgements of the method and of plain decoding.

    Sampled texts are not compared, as only their distribution is the same. reference: the arm whose texts count as
    right. identical: texts that equal the reference's. excused_ties: texts that part at a rounding tie, in half
    precision. judged: by arm, the rounding errors of keys, values and logits; None if only equal texts counted.
    """

    reference: str | None
    checked: int
    identical: int
    identical_to_plain: int
    excused_ties: int
    autoregressive_identical: int
    autoregressive_excused_ties: int
    judged: Mapping[str, Judgement | None]


@dataclass(frozen=True)
class AutoSizes:
    """The measured costs, in seconds, from which "auto" sizes were chosen (`Costs.summary`), and the sizes."""

    costs: Mapping[str, float | Mapping[str, float]]
    chosen: Mapping[str, statistics.ChosenSize]


@dataclass(frozen=True)
class GenerateSpeed:
    """The speed-ups of transformers' `generate` over plain decoding, without and with the prefill."""

    speedup: statistics.MedianInterval
    end_to_end: statistics.MedianInterval


@dataclass(frozen=True)
class DepthShare:
    """A depth of drafts: the share of rounds that accepted so many tokens, in the engine (served) and in this runtime
    (here). differs: by more than chance."""

    depth: int
    served: float
    here: float
    difference_ci95: tuple[float, float]
    differs: bool


@dataclass(frozen=True, kw_only=True)
class ServedRow:
    """The figures of a method in an engine, where `concurrency` requests run at a time.

    tau, rounds: None where a server does not tell them. tau_here: of this runtime, or of the table alone. The counts of
    identical texts are None where there is no such arm, or texts are drawn. unread: texts whose token ids are unknown;
    retokenised: texts that came without ids, which were made of the text.
    Of arms, "plain" and "drafted": tokens per second of all requests together, and seconds per token of one request.
    """

    engine: str
    options: Mapping[str, object]
    concurrency: int
    draft_tokens: int
    requests: int
    tau: float | None
    rounds: int | None
    acceptance: tuple[DepthShare, ...]
    tau_here: float
    identical_to_plain: int | None
    plain_identical_to_reference: int | None
    identical_to_reference: int | None
    retokenised: int
    unread: int
    tokens_per_second: Mapping[str, float]
    seconds_per_token: Mapping[str, float]
    loops: Mapping[str, statistics.Loops]
    speedup: statistics.MedianInterval
    speedup_without_loops: statistics.MedianInterval
    load: statistics.MachineLoad
    verdict: str


@dataclass(frozen=True)
class ServedJudgement:
    """The audit of an engine's texts that differ from the reference's; `file` has them."""

    texts: int
    file: str
    verdict: str
    faults: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MethodReport:
    """The report of one method over all prompts.

    By arm ("autoregressive", "transformers_generate", "speculative"), None for one that was not run: the speeds without
    and with the prefill, and the seconds of the prefill. structure: means over rounds of what the draft's structure
    (chain or tree) summed. acceptance_by_candidates: by k, the share of nodes at which one of the first k candidates
    was accepted. sources: by who drafted. break_even_acceptance: at which the method is as fast as plain decoding.
    machine, made_with: the hardware, and the versions of the software. tokens: of all its texts. seed: of bootstraps.
    acceptance_by_position: to each depth; acceptance_given_previous: of rounds that accepted to the depth before.
    seconds: of decoding, by part of a round. served, served_judgement: of an engine (see the command measure-engine).
    """

    method: str
    conditions: Conditions = field(metadata=FLAT)
    settings: Mapping[str, object]
    machine: Mapping[str, str | int | None]
    made_with: Mapping[str, str]
    figures: Figures = field(metadata=FLAT)
    tokens: int
    seed: int
    lossless: Lossless
    structure: Mapping[str, float]
    acceptance_by_candidates: tuple[float, ...]
    auto: AutoSizes | None
    sources: Mapping[str, statistics.SourceRounds] | None = field(default=None, metadata=OPTIONAL)
    tokens_per_second: Mapping[str, float | None]
    whole_answers_per_second: Mapping[str, float | None]
    prefill_seconds: Mapping[str, statistics.MedianInterval | None]
    end_to_end: statistics.MedianInterval
    autoregressive: statistics.PlainToken
    break_even_acceptance: float | None
    seconds: Mapping[str, float]
    acceptance_by_position: tuple[statistics.DepthAcceptance, ...]
    acceptance_given_previous: tuple[statistics.DepthAcceptance, ...]
    by_category: Mapping[str, Figures]
    transformers_generate: GenerateSpeed | None = field(default=None, metadata=OPTIONAL)
    speedup_per_prompt: Mapping[str, float]
    verdict: str
    served: tuple[ServedRow, ...] | None = field(default=None, metadata=OPTIONAL)
    served_judgement: Mapping[str, ServedJudgement] | None = field(default=None, metadata=OPTIONAL)

    @property
    def served_faults(self) -> tuple[str, ...]:
        """The faults in the texts that an engine wrote with this method's drafter."""
        judgement = (self.served_judgement or {}).get(DRAFTED)
        return judgement.faults if judgement else ()


def to_json(value: object) -> object:
    """`value`, a report or a part of one, for JSON: `FLAT` fields among the others, no `OPTIONAL` one that is None."""
    if isinstance(value, Mapping):
        return {key: to_json(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(member) for member in value]
    if isinstance(value, type) or not is_dataclass(value):
        return value
    json_object: dict[str, object] = {}
    for data_field in fields(value):
        member = getattr(value, data_field.name)
        if data_field.metadata == FLAT:
            json_object |= cast(dict[str, object], to_json(member))
        elif member is not None or not data_field.metadata.get("optional"):
            json_object[data_field.metadata.get("key", data_field.name)] = to_json(member)
    return json_object


def read_reports(path: Path | str, remedy: str) -> list[MethodReport]:
    """The reports, one a method, of a report.json, also of an earlier run. Raises `UserError` for a damaged file."""
    content = read_json(path, "report", remedy)
    try:
        return reports_in(content)
    except UserError as error:
        raise UserError(f"{path}: damaged report ({error}); {remedy}") from None


def reports_in(content: object) -> list[MethodReport]:
    """The reports in a report.json: one, or several in "reports". Raises `UserError` naming the first wrong key."""
    json_reports = content.get("reports", [content]) if isinstance(content, dict) else content
    return [_from_json(construct(dict[str, object], report)) for report in construct(list[object], json_reports)]


def _from_json(json_report: Mapping[str, object]) -> MethodReport:
    """The report that was `to_json`. Keys of other versions, which this version does not have, are left out."""

    def part(report_type: type[Conditions] | type[Figures] | type[MethodReport]) -> dict[str, object]:
        return {inner.name: json_report[inner.name] for inner in fields(report_type) if inner.name in json_report}

    return construct(MethodReport, {**part(MethodReport), "conditions": part(Conditions), "figures": part(Figures)})
