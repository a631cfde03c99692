"""Settings of the trainings of drafters. Light on purpose: a mistake shows before torch is imported.

A field by `free` affects no result, other fields do. debug: its value in a rehearsal, on tiny models: a number is the
largest value, unless_null(64) keeps null, `DEFAULT` is the field's default. step_debug: the same in a pipeline's step.
decides: another option, without which the field affects no result. The text below a field is its meaning, as --help
shows it. `check_fields` of a class runs after those of its bases, without super(). eval_tau_text is τ of greedy drafts
if the target had written the held-out text, eval_tau_analytic the expected τ of sampling along that text.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator

from outrider.base.errors import require
from outrider.base.settings import DEFAULT, Count, Positive, RunConfig, Settings, Share, free, only, opt, unless_null
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.targets.settings import (
    DFLASH,
    EAGLE3,
    EARLY_EXIT,
    SMALL_LM,
    TARGET,
    Divergence,
    DrafterFolder,
    FloatDtype,
    Head,
    HeadStart,
    Model,
    ReadingChanges,
    Rehearsed,
    RunDtype,
    TargetOrTokenizer,
    TinyModel,
    WrittenDialect,
)
from outrider.train.settings.fit import CHECKPOINTS, FitConfig

NotNegative = Annotated[int, Ge(0)]
Width = Annotated[int, Ge(2)]  # tokens of a packed row of text
Objective = Literal["cross_entropy", Divergence]
Teacher = Literal["online", "cached"]
PositionWeights = Literal["none", "cat", "dpace"]  # see train/parts/position_weights.py
TINY_SHAPE = {"hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2}  # of a Llama in a rehearsal
_NEW = only(start=None)  # the mark of an option that is read only for a new drafter: a finished one has decided it


@dataclass(frozen=True, kw_only=True)
class DrafterTraining(Settings):
    """What all trainings of drafters have. The best drafter of those evaluated on the way is kept."""

    run_files: ClassVar[tuple[str, ...]] = (CHECKPOINTS,)
    out_dir: str = free(help="where everything goes")
    target: Model | None = free(help="model directory, GGUF file or Hub name", debug=TinyModel(TARGET))
    revision: str | None = free(None, "of the target on the Hub: branch, tag or commit", debug=None)
    data: DataConfig
    fit: FitConfig
    objective: Objective
    draft_vocabulary: Annotated[Count | None, _NEW] = opt(None, debug=64)
    """tokens that it predicts, the text's most frequent; null: all"""
    seq_len: Width = opt(2048, "tokens of a row", debug=64, step_debug=1024)
    minutes: Positive | None = opt(None, "as many steps as take this long here, but at most those of `fit`", debug=None)
    decode_prompts: Count = opt(16, debug=2, decides="decode_prompts")
    """held-out prompts that give eval_tau, which chooses the drafter"""
    decode_tokens: Annotated[int, Ge(2)] = opt(64, debug=8, decides="decode_prompts")
    """new ones of each of those prompts; the first is the prefill's"""

    def check_fields(self) -> None:
        require_heldout(self.data, "the drafter is watched and chosen on held-out text")

    @property
    def distils(self) -> bool:
        """Whether the loss compares with the target's distribution."""
        return self.objective != "cross_entropy"

    def decisions(self) -> dict[str, object]:
        """The options that affect results, by name; eval_every does if evaluations choose the weights to keep."""
        return super().decisions() | ({"eval_every": self.fit.eval_every} if self.decode_prompts else {})


@dataclass(frozen=True, kw_only=True)
class Distillation(Settings):
    """What a training has that can learn from cached distributions of the target, and to draft several tokens in one
    pass."""

    objective: Objective
    teacher: Teacher = "online"
    """source of the target's distribution, for objectives other than cross_entropy: online runs the whole target;
    cached reads the top k stored with `data`"""
    parallel: Annotated[int, Ge(0), Le(16)] = 0
    """tokens that it learns to draft in one pass, all but the first from a mask (PARD, arXiv 2504.18583); 0: one pass a
    token"""
    position_weights: PositionWeights = "none"
    """of a token's loss within such a draft: cat, the target's probability of the text before it in the draft (PARD-2);
    dpace, how many tokens are accepted from it on, by the drafter's own probabilities (arXiv 2605.18810); none: 1"""

    def check_fields(self) -> None:
        self.require("parallel", self.parallel != 1, "0, or 2 tokens or more")
        weighting, has_drafts = self.position_weights, self.parallel > 0
        expected = "none without parallel: then each token begins a draft"
        self.require("position_weights", weighting == "none" or has_drafts, expected)
        expected = "another with objective=cross_entropy: cat needs the target's distribution"
        self.require("position_weights", weighting != "cat" or self.objective != "cross_entropy", expected)

    @property
    def online(self) -> bool:
        """Whether the whole target runs along for the loss."""
        return self.objective != "cross_entropy" and self.teacher == "online"


