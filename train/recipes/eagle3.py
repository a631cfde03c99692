"""Recipe for EAGLE-3 heads: trained with the whole target, by training-time test.

The training step is `Eagle3Student.forward`.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from accelerate import PartialState
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from outrider.base.errors import UserError, warn
from outrider.base.processes import from_main, say
from outrider.base.progress import counted
from outrider.base.streams import Streams
from outrider.data_prep.text.rows import PackedRows, load_rows
from outrider.draft_models.acceptance import acceptance_by_target, judge, tau_of_rounds
from outrider.draft_models.draft_vocabulary import places
from outrider.draft_models.eagle3.checkpoint import (
    TRAINING_FILE,
    StoredHead,
    make_head,
    new_head,
    open_head,
    save_head,
    shapes_of,
    use_of,
)
from outrider.draft_models.eagle3.dialects import require_said
from outrider.draft_models.eagle3.model import Eagle3, Mask, Steps
from outrider.draft_models.eagle3.reading import Reading, new_reading, require_target
from outrider.draft_models.losses import IGNORE, head_product, rows_cross_entropy, rows_divergence
from outrider.draft_models.targets.attention import packed_mask
from outrider.draft_models.targets.fingerprint import model_identity
from outrider.draft_models.targets.model_files import empty_model, layer_stack
from outrider.draft_models.targets.open_target import OpenTarget, open_target, stored_dtype
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.target import Band
from outrider.inference.drafters.eagle3 import Eagle3Source
from outrider.inference.loading.memory_plan import Held, explained, planned_device
from outrider.inference.loading.memory_plan import describe as describe_memory
from outrider.inference.loading.rehearsal import rehearsable
from outrider.train.core.driver import run_training
from outrider.train.core.training import Batch, Metrics, Trained, Training
from outrider.train.parts.drafter import (
    fit_memory,
    frozen_dtype,
    parameters_of,
    pick_tokens,
    require_context,
    write_records,
)
from outrider.train.parts.heldout import WATCHED_DRAFT, Decoding, batches_of, evaluation
from outrider.train.parts.target_states import RowsWithStates, with_states
from outrider.train.settings.drafters import Eagle3Config


@rehearsable
def train_eagle3(config: Eagle3Config) -> None:
    """Train a head according to `config`. The result is `config.out_dir`, a directory that serving engines can load.

    It contains the weights with the highest τ of all evaluations, not the last ones. Raises `UserError` for an unusable
    target, head, data set or directory, before any weight is read.
    """
    target = open_target(config.target, config.revision)
    stored = None if config.start is None else open_head(config.start, target.config, changes=config.reading)
    if stored is not None and not stored.made_here:
        warn(f"start={config.start}: another trainer's head, read as its config.json says; examine it first "
             "(evaluate-checkpoint eagle3=… doctor=true): a misread head learns to be one")  # fmt: skip
    reading = reading_of(config, stored, target.config)
    if config.plan:
        student = empty_student(config, reading, target.config)
        trained, frozen = parameters_of(student)
        facts = {"taps": ",".join(map(str, reading.taps)), "draft_steps": config.draft_steps}
        facts |= {"trained_parameters": trained, "frozen_parameters": frozen}
        print(describe_memory(memory_of(config, student), planned_device(), **facts), flush=True)
        return
    with explained(lambda: memory_of(config, empty_student(config, reading, target.config))):
        run_training(config, partial(prepare, config, target, stored, reading))


def prepare(
    config: Eagle3Config, target: OpenTarget, stored: StoredHead | None, reading: Reading, state: PartialState
) -> "Training[Eagle3Student]":
    """The training of a head with this reading. stored: the finished head to continue from.

    Raises `UserError` for unusable or incompatible inputs.
    """
    rows = load_rows(config.data, target.tokenizer, config.seq_len, "train")
    heldout = load_rows(config.data, target.tokenizer, config.seq_len, "heldout", max_rows=config.eval_rows)
    tokens = from_main(state, lambda: pick_tokens(config.draft_vocabulary, target, rows, heldout))
    fingerprint = from_main(state, lambda: target.fingerprint)
    build = partial(make_student, config, target, stored, reading, tokens, state.device)
    made_from = {"target": asdict(fingerprint), "data_key": rows.key, "taps": list(reading.taps)}
    taught: PackedRows | RowsWithStates = rows
    if config.features is not None:
        read_by = {**made_from, "frozen_dtype": str(frozen_dtype(config.frozen_dtype, state.device))}
        item = (config.seq_len, len(reading.taps) + 1, reading.target_hidden)
        dtype = getattr(torch, config.features_dtype)
        taught = with_states(rows, lambda: build().states_of, item, Path(config.features), dtype, read_by, state)
    student = build()
    say(describe(student, config))
    start = None if stored is None else from_main(state, lambda: model_identity(stored.files))
    identity = {**config.deciding(), **made_from, "start_model": start}
    return Training(
        student,
        taught,
        config.fit,
        identity,
        evaluation_of(config, target, heldout, student) if state.is_main_process else None,
        # The reading of another trainer's head still has to be examined (doctor=true).
        partial(save, config, target.config, student.head, identity, stored is None or stored.made_here),
        finished=TRAINING_FILE,
        keeps_best=True,
        saved_whole=student.head,
        minutes=config.minutes,
    )


class Judged(NamedTuple):
    """A head's results on the supervised tokens of a batch [B, T] in each of S steps.

    guesses: the number of predictions, [S]. loss: the objective, summed over them, [S]. right: the number of
    predictions whose most likely token is the target's, [S]. accepted: the acceptance probability, by the position of
    the label, [B, T, S], NaN where there is no prediction.
    """

    guesses: Tensor
    loss: Tensor
    right: Tensor
    accepted: Tensor


class Eagle3Student(nn.Module):
    """A trainable float32 head on the frozen layers of a whole target, with the contract of `fit`.

    Step t of `steps` predicts token j at position j − 2 − t of its document: step 0 from the target's feature there and
    the token after it, later steps from the previous step's output there and the next token of the text. So every token
    is predicted `steps` times, by drafts that began 0, 1, … tokens earlier. The weight of a step is `decay` times that
    of the previous step, and all weights sum to 1.

    objective: cross_entropy on the labels, or one of `draft_models.losses.DIVERGENCES` from the target.
    """

    counts: Tensor

    def __init__(
        self, stack: LayerStack, head: Eagle3, *, objective: str, steps: int, decay: float, train_head: bool
    ) -> None:
        super().__init__()
        self.stack, self.head = stack.requires_grad_(False), head.float().requires_grad_(True)
        self.objective, self.steps = objective, steps
        counts = torch.tensor([decay**step for step in range(steps)], device=stack.device)
        self.register_buffer("counts", counts / counts.sum(), persistent=False)
        head.lm_head.requires_grad_(train_head)
        if head.embed_tokens is not None:
            head.embed_tokens.requires_grad_(False)
        self.recomputed = False

    def train(self, mode: bool = True) -> "Eagle3Student":
        """Set the head's mode; the frozen target stays in eval mode, as in decoding."""
        super().train(mode)
        self.stack.eval()
        return self

    def gradient_checkpointing_enable(self) -> None:
        """Store the output of each step and recompute its activations in the backward pass."""
        self.recomputed = True

    def forward(
        self, input_ids: Tensor, labels: Tensor, positions: Tensor, documents: Tensor, states: Tensor | None = None
    ) -> dict[str, Tensor]:
        """{"loss_sum"} over supervised positions. All arguments are [B, T] (see `data_prep.text.rows`).

        states: the output of `states` for them; None: the target runs.
        """
        kept = _supervised(labels)
        known = self.states(input_ids, positions, documents) if states is None else states.to(self.stack.dtype)
        aux, target = known[:, :, :-1].flatten(2), known[:, :, -1]
        guesses = self.guesses(input_ids, positions, documents, aux, kept, self.steps)
        shares = self.valid(positions, kept, self.steps) * self.counts
        return {"loss_sum": self.loss(guesses, target.flatten(0, 1)[kept], labels.flatten()[kept], shares)}

    @torch.no_grad()
    def states(self, input_ids: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        """The target's k aux hidden states and, last, its states after the final norm: [B, T, k + 1, H_t]."""
        stack = self.stack
        with torch.autocast(input_ids.device.type, enabled=False):
            stack.reserve(positions.shape[1])
            given = (stack.rotary(positions), stack.packed_masks(positions, documents), self.head.reading.taps)
            hidden, aux = stack.run_with_aux(stack.embed(input_ids, positions), 0, len(stack.layers), *given)
            return torch.stack([*aux, stack.norm(hidden)], 2)

    def states_of(self, batch: Batch) -> Tensor:
        """`states` of a batch on any device."""
        given = {name: batch[name].to(self.stack.device) for name in ("input_ids", "positions", "documents")}
        return self.states(**given)

    def guesses(
        self, input_ids: Tensor, positions: Tensor, documents: Tensor, aux: Tensor, kept: Tensor, steps: int
    ) -> Tensor:
        """The head's output where step t of `steps` predicts the label of position kept[i], [n, steps, H].

        aux [B, T, k · H_t]: the target's aux hidden states. kept [n]: flat indices into [B, T]. If a document has no
        such position the values are meaningless (see `valid`).
        """
        head, length = self.head, positions.shape[1]
        head.reserve(length + steps)
        mask: Mask = Band.packed(documents) if length > Band.BLOCK else packed_mask(documents)
        cache, found = Steps(), []
        features = head.features(aux.float()).float()
        for step in range(steps):
            tokens = F.pad(input_ids[:, step + 1 :], (0, min(step + 1, length)))
            run = partial(self._step, cache, step, mask, positions)
            if self.recomputed and torch.is_grad_enabled():
                run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
            features = run(self._embedded(tokens), features)
            found.append(features.flatten(0, 1)[(kept - 1 - step).clamp(min=0)])
        return torch.stack(found, 1)

    def _step(
        self, cache: Steps, step: int, mask: Mask, positions: Tensor, embedding: Tensor, features: Tensor
    ) -> Tensor:
        cache.now = step
        masks = dict.fromkeys(self.head.windows, mask)
        return self.head.run_embedded(embedding, features, masks, self.head.rotary(positions + step), cache)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Like `Eagle3.embed`, but reads weights from their own module, as launchers that shard weights expect."""
        own = self.head.embed_tokens
        return F.embedding(tokens, self.stack.embed_tokens.weight if own is None else own.weight)

    def valid(self, positions: Tensor, kept: Tensor, steps: int) -> Tensor:
        """bool [n, steps]: whether a step's prediction for kept[i] lies in its document, whose positions begin at 0."""
        return positions.flatten()[kept][:, None] > torch.arange(steps, device=positions.device)

    def loss(self, guesses: Tensor, target: Tensor, labels: Tensor, shares: Tensor) -> Tensor:
        """The loss summed over predictions, each weighted by its share: guesses [n, S, H], shares [n, S].

        target [n, H_t]: the target's states after its final norm where it predicts the n tokens. labels [n].
        """
        head, steps = self.head, guesses.shape[1]
        rows, weight = head.normed(guesses).flatten(0, 1), head.lm_head.weight
        if self.objective == "cross_entropy":
            if head.draft_tokens is not None:
                labels = places(labels, head.draft_tokens, head.reading.vocabulary)
            counted = (shares * (labels != IGNORE)[:, None]).flatten()
            wanted = labels.clamp(min=0).repeat_interleave(steps)
            return rows_cross_entropy(rows, weight, wanted, shares=counted)
        states, matrix = head_product(self.stack.head, target)
        return rows_divergence(
            rows, weight, states, matrix, self.objective, target_rule=self.stack.spec.logits,
            tokens=head.draft_tokens, shares=shares.flatten(),
        )  # fmt: skip

    @torch.no_grad()
    def judged(self, input_ids: Tensor, labels: Tensor, positions: Tensor, documents: Tensor, steps: int) -> Judged:
        """The head's results in each of `steps` steps. Other arguments as in `forward`."""
        kept = _supervised(labels)
        states = self.states(input_ids, positions, documents)
        aux, target = states[:, :, :-1].flatten(2), states[:, :, -1]
        guesses = self.guesses(input_ids, positions, documents, aux, kept, steps)
        target, wanted, valid = target.flatten(0, 1)[kept], labels.flatten()[kept], self.valid(positions, kept, steps)
        accept = acceptance_by_target(self.stack.logits_after_norm, target)
        choices, _ = judge(self.stack.logits_after_norm, target, None)
        loss, right, accepted = [], [], []
        for step in range(steps):
            said, found = judge(self.head.logits, guesses[:, step], accept)
            assert found is not None
            loss.append(self.loss(guesses[:, step, None], target, wanted, valid[:, step, None].float()))
            right.append(((said == choices) & valid[:, step]).sum())
            accepted.append(found.masked_fill(~valid[:, step], torch.nan))
        by_place = accepted[0].new_full((labels.numel(), steps), torch.nan)
        by_place[kept] = torch.stack(accepted, 1)
        return Judged(valid.sum(0), torch.stack(loss), torch.stack(right), by_place.unflatten(0, labels.shape))


def judge_steps(student: Eagle3Student, batches: Sequence[Batch], steps: int) -> Metrics:
    """The metrics of `student` on `batches` of rows, for a recipe's evaluation.

    loss_<i>, agree_<i>: for the i-th token of a draft, the loss and the share of positions where the head's most likely
    token is the target's. tau_analytic: the expected τ of sampling (see `expected_tau`).
    """
    device = student.stack.device
    found = [student.judged(**{key: value.to(device) for key, value in batch.items()}, steps=steps)
             for batch in counted(batches, "judging held-out text", "batches")]  # fmt: skip
    metrics = Metrics()
    for i, count in enumerate(torch.stack([one.guesses for one in found]).sum(0).tolist()):
        if count:
            metrics[f"loss_{i + 1}"] = sum(float(one.loss[i]) for one in found) / count
            metrics[f"agree_{i + 1}"] = sum(int(one.right[i]) for one in found) / count
    rounds = torch.cat([tau_of_rounds(drafts_of(one.accepted)) for one in found])
    return metrics | ({"tau_analytic": rounds.double().mean().item()} if len(rounds) else {})


def drafts_of(accepted: Tensor) -> Tensor:
    """α of every draft of `WATCHED_DRAFT` tokens on the text, [B, positions, WATCHED_DRAFT], NaN where there is none.

    accepted [B, T, S]: α by the label's position and step. Step i of the draft that begins after position t has the
    label of position t + 1 + i.
    """
    count = max(0, accepted.shape[1] - WATCHED_DRAFT)
    by_step = [accepted[:, step + 1 : step + 1 + count, step] for step in range(WATCHED_DRAFT)]
    return torch.stack(by_step, -1)


def _supervised(labels: Tensor) -> Tensor:
    """Flat indices [n] of the supervised positions of labels [B, T]."""
    return (labels != IGNORE).flatten().nonzero()[:, 0]


def evaluation_of(
    config: Eagle3Config, target: OpenTarget, heldout: PackedRows, student: Eagle3Student
) -> Callable[[Eagle3Student, int], Metrics]:
    """The evaluation during training, on the main process: `judge_steps`, then real decoding (`Decoding`) with the head
    as it would be served, and `MovedNorms`."""
    batches, steps = batches_of(heldout, config.eval_batch_rows), max(config.draft_steps, WATCHED_DRAFT)
    decoding = Decoding.of(target, heldout, config.decode_prompts, config.decode_tokens)

    def judge(student: Eagle3Student) -> Metrics:
        return judge_steps(student, batches, steps)

    return evaluation(student, stored_dtype(target.config), judge, partial(decode_student, decoding))


def decode_student(decoding: Decoding, student: Eagle3Student) -> Metrics:
    """Metrics of real decoding by the target with the student's head."""
    stack = student.stack
    head = copy.deepcopy(student.head).to(stack.dtype).requires_grad_(False)
    if not head.reading.own_embedding:
        head.use_embedding(stack.embed_tokens.weight)
    return decoding(stack, Eagle3Source(head))


def save(
    config: Eagle3Config,
    target: PreTrainedConfig,
    trained_head: Eagle3,
    identity: Mapping[str, object],
    made_here: bool,
    trained: Trained,
) -> None:
    """Write the head, its card and, last, the record of its training."""
    out_dir, reading = Path(config.out_dir), trained_head.reading
    head = copy.deepcopy(trained_head).to(stored_dtype(target)).requires_grad_(False)
    save_head(out_dir, head, config.dialect, target, config.target, min(config.draft_steps, 7), made_here=made_here)
    facts: dict[str, object] = {"taps": list(reading.taps), "objective": config.objective}
    facts |= {"draft steps": config.draft_steps, "seq_len": config.seq_len}
    facts |= {"tokens": f"{reading.draft_vocabulary} of the target's {reading.vocabulary}"}
    write_records(out_dir / TRAINING_FILE, config, identity, trained, use_of(config.dialect), facts, shown=("tau",))


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
    empty = Eagle3(reading, all_tokens=reading.draft_vocabulary == reading.vocabulary)
    require_said(reading, shapes_of(empty), config.dialect, target)
    require_context(target, config.seq_len, config.decode_tokens)
    return reading


def make_student(
    config: Eagle3Config,
    target: OpenTarget,
    stored: StoredHead | None,
    reading: Reading,
    tokens: Tensor | None,
    device: torch.device,
) -> Eagle3Student:
    """The student: the `stored` head, or a new head with draft vocabulary `tokens`, and the whole target."""
    stack = target.stack(dtype=frozen_dtype(config.frozen_dtype, device), device=device)
    if stored is None:
        tokens = None if tokens is None else tokens.to(device)
        head = new_head(reading, stack, tokens, Streams(config.fit.seed).number("weights", bits=63))
    else:
        require_target(reading, target.config, stored.source)
        head = make_head(reading, stored.weights(torch.float32, device), stored.source)
    return student_of(config, stack, head)


def empty_student(config: Eagle3Config, reading: Reading, target: PreTrainedConfig) -> Eagle3Student:
    """The student without weights, in the dtypes that it has here."""
    dtype = frozen_dtype(config.frozen_dtype, planned_device())
    stack = layer_stack(nn.Module.to(empty_model(target), dtype))
    head = Eagle3(reading, all_tokens=reading.draft_vocabulary == reading.vocabulary)
    return student_of(config, stack, head)


def student_of(config: Eagle3Config, stack: LayerStack, head: Eagle3) -> Eagle3Student:
    """The student of `head` on the whole target."""
    return Eagle3Student(
        stack, head, objective=config.objective, steps=config.draft_steps, decay=config.step_decay,
        train_head=config.train_head,
    )  # fmt: skip


def memory_of(config: Eagle3Config, student: Eagle3Student) -> list[Held]:
    """Of each device in a training of `student`, which may have no weights."""
    reading = student.head.reading
    taps = len(reading.taps) * reading.target_hidden
    return fit_memory(student, config.fit, config.seq_len, taps, reading.vocabulary, planned_device())


def describe(student: Eagle3Student, config: Eagle3Config) -> str:
    """One greppable line: the head, its objective, parameter counts, and the number of processes."""
    reading = student.head.reading
    trained, frozen = parameters_of(student)
    return (
        f"eagle3 start={config.start or 'new'} taps={','.join(map(str, reading.taps))} "
        f"draft_steps={config.draft_steps} draft_vocabulary={reading.draft_vocabulary} trained_parameters={trained} "
        f"frozen_parameters={frozen} "
        f"processes={PartialState().num_processes} objective={config.objective}"
    )
