"""The EAGLE-3 head in training: its reading, the module that its recipe trains, what is watched, and its memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from outrider.base.errors import UserError
from outrider.base.progress import counted
from outrider.draft_models.acceptance import acceptance_by_target, argmax_and_acceptance, tau_of_rounds
from outrider.draft_models.eagle3.checkpoint import StoredHead, head_shapes
from outrider.draft_models.eagle3.dialects import require_expressible
from outrider.draft_models.eagle3.model import Eagle3, Mask, Steps
from outrider.draft_models.eagle3.reading import Reading, new_reading
from outrider.draft_models.losses import IGNORE
from outrider.draft_models.targets.attention import packed_band
from outrider.draft_models.targets.model_files import empty_model, layer_stack
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.target import Band
from outrider.inference.loading.memory_plan import planned_device
from outrider.train.core.training import Batch, Metrics, Plan
from outrider.train.parts.drafter import fit_memory, frozen_dtype, parameters_of, require_context
from outrider.train.parts.heldout import WATCHED_DRAFT
from outrider.train.settings.drafters import Eagle3Config

NEARLY_ALL = 0.95  # to run a few positions too many takes less than to copy the others
BATCH = ("input_ids", "labels", "positions", "documents")


def reading_of(config: Eagle3Config, stored: StoredHead | None, target: PreTrainedConfig) -> Reading:
    """The reading of the head to train. Raises `UserError` if it cannot be trained with it, or not be written."""
    if stored is not None:
        reading = stored.reading
    else:
        shape = {name: getattr(config, name) for name in ("taps", "version", "draft_vocabulary", "intermediate")}
        reading = new_reading(target, **shape)
        if reading.taps[-1] > target.num_hidden_layers:
            raise UserError(f"taps={list(reading.taps)}: expected 0 to {target.num_hidden_layers}, the target's layers")
    if set(reading.windows) != {None}:
        raise UserError(f"start={config.start}: its layers see {list(reading.windows)} positions; only heads that see "
                        "all of them are trained here")  # fmt: skip
    require_expressible(reading, head_shapes(reading), config.dialect, target)
    require_context(target, config.seq_len, config.decode_tokens)
    return reading


@dataclass(frozen=True, kw_only=True)
class SomeQueries(Band):
    """The mask of the queries at the positions `last` [B, N] of packed rows. A block also says where its keys end."""

    last: Tensor

    @classmethod
    def of(cls, band: Band, documents: Tensor, positions: Tensor) -> Self:
        """Those at `positions` of the rows `documents` [B, T] with the mask `band`; on a CPU of one row."""
        first, (parts,) = band.first.gather(1, positions), packed_band(documents.gather(1, positions)).blocks
        lows, highs = first.amin(0).tolist(), positions.amax(0).tolist()
        blocks = [(begin, end, min(lows[begin:end]), max(highs[begin:end]) + 1, end) for begin, end, _ in parts]
        return cls(first, (tuple(blocks),), last=positions)

    def block(self, begin: int, end: int, start: int, *more: int) -> Tensor:
        keys = torch.arange(start, more[0], device=self.last.device)
        seen = (keys >= self.first[:, begin:end, None]) & (keys <= self.last[:, begin:end, None])
        return F.pad(seen[:, None], (self.front, 0), value=True)


class Guesses(NamedTuple):
    """Predictions, ordered by the positions of their labels."""

    hidden: Tensor  # [n, H]: the outputs of the head
    labels: Tensor  # [n]: flat indices of the labels into [B, T]
    steps: Tensor  # [n]


class HeadOnTarget(nn.Module):
    """A trainable float32 head on the frozen layers of a whole target: training-time test, without the loss.

    Step t of `steps` predicts token j at position j − 2 − t of its document: step 0 from the target's feature there and
    the token after it, later steps from the previous step's output there and the next token of the text. So every token
    is predicted `steps` times, by drafts that began 0, 1, … tokens earlier. The weight of a step is `step_decay` times
    that of the previous step, and all weights sum to 1. With `keep` step t is drawn to run at a share of keep^t of the
    positions, with 1 / keep^t times the weight. So the expected loss and gradient are those of all positions.
    """

    counts: Tensor

    def __init__(self, stack: LayerStack, head: Eagle3, config: Eagle3Config) -> None:
        super().__init__()
        self.stack, self.head = stack.requires_grad_(False), head.float().requires_grad_(True)
        self.objective, self.steps, self.keep = config.objective, config.draft_steps, config.keep
        self.seed, self.step = config.fit.seed, 0
        counts = torch.tensor([config.step_decay**step for step in range(self.steps)], device=stack.device)
        shares = self.keep ** torch.arange(self.steps, device=stack.device)
        self.register_buffer("counts", counts / counts.sum() / shares, persistent=False)
        head.lm_head.requires_grad_(config.train_head)
        if head.embed_tokens is not None:
            head.embed_tokens.requires_grad_(False)
        self.recomputed = False

    def gradient_checkpointing_enable(self) -> None:
        """Store the output of each step and recompute its activations in the backward pass."""
        self.recomputed = True

    @torch.no_grad()
    def states(self, input_ids: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        """The target's k aux hidden states and, last, its states after the final norm: [B, T, k + 1, H_t]."""
        stack, taps = self.stack, self.head.reading.taps
        with torch.autocast(input_ids.device.type, enabled=False):
            stack.reserve(positions.shape[1])
            hidden, rotary = stack.embed(input_ids, positions), stack.rotary(positions)
            hidden, aux = stack.run_with_aux(hidden, 0, len(stack.layers), rotary, stack.packed_masks(documents), taps)
            return torch.stack([*aux, stack.norm(hidden)], 2)

    def states_of(self, batch: Batch) -> Tensor:
        """`states` of a batch on any device."""
        return self.states(*(batch[name].to(self.stack.device) for name in ("input_ids", "positions", "documents")))

    def guesses(self, input_ids: Tensor, positions: Tensor, documents: Tensor, aux: Tensor, due: Tensor) -> Guesses:
        """The head's predictions where `due`, bool [B, T, steps] (see `predictions`), of packed rows [B, T].

        aux [B, T, k · H_t]: the target's aux hidden states. Step 0 runs at all positions, to which later steps attend,
        and a later one where it or one after it is due.
        """
        head, (count, length, steps) = self.head, due.shape
        head.reserve(length + steps)
        if input_ids.device.type == "cpu":  # as one row, since attention goes from document to document
            documents = (documents + (length + 1) * torch.arange(count)[:, None]).view(1, -1)
        band, needed = packed_band(documents), (due.flip(-1).cumsum(-1).flip(-1) > 0).flatten(0, 1)
        mask, where = band, torch.arange(len(needed), device=needed.device).view_as(documents)
        # Read from the module that holds it, unlike in `Eagle3.embed`, as launchers that shard weights expect.
        embedding = F.embedding(input_ids, (head.embed_tokens or self.stack.embed_tokens).weight).float()
        features = head.features(aux.float()).float().view(*where.shape, -1)
        cache, outputs, chosen, labels = Steps(), list[Tensor](), list[Tensor](), list[Tensor]()
        for step in range(steps):
            if step and (pick := picked(needed[where, step])) is not None:
                features, where = F.embedding(pick, features.flatten(0, 1)), where.flatten()[pick]
                cache.picks[step], mask = pick, SomeQueries.of(band, documents, where % documents.shape[1])
            cache.tokens[step] = (where + 1 + step) % len(needed)
            run = partial(self._step, cache, step, mask, positions.flatten()[where])
            if self.recomputed and torch.is_grad_enabled():
                run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
            features, embedding = run(embedding, features), embedding[:, :0]
            there = due.flatten(0, 1)[where, step]
            chosen.append(there.flatten().nonzero()[:, 0] + sum(map(len, outputs)))
            labels.append(where[there] + 1 + step)
            outputs.append(features.flatten(0, 1))
        at = torch.cat([torch.full_like(part, step) for step, part in enumerate(labels)])
        label, order = torch.cat(labels).sort(stable=True)
        return Guesses(F.embedding(torch.cat(chosen)[order], torch.cat(outputs)), label, at[order])

    def _step(
        self, cache: Steps, step: int, mask: Mask, positions: Tensor, embedding: Tensor, features: Tensor
    ) -> Tensor:
        cache.now = step
        masks = dict.fromkeys(self.head.windows, mask)
        return self.head.run(embedding, features, masks, self.head.rotary(positions + step), cache)

    def loss(self, guesses: Guesses, target: Tensor, labels: Tensor, shares: Tensor | None) -> Tensor:
        """The loss of predictions (see `recipes.eagle3`)."""
        raise NotImplementedError

    @torch.no_grad()
    def judged(self, batch: Batch, steps: int) -> tuple[Tensor, Tensor]:
        """The head's results on a batch of rows in each of `steps` steps.

        Returns float64 [steps, 3]: the number of predictions, the loss summed over them, and how many have the target's
        most likely token as theirs; and the acceptance probability, by the position of the label, [B, T, steps], NaN
        where there is no prediction.
        """
        input_ids, labels, positions, documents = (batch[name].to(self.stack.device) for name in BATCH)
        states = self.states(input_ids, positions, documents)
        due = predictions(labels, documents, steps)
        guesses = self.guesses(input_ids, positions, documents, states[:, :, :-1].flatten(2), due)
        flat, owners = guesses.labels.unique_consecutive(return_inverse=True)
        target, logits = states[:, :, -1].flatten(0, 1)[flat], self.stack.logits_after_norm
        choices, accepted = argmax_and_acceptance(
            self.head.logits, guesses.hidden, acceptance_by_target(logits, target[owners])
        )
        assert accepted is not None
        by_label = accepted.new_full((labels.numel(), steps), torch.nan)
        by_label[guesses.labels, guesses.steps] = accepted
        right, sums = choices == argmax_and_acceptance(logits, target, None)[0][owners], list[Tensor]()
        for step in range(steps):
            in_step = guesses.steps == step
            loss = self.loss(Guesses(*(values[in_step] for values in guesses)), states[:, :, -1], labels, None)
            sums.append(torch.stack([in_step.sum(), loss.double(), (right & in_step).sum()]))
        return torch.stack(sums).cpu(), by_label.unflatten(0, labels.shape)


