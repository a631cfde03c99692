"""DSpark and DFlash: block drafters, trained with the whole target.

    python train/dspark.py target=MODEL data=ultrachat

`train_head` is the whole training, `HeadStudent.forward` its step with the loss, `DSparkStudent.unroll` what the
drafter predicts. The loop around the step is train/core/loop.py.
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    from outrider.commands import run_script

    run_script("dspark")

import copy
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from outrider.base.errors import UserError, warn
from outrider.draft_models.dflash import checkpoint as drafters
from outrider.draft_models.dflash.model import DFlash
from outrider.draft_models.dflash.packed import PackedBlocks, block_positions
from outrider.draft_models.dflash.reading import BlockReading, new_reading
from outrider.draft_models.targets.attention import packed_band
from outrider.draft_models.targets.open_target import OpenTarget, open_target, stored_dtype
from outrider.draft_models.targets.settings import DFLASH
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.drafters.dflash.drafter import OneBlock
from outrider.train.parts.drafter import require_context
from outrider.train.parts.head_student import HeadStudent
from outrider.train.parts.head_training import HeadKind, train_head, warn_of_other_trainer
from outrider.train.parts.on_policy import row_generator
from outrider.train.parts.parallel import unused_token
from outrider.train.parts.position_weights import Product
from outrider.train.parts.steps import Predictions, QueriesAt, positions_to_run
from outrider.train.settings.drafters import DSparkConfig


def train_dspark(config: DSparkConfig) -> None:
    """Train a block drafter according to `config`. The result is `config.out_dir`, a directory in z-lab's layout.

    Raises `UserError` for an unusable target, drafter, data set or directory, before any weight is read.
    """
    target = open_target(config.target, config.revision)
    stored = None if config.start is None else drafters.open_drafter(config.start, target.config)
    if stored is not None:
        warn_of_other_trainer(config, stored, DFLASH)
    reading = reading_of(config, stored, target)

    def save(trained: DFlash) -> str:
        """As serving engines load it."""
        drafter = copy.deepcopy(trained).to(stored_dtype(target.config)).requires_grad_(False)
        made_here = stored is None or stored.made_here
        drafters.save_drafter(Path(config.out_dir), drafter, target.config, made_here=made_here)
        return drafters.describe_use(reading)

    def new_student(stack: LayerStack, head: DFlash) -> DSparkStudent:
        return DSparkStudent(stack, head, config)

    facts = {"block": reading.drafted, "markov_rank": reading.markov_rank}
    kind = HeadKind(
        command="dspark", facts=facts, module=DFlash, new=drafters.new_drafter, student=new_student,
        steps=reading.drafted, drafts=OneBlock, record=drafters.TRAINING_FILE, save=save,
    )  # fmt: skip
    train_head(config, target, stored, reading, kind)


def reading_of(config: DSparkConfig, stored: drafters.StoredBlock | None, target: OpenTarget) -> BlockReading:
    """The reading of the drafter to train. Raises `UserError` if it cannot be trained with it."""
    if stored is not None:
        reading = stored.reading
        if {*reading.spans} != {(None, False)} or not reading.own_head:
            raise UserError(f"start={config.start}: only drafters are trained whose rows see each other and the whole "
                            "text, and that have a head")  # fmt: skip
        if reading.confidence != "none":
            warn(f"start={config.start}: its confidence head does not learn along; calibrate the result")
    else:
        mask = unused_token(target.tokenizer, target.config.vocab_size)
        config.require("target", mask < target.config.vocab_size, "a model with a token that no text has: the mask")
        shape = {name: getattr(config, name) for name in ("taps", "layers", "markov_rank", "intermediate")}
        shape |= {"drafted": config.block, "draft_vocabulary": config.draft_vocabulary}
        reading = new_reading(target.config, mask_token=mask, **shape)
        layers = target.config.num_hidden_layers
        config.require("taps", reading.taps[-1] <= layers, f"0 to {layers}, the target's layers")
    require_context(target.config, config.seq_len, config.decode_tokens)
    return reading


class DSparkStudent(HeadStudent):
    """A block drafter that learns after a share `anchors` of the positions, drawn anew in every step.

    The block after position i, of which the feature is the last of its context, has the text's token i + 1 and masks.
    Its row t predicts the token i + 2 + t; in DFlash row t + 1 does. The Markov head is given the text's token
    before the predicted one.
    """

    head: DFlash

    def __init__(self, stack: LayerStack, head: DFlash, config: DSparkConfig) -> None:
        super().__init__(stack, head, config, head.reading.drafted, [config.anchors] * head.reading.drafted)
        self.anchors = config.anchors
        if head.lm_head is not None:
            head.lm_head.requires_grad_(config.train_head)
        if head.confidence_head is not None:  # no loss reaches it, and processes wait for the gradients of what learns
            head.confidence_head.requires_grad_(False)

    def draw(self, loss_mask: Tensor, input_ids: Tensor) -> Tensor:
        if self.anchors == 1:
            return loss_mask
        numbers = [row_generator(self.seed, self.step, row).random(len(row)) for row in input_ids]
        return loss_mask & (torch.from_numpy(np.stack(numbers)) < self.anchors).to(loss_mask.device)[..., None]

    def product(self, predictions: Predictions, input_ids: Tensor) -> Product:
        """The bias of the Markov head is a part of the product: its embedding stands beside the hidden states."""
        lm_head, markov = self.head.lm_head, self.head.markov_head
        assert lm_head is not None
        if markov is None:
            return predictions.hidden, lm_head.weight
        before = input_ids.flatten()[predictions.labels]  # [n], the token before the predicted one
        states = torch.cat([predictions.hidden, F.embedding(before, markov.markov_w1.weight)], dim=-1)  # [n, H + r]
        return states, torch.cat([lm_head.weight, markov.markov_w2.weight], dim=1)  # [V', H + r]

    def unroll(
        self, input_ids: Tensor, positions: Tensor, documents: Tensor, aux: Tensor, loss_mask: Tensor
    ) -> Predictions:
        head, (count, length, slots) = self.head, loss_mask.shape
        rows, flat_mask, flat_ids = head.reading.block, loss_mask.flatten(0, 1), input_ids.flatten()
        head.reserve(length + rows)
        if input_ids.device.type == "cpu":  # as one row, since attention goes from document to document
            documents = (documents + (length + 1) * torch.arange(count)[:, None]).view(1, -1)
        band, is_run = packed_band(documents), flat_mask.any(-1).view_as(documents)
        everywhere = torch.arange(len(flat_ids), device=flat_ids.device).view_as(documents)
        picks = positions_to_run(is_run)
        last = everywhere if picks is None else picks  # [R, N], flat indices of the last positions of contexts
        mask = QueriesAt.of(band, documents, (last % documents.shape[1]).repeat_interleave(rows, dim=1))

        # Read from the module that holds it, unlike in `DraftHead.embed`, as launchers that shard weights expect.
        embedding = (head.embed_tokens or self.stack.embed_tokens).weight
        ids = torch.full((*last.shape, rows), head.reading.mask_token, device=last.device)  # [R, N, rows]
        ids[..., 0] = flat_ids[(last + 1) % len(flat_ids)]
        blocks = F.embedding(ids.flatten(1), embedding).float() * head.reading.embedding_scale  # [R, N · rows, H]
        features = head.features(aux.float()).view(*documents.shape, -1)  # [R, T, H]
        cache = PackedBlocks(rows)
        head.store_context(features, head.rotary(positions.view_as(documents)), cache)
        rotary = head.rotary(block_positions(positions.flatten()[last], rows))
        run = partial(head.run, masks=[mask] * head.reading.layers, rotary=rotary, cache=cache)
        if self.recomputes and torch.is_grad_enabled():
            run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
        hidden = run(blocks)
        first = rows - head.reading.drafted
        hidden = hidden.unflatten(1, (-1, rows))[:, :, first : first + slots]
        return predictions_of(hidden, last, flat_mask[last])


def predictions_of(hidden: Tensor, last: Tensor, has_loss: Tensor) -> Predictions:
    """The rows of blocks, hidden [R, N, slots, H], where `has_loss` [R, N, slots], ordered by their labels.
    last [R, N]: the last position of each block's context."""
    slots = torch.arange(has_loss.shape[-1], device=last.device).expand_as(has_loss)  # [R, N, slots]
    labels = last[..., None] + 1 + slots
    label, order = labels[has_loss].sort(stable=True)
    return Predictions(F.embedding(order, hidden[has_loss]), label, slots[has_loss][order])
