"""Settings of the runtime: of what decodes, and of evaluate-checkpoint and replay, which measure it.

An option is a field. `opt`: results depend on the option; `free`: they do not; debug=: the value in a rehearsal, which
runs on tiny models. Its help stands in the call, or as a string below the field. `only`: when the option is read.
A method is a drafter with its settings. A `Kind` describes a kind of drafters, which is the `source` of a method.
`Settings` runs the `check_fields` of each class, those of bases first.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge

from outrider.base import settings as base_settings
from outrider.base.errors import require
from outrider.base.settings import DEFAULT, Count, Positive, RunConfig, Settings, Url, free, only, opt
from outrider.base.wandb_config import WandbConfig
from outrider.data_prep.text.settings import PromptSource, PromptTemplate, RecordFile, TemplateArguments
from outrider.draft_models.targets import settings as models
from outrider.inference.settings.kind import Kind
from outrider.inference.settings.kinds import DFLASH, EAGLE3, EARLY_EXIT, KINDS, MTP, READABLE, kind_in
from outrider.inference.settings.method import MethodConfig
from outrider.inference.settings.sampling import SamplingConfig

if TYPE_CHECKING:
    from outrider.inference.drafters.plugin import AnyPlugin, TrainingRecord

Runtime = Literal["auto", "eager", "graphed"]


class Drafting:
    """What the settings of all commands with methods share. The options stand in each class, in its order of --help."""

    drafters: dict[str, models.AnyDrafter]
    methods: dict[str, MethodConfig]

    def check_drafters(self) -> None:
        """Raise `UserError` unless each kind that a method uses is given, and every given kind is known."""
        self._check_methods()
        for kind in KINDS.values():
            method_names = ", ".join(name for name, method in self.methods.items() if method.source == kind.name)
            key, model_path = kind.option, self.where(kind)
            if key is not None and method_names:
                option = key if hasattr(self, key) else f"+drafters.{key}"  # early exits: `checkpoint`, of any kind
                path = getattr(self, key, None) if key == EARLY_EXIT.option else model_path
                expected = f"{kind.needs} for {method_names}{self._checkpoint_hint()}"
                if path is None and model_path is None:
                    raise base_settings.missing_error(option, expected)
                require(model_path is not None, option, path, expected)
        extra_options = [kind.option for kind in KINDS.values() if kind.option and not hasattr(self, kind.option)]
        for name, model_path in self.drafters.items():
            expected = ", ".join(extra_options) or "none here: no kind of drafter needs it"
            require(name in extra_options, f"drafters.{name}", model_path, f"one of {expected}")

    def where(self, kind: Kind) -> str | None:
        """The path of the model of `kind`; None if no path is given, or the kind has no model."""
        path: str | None = kind.option and (getattr(self, kind.option, None) or self.drafters.get(kind.option))
        return getattr(self, models.TARGET, None) if kind.in_target and path == models.TARGET else path

    @property
    def paths(self) -> dict[str, str]:
        """The paths of all models that are given, by the name of their kind."""
        return {kind.name: path for kind in KINDS.values() if (path := self.where(kind)) is not None}

    def training_records(self) -> "dict[str, TrainingRecord]":
        """The training record of each of these models. Raises `UserError` if a record cannot be read."""
        return {name: self.plugin(KINDS[name]).training_record(path) for name, path in self.paths.items()}

    def plugin(self, kind: Kind) -> "AnyPlugin":
        """The `DrafterPlugin` of `kind`, which reads models as these options say."""
        return kind.load_plugin()

    def _check_methods(self) -> None:
        """Raise `UserError` if the command cannot run the methods."""

    def _checkpoint_hint(self) -> str:
        """A hint for an error about a missing model: what was given instead; empty if nothing was."""
        return ""


@dataclass(frozen=True, kw_only=True)
class DecodingConfig(Drafting, Settings):
    """A target, its drafters, and how they decode."""

    table: models.TableFolder | None = opt(None, debug=models.TinyModel(models.TABLE))
    """n-gram table directory (`outrider build-trigrams`), for methods with source=ngrams"""
    drafters: dict[str, models.AnyDrafter] = free(factory=dict, help="models of other kinds, as +drafters.NAME=PATH")
    methods: dict[str, MethodConfig] = field(default_factory=dict)
    """the ways of decoding, by name; method=[…] chooses presets"""
    checkpoint: models.DrafterFolder | None = opt(None, debug=models.TinyModel(EARLY_EXIT.name, any_kind=True))
    """directory of a drafter of any kind: early exit, small LM, EAGLE-3 head, block drafter or n-gram table"""
    small_lm: models.Model | None = opt(None, debug=models.TinyModel(models.SMALL_LM))
    """causal LM, as `target`, for methods with source=small_lm"""
    eagle3: models.Head | None = opt(None, debug=models.TinyModel(EAGLE3.name))
    """EAGLE-3 head, a directory or Hub name, for methods with source=eagle3"""
    mtp: models.MtpSource | None = opt(None, debug=models.TinyModel(MTP.name))
    """MTP head, for methods with source=mtp: target, if the target has one, or a model's directory, GGUF file or Hub
    name with one"""
    dflash: models.Head | None = opt(None, debug=models.TinyModel(DFLASH.name))
    """DFlash or DSpark drafter, a directory or Hub name, for methods with source=dflash"""
    target: models.Model | None = opt(None, debug=models.TinyModel(models.TARGET))
    """model directory, GGUF file or Hub name; null: the one `checkpoint` was trained for"""
    revision: str | None = free(None, "of the target on the Hub: branch, tag or commit", debug=None)
    template: PromptTemplate = "auto"
    """how chat prompts are rendered; auto: as in the drafters' training, else by the tokenizer's chat template; none:
    bare text. A template that is not the drafters' is refused"""
    chat_template_kwargs: TemplateArguments = opt(factory=dict, debug=DEFAULT)
    """what the chat template reads besides, by name"""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    dtype: models.DecodeDtype = "auto"
    """auto: float32 on CPU, else the target's own; fast: also bfloat16 on a CPU that has instructions for it; int8: the
    target's linear layers in whole numbers to ±127, which is another target, in all arms (docs/evaluate.md)"""
    device: str = opt("auto", "auto | cpu | cuda | cuda:N")
    runtime: Runtime = opt("auto", "graphed: passes of fixed shape as CUDA graphs (uncaptured without CUDA)")

    def check_fields(self) -> None:
        self.check_drafters()
        for kind in KINDS.values():
            is_unambiguous = kind != self.checkpoint_kind or super().where(kind) in (None, self.checkpoint)
            expected = f"null where checkpoint={self.checkpoint} is one of its kind"
            require(is_unambiguous, str(kind.option), super().where(kind), expected)
        is_same_revision = self.revision is None or super().where(MTP) != self.target
        expected = "a directory of that revision, as the head is looked for in the latest one"
        require(is_same_revision, "mtp", models.TARGET, expected)
        if self.target is None and self.early_exit is None:
            raise base_settings.missing_error("target", f"the model that is to decode{self._checkpoint_hint()}")

    def where(self, kind: Kind) -> str | None:
        if self.checkpoint is not None and kind == (self.checkpoint_kind or EARLY_EXIT):
            return self.checkpoint  # an unknown one counts as an early exit, whose loading reports the error
        return None if kind == EARLY_EXIT else super().where(kind)

    @cached_property
    def checkpoint_kind(self) -> Kind | None:
        """The kind of drafter in `checkpoint`; None if `checkpoint` is null, no directory, or holds no drafter."""
        return None if self.checkpoint is None else kind_in(self.checkpoint)

    @property
    def early_exit(self) -> str | None:
        """The path of an early-exit drafter, which records its target."""
        return self.where(EARLY_EXIT)

    @property
    def by_layers(self) -> bool:
        """Whether a method, or a drafter that no method uses, needs single layers of the target."""
        used_kinds = {method.source for method in self.methods.values()}
        return any(kind.layers and (kind.name in used_kinds or self.where(kind) is not None) for kind in KINDS.values())

    def _checkpoint_hint(self) -> str:
        """The hint: what `checkpoint` holds."""
        if self.checkpoint_kind is None:
            return "" if self.checkpoint is None else f"; checkpoint={self.checkpoint} holds no drafter that is known"
        kind = self.checkpoint_kind
        return f"; checkpoint={self.checkpoint} holds {kind.name}, for method={kind.preset}"


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(models.Rehearsed, RunConfig, DecodingConfig):
    """evaluate-checkpoint: a drafter, prompts, and the methods to compare on them."""

    run_files: ClassVar[tuple[str, ...]] = ("results-*.jsonl", "report.json")
    prompts: PromptSource = opt("python_stdlib", debug="python_stdlib")
    """python_stdlib: held-out standard-library files; a JSONL, JSON or parquet file; or a benchmark of the Hub by name:
    mt_bench, gsm8k, humaneval, alpaca, cnn_dm, xsum or wmt"""
    prompt_text: list[str] = free(factory=list, help="inline prompts instead", debug=DEFAULT)
    prompt_chars: Count = free(1000, "python_stdlib: characters of a file to continue from", debug=120)
    num_prompts: Count | None = free(24, "evenly spread; null: all", debug=2)
    minutes: Positive | None = free(None, debug=None)
    """start no new prompt after this time (all runs in out_dir together), but measure at least 5; null: all prompts"""
    max_new_tokens: Annotated[int, Ge(2)] = opt(128, "of each method; the prefill decides the first", debug=12)
    ignore_eos: bool = opt(False, "continue after end tokens, to max_new_tokens")
    generation_config: Literal["target", "none"] = "target"
    """target: use its settings that affect greedy decoding; none: ignore them"""
    stop_strings: list[Annotated[str, base_settings.Named("a text")]] = field(default_factory=list)
    """text also ends with the first of these; none: the target's"""
    repeats: Count = opt(1, debug=1)
    """timed runs of every prompt, with new random numbers when sampling; the run of median time counts"""
    seed: int = opt(0, "of sampling, and of random stop rules and searches")
    compare_transformers: bool = opt(True, "also time model.generate")
    batch: Count = opt(1, "prompts that each method decodes at once; model.generate takes one after another")
    plan: bool = free(False, "only say what every device would hold; needs no weights")
    threads: Count | None = opt(None, "of the CPU; null: torch's choice")
    reading: models.ReadingChanges = opt(factory=models.ReadingChanges, debug=DEFAULT)
    """how the draft head is read where its files are misleading"""
    doctor: bool | None = None
    """examine the drafters before they are measured: how often they agree with the target, and whether another reading
    would agree more; null: only draft heads of other trainers, and quickly"""
    doctor_lengths: Annotated[tuple[Annotated[int, Ge(256)], ...], only(doctor=True)] = opt((), debug=())
    """lengths in tokens of texts, joined from the prompts, on which agreement is measured too"""
    show_prompts: Annotated[int, Ge(0)] = free(4)
    """texts whose rounds report.html shows, evenly spread over the prompts; they are decoded once more, untimed"""
    wandb: WandbConfig = free(factory=WandbConfig, help="the table and the page in Weights & Biases too", debug=DEFAULT)
    card: bool = free(False, "also put the table into README.md of the drafters evaluated")
    out_dir: str = free("runs/evaluate", "where the report goes")

    def _check_methods(self) -> None:
        require(bool(self.methods), "method", sorted(self.methods), "at least one, e.g. method=eesd_survival")

    def check_fields(self) -> None:
        head_names = [kind.name for kind in READABLE if self.where(kind) is not None]
        if len(head_names) != 1:
            why = f"expected with one draft head; this run has {', '.join(head_names) or 'none'}"
            base_settings.require_defaults(self, ["reading"], why)

    def plugin(self, kind: Kind) -> "AnyPlugin":
        return kind.load_plugin().read_with(self.reading)