def predictions(labels: Tensor, documents: Tensor, steps: int) -> Tensor:
    """bool [B, T, steps]: whether there is something to predict at a position i of packed rows [B, T] in step t: a
    label at position i + 1 + t of its document."""

    def ahead(values: Tensor, beyond: int) -> Tensor:
        return F.pad(values, (0, steps), value=beyond).unfold(1, steps + 1, 1)[..., 1:]

    return (ahead(labels, IGNORE) != IGNORE) & (ahead(documents, -2) == documents[..., None])


def picked(needed: Tensor) -> Tensor | None:
    """The flat indices [B, N] of the needed positions, bool [B, T], and of others in rows with fewer; None: all."""
    most, length = max(1, int(needed.sum(1).max())), needed.shape[1]
    if most > NEARLY_ALL * length:
        return None
    begun = length * torch.arange(len(needed), device=needed.device)[:, None]
    return begun + needed.byte().argsort(dim=1, descending=True, stable=True)[:, :most]


def judge_steps(student: HeadOnTarget, batches: Sequence[Batch], steps: int) -> Metrics:
    """The metrics of `student` on `batches` of rows, for a recipe's evaluation.

    loss_<i>, agree_<i>: for the i-th token of a draft, the loss and the share of positions where the head's most likely
    token is the target's. tau_analytic: the expected τ of sampling (see `expected_tau`).
    """
    judged = [student.judged(batch, steps) for batch in counted(batches, "judging held-out text", "batches")]
    metrics = Metrics()
    for i, (count, loss, right) in enumerate(torch.stack([sums for sums, _ in judged]).sum(0).tolist(), 1):
        if count:
            metrics |= {f"loss_{i}": loss / count, f"agree_{i}": right / count}
    rounds = torch.cat([tau_of_rounds(drafts_of(accepted)) for _, accepted in judged])
    return metrics | ({"tau_analytic": rounds.double().mean().item()} if len(rounds) else {})


