"""Settings of a decoding method: its drafter, draft shape and stop rule; and methods by their names.

A named method is a file of conf/method/, or composed as SOURCE/SHAPE, SOURCE/STOP or SOURCE/SHAPE/STOP. SOURCE is a
kind of drafter, SHAPE a file of conf/shape/, STOP one of conf/stop/. The key of "eagle3/opt_tree" is eagle3_opt_tree,
as in `methods.eagle3_opt_tree.structure.nodes=30` and in reports.

An option is a field. The text of its help stands in its `opt(…)`, or as a string below the field; `only` says when the
option is read. `Settings` runs `check_fields`. The head is the calibration head of `outrider calibrate`, which
estimates whether a token is accepted. A `Kind` describes a kind of drafters; a kind is *shaped* if a structure (chain
or tree) and a stop rule shape its drafts.
Papers: beta and the Thompson rules are EESD's (arXiv 2406.03853); inference/stopping/rules.py explains θ̂ (the observed
acceptance), natural and printed. E(A): the tokens expected of a round (OPT-Tree, 2406.17276). TSD: GSD (2407.16207)
without merging. s, n, t, c1, c2 and the algorithms of `NgramConfig` are ADED's (2407.12021).
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

from annotated_types import Ge, Gt, Le, Lt

from outrider.base.errors import UserError, require
from outrider.base.settings import Count, KeyOf, Positive, Settings, Share, construct, only, opt, require_defaults
from outrider.base.words import did_you_mean
from outrider.inference.settings import CHAIN_TOKENS, LONGEST_CHAIN, MOST_NODES
from outrider.inference.settings.kind import Kind
from outrider.inference.settings.kinds import EARLY_EXIT, KINDS
from outrider.inference.settings.sampling import Verification
from outrider.inference.settings.stop_rules import RULES, THRESHOLDS

# A size that is chosen from costs measured at start and from acceptance (see inference/sizing/). Greedy tokens never
# depend on it, nor does the distribution of sampled ones. Which tokens a seed draws depends on it, and so on the
# machine's speed.
AUTO: Final = "auto"
AUTOREGRESSIVE, TRANSFORMERS = "autoregressive", "transformers_generate"  # the names of the two baselines
Size = Count | Literal["auto"]
CONF_DIR = (Path(__file__).parents[2] / "conf").resolve()
PARTS = ("shape", "stop")  # the groups that a composed name chooses from, in the order of the name


def known_size(value: int | str) -> int:
    """`value`, a size that is a number. Raises `ValueError` for "auto", which the caller must have replaced."""
    if isinstance(value, str):
        raise ValueError(f"a size is {value!r} where it must be known by now")
    return value


_THOMPSON = ("calibrated", "posterior_mean")  # rules that join the head's estimate and the observed acceptance
_WITH_HEAD = ", ".join(name for name, entry in RULES.items() if entry.needs_head)
_BOUNDS = ", ".join(f"{RULES[name].bounds} ({name}; null: {bound})" for name, bound in THRESHOLDS.items())


@dataclass(frozen=True)
class StopConfig(Settings):
    """The stop rule of a chain or a tree (see inference/stopping/)."""

    rule: Annotated[str, KeyOf(RULES)] = opt(
        "fixed", f"docs/when-to-stop.md; {_WITH_HEAD} need the head that `outrider calibrate` trains"
    )
    max_draft: Size | None = None
    """most tokens of a chain, or levels of a tree, in a round; rule=fixed drafts exactly this many; auto: what pays;
    null: 8 tokens (15 with rule=survival), or the structure's own levels"""
    threshold: Annotated[Annotated[float, Gt(0), Lt(1)] | None, only(rule=tuple(THRESHOLDS))] = opt(
        None, f"stop at {_BOUNDS}"
    )
    gamma: Annotated[Positive, only(rule="adaedl")] = opt(0.2, "γ: weight of the entropy in the bound")
    alpha: Annotated[Positive, only(rule="beta")] = opt(4.0, "successes that the prior counts for")
    beta: Annotated[Positive, only(rule="beta")] = opt(2.0, "failures that the prior counts for")
    update: Annotated[Literal["natural", "printed"], only(rule="beta")] = opt("natural", "printed: the paper's formula")
    discount: Annotated[float, Gt(0), Le(1), only(rule="beta")] = 1.0
    """factor on the weight of earlier trials in every round; 1: as in the paper"""
    evidence: Annotated[Literal["both", "model", "sample"], only(rule="calibrated")] = "both"
    """model: only the head; sample: only the observed acceptance"""
    model_sigma: Annotated[Positive, only(rule=_THOMPSON, evidence=("both", "model"))] = 0.15
    """σ_M: assumed error of the head"""
    sample_sigma: Annotated[Positive, only(rule=_THOMPSON, evidence=("both", "sample"))] = 1.0
    """σ_S: assumed error of the observed acceptance"""
    prior: Annotated[Share, only(rule=_THOMPSON, evidence=("both", "sample"))] = 0.7
    """θ̂ before the first observation"""
    mean: Annotated[Literal["sample", "printed"], only(rule=_THOMPSON, evidence=("both", "sample"))] = "sample"
    """θ̂ is the share of tested tokens that were right; printed: the paper's formula"""
    score: Annotated[Literal["draft", "head"], only(rule="survival")] = "draft"
    """source of a token's probability to be right: the draft's q, or the head of `outrider calibrate`"""

    def check_fields(self) -> None:
        size_fits = self.max_draft != AUTO or self.rule == "fixed"
        expected = "an integer ≥ 1, or auto with rule=fixed (the others decide themselves when to stop), or null"
        self.require("max_draft", size_fits, expected)
        length_fits = not self.by_costs or self.longest() <= LONGEST_CHAIN
        self.require("max_draft", length_fits, f"at most {LONGEST_CHAIN} with rule={self.rule}, or null")

    @property
    def needs_head(self) -> bool:
        return RULES[self.rule].needs_head or self.score == "head"

    @property
    def by_costs(self) -> bool:
        """Whether the rule weighs the tokens of a chain against measured costs."""
        return RULES[self.rule].by_costs

    @property
    def bound(self) -> float:
        """The threshold of a rule that has one."""
        return THRESHOLDS[self.rule] if self.threshold is None else self.threshold

    def longest(self, level_count: int | None = None) -> int:
        """The most tokens of a chain, or levels of a tree. level_count: of the structure; `max_draft` replaces them."""
        if self.max_draft is None and level_count is not None:
            return level_count
        if self.max_draft == AUTO or (self.max_draft is None and self.by_costs):
            return LONGEST_CHAIN
        return CHAIN_TOKENS if self.max_draft is None else known_size(self.max_draft)


