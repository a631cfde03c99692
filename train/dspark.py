"""DSpark: block drafters, trained with the whole target.

    python train/dspark.py target=MODEL data=ultrachat

`train_dspark` is the whole training, `HeadStudent.forward` its step with the loss, `DSparkStudent.unroll` what the
drafter predicts. The loop around the step is train/core/loop.py.
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    from outrider.commands import run_script

    run_script("dspark")

import copy
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from outrider.base.errors import UserError, warn
from outrider.base.processes import say
from outrider.base.streams import Streams
from outrider.data_prep.text.rows import PackedRows, load_rows
from outrider.draft_models.dflash import checkpoint as drafters
from outrider.draft_models.dflash.model import DFlash
from outrider.draft_models.dflash.packed import PackedBlocks, block_positions
from outrider.draft_models.dflash.reading import BlockReading, new_reading
from outrider.draft_models.targets.attention import packed_band
from outrider.draft_models.targets.fingerprint import model_identity
from outrider.draft_models.targets.model_files import layer_stack
from outrider.draft_models.targets.open_target import OpenTarget, open_target, stored_dtype
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.drafters.dflash.drafter import OneBlock
from outrider.inference.loading.memory_plan import Plan
from outrider.train.core.driver import training_run
from outrider.train.core.training import FitResult, Metrics
from outrider.train.parts.drafter import frozen_dtype, pick_tokens, require_context, write_records
from outrider.train.parts.head_student import HeadStudent, score_steps
from outrider.train.parts.heldout import Decoding, batches_of
from outrider.train.parts.memory import empty_target, fit_memory
from outrider.train.parts.on_policy import row_generator
from outrider.train.parts.parallel import unused_token
from outrider.train.parts.position_weights import Product
from outrider.train.parts.steps import Predictions, QueriesAt, positions_to_run
from outrider.train.parts.target_states import FEATURES, add_states
from outrider.train.settings.drafters import DSparkConfig


def train_dspark(config: DSparkConfig) -> None:
    """Train a block drafter according to `config`. The result is `config.out_dir`, a directory in z-lab's layout.

    It contains the weights with the highest τ of all evaluations, not the last ones. Raises `UserError` for an unusable
    target, drafter, data set or directory, before any weight is read.
    """
    target = open_target(config.target, config.revision)
    stored = open_start(config, target)
    reading = reading_of(config, stored, target)
    memory = partial(plan_memory, config, reading, target.config)
    if config.plan:
        print(memory(), flush=True)
        return
    with training_run(config, memory) as run:
        rows = load_rows(config.data, target.tokenizer, config.seq_len, "train")
        heldout = load_rows(config.data, target.tokenizer, config.seq_len, "heldout", max_rows=config.eval_rows)
        tokens = run.from_main(lambda: pick_tokens(config.draft_vocabulary, target, rows, heldout))
        fingerprint = run.from_main(lambda: target.fingerprint)
        origin = {"target": asdict(fingerprint), "data_key": rows.key, "taps": list(reading.taps)}

        build = partial(build_student, config, target, stored, reading, tokens, run.device)
        row_shape = (config.seq_len, len(reading.taps) + 1, reading.target_hidden)
        student, rows_to_fit = add_states(config, rows, row_shape, origin, build, run)
        trained, frozen = student.count_parameters()
        say(f"dspark start={config.start or 'new'} taps={','.join(map(str, reading.taps))} block={reading.block} "
            f"markov_rank={reading.markov_rank} draft_vocabulary={reading.draft_vocabulary} "
            f"trained_parameters={trained} frozen_parameters={frozen} processes={run.state.num_processes} "
            f"objective={config.objective}")  # fmt: skip

        start = None if stored is None else run.from_main(lambda: model_identity(stored.files))
        identity = {**config.decisions(), **origin, "start_model": start}
        # The evaluation is made before the fit: DeepSpeed shards every module that is constructed after its start.
        evaluate = make_evaluation(config, target, heldout, student) if run.is_main else None
        result = run.fit(
            student, rows_to_fit, config.fit, identity=identity, evaluate=evaluate,
            saved_dtype=stored_dtype(target.config), keeps_best=True, last_file=drafters.TRAINING_FILE,
            minutes=config.minutes,
        )  # fmt: skip
        if result is not None:
            made_here = stored is None or stored.made_here
            save_drafter(config, target.config, student.head, made_here, identity, result)


# --- the drafter


def open_start(config: DSparkConfig, target: OpenTarget) -> drafters.StoredBlock | None:
    """The finished drafter to continue from, if any; warns if another trainer wrote it."""
    if config.start is None:
        return None
    stored = drafters.open_drafter(config.start, target.config)
    if not stored.made_here:
        warn(f"start={config.start}: another trainer's drafter, read as its config.json says; examine it first "
             "(evaluate-checkpoint dflash=… doctor=true): a misread drafter learns to be one")  # fmt: skip
    return stored


def reading_of(config: DSparkConfig, stored: drafters.StoredBlock | None, target: OpenTarget) -> BlockReading:
    """The reading of the drafter to train. Raises `UserError` if it cannot be trained with it."""
    if stored is not None:
        reading = stored.reading
        trainable = reading.sample_from_anchor and {*reading.spans} == {(None, False)}
        if not (trainable and reading.own_head):
            raise UserError(f"start={config.start}: only drafters are trained whose rows predict the token after them "
                            "(sample_from_anchor), see each other and the whole text, and have a head")  # fmt: skip
    else:
        mask = unused_token(target.tokenizer, target.config.vocab_size)
        config.require("target", mask < target.config.vocab_size, "a model with a token that no text has: the mask")
        shape = {name: getattr(config, name) for name in ("taps", "layers", "block", "markov_rank", "intermediate")}
        reading = new_reading(target.config, mask_token=mask, draft_vocabulary=config.draft_vocabulary, **shape)
        layers = target.config.num_hidden_layers
        config.require("taps", reading.taps[-1] <= layers, f"0 to {layers}, the target's layers")
    require_context(target.config, config.seq_len, config.decode_tokens)
    return reading


def build_student(
    config: DSparkConfig,
    target: OpenTarget,
    stored: drafters.StoredBlock | None,
    reading: BlockReading,
    tokens: Tensor | None,
    device: torch.device,
) -> "DSparkStudent":
    """The drafter on the whole target, both on `device`. tokens: the draft vocabulary of a new drafter."""
    stack = target.stack(dtype=frozen_dtype(config.frozen_dtype, device), device=device)
    if stored is not None:
        return DSparkStudent(stack, stored.load(torch.float32, device), config)
    seed = Streams(config.fit.seed).number("weights", bits=63)
    drafter = drafters.new_drafter(reading, stack, None if tokens is None else tokens.to(device), seed)
    return DSparkStudent(stack, drafter, config)


class DSparkStudent(HeadStudent):
    """A block drafter that learns after a share `anchors` of the positions, drawn anew in every step.

    The block after position i, of which the feature is the last of its context, has the text's token i + 1 and masks.
    Its row t predicts the token i + 2 + t. The Markov head is given the text's token before the predicted one.
    """

    head: DFlash

    def __init__(self, stack: LayerStack, head: DFlash, config: DSparkConfig) -> None:
        super().__init__(stack, head, config, head.reading.block, [config.anchors] * head.reading.block)
        self.anchors, self.recomputes = config.anchors, False
        if head.lm_head is not None:
            head.lm_head.requires_grad_(config.train_head)

    def gradient_checkpointing_enable(self) -> None:
        """Recompute the layers on blocks in the backward pass."""
        self.recomputes = True

    @property
    def taps(self) -> tuple[int, ...]:
        return self.head.reading.taps

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
        return predictions_of(hidden.unflatten(1, (-1, rows))[:, :, :slots], last, flat_mask[last])


def predictions_of(hidden: Tensor, last: Tensor, has_loss: Tensor) -> Predictions:
    """The rows of blocks, hidden [R, N, slots, H], where `has_loss` [R, N, slots], ordered by their labels.
    last [R, N]: the last position of each block's context."""
    slots = torch.arange(has_loss.shape[-1], device=last.device).expand_as(has_loss)  # [R, N, slots]
    labels = last[..., None] + 1 + slots
    label, order = labels[has_loss].sort(stable=True)
    return Predictions(F.embedding(order, hidden[has_loss]), label, slots[has_loss][order])