def drafts_of(accepted: Tensor) -> Tensor:
    """α of every draft of `WATCHED_DRAFT` tokens on the text, [B, positions, WATCHED_DRAFT], NaN where there is none.

    accepted [B, T, S]: α by the label's position and step. Step i of the draft that begins after position t has the
    label of position t + 1 + i.
    """
    count = max(0, accepted.shape[1] - WATCHED_DRAFT)
    return torch.stack([accepted[:, step + 1 : step + 1 + count, step] for step in range(WATCHED_DRAFT)], -1)


def head_plan(config: Eagle3Config, reading: Reading, target: PreTrainedConfig) -> Plan:
    """The memory plan of a head with this reading, trained with the whole target."""
    stack = layer_stack(nn.Module.to(empty_model(target), frozen_dtype(config.frozen_dtype, planned_device())))
    head = Eagle3(reading, all_tokens=reading.draft_vocabulary == reading.vocabulary)
    student = HeadOnTarget(stack, head, config)
    trained, frozen = parameters_of(student)
    facts = {"taps": ",".join(map(str, reading.taps)), "draft_steps": config.draft_steps}
    facts |= {"trained_parameters": trained, "frozen_parameters": frozen}
    return Plan(fit_memory(config, student, len(reading.taps) * reading.target_hidden, reading.vocabulary), facts)