@dataclass(frozen=True, kw_only=True)
class EesdConfig(Distillation, DrafterTraining, Rehearsed, RunConfig):
    """EESD: train an early-exit drafter on the first layers of `target`."""

    by_layers: ClassVar[bool] = True  # it needs a target whose layers can be run one by one

    target: Model = free(debug=TinyModel(TARGET))
    """model directory, GGUF file or Hub name; only the layers needed are read"""
    start: DrafterFolder | None = opt(None, debug=TinyModel(EARLY_EXIT))
    """an early exit of this target to continue training, for example on more data; null: a new one, which begins as the
    target's last layer, norm and head"""
    exit_layer: Annotated[Count | None, _NEW] = opt(None, debug=1)
    """N, the target layers under the exit; null: 8 % of them"""
    exit_depth: Annotated[Count, _NEW] = opt(1, "transformer layers of the exit")
    train_head: Annotated[bool, _NEW] = True
    """train a head of its own; false: share the target's, recommended for a large vocabulary"""
    train_layer: Annotated[bool, _NEW] = True
    """a layer of its own; false: norm and head sit on the first N layers (the paper's ablation)"""
    objective: Objective = "cross_entropy"
    """cross_entropy: the paper's, on the text's tokens; others: from the target's distribution, see
    draft_models/losses.py"""
    frozen_dtype: Literal["fast", FloatDtype] = "fast"
    """of the target's layers, which are not trained; fast: bfloat16, or float32 on a CPU without instructions for it"""
    eval_rows: Count = opt(64, debug=4, decides="decode_prompts")
    """held-out rows that give eval_top1, eval_tau_text and eval_tau_analytic, and the prompts that are decoded"""
    eval_batch_rows: Count = free(4, "held-out rows run together")
    decode_prompts: NotNegative = opt(0, debug=2, decides="decode_prompts")
    """held-out prompts that give eval_tau, which chooses the drafter; 0 never loads the target"""
    decode_tokens: Count = opt(64, "new ones of each of those prompts", debug=8, decides="decode_prompts")
    plan: bool = free(False, "only say what it would read, hold and compute; needs no weights")
    out_dir: str = free("runs/eesd", "where everything goes")

    def check_fields(self) -> None:
        require_teacher(self)
        expected = "adamw for train_layer=false: muon is for a layer's matrices"
        self.require("fit.optimizer", self.train_layer or self.fit.optimizer == "adamw", expected)
        self.require("exit_depth", self.train_layer or self.exit_depth == 1, "1 with train_layer=false")


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig(TargetOrTokenizer, Rehearsed, RunConfig):
    """Train the calibration head of a drafter on the outcomes of its drafted tokens.

    Texts are known by what is captured of them, drafter and target by their digests. The paper is EESD (2406.03853).
    """

    run_files: ClassVar[tuple[str, ...]] = (CHECKPOINTS,)
    checkpoint: DrafterFolder = free(debug=TinyModel(EARLY_EXIT, any_kind=True))
    """directory of an early exit, a small LM or an EAGLE-3 head; the calibration head is stored there"""
    data: DataConfig = free()
    fit: FitConfig = opt(help="a row is 64 drafted tokens")
    target: Model | None = free(None, debug=TinyModel(TARGET))
    """model directory, GGUF file or Hub name; null: the one the early exit in `checkpoint` was trained for"""
    reading: ReadingChanges = free(factory=ReadingChanges, debug=DEFAULT)
    """corrections of an EAGLE-3 head's config.json; give evaluate-checkpoint the same"""
    answers: Literal["target", "recorded"] = opt("target", debug="target")
    """target: it continues texts; recorded: `data` holds its greedy answers (see docs/when-to-stop.md). Then only the
    layers that the drafter shares are read, and the head sees no hidden state of the last layer"""
    prompts: Count = free(400, "texts continued for training, each from the start of a row", debug=4)
    heldout_prompts: Count = free(64, "texts continued for the report", debug=2)
    minutes: Positive | None = opt(None, debug=None)
    """continue texts until this time is over, but draft at least 64 tokens for training and 64 for the report, which
    share the time in proportion to their texts; null: all texts"""
    seq_len: Width = free(512, "most tokens of a text before its continuation", debug=64, step_debug=1024)
    new_tokens: Annotated[int, Ge(3)] = opt(128, debug=8)
    """per prompt, greedy; the first is the prefill's, and the last is never drafted"""
    max_draft: Count = opt(10, "tokens drafted every round: the paper's positions")
    l2: Annotated[float, Ge(0)] = opt(1000.0, "penalty on the head's weights, in units of the loss of one token")
    odds: bool = True
    """false: the paper's head, which sees only hidden states, without the draft's log-odds and without temperatures"""
    dtype: RunDtype = "auto"
    """auto: float32 on CPU, else the target's own; fast: also bfloat16 on a CPU that has instructions for it"""
    plan: bool = free(False, "only say what every device would hold; needs no weights")
    out_dir: str = free("runs/calibrate", "where everything goes")

    def check_fields(self) -> None:
        require_heldout(self.data, "the head is judged on held-out text")
        has_answers = self.answers == "target" or self.data.source == "local"
        self.require("answers", has_answers, "target without data=responses")
        lacks_target = self.tokenizer is not None and self.answers == "target"
        self.require("answers", not lacks_target, "recorded with tokenizer=, as no target is there to decode")