# --- evaluation


def make_evaluation(
    config: DSparkConfig, target: OpenTarget, heldout: PackedRows, student: DSparkStudent
) -> Callable[[int], Metrics]:
    """The evaluation during training: `score_steps`, then real decoding (`Decoding`) with the drafter as it would be
    served."""
    batches = batches_of(heldout, config.eval_batch_rows)
    decoding = Decoding.of(target, heldout, config.decode_prompts, config.decode_tokens)

    def evaluate(step: int) -> Metrics:
        drafter = copy.deepcopy(student.head).to(student.stack.dtype).requires_grad_(False)
        if not drafter.reading.own_embedding:
            drafter.use_embedding(student.stack.embed_tokens.weight)
        return score_steps(student, batches, student.steps) | decoding(student.stack, OneBlock(drafter))

    return evaluate


# --- what is saved, and the memory


def save_drafter(
    config: DSparkConfig,
    target: PreTrainedConfig,
    trained: DFlash,
    made_here: bool,
    identity: Mapping[str, object],
    result: FitResult,
) -> None:
    """Write the drafter as serving engines load it, its card and, last, the record of its training.

    made_here: whether no other trainer's drafter was its start.
    """
    out_dir, reading = Path(config.out_dir), trained.reading
    drafter = copy.deepcopy(trained).to(stored_dtype(target)).requires_grad_(False)
    drafters.save_drafter(out_dir, drafter, target, made_here=made_here)
    if config.features in (None, "auto"):  # begun with auto, perhaps
        shutil.rmtree(out_dir / FEATURES, ignore_errors=True)
    tokens = f"{reading.draft_vocabulary} of the target's {reading.vocabulary}"
    facts: dict[str, object] = {"taps": list(reading.taps), "objective": config.objective, "tokens": tokens}
    facts |= {"block": reading.block, "Markov rank": reading.markov_rank, "seq_len": config.seq_len}
    write_records(config, drafters.describe_use(reading), facts, result, ("tau",), (drafters.TRAINING_FILE, identity))


def plan_memory(config: DSparkConfig, reading: BlockReading, target: PreTrainedConfig) -> Plan:
    """The memory of training a drafter with this reading and the whole target of this config."""
    stack = layer_stack(empty_target(config, target)[0])
    student = DSparkStudent(stack, DFlash(reading, all_tokens=reading.draft_vocabulary == reading.vocabulary), config)
    parameters = dict(zip(("trained_parameters", "frozen_parameters"), student.count_parameters(), strict=True))
    facts = {"taps": ",".join(map(str, reading.taps)), "block": reading.block, **parameters}
    return Plan(fit_memory(config, student, len(reading.taps) * reading.target_hidden, reading.vocabulary), facts)
