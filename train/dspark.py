"""DSpark and DFlash: block drafters, trained with the whole target.

    python train/dspark.py target=MODEL data=ultrachat

A block is the rows of one pass: the text's last token, then masks. It attends to features, which the drafter makes of
the target's aux hidden states: those at its taps, some boundaries of target layers. A reading says how the tensors in a
drafter's files are used. The anchor of a block is the last position of its context.

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
from outrider.train.parts.position_weights import Factors
from outrider.train.parts.steps import Predictions, QueriesAt, positions_to_run
from outrider.train.settings.drafters import DSparkConfig


def train_dspark(config: DSparkConfig) -> None:
    """Train a block drafter according to `config`. The result is `config.out_dir`, a directory in z-lab's layout.

    Raises `UserError` for an unusable target, drafter, data set or directory, before any weight is read.
    """
    target = open_target(config.target, config.revision)
    stored_drafter = None if config.start is None else drafters.open_drafter(config.start, target.config)
    if stored_drafter is not None:
        warn_of_other_trainer(config, stored_drafter, DFLASH)
    block_reading = reading_of(config, stored_drafter, target)

    def save(trained: DFlash) -> str:
        """Write the drafter as serving engines load it; returns how they use it, in words."""
        drafter_copy = copy.deepcopy(trained).to(stored_dtype(target.config)).requires_grad_(False)
        made_here = stored_drafter is None or stored_drafter.made_here  # by this toolkit from the beginning
        drafters.save_drafter(Path(config.out_dir), drafter_copy, target.config, made_here=made_here)
        return drafters.describe_use(block_reading)

    card_facts = {"block": block_reading.drafted, "markov_rank": block_reading.markov_rank}
    kind = HeadKind(
        command="dspark", facts=card_facts, module=DFlash, new=drafters.new_drafter,
        student=partial(DSparkStudent, config=config), steps=block_reading.drafted, drafts=OneBlock,
        record=drafters.TRAINING_FILE, save=save,
    )  # fmt: skip
    train_head(config, target, stored_drafter, block_reading, kind)


def reading_of(config: DSparkConfig, stored_drafter: drafters.StoredBlock | None, target: OpenTarget) -> BlockReading:
    """The reading of the drafter to train: the stored one's, or that of a new one. Raises `UserError` if a drafter with
    this reading cannot be trained."""
    if stored_drafter is not None:
        reading = stored_drafter.reading
        if {*reading.spans} != {(None, False)} or not reading.own_head:  # spans: (window, is causal) of each layer
            raise UserError(f"start={config.start}: only drafters are trained whose rows see each other and the whole "
                            "text, and that have a head")  # fmt: skip
        if reading.confidence != "none":
            warn(f"start={config.start}: its confidence head does not learn along; calibrate the result")
    else:
        mask_id = unused_token(target.tokenizer, target.config.vocab_size)
        config.require("target", mask_id < target.config.vocab_size, "a model with a token that no text has: the mask")
        reading_options = {name: getattr(config, name) for name in ("taps", "layers", "markov_rank", "intermediate")}
        reading_options |= {"drafted": config.block, "draft_vocabulary": config.draft_vocabulary}
        reading = new_reading(target.config, mask_token=mask_id, **reading_options)
        layer_count = target.config.num_hidden_layers
        config.require("taps", reading.taps[-1] <= layer_count, f"0 to {layer_count}, the target's layers")
    require_context(target.config, config.seq_len, config.decode_tokens)
    return reading


class DSparkStudent(HeadStudent):
    """A block drafter that learns after a share `anchors` of the positions, drawn anew in every step.

    The block with the anchor i has the text's token i + 1, then masks. Its row t predicts the token i + 2 + t; in
    DFlash row t + 1 does. The Markov head, a bias of the logits by the token before, reads the text's token.
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
        """The predictions `loss_mask` [B, T, slots] of a random share of the anchors, by each row's content."""
        if self.anchors == 1:
            return loss_mask
        uniforms = [row_generator(self.seed, self.step, row_ids).random(len(row_ids)) for row_ids in input_ids]
        return loss_mask & (torch.from_numpy(np.stack(uniforms)) < self.anchors).to(loss_mask.device)[..., None]

    def product(self, predictions: Predictions, input_ids: Tensor) -> Factors:
        """States and a matrix whose product has the logits with the bias of the Markov head: the bias is a product too,
        of the head's embedding of the token before (rank r) and its second matrix, and stands beside lm_head's."""
        lm_head, markov = self.head.lm_head, self.head.markov_head
        assert lm_head is not None
        if markov is None:
            return predictions.hidden, lm_head.weight
        prev_ids = input_ids.flatten()[predictions.labels]  # [n], the tokens before: a label is the next token
        states = torch.cat([predictions.hidden, F.embedding(prev_ids, markov.markov_w1.weight)], dim=-1)  # [n, H + r]
        return states, torch.cat([lm_head.weight, markov.markov_w2.weight], dim=1)  # [V', H + r]

    def unroll(
        self, input_ids: Tensor, positions: Tensor, documents: Tensor, aux_states: Tensor, loss_mask: Tensor
    ) -> Predictions:
        """A block runs after each position at which a slot, a token of its draft, has a loss. [R, T]: the texts as rows
        of attention. N, K: the blocks of a row, and the rows of a block."""
        head, (batch_size, row_length, slot_count) = self.head, loss_mask.shape
        block_size, flat_mask, flat_ids = head.reading.block, loss_mask.flatten(0, 1), input_ids.flatten()
        head.reserve(row_length + block_size)
        if input_ids.device.type == "cpu":  # all in one row, since attention goes from document to document
            documents = (documents + (row_length + 1) * torch.arange(batch_size)[:, None]).view(1, -1)  # still distinct
        text_band, has_anchor = packed_band(documents), flat_mask.any(-1).view_as(documents)
        all_indices = torch.arange(len(flat_ids), device=flat_ids.device).view_as(documents)
        picks = positions_to_run(has_anchor)  # None: all
        anchors = all_indices if picks is None else picks  # [R, N], flat indices in the texts
        # Each row of a block sees what its anchor sees of the text.
        mask = QueriesAt.of(text_band, documents, (anchors % documents.shape[1]).repeat_interleave(block_size, dim=1))

        # Read from the module that holds it, unlike in `DraftHead.embed`, as launchers that shard weights expect.
        embedding = (head.embed_tokens or self.stack.embed_tokens).weight
        ids = torch.full((*anchors.shape, block_size), head.reading.mask_token, device=anchors.device)  # [R, N, K]
        ids[..., 0] = flat_ids[(anchors + 1) % len(flat_ids)]  # the text's last token has none, nor a loss
        block_embeds = F.embedding(ids.flatten(1), embedding).float() * head.reading.embedding_scale  # [R, N · K, H]
        features = head.features(aux_states.float()).view(*documents.shape, -1)  # [R, T, H]
        cache = PackedBlocks(block_size)  # the keys and values of the features, and of the blocks
        head.store_context(features, head.rotary(positions.view_as(documents)), cache)
        rotary = head.rotary(block_positions(positions.flatten()[anchors], block_size))
        run_layers = partial(head.run, masks=[mask] * head.reading.layers, rotary=rotary, cache=cache)
        if self.recomputes and torch.is_grad_enabled():
            run_layers = partial(checkpoint, run_layers, use_reentrant=False, preserve_rng_state=False)
        hidden = run_layers(block_embeds)  # [R, N · K, H]
        first_drafted = block_size - head.reading.drafted  # DFlash's first row predicts nothing
        hidden = hidden.unflatten(1, (-1, block_size))[:, :, first_drafted : first_drafted + slot_count]
        return predictions_of(hidden, anchors, flat_mask[anchors])


def predictions_of(hidden: Tensor, anchors: Tensor, has_loss: Tensor) -> Predictions:
    """The rows of blocks, hidden [R, N, slots, H], where `has_loss` [R, N, slots], ordered by the positions of their
    labels. anchors [R, N]: flat indices in the texts."""
    slot_numbers = torch.arange(has_loss.shape[-1], device=anchors.device).expand_as(has_loss)  # [R, N, slots]
    label_indices = anchors[..., None] + 1 + slot_numbers
    sorted_indices, order = label_indices[has_loss].sort(stable=True)
    return Predictions(F.embedding(order, hidden[has_loss]), sorted_indices, slot_numbers[has_loss][order])
