"""EAGLE-3 heads: trained with the whole target, by training-time test. MTP heads are refitted in the same way.

    python train/eagle3.py target=MODEL data=ultrachat

A head reads features, which are made of the target's aux hidden states: those at its taps, some boundaries of target
layers. A reading says how the tensors in a head's files are used, a dialect is a format of these files.

`train_head` is the whole training, `HeadStudent.forward` its step with the loss. The loop around the step is
train/core/loop.py.
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    from outrider.commands import run_script

    run_script("eagle3")

import copy
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from outrider.base.errors import UserError
from outrider.base.settings import require_defaults
from outrider.draft_models.eagle3 import checkpoint as heads
from outrider.draft_models.eagle3.dialects import require_expressible
from outrider.draft_models.eagle3.model import Eagle3, Mask, Steps
from outrider.draft_models.eagle3.reading import Reading, new_reading
from outrider.draft_models.formats.gguf_file import find_gguf
from outrider.draft_models.losses import PLAIN, head_product
from outrider.draft_models.mtp.checkpoint import USE, StoredMtp, open_mtp, save_mtp
from outrider.draft_models.mtp.model import MtpHead
from outrider.draft_models.mtp.reading import MtpReading
from outrider.draft_models.mtp.spellings import find_head
from outrider.draft_models.targets.attention import packed_band
from outrider.draft_models.targets.model_spec import LogitRule
from outrider.draft_models.targets.open_target import OpenTarget, open_target, stored_dtype
from outrider.draft_models.targets.settings import EAGLE3, MTP, TARGET
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.drafters.eagle3.drafter import Eagle3DraftModel
from outrider.train.parts.drafter import require_context
from outrider.train.parts.head_student import HeadStudent
from outrider.train.parts.head_training import HeadKind, train_head, warn_of_other_trainer
from outrider.train.parts.on_policy import draw_depths
from outrider.train.parts.position_weights import Factors
from outrider.train.parts.steps import WATCHED_DRAFT, Predictions, QueriesAt, positions_to_run
from outrider.train.settings.drafters import Eagle3Config


def train_eagle3(config: Eagle3Config) -> None:
    """Train a head according to `config`. The result is `config.out_dir`, a directory that serving engines can load.

    Raises `UserError` for an unusable target, head, data set or directory, before any weight is read.
    """
    target = open_target(config.target, config.revision)
    stored_head = open_start(config, target)
    head_reading = reading_of(config, stored_head, target.config)
    train_head(config, target, stored_head, head_reading, kind_of(config, stored_head, head_reading, target.config))


def kind_of(
    config: Eagle3Config, stored_head: heads.StoredHead | None, head_reading: Reading, target_config: PreTrainedConfig
) -> HeadKind:
    """What is particular to the training of a head of this reading. stored_head: the head to continue from, if any."""
    is_mtp = isinstance(head_reading, MtpReading)

    def save(trained_head: Eagle3) -> str:
        """Write the head as serving engines load it; returns how they use it, in words."""
        out_dir, dtype = Path(config.out_dir), stored_dtype(target_config)
        if isinstance(stored_head, StoredMtp):
            save_mtp(out_dir, trained_head, stored_head, dtype)
            return USE
        head, made_here = copy.deepcopy(trained_head).to(dtype), stored_head is None or stored_head.made_here
        draft_length = min(config.draft_steps, 7)  # that the files suggest, 7 at most
        heads.save_head(out_dir, head, config.dialect, target_config, config.target, draft_length, made_here=made_here)
        return heads.describe_use(config.dialect)

    return HeadKind(
        command="eagle3", facts={"draft_steps": config.draft_steps}, module=MtpHead if is_mtp else Eagle3,
        new=heads.new_head, student=partial(MtpStudent if is_mtp else Eagle3Student, config=config),
        steps=max(config.draft_steps, WATCHED_DRAFT), drafts=Eagle3DraftModel, record=heads.TRAINING_FILE, save=save,
    )  # fmt: skip


def open_start(config: Eagle3Config, target: OpenTarget) -> heads.StoredHead | None:
    """The finished head to continue from, if any. Warns if another trainer wrote the head; raises `UserError` for GGUF.

    start=target is the target's own MTP head.
    """
    if config.start is None:
        return None
    source = config.target if config.start == TARGET else config.start
    if find_gguf(source) is not None:
        raise UserError(f"start={config.start}: a GGUF file, to which no head is written; give the directory or Hub "
                        "name of the model that was converted, and convert the model with the new head")  # fmt: skip
    is_mtp = config.start == TARGET or find_head(source) is not None
    stored_head = open_mtp(source, target.config) if is_mtp else heads.open_head(source, target.config, config.reading)
    warn_of_other_trainer(config, stored_head, MTP if is_mtp else EAGLE3)
    return stored_head


def reading_of(config: Eagle3Config, stored_head: heads.StoredHead | None, target: PreTrainedConfig) -> Reading:
    """The reading of the head to train. Raises `UserError` if such a head cannot be trained or written."""
    if stored_head is not None:
        reading = stored_head.reading
    else:
        options = {name: getattr(config, name) for name in ("taps", "version", "draft_vocabulary", "intermediate")}
        reading = new_reading(target, **options)
        if reading.taps[-1] > target.num_hidden_layers:
            raise UserError(f"taps={list(reading.taps)}: expected 0 to {target.num_hidden_layers}, the target's layers")
    if set(reading.windows) != {None}:
        raise UserError(f"start={config.start}: its layers see {list(reading.windows)} positions; only heads that see "
                        "all of them are trained here")  # fmt: skip
    if isinstance(reading, MtpReading):
        reason = "an MTP head is written in the spelling in which it was read"
        require_defaults(config, ("reading", "dialect"), reason)
        has_lm_head = config.train_head or reading.own_head
        config.require("train_head", has_lm_head, "true, as the logits' matrix of this MTP head is the target's")
    else:
        require_expressible(reading, heads.head_shapes(reading), config.dialect, target)
    require_context(target, config.seq_len, config.decode_tokens)
    return reading


class Eagle3Student(HeadStudent):
    """A head that learns by training-time test.

    Step 0 runs on the target's feature and the token after it, later steps on the previous step's output at the same
    position and the next token of the text. With `keep` step t is drawn to run at a share of keep^t of the positions.
    """

    head: Eagle3

    def __init__(self, stack: LayerStack, head: Eagle3, config: Eagle3Config) -> None:
        step_count = config.draft_steps
        super().__init__(stack, head, config, step_count, [config.keep**step for step in range(step_count)])
        self.keep = config.keep
        if head.reading.own_head:
            head.lm_head.requires_grad_(config.train_head)

    def draw(self, loss_mask: Tensor, input_ids: Tensor) -> Tensor:
        """The predictions `loss_mask` [B, T, steps] up to a depth drawn at each position, by each row's content."""
        if self.keep == 1:
            return loss_mask
        return loss_mask & draw_depths(self.keep, self.steps, self.seed, self.step, input_ids)

    def product(self, predictions: Predictions, input_ids: Tensor) -> Factors:
        return self.head.normalise(predictions.hidden), self.head.lm_head.weight  # [n, H], [V', H]

    def features(self, aux_states: Tensor) -> Tensor:
        """aux_states [B, T, k · H_t], the target's aux hidden states → the features of step 0 [B, T, H]."""
        return self.head.features(aux_states.float())

    def unroll(
        self, input_ids: Tensor, positions: Tensor, documents: Tensor, aux_states: Tensor, loss_mask: Tensor
    ) -> Predictions:
        """Step 0 runs at all positions, to which later steps attend. A later step runs where it or one after it has a
        loss. Attention has rows [R, T]; a step runs at N positions of each row, of flat `indices` [R, N]."""
        head, (batch_size, row_length, step_count) = self.head, loss_mask.shape
        head.reserve(row_length + step_count)
        if input_ids.device.type == "cpu":  # all in one row, since attention goes from document to document
            documents = (documents + (row_length + 1) * torch.arange(batch_size)[:, None]).view(1, -1)  # still distinct
        band = packed_band(documents)  # the mask of the texts: causal, within documents
        is_run = (loss_mask.flip(-1).cumsum(-1).flip(-1) > 0).flatten(0, 1)  # [B · T, step_count]: a loss here or later
        mask, indices = band, torch.arange(len(is_run), device=is_run.device).view_as(documents)
        # Read from the module that holds it, unlike in `Eagle3.embed`, as launchers that shard weights expect.
        embedding = F.embedding(input_ids, (head.embed_tokens or self.stack.embed_tokens).weight).float()
        features = self.features(aux_states).float().view(*indices.shape, -1)
        cache, outputs, output_rows, label_indices = Steps(), list[Tensor](), list[Tensor](), list[Tensor]()
        for step in range(step_count):
            if step and (picks := positions_to_run(is_run[indices, step])) is not None:  # among the last step's
                features, indices = F.embedding(picks, features.flatten(0, 1)), indices.flatten()[picks]
                cache.picks[step], mask = picks, QueriesAt.of(band, documents, indices % documents.shape[1])
            cache.tokens[step] = (indices + 1 + step) % len(is_run)  # beyond the end nothing has a loss
            run_step = partial(self._run_step, cache, step, mask, positions.flatten()[indices])
            if self.recomputes and torch.is_grad_enabled():
                run_step = partial(checkpoint, run_step, use_reentrant=False, preserve_rng_state=False)
            features, embedding = run_step(embedding, features), embedding[:, :0]  # only step 0 reads it (see `Steps`)
            has_loss = loss_mask.flatten(0, 1)[indices, step]
            output_rows.append(has_loss.flatten().nonzero()[:, 0] + sum(map(len, outputs)))
            label_indices.append(indices[has_loss] + 1 + step)
            outputs.append(features.flatten(0, 1))
        step_numbers = torch.cat([torch.full_like(chunk, step) for step, chunk in enumerate(label_indices)])
        labels, order = torch.cat(label_indices).sort(stable=True)
        return Predictions(F.embedding(torch.cat(output_rows)[order], torch.cat(outputs)), labels, step_numbers[order])

    def _run_step(
        self, step_cache: Steps, step: int, mask: Mask, positions: Tensor, embedding: Tensor, features: Tensor
    ) -> Tensor:
        """The outputs [R, N, H] of a step at `positions` [R, N], which are the features of the next step."""
        step_cache.step = step  # set here, as a recomputed step runs again in the backward pass
        mask_by_window = dict.fromkeys(self.head.windows, mask)
        return self.head.run(embedding, features, mask_by_window, self.head.rotary(positions + step), step_cache)


class MtpStudent(Eagle3Student):
    """An MTP head, which learns as an EAGLE-3 head does. It shares the target's final norm, and may share its head."""

    head: MtpHead

    @property
    def rule(self) -> LogitRule:
        """From products to logits: the target's, such as a scale, for the target's head."""
        return PLAIN if self.head.reading.own_head else self.stack.spec.logits

    def product(self, predictions: Predictions, input_ids: Tensor) -> Factors:
        if self.head.reading.own_head:
            return super().product(predictions, input_ids)
        return head_product(self.stack.head, self.head.normalise(predictions.hidden))  # [n, H], [V, H]

    def features(self, aux_states: Tensor) -> Tensor:
        return self.stack.norm(aux_states) if self.head.reading.target_norm else aux_states
