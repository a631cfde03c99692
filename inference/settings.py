"""Settings of the runtime and of evaluate-checkpoint."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from draft_models.tiny_architectures import TINY_ARCHITECTURES
from inference.drafters.registry import KINDS, Kind
from outrider.errors import require, require_choice

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
ARCHITECTURES = tuple(TINY_ARCHITECTURES)  # of the random models of debug=true
RUNTIMES = ("auto", "eager", "graphed")
# A size that is chosen from costs measured at start and from acceptance (see inference/auto/). Greedy tokens never
# depend on it, nor does the law of sampled ones; but which tokens a seed draws does, and so on the machine's speed.
AUTO = "auto"
MOST_NODES = 63  # that "auto" considers: with the root 64 rows
CHAIN_TOKENS = 8  # a round, of a chain or of prompt lookup, where stop.max_draft is null
Readers = Mapping[Any, tuple[str, ...]]  # of an option, by value: the fields that mean something with it


def _is_size(value: int | str) -> bool:
    return value >= 1 if isinstance(value, int) else value == AUTO


def number(value: int | str) -> int:
    """A size that was given as a number; it must not be "auto"."""
    if isinstance(value, str):
        raise ValueError(f"a size is {value!r} where it must be known by now")
    return value


def _refuse_unread(config: Any, option: str, readers: Readers) -> None:
    """Refuse a field that is not at its default and belongs to other values of `option` than the one chosen."""
    chosen = getattr(config, option)
    unread = {name for names in readers.values() for name in names} - set(readers.get(chosen, ()))
    _require_defaults(config, f"{option}={chosen} does not read it", names=unread)


def _require_defaults(config: Any, why: str, *, prefix: str = "", names: Collection[str] | None = None) -> None:
    """Refuse fields (those in `names`, or any) that are not at their defaults: nothing would come of them."""
    for own in fields(config):
        given = getattr(config, own.name)
        unread = names is None or own.name in names
        require(not unread or given == own.default, prefix + own.name, given, f"{own.default!r}, its default: {why}")


_RULE_READS: Readers = {
    "confidence": ("threshold",),
    "beta": ("alpha", "beta", "update"),
    "calibrated": ("evidence", "model_sigma", "sample_sigma", "prior", "mean"),
}
_EVIDENCE_READS: Readers = {
    "both": ("model_sigma", "sample_sigma", "prior", "mean"),
    "model": ("model_sigma",),
    "sample": ("sample_sigma", "prior", "mean"),
}


@dataclass(frozen=True)
class StopConfig:
    """When a draft is long enough, or a tree deep enough (see inference/stopping.py)."""

    rule: str = "fixed"  # fixed | confidence | beta | calibrated (early_exit, after train/calibrate.py)
    # tokens of a chain, levels of a tree, a round at most; a chain with rule=fixed drafts so many; auto: what pays;
    max_draft: int | str | None = None  # null: 8 tokens, as many levels as the structure has by itself
    threshold: float = 0.4  # confidence: stop below this probability
    alpha: float = 4.0  # beta: successes that the prior counts for
    beta: float = 2.0  # beta: failures that the prior counts for
    update: str = "natural"  # beta: natural | printed
    evidence: str = "both"  # calibrated: both | model (the head alone) | sample (what was observed alone)
    model_sigma: float = 0.15  # calibrated: σ_M, how far off the head is taken to be
    sample_sigma: float = 1.0  # calibrated: σ_S, how far off what was observed is taken to be
    prior: float = 0.7  # calibrated: θ̂ before anything was observed
    mean: str = "sample"  # calibrated: θ̂ is the share of tested tokens that were right; printed: the paper's formula

    def __post_init__(self) -> None:
        require_choice("rule", self.rule, ("fixed", "confidence", "beta", "calibrated"))
        require_choice("update", self.update, ("natural", "printed"))
        require_choice("evidence", self.evidence, ("both", "model", "sample"))
        require_choice("mean", self.mean, ("sample", "printed"))
        for key in ("model_sigma", "sample_sigma"):
            require(0 < getattr(self, key) < math.inf, key, getattr(self, key), "a number > 0")
        require(0 <= self.prior <= 1, "prior", self.prior, "a probability")
        expected = "an integer ≥ 1, or auto with rule=fixed (the others decide themselves when to stop), or null"
        fits = self.max_draft is None or _is_size(self.max_draft)
        require(fits and (self.max_draft != AUTO or self.rule == "fixed"), "max_draft", self.max_draft, expected)
        require(0 < self.threshold < 1, "threshold", self.threshold, "a probability between 0 and 1")
        require(0 < self.alpha < math.inf, "alpha", self.alpha, "a number > 0")
        require(0 < self.beta < math.inf, "beta", self.beta, "a number > 0")
        _refuse_unread(self, "rule", _RULE_READS)
        _refuse_unread(self, "evidence", _EVIDENCE_READS)

    def limit(self, default: int) -> int:
        """max_draft as a number; `default` where it is null."""
        return default if self.max_draft is None else number(self.max_draft)


_KIND_READS: Readers = {
    "k_config": ("widths", "draw"),
    "opt_tree": ("max_depth", "nodes", "delta", "temperature"),
    "token_graph": ("max_depth", "nodes", "out_degree", "theta_prob", "theta_sibling", "tau", "temperature"),
    "static": ("shape", "nodes"),
}


@dataclass(frozen=True)
class StructureConfig:
    """The shape of a draft (see inference/structures/shapes.py)."""

    kind: str = "chain"  # chain | k_config | opt_tree | token_graph | static
    max_depth: int | str = 10  # opt_tree, token_graph: drafting steps at most; opt_tree: or auto
    nodes: int | str = 25  # opt_tree, token_graph: node budget; static shape=binary: its size; opt_tree: or auto
    widths: tuple[int, ...] | str = (4, 2, 2)  # k_config: children per node, level by level; or auto
    draw: str = "without_replacement"  # k_config when sampling: with_replacement | without_replacement | top_k
    delta: float | None = None  # opt_tree: stop when E(A) gains no more than this; null: μ, as measured here
    out_degree: int = 4  # token_graph: children of a node at most
    theta_prob: float = 0.2  # token_graph: a less probable node stays a leaf
    theta_sibling: float = 0.3  # token_graph: so does one less probable than this share of its likeliest sibling
    tau: int = 2  # token_graph: nodes that end in the same τ tokens are merged; 0 merges nothing
    shape: str = "eagle"  # static: eagle | binary | a JSON file of rank paths
    # of q under greedy decoding, where q only ranks: the target takes its likeliest token far more often than q says,
    temperature: float = 1.0  # so a sharper q (below 1) makes opt_tree and token_graph draft deeper

    def __post_init__(self) -> None:
        require_choice("kind", self.kind, ("chain", "k_config", "opt_tree", "token_graph", "static"))
        require_choice("draw", self.draw, ("with_replacement", "without_replacement", "top_k"))
        for key in ("out_degree", "tau"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "an integer ≥ 1")
        self._check_sizes()
        require(0 < self.temperature < math.inf, "temperature", self.temperature, "a number > 0")
        require(self.delta is None or 0 <= self.delta <= 1, "delta", self.delta, "0 to 1, or null")
        for key in ("theta_prob", "theta_sibling"):
            require(0 <= getattr(self, key) <= 1, key, getattr(self, key), "a probability")
        _refuse_unread(self, "kind", _KIND_READS)
        if self.kind == "static":
            _refuse_unread(self, "shape", {"binary": ("nodes",)})

    def _check_sizes(self) -> None:
        for key in ("max_depth", "nodes"):
            value = getattr(self, key)
            fits = _is_size(value) and (value != AUTO or self.kind == "opt_tree")
            require(fits, key, value, "an integer ≥ 1, or auto with kind=opt_tree")
        if isinstance(self.widths, tuple):
            fits = len(self.widths) > 0 and all(isinstance(width, int) and width >= 1 for width in self.widths)
        else:
            fits = self.widths == AUTO and self.kind == "k_config"
        require(fits, "widths", self.widths, "integers ≥ 1, e.g. [4,2,2], or auto with kind=k_config")
        if self.max_depth == AUTO:
            require(self.delta is None, "delta", self.delta, "null with max_depth=auto, which decides when to stop")
            few = self.nodes == AUTO or number(self.nodes) <= MOST_NODES
            require(few, "nodes", self.nodes, f"at most {MOST_NODES} with max_depth=auto: costs are measured so far")


_NGRAM_READS: Readers = {
    "table": (
        "order", "adapt", "increment", "max_probability", "search", "iterations", "sentences", "widest", "c1", "c2",
    ),
    "mixed": ("longest", "decay", "strength"),
}  # fmt: skip
_SEARCH_READS: Readers = {"puct": ("iterations", "sentences", "widest", "c1", "c2")}
_ADAPT_READS: Readers = {True: ("increment", "max_probability")}


@dataclass(frozen=True)
class NgramConfig:
    """Drafting from an n-gram table (see inference/drafters/ngrams.py)."""

    evidence: str = "table"  # table: one order of it, adapted (ADED) | mixed: its orders 2 to 4 and the text so far
    nodes: int = 64  # node budget
    depth: int = 4  # tokens ahead at most
    order: int = 3  # table: the n of its n-grams
    adapt: bool = True  # table: raise the n-grams of prompt and output (Algorithm 2), and with it:
    increment: float = 0.4  # table: what Algorithm 2 adds to an n-gram that occurs
    max_probability: float = 0.7  # table: and the most that it comes to
    search: str = "best_first"  # table: best_first | puct; the paper's search has these settings:
    iterations: int = 150  # puct: s
    sentences: int = 24  # puct: n, the best ones that make the tree
    widest: int = 12  # puct: t, likeliest successors of a state in the table that count
    c1: float = 32.0  # puct: more explores more
    c2: float = 8.0  # puct: larger makes exploration grow more slowly
    longest: int = 8  # mixed: longest context that is looked up in the text
    decay: float = 0.85  # mixed: what a count keeps when its context occurs again
    strength: float = 20.0  # mixed: how many tokens' evidence the prior weight of a source counts for

    def __post_init__(self) -> None:
        require_choice("evidence", self.evidence, ("table", "mixed"))
        require_choice("search", self.search, ("best_first", "puct"))
        for key in ("nodes", "depth", "iterations", "sentences", "widest", "longest"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "an integer ≥ 1")
        require(2 <= self.order <= 4, "order", self.order, "2, 3 or 4")
        require(0 < self.increment <= 1, "increment", self.increment, "a number in (0, 1]")
        require(self.increment <= self.max_probability <= 1, "max_probability", self.max_probability, "increment to 1")
        require(0 <= self.c1 < math.inf, "c1", self.c1, "a number ≥ 0")
        require(0 < self.c2 < math.inf, "c2", self.c2, "a number > 0")
        require(0 < self.decay <= 1, "decay", self.decay, "a number in (0, 1]")
        require(0 < self.strength < math.inf, "strength", self.strength, "a number > 0")
        _refuse_unread(self, "evidence", _NGRAM_READS)
        _refuse_unread(self, "search", _SEARCH_READS)
        _refuse_unread(self, "adapt", _ADAPT_READS)


@dataclass(frozen=True)
class MethodConfig:
    """One way of decoding: who drafts, in what shape, until when."""

    source: str = "early_exit"  # early_exit | small_lm | prompt_lookup, ngrams (their own structures)
    structure: StructureConfig = field(default_factory=StructureConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    verify: str = "exact"  # when sampling; naive: accept a drawn candidate only if p draws it too (MCNS), a baseline
    max_ngram: int = 3  # prompt_lookup: longest suffix that is looked up; drafts stop.max_draft tokens
    ngrams: NgramConfig = field(default_factory=NgramConfig)  # source=ngrams

    def __post_init__(self) -> None:
        require_choice("source", self.source, tuple(KINDS))
        kind = KINDS[self.source]
        require_choice("verify", self.verify, ("exact", "naive"))
        require(
            self.stop.rule != "calibrated" or kind.hidden,
            "stop.rule",
            self.stop.rule,
            f"another rule for source={self.source}: the calibration head belongs to an early-exit drafter",
        )
        require(self.max_ngram >= 1, "max_ngram", self.max_ngram, "an integer ≥ 1")
        modelled, shape = kind.shaped, self.structure.kind
        self._refuse_unread(kind)
        sized = self.stop.max_draft != AUTO or (modelled and shape == "chain")
        expected = "a number or null: auto chooses the length of a chain of early_exit or small_lm"
        require(sized, "stop.max_draft", self.stop.max_draft, expected)
        rigid = self.stop.rule == "fixed" or not self.adapts
        require(rigid, "stop.rule", self.stop.rule, "fixed where sizes are auto, which decide how deep a tree goes")
        drawn = modelled and (shape == "chain" or (shape == "k_config" and self.structure.draw != "top_k"))
        require(self.verify == "exact" or drawn, "verify", self.verify, "exact where no candidate is ever drawn")

    def _refuse_unread(self, kind: Kind) -> None:
        """The parts that belong to other kinds of drafters, or to drafts that a structure shapes."""
        why = f"source={self.source} does not read it"
        foreign = {name for other in KINDS.values() for name in other.own if "." not in name} - set(kind.own)
        whole = {name for name in foreign if dataclasses.is_dataclass(getattr(self, name))}
        _require_defaults(self, why, names=foreign - whole)
        parts: dict[str, Any] = {f"{name}.": getattr(self, name) for name in sorted(whole)}
        if not kind.shaped:
            read: dict[str, Any] = {name.removeprefix("stop."): None for name in kind.own if name.startswith("stop.")}
            parts |= {"structure.": self.structure, "stop.": replace(self.stop, **read)}
        for prefix, part in parts.items():
            _require_defaults(part, why, prefix=prefix)

    @property
    def adapts(self) -> bool:
        """Whether a size is left to be chosen here."""
        tree = self.structure
        return AUTO in (self.stop.max_draft, tree.nodes, tree.max_depth, tree.widths)


@dataclass(frozen=True)
class SamplingConfig:
    """From logits to probabilities, the same for target and drafter (see inference/sampling.py)."""

    temperature: float = 0.0  # 0: greedy; top_k, top_p and min_p then have nothing to choose from
    top_k: int = 0  # keep the k likeliest tokens; 0: all
    top_p: float = 1.0  # keep the likeliest tokens that together have this probability; 1: all
    min_p: float = 0.0  # keep tokens at least this fraction as likely as the likeliest; 0: all
    # divides positive logits of tokens in the text so far (prompt too); 1: none; null: the target's own where its
    repetition_penalty: float | None = None  # generation config is taken over, else none

    def __post_init__(self) -> None:
        require(
            self.temperature == 0 or 1e-6 <= self.temperature < math.inf,  # below, logits overflow float32
            "temperature",
            self.temperature,
            "0 (greedy) or a number ≥ 1e-6",
        )
        require(self.top_k >= 0, "top_k", self.top_k, "an integer ≥ 0 (0: all tokens)")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "a number in [0, 1]")
        penalty = self.repetition_penalty
        require(penalty is None or 0 < penalty < math.inf, "repetition_penalty", penalty, "a number > 0, or null")


@dataclass(frozen=True)
class EvaluateConfig:
    """evaluate-checkpoint: a drafter, prompts, and the methods to compare on them."""

    checkpoint: str | None = None  # early-exit drafter directory, for methods with source=early_exit
    small_lm: str | None = None  # causal LM directory or Hub name, for methods with source=small_lm
    table: str | None = None  # n-gram table directory (data_prep/build_trigrams.py), for methods with source=ngrams
    target: str | None = None  # model directory or Hub name; null: the one `checkpoint` was trained for; or replay
    transcripts: str | None = None  # target=replay: recorded greedy answers to `prompts`
    tokenizer: str | None = None  # target=replay: a Hugging Face directory or a SentencePiece .model
    revision: str | None = None  # of the target on the Hub: branch, tag or commit
    # the ways of decoding to compare, by name; method=[…] chooses presets
    methods: dict[str, MethodConfig] = field(default_factory=dict)
    prompts: str = "python_stdlib"  # held-out standard-library files, or a JSONL/JSON file of prompts
    prompt_text: list[str] = field(default_factory=list)  # inline prompts instead
    prompt_chars: int = 1000  # python_stdlib: characters of a file to continue from
    num_prompts: int | None = 24  # evenly spread; null: all
    template: str = "auto"  # auto | tokenizer | vicuna | none
    max_new_tokens: int = 128  # target=replay: the length of the recorded answer where that is longer
    ignore_eos: bool = False  # go on to max_new_tokens
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    generation_config: str = "target"  # target: what acts on greedy decoding there is taken over | none: ignored
    stop_strings: list[str] = field(default_factory=list)  # text also ends with the first of these; none: the target's
    repeats: int = 1  # timed passes over every prompt, which draw anew when sampling; the one of median time counts
    compare_transformers: bool = True  # also time model.generate
    dtype: str = "auto"  # auto: float32 on CPU, else the target's own
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    runtime: str = "auto"  # eager | graphed: passes of fixed shape as CUDA graphs (uncaptured without CUDA) | auto
    threads: int | None = None  # CPU threads; null: torch's choice
    seed: int = 0  # of sampling, and of what rules and searches draw
    drafters: dict[str, str] = field(default_factory=dict)  # models of other kinds, as +drafters.NAME=PATH
    card: bool = False  # also put the table into README.md of the drafters evaluated
    out_dir: str = "runs/evaluate"  # where the report goes
    resume: bool = False  # go on with what an earlier run left in out_dir
    debug: bool = False  # a rehearsal in <out_dir>-debug: tiny random models of this architecture, few tokens
    debug_architecture: str = "llama"  # see ARCHITECTURES

    def __post_init__(self) -> None:
        require(bool(self.methods), "method", sorted(self.methods), "at least one, e.g. method=eesd_beta")
        sources = {method.source for method in self.methods.values()}
        for kind in KINDS.values():
            using = ", ".join(name for name, method in self.methods.items() if method.source == kind.name)
            key, where = kind.option, self.where(kind)
            if key is not None and using:
                given_as = key if hasattr(self, key) else f"+drafters.{key}"
                require(where is not None, given_as, where, f"{kind.needs} for {using}")
        others = [kind.option for kind in KINDS.values() if kind.option and not hasattr(self, kind.option)]
        for name, where in self.drafters.items():
            known = ", ".join(others) or "none here: no kind of drafter needs it"
            require(name in others, f"drafters.{name}", where, f"one of {known}")
        replayed = self.target == "replay"
        for key in ("transcripts", "tokenizer"):
            expected = "a file for target=replay" if replayed else "null unless target=replay"
            require((getattr(self, key) is not None) == replayed, key, getattr(self, key), expected)
        blind = all(KINDS[source].sees_tokens_only for source in sources)
        require(not replayed or blind, "target", self.target, "a model: a recording has no hidden states or logits")
        for key, setting, expected in (
            ("sampling.temperature", self.sampling.temperature, "0 for target=replay: recordings are greedy"),
            ("sampling.repetition_penalty", self.sampling.repetition_penalty, "null for target=replay: no logits"),
            (
                "generation_config",
                self.generation_config.removeprefix("target"),
                "target for target=replay: no model runs",
            ),
            ("stop_strings", self.stop_strings, "none for target=replay: recordings are replayed whole"),
            ("card", self.card, "false for target=replay: a table or prompt_lookup has no README.md to put it into"),
            ("runtime", self.runtime == "graphed", "auto for target=replay: no model runs"),
            ("debug", self.debug, "false for target=replay: no model runs; try it with a small num_prompts"),
            ("resume", self.resume, "false for target=replay: it takes seconds and starts over"),
        ):
            require(not replayed or not setting, key, setting, expected)
        require(self.target is not None or self.checkpoint is not None, "target", None, "the model that is to decode")
        require(self.prompt_chars >= 1, "prompt_chars", self.prompt_chars, "an integer ≥ 1")
        require(self.num_prompts is None or self.num_prompts >= 1, "num_prompts", self.num_prompts, "null or ≥ 1")
        require(
            self.max_new_tokens >= 2,
            "max_new_tokens",
            self.max_new_tokens,
            "≥ 2 (the first is the prefill's)",
        )
        require(all(self.stop_strings), "stop_strings", self.stop_strings, "texts of at least one character")
        require(self.repeats >= 1, "repeats", self.repeats, "an integer ≥ 1")
        require(self.threads is None or self.threads >= 1, "threads", self.threads, "null or an integer ≥ 1")
        require_choice("generation_config", self.generation_config, ("target", "none"))
        require_choice("template", self.template, ("auto", "tokenizer", "vicuna", "none"))
        require_choice("debug_architecture", self.debug_architecture, ARCHITECTURES)
        require_choice("dtype", self.dtype, DTYPES)
        require_choice("runtime", self.runtime, RUNTIMES)

    def where(self, kind: Kind) -> str | None:
        """Where the model of `kind` lies, None where that is not said or it has none."""
        if kind.option is None:
            return None
        given: str | None = getattr(self, kind.option, None) or self.drafters.get(kind.option)
        return given