Draw = Literal["with_replacement", "without_replacement", "top_k"]
DRAWS = get_args(Draw)
StructureKind = Literal["chain", "k_config", "opt_tree", "token_graph", "static"]
_GROWN: tuple[StructureKind, ...] = ("opt_tree", "token_graph")  # their trees grow where q is large


@dataclass(frozen=True)
class StructureConfig(Settings):
    """The shape of a draft (see inference/shapes/shapes.py)."""

    kind: StructureKind = opt("chain", "one line of tokens, or a tree")
    max_depth: Annotated[Size, only(kind=_GROWN)] = opt(10, "drafting steps at most; auto with opt_tree")
    nodes: Annotated[Size, only(kind=(*_GROWN, "static"))] = 25
    """budget; the size of shape=binary; auto with opt_tree"""
    widths: Annotated[tuple[Count, ...], only(kind="k_config")] = opt((4, 2, 2), "children per node, level by level")
    draw: Annotated[Draw, only(kind="k_config")] = opt("without_replacement", "how children come about when sampling")
    width: Annotated[Count | None, only(kind="opt_tree")] = None
    """most nodes of a level that are extended, the likeliest first; null: all that are in the best tree so far"""
    delta: Annotated[Share | None, only(kind="opt_tree")] = None
    """stop when E(A) gains no more than this; null: μ, the time of a draft step over that of a decoding step, as
    measured here"""
    out_degree: Annotated[Count, only(kind="token_graph")] = opt(4, "children of a node at most")
    theta_prob: Annotated[Share, only(kind="token_graph")] = opt(0.2, "a less probable node stays a leaf")
    theta_sibling: Annotated[Share, only(kind="token_graph")] = 0.3
    """so does one less probable than this share of its likeliest sibling"""
    tau: Annotated[int, Ge(0), only(kind="token_graph")] = 2
    """nodes that end in the same τ tokens are merged; 0: none, which is GSD's TSD"""
    deep_copies: Annotated[bool, only(kind="token_graph")] = False
    """copies below merged nodes may be deeper than max_depth, which then bounds only what the drafter runs (the
    paper's)"""
    shape: Annotated[str, only(kind="static")] = opt("eagle", "eagle | binary | a JSON file of rank paths")
    temperature: Annotated[Positive, only(kind=_GROWN)] = 1.0
    """of q where it only ranks: under greedy decoding, and by rank=drafter; below 1 it drafts deeper, which pays where
    the target is far surer of q's likeliest token than q"""
    rank: Annotated[Literal["sampler", "drafter"], only(kind=_GROWN)] = "sampler"
    """by what a tree grows when sampling: q after the sampler's temperature, top-p and so on; drafter: q as under
    greedy decoding, so that sampling changes the verification only (OPT-Tree, section 4.6)"""

    def check_fields(self) -> None:
        for key in ("max_depth", "nodes"):
            size_fits = getattr(self, key) != AUTO or self.kind == "opt_tree"
            self.require(key, size_fits, "an integer ≥ 1, or auto with kind=opt_tree")
        self.require("widths", len(self.widths) > 0, "integers ≥ 1, e.g. [4,2,2]")
        if self.kind == "static" and self.shape != "binary":
            require_defaults(self, ["nodes"], f"shape={self.shape} does not read it")
        require(self.tau > 0 or not self.deep_copies, "deep_copies", True, "false with tau=0, which copies nothing")
        if self.max_depth == AUTO:
            self.require("delta", self.delta is None, "null with max_depth=auto, which decides when to stop")
            nodes_fit = self.nodes == AUTO or known_size(self.nodes) <= MOST_NODES
            self.require("nodes", nodes_fit, f"at most {MOST_NODES} with max_depth=auto: costs are measured so far")


