"""Settings of the runtime and of evaluate-checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge

from outrider.base.errors import require
from outrider.base.settings import Count, Named, Place, Positive, Url, free, only, opt, require_default
from outrider.base.wandb_config import WandbConfig
from outrider.base.words import SECRET_NAME
from outrider.data_prep.text.settings import PromptSource, PromptTemplate
from outrider.draft_models.targets.settings import (
    MODEL,
    DecodeDtype,
    DrafterFolder,
    Head,
    Model,
    ReadingChanges,
    RehearsedConfig,
    TableFolder,
)
from outrider.inference.settings.kinds import EAGLE3, EARLY_EXIT, KINDS, DrafterPlugin, Kind, kind_in
from outrider.inference.settings.method import MODULES, Engine, MethodConfig, why_not, with_lengths
from outrider.inference.settings.sampling import SamplingConfig

Runtime = Literal["auto", "eager", "graphed"]
RUNTIMES = get_args(Runtime)
Threads = Count | Literal["auto"] | None
_SERVED = only(engine=get_args(Engine))


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(RehearsedConfig):
    """evaluate-checkpoint: a drafter, prompts, and the methods to compare on them."""

    checkpoint: DrafterFolder | None = None
    """directory of a drafter: an early exit, or what small_lm, eagle3 and table take, whichever lies there"""
    small_lm: Model | None = opt(None, "causal LM, as `target`, for methods with source=small_lm")
    eagle3: Head | None = opt(None, "EAGLE-3 head, a directory or Hub name, for methods with source=eagle3")
    table: TableFolder | None = None
    """n-gram table directory (`outrider build-trigrams`), for methods with source=ngrams"""
    target: Annotated[str, Place(MODEL, hub=True, besides=("replay",))] | None = None
    """model directory, GGUF file or Hub name; null: the one `checkpoint` was trained for; or replay"""
    transcripts: Annotated[str, Place("a file of recorded answers")] | None = free(None)
    """target=replay: recorded greedy answers to `prompts`"""
    tokenizer: Annotated[str, Place("a tokenizer directory or a SentencePiece .model", hub=True)] | None = free(None)
    """target=replay: a Hugging Face directory or a SentencePiece .model"""
    revision: str | None = free(None, "of the target on the Hub: branch, tag or commit")
    methods: dict[str, MethodConfig] = field(default_factory=dict)
    """the ways of decoding to compare, by name; method=[…] chooses presets"""
    prompts: PromptSource = "python_stdlib"
    """python_stdlib: held-out standard-library files; a JSONL, JSON or parquet file; or a benchmark of the Hub by name:
    mt_bench, gsm8k, humaneval, alpaca, cnn_dm, xsum or wmt"""
    prompt_text: list[str] = free(factory=list, help="inline prompts instead")
    prompt_chars: Count = free(1000, "python_stdlib: characters of a file to continue from")
    num_prompts: Count | None = free(24, "evenly spread; null: all")
    minutes: Positive | None = free(None)
    """take no new prompt when this time is over, of all runs in out_dir together, but at least 5; null: all prompts"""
    template: PromptTemplate = "auto"
    """how chat prompts are rendered; auto: as in the drafters' training, else by the tokenizer's chat template; another
    than the drafters' is refused, but for none: bare text"""
    max_new_tokens: Annotated[int, Ge(2)] = 128
    """the first is the prefill's; target=replay: the length of the recorded answer where that is longer"""
    ignore_eos: bool = opt(False, "go on to max_new_tokens")
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    generation_config: Literal["target", "none"] = "target"
    """target: what acts on greedy decoding there is taken over; none: ignored"""
    stop_strings: list[Annotated[str, Named("a text")]] = field(default_factory=list)
    """text also ends with the first of these; none: the target's"""
    repeats: Count = 1
    """timed passes over every prompt, which draw anew when sampling; the one of median time counts"""
    compare_transformers: bool = opt(True, "also time model.generate")
    dtype: DecodeDtype = "auto"
    """auto: float32 on CPU, else the target's own; fast: also bfloat16 on a CPU that has instructions for it; int8: the
    target's linear layers in whole numbers to ±127, which is another target, in all arms (docs/evaluate.md)"""
    device: str = opt("auto", "auto | cpu | cuda | cuda:N")
    runtime: Runtime = opt("auto", "graphed: passes of fixed shape as CUDA graphs (uncaptured without CUDA)")
    plan: bool = free(False, "only say what every device would hold; needs no weights")
    threads: Threads = opt(None, "of the CPU; auto: measured at the start; null: torch's choice")
    seed: int = opt(0, "of sampling, and of what rules and searches draw")
    reading: ReadingChanges = field(default_factory=ReadingChanges)
    """how the EAGLE-3 head is read where its config.json is wrong"""
    doctor: bool | None = None
    """examine the drafters before they are measured: how often they agree with the target, and whether read in another
    way they would more; null: only EAGLE-3 heads of other trainers, and quickly"""
    doctor_lengths: Annotated[tuple[Annotated[int, Ge(256)], ...], only(doctor=True)] = ()
    """texts of so many tokens, joined from the prompts, on which agreement is looked at too"""
    drafters: dict[str, str] = free(factory=dict, help="models of other kinds, as +drafters.NAME=PATH")
    engine: Engine | Url | None = free(None)
    """also measure the methods in a serving engine that can run them (docs/deploy.md), without a drafter and with each;
    or the URL of an OpenAI-compatible server that runs already, with the drafter and draft length of one method"""
    engine_plain: Url | None = free(None)
    """with engine=URL: the same server without a drafter; null: no speed-up is said"""
    server_model: str | None = free(None, "with engine=URL: the target's name there; null: the first one that it lists")
    engine_python: Annotated[Annotated[str, Place("an environment with the engine")] | None, _SERVED] = free(None)
    """directory of the engine's environment, or its Python; null: the one that runs this"""
    engine_options: Annotated[dict[str, Any], _SERVED] = free(factory=dict)
    """of the engine itself, as +engine_options.NAME=VALUE"""
    concurrency: tuple[Count, ...] = free((1,), "requests to the engine at a time, one measurement for each")
    draft_tokens: tuple[Count, ...] = ()
    """lengths K of the drafts of all methods that the engine runs, one method for each; empty: their own"""
    show_prompts: Annotated[int, Ge(0)] = free(4)
    """texts whose rounds report.html shows, evenly spread over the prompts; they are decoded once more, untimed"""
    wandb: WandbConfig = free(factory=WandbConfig, help="the table and the page in Weights & Biases too")
    card: bool = free(False, "also put the table into README.md of the drafters evaluated")
    out_dir: str = free("runs/evaluate", "where the report goes")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.methods), "method", sorted(self.methods), "at least one, e.g. method=eesd_survival")
        self._check_drafters()
        for key in ("transcripts", "tokenizer"):
            expected = "a file for target=replay" if self.replays else "null unless target=replay"
            require((getattr(self, key) is not None) == self.replays, key, getattr(self, key), expected)
        for what, holds, names in _UNREAD:
            for name in names if holds(self) else ():
                require_default(self, name, f"{what} does not read it")
        if self.replays:
            self._check_replay()
        if self.engine is not None:
            self._check_engine(self.engine)
        has_target = self.target is not None or self.early_exit is not None
        require(has_target, "target", None, f"the model that is to decode{self._instead()}")

    def _check_drafters(self) -> None:
        """Each kind that a method uses is given once, and no unknown one."""
        for kind in KINDS.values():
            using = ", ".join(name for name, method in self.methods.items() if method.source == kind.name)
            key, where = kind.option, self.where(kind)
            if key is not None and using:
                given_as = key if hasattr(self, key) else f"+drafters.{key}"
                given = self.checkpoint if key == "checkpoint" else where
                require(where is not None, given_as, given, f"{kind.needs} for {using}{self._instead()}")
            once = kind != self.held or self._given(kind) in (None, where)
            require(once, str(key), self._given(kind), f"null where checkpoint={self.checkpoint} is one of its kind")
        others = [kind.option for kind in KINDS.values() if kind.option and not hasattr(self, kind.option)]
        for name, where in self.drafters.items():
            known = ", ".join(others) or "none here: no kind of drafter needs it"
            require(name in others, f"drafters.{name}", where, f"one of {known}")

    def _check_replay(self) -> None:
        """A recording is greedy text: no model runs, so nothing is there of logits and hidden states."""
        blind = all(KINDS[method.source].sees_tokens_only for method in self.methods.values())
        require(blind, "target", self.target, "a model: a recording has no hidden states or logits")
        for kind in KINDS.values():
            key, where = (kind.option if self._given(kind) else "checkpoint"), self.where(kind)
            unread = where is not None and not kind.sees_tokens_only
            require(not unread, str(key), where, "null for target=replay: no model runs")
        recycled = max(method.ngrams.recycle for method in self.methods.values())
        for key, given, expected in (
            ("sampling.temperature", self.sampling.temperature, 0.0),
            ("sampling.repetition_penalty", self.sampling.repetition_penalty, None),
            ("ngrams.recycle", recycled, 0),
            ("wandb.mode", self.wandb.mode, WandbConfig.mode),
        ):
            require(given == expected, key, given, f"{expected!r} for target=replay: recordings are greedy texts")

    def _check_engine(self, engine: str) -> None:
        own = self.engine_options.get("speculative_config", {})
        chosen = isinstance(own, Mapping) and not own.keys() & {"method", "model", "num_speculative_tokens"}
        plain = not any(map(SECRET_NAME.search, self.engine_options))
        for key, fits, expected in (
            ("dtype", self.dtype != "int8", f"another one with engine={engine}"),
            ("concurrency", len({*self.concurrency}) == len(self.concurrency) > 0, "numbers, each once"),
            ("engine_options", plain, "no key, as reports have them: set HF_TOKEN or the engine's own variable"),
            ("engine_options", chosen, "no drafter and no length: method and draft_tokens say them"),
        ):
            require(fits, key, getattr(self, key), expected)
        reasons = {name: why_not(engine, method) for name, method in self.all_methods.items()}
        told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        runs = [reason for reason in reasons.values() if reason is None]
        require(bool(runs), "engine", engine, f"a method that it can run ({told})")
        one = engine in MODULES or len(runs) == 1
        require(one, "engine", engine, f"one method in one length, as a server has one drafter ({told})")

    @property
    def replays(self) -> bool:
        """Whether recorded answers stand in for a target."""
        return self.target == "replay"

    @property
    def all_methods(self) -> dict[str, MethodConfig]:
        """The methods, those for an engine in all lengths of drafts."""
        return with_lengths(self.engine, self.methods, self.draft_tokens) if self.engine else self.methods

    def where(self, kind: Kind) -> str | None:
        """Where the model of `kind` lies, None where that is not said or it has none."""
        if self.checkpoint is not None and kind == (self.held or EARLY_EXIT):
            return self.checkpoint
        return self._given(kind)

    def _given(self, kind: Kind) -> str | None:
        """Where it lies by an option of its own."""
        if kind.option in (None, "checkpoint"):
            return None
        given: str | None = getattr(self, kind.option, None) or self.drafters.get(kind.option)
        return given

    @cached_property
    def held(self) -> Kind | None:
        """The kind of drafter in `checkpoint`; None where that is null, no directory, or holds none."""
        return None if self.checkpoint is None else kind_in(self.checkpoint)

    @property
    def early_exit(self) -> str | None:
        """Where an early-exit drafter lies, which knows its target."""
        return self.where(EARLY_EXIT)

    @property
    def by_layers(self) -> bool:
        """Whether any of its methods, or a drafter that it names for none of them, is about layers of the target."""
        used = {method.source for method in self.methods.values()}
        return any(kind.layers and (kind.name in used or self.where(kind) is not None) for kind in KINDS.values())

    def _instead(self) -> str:
        """What `checkpoint` holds, for an error about what is missing."""
        if self.held is None:
            return "" if self.checkpoint is None else f"; checkpoint={self.checkpoint} holds no drafter that is known"
        return f"; checkpoint={self.checkpoint} holds {self.held.name}, for method={self.held.preset}"

    def plugin(self, kind: Kind) -> DrafterPlugin[Any]:
        """The `DrafterPlugin` of `kind`, which reads models as these options say."""
        return kind.load_plugin().reading(self.reading)


# Options by what does not read them: what it is called, whether a run is one, and the options.
_UNREAD: tuple[tuple[str, Callable[[EvaluateConfig], bool], tuple[str, ...]], ...] = (
    (
        "target=replay",
        lambda run: run.replays,
        (
            "generation_config",
            "stop_strings",
            "card",
            "show_prompts",
            "minutes",
            "plan",
            "runtime",
            "doctor",
            "debug",
            "resume",
            "engine",
        ),
    ),
    ("a run without engine=", lambda run: run.engine is None, ("concurrency", "draft_tokens")),
    ("a run without engine=URL", lambda run: run.engine in (None, *MODULES), ("engine_plain", "server_model")),
    ("engine=", lambda run: run.engine is not None, ("stop_strings",)),
    ("an engine of one request at a time", lambda run: run.engine in ("openvino", "transformers"), ("concurrency",)),
    ("a run without an EAGLE-3 head", lambda run: run.where(EAGLE3) is None, ("reading",)),
)
