"""The calibration head as a student for `fit`, and captured examples in rows."""

import torch
from torch import Tensor, nn

from draft_models.calibration_head import CalibrationHead, log_odds
from draft_models.losses import IGNORE
from train.parts.calibration_scores import Batch

EXAMPLES = 64  # drafted tokens in one row of `fit`


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


class CalibrationModel(nn.Module):
    """The head on standardised inputs, so that one learning rate fits every model; see `folded`.

    It is initialised to the draft's own odds, shifted to the mean acceptance, so that few steps are enough.
    odds=False: these stay without weight, as in the paper.
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
