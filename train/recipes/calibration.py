"""Calibration heads: trained on the outcomes of a drafter's drafts (EESD §3.3).

`prepare` captures these first (train/parts/capture.py); `CalibrationModel.forward` is the training step with its loss;
the loop around it is train/core/loop.py.
"""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState
from torch import Tensor, nn

from outrider.base.files import digest_of, require_writable, write_atomically, write_json
from outrider.base.processes import from_main
from outrider.data_prep.text.sources import Split
from outrider.draft_models.calibration import save_calibration
from outrider.draft_models.calibration_head import CalibrationHead, log_odds
from outrider.draft_models.losses import IGNORE
from outrider.draft_models.targets.open_target import pick_dtype
from outrider.inference.drafters.model_plugin import ModelDrafterPlugin
from outrider.inference.loading.drafters import position_limits
from outrider.inference.loading.target_setup import end_tokens
from outrider.inference.measure.time_limit import TimeLimit
from outrider.inference.settings.kind import Kind
from outrider.inference.settings.method import MethodConfig
from outrider.train.core.driver import train
from outrider.train.core.training import Batch, Metrics, Trained, Training
from outrider.train.parts.calibration_scores import brier, judge, later_half, plot_reliability, predict, temper
from outrider.train.parts.capture import EXAMPLES, Drafting, capture_splits, only_tested, require_answers_of
from outrider.train.settings.drafters import CalibrateConfig
from outrider.train.students import calibration as students


def calibrate(config: CalibrateConfig) -> None:
    """Capture, fit, report, and store the head in `config.checkpoint`.

    Raises `UserError` before the target is loaded if checkpoint, target or directory are unusable.
    """
    kind = students.kind_to_calibrate(config)
    train(config, partial(students.capture_plan, config, kind), partial(prepare, config, kind), config.checkpoint)


def prepare(config: CalibrateConfig, kind: Kind, state: PartialState) -> "Training[CalibrationModel]":
    """The training, on examples that this captures first. Raises `UserError`."""
    config = students.with_its_heldout(config, kind)
    target = students.find_target(config, kind)
    if config.answers == "recorded":
        require_answers_of(target, config.data)
    plugin = kind.load_plugin().read_with(config.reading)
    digest = plugin.digest(config.checkpoint)
    assert isinstance(plugin, ModelDrafterPlugin)  # true of every kind that has a head
    students.warn_of_template(config, plugin.training_record(config.checkpoint).data, target)
    fingerprint = from_main(state, lambda: target.fingerprint)
    target_record = {"config": fingerprint.config, "tensors": fingerprint.tensors}
    dtype, ends = pick_dtype(config.dtype, target.config, state.device), end_tokens(target)
    model = plugin.load(config.checkpoint, target, {}, dtype=dtype, device=state.device)

    def load() -> Drafting:
        decode = students.load_decoder(config, kind, target, model, dtype, state.device)
        draft_model = partial(plugin.draft_model, model, MethodConfig(kind.name))
        return Drafting(decode, draft_model, config.new_tokens, config.max_draft, ends)

    settings = {name: value for name, value in config.deciding().items() if name not in ("fit", "l2", "odds")}
    settings |= {"drafter": digest, "target": digest_of(target_record)[:16], "dtype": str(dtype), "ends": sorted(ends)}
    texts = students.texts_of(config, target, position_limits({kind.name: model}))
    captured = capture_splits(Path(config.out_dir), settings, texts, load, TimeLimit(config.minutes), state)
    learned, heldout = captured["train"], only_tested(captured["heldout"])
    heldout = {name: value.to(state.device) for name, value in heldout.items()}
    student = CalibrationModel(learned, config.l2, odds=config.odds)
    recipe = {"capture": settings, "l2": config.l2, "odds": config.odds, "examples": len(learned["label"])}

    def evaluate(fitted: CalibrationModel, _: int) -> Metrics:
        return {"brier": brier(predict(fitted.folded(), heldout), heldout["label"])}

    def save(trained: Trained) -> None:
        facts = {**recipe, "data": config.data.source, "fit": asdict(config.fit), "steps": trained.result.steps}
        save_head(config, kind, digest, student.cpu().folded(), captured, {**facts, "target": target_record})

    identity = {**recipe, "labels": digest_of(learned["label"].tolist())[:16]}
    return Training(student, Examples(learned), config.fit, identity, evaluate, save)