@dataclass(frozen=True)
class NgramConfig(Settings):
    """Drafting from an n-gram table (see inference/drafters/ngrams/drafter.py)."""

    evidence: Literal["table", "mixed"] = opt("table", "one order of it, adapted (ADED); or orders 2 to 4 and the text")
    nodes: Size = 64
    """node budget; auto: what pays on this device, at most 63 (a replay has no device, and takes 63)"""
    depth: Count = opt(4, "tokens ahead at most")
    order: Annotated[Literal[2, 3, 4], only(evidence="table")] = opt(3, "the n of its n-grams")
    adapt: Annotated[bool, only(evidence="table")] = opt(True, "raise the n-grams of prompt and output (Algorithm 2)")
    increment: Annotated[float, Gt(0), Le(1), only(evidence="table", adapt=True)] = 0.4
    """probability that Algorithm 2 adds to an n-gram when it occurs"""
    max_probability: Annotated[Share, only(evidence="table", adapt=True)] = 0.7
    """its limit; at least increment"""
    search: Annotated[Literal["best_first", "puct"], only(evidence="table")] = opt("best_first", "the paper's is puct")
    iterations: Annotated[Count, only(evidence="table", search="puct")] = opt(150, "s")  # of the search
    sentences: Annotated[Count, only(evidence="table", search="puct")] = opt(24, "n: sentences that make the tree")
    widest: Annotated[Count, only(evidence="table", search="puct")] = 12
    """t: most successors of a state that the search uses, the likeliest first"""
    c1: Annotated[float, Ge(0), only(evidence="table", search="puct")] = opt(32.0, "more explores more")
    c2: Annotated[Positive, only(evidence="table", search="puct")] = 8.0
    """larger makes exploration grow more slowly"""
    longest: Annotated[int, Ge(0), only(evidence="mixed")] = 16
    """longest context that is looked up in the text; 0: the text says nothing"""
    decay: Annotated[float, Gt(0), Le(1), only(evidence="mixed")] = 0.85
    """factor on older counts when their context occurs again"""
    strength: Annotated[Positive, only(evidence="mixed")] = 60.0
    """how many tokens' evidence the prior weight of a source counts for"""
    recycle: Annotated[int, Ge(0), Le(64), only(evidence="mixed")] = 0
    """likeliest tokens kept of every row that the target verified, as evidence (recycled logits); 0: none"""

    def check_fields(self) -> None:
        size_fits = self.nodes != AUTO or self.search == "best_first"
        self.require("nodes", size_fits, "an integer ≥ 1, or auto with search=best_first")
        self.require("max_probability", self.increment <= self.max_probability, f"increment ({self.increment}) to 1")