_RECORDED = "a file of recorded answers, or the directory of generate-responses"


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(Drafting, Settings):
    """replay: the exact τ of drafters that read tokens only, from recorded greedy answers, without a target."""

    small_lm: models.Model | None = opt(None, "causal LM, for methods with source=small_lm")
    table: models.TableFolder | None = opt(None, debug=models.TinyModel(models.TABLE))
    """n-gram table directory (`outrider build-trigrams`), for methods with source=ngrams"""
    drafters: dict[str, models.AnyDrafter] = free(factory=dict, help="models of other kinds, as +drafters.NAME=PATH")
    methods: dict[str, MethodConfig] = field(default_factory=dict)
    """the ways of decoding, by name; method=[…] chooses presets"""
    transcripts: Annotated[str, RecordFile(_RECORDED, holds=("responses-*.jsonl",))] = free()
    """the recorded answers to `prompts`; or without prompts a file or the directory of generate-responses"""
    tokenizer: models.Tokenizer = free()
    """the target's: a Hugging Face directory or a SentencePiece .model"""
    prompts: PromptSource | None = free(None)
    """the questions, a JSONL, JSON or parquet file or a benchmark's name; null: `transcripts` has them as token ids"""
    num_prompts: Count | None = free(None, "evenly spread; null: all")
    draft_tokens: tuple[Count, ...] = ()
    """lengths K of the drafts of all methods that an engine runs, one method for each; empty: their own"""
    server: Url | None = free(None)
    """URL of an OpenAI-compatible server that runs the target: requests time its passes, and the report has the
    speed-up that each method would have there; at most 16 tokens a pass"""
    server_model: str | None = free(None, "the target's name there; null: the first one that it lists")
    draft_server: Url | None = free(None)
    """URL of such a server that runs the exported small LM: a drafted token takes at most as long as its token"""
    max_new_tokens: Annotated[int, Ge(2)] = opt(128, "of an answer; a longer recorded answer is replayed whole")
    threads: Count | None = opt(None, "of the CPU; null: torch's choice")
    seed: int = opt(0, "of what searches draw")
    out_dir: str = free("runs/replay", "where report.md and report.json go")

    def check_fields(self) -> None:
        self.check_drafters()
        for option, setting in (("server_model", self.server_model), ("draft_server", self.draft_server)):
            self.require(option, self.server is not None or setting is None, "null without server=URL")
        self.require("draft_server", not self.draft_server or self.small_lm is not None, "null without small_lm")

    def _check_methods(self) -> None:
        for name, method in self.methods.items():
            kind = KINDS[method.source]
            require(not kind.layers, f"methods.{name}", kind.name, "a drafter of tokens: a recording has no layers")
            # shaped: by a structure and a stop rule; adapts: to costs; lacks_delta: OPT-Tree's δ is to be measured
            needs_costs = kind.shaped and (method.adapts or method.lacks_delta)
            require(not needs_costs, f"methods.{name}", kind.name, "sizes and a stop rule that need no measured costs")
            recycled = method.ngrams.recycle
            require(recycled == 0, f"methods.{name}.ngrams.recycle", recycled, "0: a recording has no logits")
        for kind in KINDS.values():
            is_layered = kind.layers and self.where(kind) is not None
            require(not is_layered, f"drafters.{kind.option}", self.where(kind), "null: no layers of a target run")