@dataclass(frozen=True)
class DrafterConfig(Settings):
    """The small LM to start from: a finished one (`path`), or a Llama of this shape from random weights."""

    # without: a pipeline's rehearsal that has trained no such model makes a new one of this shape instead.
    path: Model | None = free(None, debug=TinyModel(SMALL_LM, without={"layers": 1, **TINY_SHAPE}))
    """model directory, GGUF file or Hub name"""
    revision: str | None = free(None, "of that model on the Hub", debug=None)
    layers: Count | None = opt(None, "of a new drafter, instead of `path`", debug=3)
    hidden: Count | None = opt(None, "width", debug=unless_null(TINY_SHAPE["hidden"]))
    heads: Count | None = opt(None, "of attention", debug=unless_null(TINY_SHAPE["heads"]))
    kv_heads: Count | None = opt(None, "null: heads", debug=unless_null(TINY_SHAPE["kv_heads"]))
    intermediate: Count | None = opt(None, "width inside the MLPs", debug=unless_null(TINY_SHAPE["intermediate"]))
    tied: bool = opt(False, "from a shape: one matrix for embedding and head")

    def check_fields(self) -> None:
        shape = {key: getattr(self, key) for key in ("layers", "hidden", "heads", "intermediate")}  # all or none
        sizes = {key: value for key, value in {**shape, "kv_heads": self.kv_heads}.items() if value is not None}
        if self.path is not None:
            self.require("path", not sizes and not self.tied, "no shape beside it; drafter=pretrained leaves it out")
            return
        self.require("revision", self.revision is None, "a path it belongs to")
        for key, value in shape.items():
            require(value is not None, key, value, "a positive number, or a path (drafter.path=MODEL)")
        assert self.hidden is not None
        assert self.heads is not None
        require_heads(self.hidden, self.heads, self.kv_heads or self.heads)


