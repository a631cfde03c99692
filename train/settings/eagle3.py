"""Config of the training of EAGLE-3 heads. Light on purpose: a mistake shows before torch is imported."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from data_prep.text.settings import DataConfig
from draft_models.targets.settings import FloatDtype, Head, ReadingChanges, TargetConfig, Written
from outrider.errors import require
from outrider.settings import Count, Positive, Share, free, opt, require_default
from train.settings.drafters import (
    NotNegative,
    Objective,
    Width,
    require_heldout,
)
from train.settings.fit import FitConfig

OF_A_NEW_HEAD = ("version", "taps", "intermediate", "draft_vocabulary")  # options that a finished one has decided


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(TargetConfig):
    """EAGLE-3: train a head on hidden states of `target`, which runs along, by training-time test."""

    by_layers: ClassVar[bool] = True  # it needs the layers of the target

    data: DataConfig
    fit: FitConfig
    start: Head | None = None
    """an EAGLE-3 head to go on with, a directory or Hub name; null: a new one, of random weights but for its logits',
    which begin as the target's"""
    reading: ReadingChanges = opt(factory=ReadingChanges, help="how that head is read where its config.json is wrong")
    version: Literal["3", "3.1"] = "3.1"
    """of a new head: 3.1 norms each tap and what a step hands on; 3: neither, as first published"""
    taps: tuple[NotNegative, ...] = ()
    """of a new head: boundaries of the target's layers, 0 its embedding; none: a low, a middle and a high one"""
    intermediate: Count | None = opt(None, "of a new head: width inside its MLP; null: the target's")
    draft_vocabulary: Count | None = None
    """of a new head: tokens that it predicts, the text's most frequent; null: all"""
    train_head: bool = opt(True, "false: the matrix of its logits stays as it begins")
    draft_steps: Count = opt(7, "of training-time test: as many tokens in a row as it learns to draft")
    step_decay: Annotated[Share, Ge(0)] = opt(0.8, "a step counts so many times what the one before counts")
    objective: Objective = opt("forward_kl", "see draft_models/losses.py; cross_entropy: on the text's tokens")
    frozen_dtype: Literal["fast", FloatDtype] = "fast"
    """of the target's layers, which are not trained; fast: bfloat16, or float32 on a CPU without instructions for it"""
    dialect: Written = "specforge"
    """whose names and words config.json and the tensors have: SpecForge's heads have three taps"""
    features: str | None = None
    """a folder for what the target makes of the rows of text: filled at first, then read instead of running the target;
    null: it runs along"""
    features_dtype: Literal["int8", FloatDtype] = opt("float16", "of what is kept there; int8: 32 values share a scale")
    seq_len: Width = opt(2048, "tokens of a row")
    minutes: Positive | None = opt(None, "as many steps as take this long here, but at most those of `fit`")
    eval_rows: Count = free(64, "held-out rows that give eval_loss_1, eval_agree_1, … and eval_tau_analytic")
    eval_batch_rows: Count = free(4, "held-out rows run together")
    decode_prompts: Count = opt(16, "held-out prompts that give eval_tau, which chooses the head")
    decode_tokens: Annotated[int, Ge(2)] = opt(64, "new ones of each of those prompts; the first is the prefill's")
    plan: bool = free(False, "only say what it would hold and compute; needs no weights")
    out_dir: str = free("runs/eagle3", "where everything goes")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in OF_A_NEW_HEAD if self.start is not None else ():
            require_default(self, name, f"start={self.start} has decided it")
        started = self.start is not None or not self.reading.stated()
        require(started, "reading", str(self.reading), "nothing without start=, which it is about")
        ascending = all(low < high for low, high in zip(self.taps, self.taps[1:], strict=False))
        require(ascending, "taps", self.taps, "boundaries in ascending order, or none")
        longest = self.seq_len - 2
        require(self.draft_steps <= longest, "draft_steps", self.draft_steps, f"at most seq_len - 2 ({longest})")
        if self.features is None:
            require_default(self, "features_dtype", "features=null does not read it")
        require_heldout(self.data, "the head is chosen on held-out text")

    def deciding(self) -> dict[str, object]:
        """As of all settings; besides, the best head of those evaluated is kept."""
        return super().deciding() | {"eval_every": self.fit.eval_every}