class CalibrationModel(nn.Module):
    """The head on standardised inputs, so that one learning rate fits every model; see `folded`.

    It is initialised to the draft's own odds, shifted to the mean acceptance, so that few steps are enough.
    odds=False: the draft's odds get no weight, as in the paper.
    """

    mean_target: Tensor
    mean_draft: Tensor
    scale_target: Tensor
    scale_draft: Tensor
    mean_odds: Tensor
    scale_odds: Tensor

    def __init__(self, captured: Batch, l2: float, *, odds: bool = True):
        super().__init__()
        self.l2 = l2 / len(captured["label"])
        seen = log_odds(captured["confidence"].log())
        self.register_buffer("mean_odds", seen.mean(), persistent=False)
        self.register_buffer("scale_odds", seen.std().clamp_min(1e-6), persistent=False)
        for name in ("target", "draft"):
            values = captured[f"{name}_hidden"].float()
            self.register_buffer(f"mean_{name}", values.mean(0), persistent=False)
            self.register_buffer(f"scale_{name}", values.std(0).clamp_min(1e-6), persistent=False)
        self.head = CalibrationHead(self.mean_target.shape[0], self.mean_draft.shape[0])
        accepted = captured["label"].float().mean().clamp(0.01, 0.99)
        nn.init.constant_(self.head.bias, float(accepted.logit()))
        nn.init.constant_(self.head.odds, float(self.scale_odds) if odds else 0.0)
        self.head.odds.requires_grad_(odds)

    def forward(
        self, target_hidden: Tensor, draft_hidden: Tensor, position: Tensor, confidence: Tensor, labels: Tensor
    ) -> Batch:
        """{"loss_sum"} over labels that are not IGNORE: binary cross-entropy, plus each label's share of
        l2 · ‖weights‖². A convex problem.

        Inputs are rows of `Examples`. There are thousands of weights and only thousands of tokens, so a head without l2
        is overconfident. The weight of the draft's own odds is not penalised.
        """
        keep = labels != IGNORE
        target = (target_hidden[keep].float() - self.mean_target) / self.scale_target
        draft = (draft_hidden[keep].float() - self.mean_draft) / self.scale_draft
        odds = (log_odds(confidence[keep].log()) - self.mean_odds) / self.scale_odds
        logits = self.head.weigh(target, draft, position[keep], odds)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels[keep].float(), reduction="sum")
        penalty = self.head.target.square().sum() + self.head.draft.square().sum()
        return {"loss_sum": loss + self.l2 * len(logits) * penalty}

    @torch.no_grad()
    def folded(self) -> CalibrationHead:
        """The same head for raw inputs: the standardisation is folded into its weights."""
        plain = CalibrationHead(self.mean_target.shape[0], self.mean_draft.shape[0]).to(self.mean_target.device)
        plain.target.copy_(self.head.target / self.scale_target)
        plain.draft.copy_(self.head.draft / self.scale_draft)
        plain.odds.copy_(self.head.odds / self.scale_odds)
        shift = plain.target @ self.mean_target + plain.draft @ self.mean_draft + plain.odds * self.mean_odds
        plain.bias.copy_(self.head.bias - shift)
        return plain.requires_grad_(False)


class Examples:
    """Captured tokens as rows of `EXAMPLES` for `fit`; the last row is padded with tokens labelled IGNORE."""

    def __init__(self, captured: Batch):
        self.captured = captured

    def __len__(self) -> int:
        return -(-len(self.captured["label"]) // EXAMPLES)

    def __getitem__(self, index: int) -> Batch:
        part = {name: value[index * EXAMPLES : (index + 1) * EXAMPLES] for name, value in self.captured.items()}
        part = {name: part[name] for name in ("target_hidden", "draft_hidden", "position", "confidence", "label")}
        missing = EXAMPLES - len(part["label"])
        row = {name: nn.functional.pad(v, (0, 0) * (v.ndim - 1) + (0, missing)) for name, v in part.items()}
        labels = row.pop("label").long()
        labels[EXAMPLES - missing :] = IGNORE
        return {**row, "labels": labels}


def save_head(
    config: CalibrateConfig,
    kind: Kind,
    digest: str,
    head: CalibrationHead,
    captured: Mapping[Split, Batch],
    facts: Mapping[str, object],
) -> None:
    """Fit the head's temperatures, write its scores, and store it with its drafter."""
    tempering = temper(head, captured["heldout"], keep=config.odds)
    scores = judge(head, captured["train"], only_tested(later_half(captured["heldout"])))
    judged = {**scores, "survival": tempering}
    write_json(Path(config.out_dir) / "calibration.json", judged)
    write_atomically(Path(config.out_dir) / "reliability.png", plot_reliability(scores))
    folder = require_writable(Path(config.checkpoint) / str(kind.calibration))
    save_calibration(folder, head, digest, {**facts, "heldout": judged})
    for name, row in scores["predictors"].items():
        print(f"calibration predictor={name} brier={row['brier']:.4f} ece={row['ece']:.4f}", flush=True)
    errors = f"ece_before={tempering['ece_before']:.4f} ece_after={tempering['ece_after']:.4f}"
    print(f"calibration survival {errors} temperatures={'kept' if tempering['kept'] else 'none'}", flush=True)
    print(f"saved calibration={folder} examples={facts['examples']}", flush=True)