def require_heads(hidden: int, heads: int, kv_heads: int) -> None:
    """Raise `UserError` unless a Llama of this width can have this many heads."""
    require(hidden % (2 * heads) == 0, "hidden", hidden, f"an even multiple of heads ({heads})")
    require(heads % kv_heads == 0, "kv_heads", kv_heads, f"a divisor of heads ({heads})")


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Distillation, TargetOrTokenizer, DrafterTraining, Rehearsed, RunConfig):
    """A small LM as a drafter for `target`, trained on text or towards the target's own distribution."""

    revision: str | None = free(None, "of the target on the Hub: branch, tag or commit", debug=None)
    drafter: DrafterConfig
    objective: Objective = opt("forward_kl", "see draft_models/losses.py; cross_entropy: on the text's tokens")
    on_policy: Share = opt(0.0, "share of the steps that train on continuations sampled by the drafter")
    on_policy_tokens: int = opt(64, "sampled per row in such a step", debug=8)
    draft_vocabulary: Count | None = opt(None, debug=64)
    """tokens that it reads and predicts, the text's most frequent; null: all, which serving engines need, or those of a
    finished drafter"""
    lora_rank: NotNegative = opt(0, "0: all weights are trained")
    lora_alpha: Positive | None = opt(None, "null: 2 · lora_rank")
    frozen_dtype: RunDtype = "auto"
    """of the target; auto: float32 on a CPU, else its own; fast: also bfloat16 on a CPU that has instructions for it"""
    out_dir: str = free("runs/finetune_drafter", "where everything goes")

    def check_fields(self) -> None:
        self.require_one()
        require_teacher(self)
        has_only_tokenizer = self.tokenizer is not None
        expected = "cached, or objective=cross_entropy, with tokenizer=: an online teacher is a whole target"
        self.require("teacher", not (has_only_tokenizer and self.online), expected)
        is_off_policy, fits = self.on_policy == 0, 1 <= self.on_policy_tokens < self.seq_len
        expected_online = "0 without a target in the loop: give a divergence as objective and teacher=online"
        self.require("on_policy", is_off_policy or self.online, expected_online)
        self.require("on_policy_tokens", is_off_policy or fits, f"at least 1 and less than seq_len ({self.seq_len})")
        allows_minutes = is_off_policy or self.minutes is None
        self.require("minutes", allows_minutes, "null with on_policy: its steps take longer than the others")
        allows_lora = not (self.parallel and self.lora_rank)
        self.require("lora_rank", allows_lora, "0 with parallel: adapters do not train the mask token's embedding")
        has_base = self.lora_rank == 0 or self.drafter.path is not None
        expected_base = "0 for a drafter from random weights, which adapters cannot train; or drafter.path"
        self.require("lora_rank", has_base, expected_base)
        self.require("lora_alpha", self.lora_alpha is None or self.lora_rank > 0, "null without a lora_rank")