_SHAPED = ", ".join(kind.name for kind in KINDS.values() if kind.shaped)
_UNSHAPED = " and ".join(kind.name for kind in KINDS.values() if not kind.shaped)


@dataclass(frozen=True)
class MethodConfig(Settings):
    """One decoding method: its drafter, draft shape and stop rule."""

    source: Annotated[str, KeyOf(KINDS)] = opt(
        EARLY_EXIT.name, f"the kind of drafter; {_UNSHAPED} shape their drafts themselves"
    )
    structure: StructureConfig = field(default_factory=StructureConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    verify: Literal["auto", Verification] = "auto"
    """when sampling; exact: token by token; block: all tokens of a chain together, which accepts more; auto: block for
    a chain, exact for a tree; naive: accept a drawn candidate only if p draws it too (MCNS), a baseline"""
    max_ngram: Count = opt(3, "prompt_lookup: longest suffix that is looked up; drafts stop.max_draft tokens")
    copy: Count | None = opt(
        None,
        f"{_SHAPED}: where the last so many tokens occurred before in prompt or answer, the draft is the text that "
        "followed them; null: every draft is the model's; `survival` and `opt_tree_auto` have 3",
    )
    ngrams: NgramConfig = opt(factory=NgramConfig, help="source=ngrams")
    skip: tuple[Annotated[int, Ge(0)], ...] | None = opt(None, debug=None)  # debug: its value in a rehearsal
    """skip_layers: layers of the target that a draft leaves out, from 0, e.g. [5,7,9]; null: every second one between
    the first and the last"""
    target_states: bool = True
    """small_lm: false leaves out a PARD-2 drafter's projection of the target's hidden states"""

    def check_fields(self) -> None:
        kind = KINDS[self.source]  # has_stop: stop.max_draft limits its drafts
        head_kinds = ", ".join(name for name, entry in KINDS.items() if entry.calibration is not None)
        expected = f"another rule for source={self.source}: a calibration head belongs to a drafter of {head_kinds}"
        self.require("stop.rule", not self.stop.needs_head or kind.calibration is not None, expected)
        structure, shape = self.structure, self.structure.kind
        self._refuse_unread(kind)
        size_fits = self.stop.max_draft != AUTO or (shape == "chain" if kind.shaped else kind.has_stop)
        kinds = ", ".join(name for name, entry in KINDS.items() if entry.has_stop)
        self.require("stop.max_draft", size_fits, f"a number or null: auto chooses the length of a chain of {kinds}")
        rule_fits = self.stop.rule == "fixed" or AUTO not in (structure.nodes, structure.max_depth)
        self.require("stop.rule", rule_fits, "fixed where sizes are auto, which decide how deep a tree goes")
        shape_fits = not self.stop.by_costs or shape == "chain"
        self.require("stop.rule", shape_fits, f"another rule for a tree: {self.stop.rule} counts the tokens of a chain")
        can_sample = kind.shaped and (shape == "chain" or (shape == "k_config" and self.structure.draw != "top_k"))
        self.require("verify", self.verify in (AUTO, "exact") or can_sample, "auto where no candidate is ever drawn")
        self.require("verify", self.verify != "block" or shape == "chain", "auto, exact or naive for a tree")

    def _refuse_unread(self, kind: Kind) -> None:
        """Raise `UserError` for a field that is set and that `kind` does not read.

        `Kind.keys` are the fields that only some kinds read, as "max_ngram" or "stop.max_draft". A kind that is not
        `shaped` also reads no structure, no copy, and of the stop rule only its keys.
        """
        why = f"source={self.source} does not read it"
        special_keys = {key for entry in KINDS.values() for key in entry.keys if not key.startswith("stop.")}
        unread_keys = sorted(special_keys - {*kind.keys})
        if not kind.shaped:
            names = (option.name for option in fields(self.stop) if f"stop.{option.name}" not in kind.keys)
            require_defaults(self.stop, names, why, "stop.")  # before `copy`, which the stop rule's file may have set
            unread_keys = ["structure", "copy", *unread_keys]
        require_defaults(self, unread_keys, why)

    @property
    def verification(self) -> Verification:
        """The rule of verification; auto stands for block with a chain, and for exact with a tree."""
        auto_rule: Verification = "block" if self.structure.kind == "chain" else "exact"
        return auto_rule if self.verify == AUTO else self.verify

    @property
    def adapts(self) -> bool:
        """Whether something is chosen by costs measured here."""
        structure, sizes = self.structure, (self.stop.max_draft, self.ngrams.nodes)
        return self.stop.by_costs or AUTO in (structure.nodes, structure.max_depth, *sizes)

    @property
    def lacks_delta(self) -> bool:
        """Whether the structure is an OPT-Tree whose δ is to be measured here."""
        structure = self.structure
        return structure.kind == "opt_tree" and structure.delta is None and structure.max_depth != AUTO


def preset(name: str) -> MethodConfig:
    """The method called `name`, as in the option `method=`. Raises `UserError` for an unknown name."""
    return construct(MethodConfig, settings_of(name))


def choices_of(conf_group: str) -> list[str]:
    """The names of the files of conf/<group>/."""
    return sorted(file.stem for file in (CONF_DIR / conf_group).glob("*.yaml"))


def method_key(name: str) -> str:
    """The key of the method `name` in `methods` and in reports."""
    return name.replace("/", "_")


def settings_of(name: str) -> dict[str, object]:
    """The settings of the method `name`, as plain containers without the defaults.

    Raises `UserError` for a name that is neither a preset nor composed of existing parts.
    """
    from omegaconf import OmegaConf  # vLLM's environment has none, and drafts by settings of its own

    source, *part_names = name.split("/")
    part_by_group = {group: part for group in PARTS for part in part_names if part in choices_of(group)}
    if list(part_by_group.values()) != part_names or (not part_names and source not in choices_of("method")):
        raise UserError(no_such_method(name))
    settings: dict[str, object] = {"source": source} if part_names else {}
    for conf_name in [f"{group}/{part}" for group, part in part_by_group.items()] or [f"method/{name}"]:
        content = OmegaConf.to_container(OmegaConf.load(CONF_DIR / f"{conf_name}.yaml"))
        settings |= {str(key): value for key, value in content.items()} if isinstance(content, dict) else {}
    return settings


def no_such_method(name: str) -> str:
    """The error message for an unknown method: the existing names."""
    presets, shapes, stops = (choices_of(group) for group in ("method", *PARTS))
    part_names = name.split("/")[1:]
    choices = [*shapes, *stops] if part_names else presets
    unknown = next((part for part in part_names or [name] if part not in choices), "")
    return (
        f"method={name}: no such method{did_you_mean(unknown, choices) or '.'} There are {', '.join(presets)}, and "
        "SOURCE/SHAPE/STOP, SOURCE/SHAPE and SOURCE/STOP with "
        f"a shape of {', '.join(shapes)}, a stop of {', '.join(stops)}"
    )
