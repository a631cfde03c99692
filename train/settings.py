"""Configs of the training commands. Light on purpose: a mistake shows before torch is imported."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from data_prep.settings import DataConfig
from inference.settings import ARCHITECTURES
from outrider.errors import require, require_choice
from train.fit_settings import FitConfig

TOY_REPORT = "toy_target.json"  # written last: a directory that has it holds a finished toy target


@dataclass(frozen=True)
class ToyTargetConfig:
    """A small Llama trained from scratch, to learn and to test on.

    Out comes an ordinary Hugging Face directory: weights, config and a byte-level BPE tokenizer.
    """

    data: DataConfig
    fit: FitConfig
    out_dir: str = "runs/toy_target"  # where everything goes
    resume: bool = False  # go on with what an earlier run left in out_dir
    vocabulary: int = 2048  # tokens, of a byte-level BPE made from the data
    layers: int = 12  # of the Llama to train
    hidden: int = 256  # width
    intermediate: int = 704  # width inside the MLPs
    heads: int = 4  # of attention
    kv_heads: int = 4  # heads of keys and values
    tied: bool = False  # one matrix for embedding and head
    seq_len: int = 256  # tokens of a row
    max_positions: int = 2048  # the context that the model says it has
    minutes: float | None = None  # as many steps as take about this long here, but at most those of `fit`
    compile: bool | None = None  # the layers, by torch.compile; null: on a GPU, where a C compiler is at hand
    eval_rows: int = 200  # held-out rows of seq_len tokens behind the final bits per byte; 0: all
    sample_tokens: int = 160  # greedy text printed at the end; 0: none

    def __post_init__(self) -> None:
        require(self.vocabulary >= 300, "vocabulary", self.vocabulary, "at least 300: bytes, special tokens, merges")
        for key in ("layers", "hidden", "intermediate", "heads", "kv_heads"):
            require(getattr(self, key) > 0, key, getattr(self, key), "a positive number")
        require(
            self.hidden % (2 * self.heads) == 0,
            "hidden",
            self.hidden,
            f"an even multiple of heads ({self.heads})",
        )
        require(self.heads % self.kv_heads == 0, "kv_heads", self.kv_heads, f"a divisor of heads ({self.heads})")
        require(self.seq_len > 1, "seq_len", self.seq_len, "at least 2 tokens")
        require(
            self.max_positions >= self.seq_len,
            "max_positions",
            self.max_positions,
            f"at least seq_len ({self.seq_len})",
        )
        positive = self.minutes is None or 0 < self.minutes < math.inf
        require(positive, "minutes", self.minutes, "a positive number of minutes, or null")
        require(self.eval_rows >= 0, "eval_rows", self.eval_rows, "zero (all) or more")
        require(self.sample_tokens >= 0, "sample_tokens", self.sample_tokens, "zero or more")

    def deciding(self) -> dict[str, Any]:
        """The options that decide the resulting weights; a resumed run must agree on these."""
        free = {"out_dir", "resume", "compile", "eval_rows", "sample_tokens"}
        values = {key: value for key, value in asdict(self).items() if key not in free}
        return values | {"data": self.data.deciding(), "fit": self.fit.deciding()}


@dataclass(frozen=True)
class EesdConfig:
    """EESD: train an early-exit drafter on the first layers of `target`."""

    target: str  # model directory or Hub name; only the layers needed are read
    data: DataConfig
    fit: FitConfig
    revision: str | None = None  # of the target on the Hub: branch, tag or commit
    exit_layer: int | None = None  # N, the target layers under the exit layer; null: 8 % of them
    train_head: bool = True  # false: share the target's head, the thing to do with a large vocabulary
    train_layer: bool = True  # false: no exit layer, norm and head sit on the first N layers (the paper's ablation)
    objective: str = "cross_entropy"  # the paper's, on the text's tokens; kl: from the whole target, run as well
    frozen_dtype: str = "bfloat16"  # float32 | bfloat16 | float16: of the target's layers, which are not trained
    seq_len: int = 2048  # tokens of a row
    eval_rows: int = 64  # held-out rows behind eval_top1
    eval_batch_rows: int = 4  # held-out rows run together
    decode_prompts: int = 0  # held-out prompts behind eval_tau, which chooses the drafter; 0 never loads the target
    decode_tokens: int = 64  # new ones of each of those prompts
    plan: bool = False  # only say what it would read, hold and compute; needs no weights
    out_dir: str = "runs/eesd"  # where everything goes
    resume: bool = False  # go on with what an earlier run left in out_dir
    debug: bool = False  # a rehearsal in <out_dir>-debug: tiny random models of this architecture, little data
    debug_architecture: str = "llama"  # see ARCHITECTURES in inference/settings.py

    def __post_init__(self) -> None:
        require(bool(self.target), "target", self.target, "a model directory or Hub name")
        require(
            self.exit_layer is None or self.exit_layer >= 1,
            "exit_layer",
            self.exit_layer,
            "null or at least 1",
        )
        require(
            self.train_layer or self.fit.optimizer == "adamw",
            "fit.optimizer",
            self.fit.optimizer,
            "adamw for train_layer=false: muon is for a layer's matrices",
        )
        require_choice("objective", self.objective, ("cross_entropy", "kl"))
        require_choice("debug_architecture", self.debug_architecture, ARCHITECTURES)
        require_choice("frozen_dtype", self.frozen_dtype, ("bfloat16", "float16", "float32", "float64"))
        require(self.seq_len >= 2, "seq_len", self.seq_len, "at least 2 tokens")
        for key in ("eval_rows", "eval_batch_rows", "decode_tokens"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        _require_heldout(self.data, "training is watched on held-out text")
        require(self.decode_prompts >= 0, "decode_prompts", self.decode_prompts, "0 or more")

    def choosing(self) -> dict[str, Any]:
        """The options that decide which of the weights on the way are kept; none where it is the last ones."""
        if not self.decode_prompts:
            return {}
        keys = ("decode_prompts", "decode_tokens")
        return {key: getattr(self, key) for key in keys} | {"eval_every": self.fit.eval_every}


@dataclass(frozen=True)
class CalibrateConfig:
    """Train the calibration head of an early-exit drafter on what became of the tokens it drafted."""

    checkpoint: str  # early-exit drafter directory; the head is stored there
    data: DataConfig
    fit: FitConfig  # a row is `EXAMPLES` drafted tokens
    target: str | None = None  # null: the one `checkpoint` was trained for
    revision: str | None = None  # of the target on the Hub: branch, tag or commit
    prompts: int = 400  # texts continued to learn from; a row's start each
    heldout_prompts: int = 64  # texts continued to report on
    seq_len: int = 512  # tokens of a text at most that are continued
    new_tokens: int = 128  # per prompt, greedy
    max_draft: int = 10  # tokens drafted every round: the paper's positions
    l2: float = 0.01  # penalty on the head's weights, per token
    dtype: str = "auto"  # auto: float32 on CPU, else the target's own
    out_dir: str = "runs/calibrate"  # where everything goes
    resume: bool = False  # go on with what an earlier run left in out_dir
    debug: bool = False  # a rehearsal in <out_dir>-debug: tiny random models of this architecture, little data
    debug_architecture: str = "llama"  # see ARCHITECTURES in inference/settings.py

    def __post_init__(self) -> None:
        require(bool(self.checkpoint), "checkpoint", self.checkpoint, "a drafter directory (train/eesd.py)")
        for key in ("prompts", "heldout_prompts", "max_draft"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        require(0 <= self.l2 < math.inf, "l2", self.l2, "zero or more")
        require(self.seq_len >= 2, "seq_len", self.seq_len, "at least 2 tokens")
        require(
            self.new_tokens >= 3,
            "new_tokens",
            self.new_tokens,
            "at least 3: the first is the prefill's, and the last is never drafted",
        )
        require_choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16", "float64"))
        require_choice("debug_architecture", self.debug_architecture, ARCHITECTURES)
        _require_heldout(self.data, "the head is judged on held-out text")


OBJECTIVES = ("cross_entropy", "forward_kl", "reverse_kl", "jensen_shannon", "total_variation")


@dataclass(frozen=True)
class DrafterConfig:
    """The small LM to start from: a finished one (`path`), or a Llama of this shape from random weights."""

    path: str | None = None  # model directory or Hub name
    revision: str | None = None  # of it on the Hub
    layers: int | None = None  # of a new drafter, in place of `path`
    hidden: int | None = None  # width
    heads: int | None = None  # of attention
    kv_heads: int | None = None  # null: heads
    intermediate: int | None = None  # width inside the MLPs
    tied: bool = False  # from a shape: one matrix for embedding and head

    def __post_init__(self) -> None:
        shape = {key: getattr(self, key) for key in ("layers", "hidden", "heads", "intermediate")}
        given = {key: value for key, value in {**shape, "kv_heads": self.kv_heads}.items() if value is not None}
        if self.path is not None:
            require(bool(self.path), "path", self.path, "a model directory or Hub name")
            require(
                not given and not self.tied, "path", self.path, "no shape beside it; drafter=pretrained leaves it out"
            )
            return
        require(self.revision is None, "revision", self.revision, "a path it belongs to")
        for key, value in {**shape, **given}.items():
            require(value is not None and value > 0, key, value, "a positive number, or a path (drafter.path=MODEL)")
        assert self.hidden is not None
        assert self.heads is not None
        require(
            self.hidden % (2 * self.heads) == 0,
            "hidden",
            self.hidden,
            f"an even multiple of heads ({self.heads})",
        )
        require(
            self.kv_heads is None or self.heads % self.kv_heads == 0,
            "kv_heads",
            self.kv_heads,
            f"a divisor of heads ({self.heads})",
        )


@dataclass(frozen=True)
class FinetuneConfig:
    """A small LM as a drafter for `target`, trained on text or towards the target's own distribution."""

    target: str  # model directory or Hub name
    data: DataConfig
    drafter: DrafterConfig
    fit: FitConfig
    revision: str | None = None  # of the target on the Hub: branch, tag or commit
    objective: str = "forward_kl"  # see `OBJECTIVES` and draft_models/losses.py; cross_entropy needs no target
    teacher: str = "online"  # where a divergence has the target from: run along, or cached top-k beside `data`
    on_policy: float = 0.0  # share of the steps on continuations that the drafter itself has sampled
    on_policy_tokens: int = 64  # sampled per row in such a step
    lora_rank: int = 0  # 0: all weights are trained
    lora_alpha: float | None = None  # null: 2 · lora_rank
    frozen_dtype: str = "auto"  # of the target; auto: float32 on a CPU, else its own
    seq_len: int = 2048  # tokens of a row
    decode_prompts: int = 16  # held-out prompts behind eval_tau, which chooses the drafter
    decode_tokens: int = 64  # new ones of each of those prompts
    out_dir: str = "runs/finetune_drafter"  # where everything goes
    resume: bool = False  # go on with what an earlier run left in out_dir
    debug: bool = False  # a rehearsal in <out_dir>-debug: tiny random models of this architecture, little data
    debug_architecture: str = "llama"  # see ARCHITECTURES in inference/settings.py

    def __post_init__(self) -> None:
        require(bool(self.target), "target", self.target, "a model directory or Hub name")
        require_choice("objective", self.objective, OBJECTIVES)
        require_choice("teacher", self.teacher, ("online", "cached"))
        require_choice("debug_architecture", self.debug_architecture, ARCHITECTURES)
        require(
            not self.debug or self.teacher == "online",
            "debug",
            self.debug,
            "teacher=online: a tiny target has no cached answers",
        )
        require_choice("frozen_dtype", self.frozen_dtype, ("auto", "bfloat16", "float16", "float32", "float64"))
        require(self.seq_len >= 2, "seq_len", self.seq_len, "at least 2 tokens")
        require(self.decode_prompts >= 1, "decode_prompts", self.decode_prompts, "at least 1: they choose the drafter")
        require(self.decode_tokens >= 2, "decode_tokens", self.decode_tokens, "at least 2: the first is the prefill's")
        require(0 <= self.on_policy <= 1, "on_policy", self.on_policy, "a share of the steps, 0 to 1")
        require(
            self.on_policy == 0 or (self.objective != "cross_entropy" and self.teacher == "online"),
            "on_policy",
            self.on_policy,
            "0 without a target in the loop: give a divergence as objective and teacher=online",
        )
        require(
            1 <= self.on_policy_tokens < self.seq_len or self.on_policy == 0,
            "on_policy_tokens",
            self.on_policy_tokens,
            f"at least 1 and less than seq_len ({self.seq_len})",
        )
        require(self.lora_rank >= 0, "lora_rank", self.lora_rank, "a rank, or 0 to train all weights")
        require(
            self.lora_alpha is None or (self.lora_rank > 0 and self.lora_alpha > 0),
            "lora_alpha",
            self.lora_alpha,
            "null, or a positive number with a lora_rank",
        )
        require(
            self.lora_rank == 0 or self.drafter.path is not None,
            "lora_rank",
            self.lora_rank,
            "0 for a drafter from random weights, which adapters cannot train; or drafter.path",
        )
        require(
            self.teacher == "online" or (self.distils and self.data.source == "local"),
            "teacher",
            self.teacher,
            "online; cached needs a divergence as objective and data=local with the responses of "
            "data_prep/generate_responses.py (top_k_logits=K)",
        )
        _require_heldout(self.data, "the drafter is chosen on held-out text")

    @property
    def distils(self) -> bool:
        """Whether the loss compares with the target's distribution."""
        return self.objective != "cross_entropy"

    def deciding(self) -> dict[str, Any]:
        """The options, besides `fit`, that decide the exported drafter; a resumed run must agree on these."""
        free = {"out_dir", "resume", "fit", "debug", "debug_architecture"}
        values = {key: value for key, value in asdict(self).items() if key not in free}
        # the best one of those evaluated is exported
        return values | {"data": self.data.deciding(), "eval_every": self.fit.eval_every}


def _require_heldout(data: DataConfig, why: str) -> None:
    fraction = data.heldout_fraction
    require(fraction > 0, "data.heldout_fraction", fraction, f"more than 0: {why}")