@dataclass(frozen=True, kw_only=True)
class HeadTraining(Settings):
    """What trainings have of heads on hidden states of the whole target, which runs along."""

    by_layers: ClassVar[bool] = True  # as of `EesdConfig`

    target: Model = free(help="model directory, GGUF file or Hub name", debug=TinyModel(TARGET))
    objective: Objective = opt("forward_kl", "see draft_models/losses.py; cross_entropy: on the text's tokens")
    taps: Annotated[tuple[NotNegative, ...], _NEW] = opt((), debug=())
    """boundaries of the target's layers, 0 its embedding; none: a low, a middle and a high one"""
    intermediate: Annotated[Count | None, _NEW] = opt(None, debug=unless_null(TINY_SHAPE["intermediate"]))
    """width inside its MLP; null: the target's"""
    train_head: bool = opt(True, "false: keep the initial matrix of its logits")
    position_weights: Literal["decay", PositionWeights] = "decay"
    """of a step's loss: decay, by step_decay; none, all alike; cat, the target's probability of the text before it in
    the draft (PARD-2); dpace, how many tokens are accepted from it on, by the head's probabilities (2605.18810)"""
    step_decay: Annotated[Share, only(position_weights="decay")] = opt(0.8, "weight of a step over the one before")
    frozen_dtype: Literal["fast", FloatDtype] = "fast"
    """of the target's layers, which are not trained; fast: bfloat16, or float32 on a CPU without instructions for it"""
    features: str | None = free("auto", debug=unless_null("auto"))
    """a folder for what the target makes of the rows of text: filled at first, then read instead of running the target;
    auto: in out_dir until the end, if the text is read again and half of the disk's free space suffices; null: it runs
    along"""
    eval_rows: Count = opt(64, debug=4)
    """held-out rows that give eval_loss_1, eval_agree_1, … and eval_tau_analytic, and the prompts that are decoded"""
    eval_batch_rows: Count = free(4, "held-out rows run together")
    plan: bool = free(False, "only say what it would hold and compute; needs no weights")

    def check_fields(self) -> None:
        self.require("taps", [*self.taps] == sorted({*self.taps}), "boundaries in ascending order, or none")


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(HeadTraining, DrafterTraining, Rehearsed, RunConfig):
    """EAGLE-3: train a head on hidden states of `target`, which runs along, by training-time test."""

    start: HeadStart | None = free(None, debug=TinyModel(EAGLE3))
    """an EAGLE-3 head to continue training, a directory or Hub name, or a model with an MTP head, which is written as
    it was read; target: the target's own MTP head; null: a new EAGLE-3 head with random weights, except that its
    logits' matrix begins as the target's"""
    reading: ReadingChanges = opt(factory=ReadingChanges, debug=DEFAULT)
    """corrections of the config.json of the EAGLE-3 head in `start`"""
    version: Annotated[Literal["3", "3.1"], BeforeValidator(str), _NEW] = "3.1"  # YAML reads numbers
    """3.1: norms each tap and each step's output; 3: neither, as first published"""
    draft_steps: Count = opt(7, "steps of training-time test: the tokens in a row that it learns to draft", debug=4)
    keep: Annotated[float, Gt(0), Le(1)] = opt(1.0, "share of a step's positions at which the next runs, drawn; 1: all")
    dialect: WrittenDialect = "specforge"
    """format of config.json and tensor names; SpecForge's heads have three taps"""
    out_dir: str = free("runs/eagle3", "where everything goes")

    def check_fields(self) -> None:
        has_start = self.start is not None or not self.reading.overrides
        require(has_start, "reading", str(self.reading), "nothing without start=, which it is about")
        is_latest = self.start != TARGET or self.revision is None
        self.require("revision", is_latest, "null with start=target, whose head is looked for in the latest one")
        has_all_steps = self.keep == 1 or self.position_weights != "dpace"
        self.require("keep", has_all_steps, "1 with position_weights=dpace, whose weights are sums over whole drafts")
        max_steps = self.seq_len - 2
        self.require("draft_steps", self.draft_steps <= max_steps, f"at most seq_len - 2 ({max_steps})")


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(HeadTraining, DrafterTraining, Rehearsed, RunConfig):
    """DSpark or DFlash: train a block drafter on hidden states of `target`, which runs along. A pass drafts a block."""

    start: Head | None = free(None, debug=TinyModel(DFLASH))
    """a drafter to continue training, a directory or Hub name; null: a new one with random weights, except that
    its logits' matrix begins as the target's"""
    layers: Annotated[Count, _NEW] = opt(1, "decoder layers of the drafter")
    block: Annotated[int, Ge(2), Le(32), _NEW] = opt(5, "tokens that it learns to draft in one pass", debug=4)
    markov_rank: Annotated[NotNegative, _NEW] = opt(64, debug=8)
    """of the matrix by which a drafted token changes the next token's logits; 0: none, a DFlash drafter"""
    anchors: Annotated[float, Gt(0), Le(1)] = opt(0.25, "share of the positions after which a block is learnt, drawn")
    out_dir: str = free("runs/dspark", "where everything goes")

    def check_fields(self) -> None:
        max_block = self.seq_len - 2
        self.require("block", self.block <= max_block, f"at most seq_len - 2 ({max_block})")


HeadConfig = Eagle3Config | DSparkConfig


def require_teacher(config: EesdConfig | FinetuneConfig) -> None:
    """Raise `UserError` for cached distributions where there can be none."""
    is_cached = config.teacher == "cached"
    config.require("debug", not (config.debug and is_cached), "teacher=online: a tiny target has no cached answers")
    expected = "a divergence as objective and data=local with the responses of generate-responses (top_k_logits=K)"
    is_stored = not is_cached or (config.distils and config.data.source == "local")
    config.require("teacher", is_stored, f"online; cached needs {expected}")


def require_heldout(data: DataConfig, reason: str) -> None:
    fraction = data.heldout_fraction
    require(fraction > 0, "data.heldout_fraction", fraction, f"more than 0: {reason}")
