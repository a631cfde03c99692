"""EAGLE-3 heads: trained with the whole target, by training-time test.

    python train/eagle3.py target=MODEL data=ultrachat

`train_eagle3` is the whole training, `Eagle3Student.forward` its step with the loss. The loop around the step is
train/core/loop.py.
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    from outrider.commands import run_script

    run_script("eagle3")

import copy
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from outrider.base.errors import UserError, warn
from outrider.base.processes import say
from outrider.base.progress import track_progress
from outrider.base.streams import Streams
from outrider.data_prep.text.rows import PackedRows, load_rows
from outrider.draft_models.acceptance import acceptance_by_target, argmax_and_acceptance, tau_of_rounds
from outrider.draft_models.draft_vocabulary import draft_indices
from outrider.draft_models.eagle3 import checkpoint as heads
from outrider.draft_models.eagle3.dialects import require_expressible
from outrider.draft_models.eagle3.model import Eagle3, Mask, Steps
from outrider.draft_models.eagle3.reading import Reading, new_reading
from outrider.draft_models.losses import PLAIN, head_product, linear_cross_entropy, linear_divergence
from outrider.draft_models.targets.attention import packed_band
from outrider.draft_models.targets.fingerprint import model_identity
from outrider.draft_models.targets.model_files import layer_stack
from outrider.draft_models.targets.open_target import OpenTarget, open_target, stored_dtype
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.drafters.eagle3.drafter import Eagle3DraftModel
from outrider.inference.loading.memory_plan import Plan
from outrider.train.core.driver import training_run
from outrider.train.core.training import Batch, FitResult, Metrics, Student
from outrider.train.parts.drafter import frozen_dtype, pick_tokens, require_context, write_records
from outrider.train.parts.heldout import WATCHED_DRAFT, Decoding, acceptance_of_drafts, batches_of
from outrider.train.parts.memory import empty_target, fit_memory
from outrider.train.parts.on_policy import draw_depths
from outrider.train.parts.position_weights import Slots, cat_weights, dpace_weights, probabilities_of
from outrider.train.parts.steps import Predictions, QueriesAt, loss_mask_per_step, positions_to_run
from outrider.train.parts.target_states import FEATURES, add_states
from outrider.train.settings.drafters import Eagle3Config

BATCH = ("input_ids", "labels", "positions", "documents")


def train_eagle3(config: Eagle3Config) -> None:
    """Train a head according to `config`. The result is `config.out_dir`, a directory that serving engines can load.

    It contains the weights with the highest τ of all evaluations, not the last ones. Raises `UserError` for an unusable
    target, head, data set or directory, before any weight is read.
    """
    target = open_target(config.target, config.revision)
    stored_head = open_start(config, target)
    reading = reading_of(config, stored_head, target.config)
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

        build = partial(build_student, config, target, stored_head, reading, tokens, run.device)
        row_shape = (config.seq_len, len(reading.taps) + 1, reading.target_hidden)
        student, rows_to_fit = add_states(config, rows, row_shape, origin, build, run)
        trained, frozen = student.count_parameters()
        say(f"eagle3 start={config.start or 'new'} taps={','.join(map(str, reading.taps))} "
            f"draft_steps={config.draft_steps} draft_vocabulary={reading.draft_vocabulary} "
            f"trained_parameters={trained} frozen_parameters={frozen} processes={run.state.num_processes} "
            f"objective={config.objective}")  # fmt: skip

        start = None if stored_head is None else run.from_main(lambda: model_identity(stored_head.files))
        identity = {**config.decisions(), **origin, "start_model": start}
        # The evaluation is made before the fit: DeepSpeed shards every module that is constructed after its start.
        evaluate = make_evaluation(config, target, heldout, student) if run.is_main else None
        result = run.fit(
            student, rows_to_fit, config.fit, identity=identity, evaluate=evaluate,
            saved_dtype=stored_dtype(target.config), keeps_best=True, last_file=heads.TRAINING_FILE,
            minutes=config.minutes,
        )  # fmt: skip
        if result is not None:
            made_here = stored_head is None or stored_head.made_here  # another trainer's head is examined (doctor=true)
            save_drafter(config, target.config, student.head, made_here, identity, result)


# --- the head, and what the target hands it


def open_start(config: Eagle3Config, target: OpenTarget) -> heads.StoredHead | None:
    """The finished head to continue from, if any; warns if another trainer wrote it."""
    if config.start is None:
        return None
    stored_head = heads.open_head(config.start, target.config, changes=config.reading)
    if not stored_head.made_here:
        warn(f"start={config.start}: another trainer's head, read as its config.json says; examine it first "
             "(evaluate-checkpoint eagle3=… doctor=true): a misread head learns to be one")  # fmt: skip
    return stored_head


def reading_of(config: Eagle3Config, stored_head: heads.StoredHead | None, target: PreTrainedConfig) -> Reading:
    """The reading of the head to train. Raises `UserError` if it cannot be trained with it, or not be written."""
    if stored_head is not None:
        reading = stored_head.reading
    else:
        shape = {name: getattr(config, name) for name in ("taps", "version", "draft_vocabulary", "intermediate")}
        reading = new_reading(target, **shape)
        if reading.taps[-1] > target.num_hidden_layers:
            raise UserError(f"taps={list(reading.taps)}: expected 0 to {target.num_hidden_layers}, the target's layers")
    if set(reading.windows) != {None}:
        raise UserError(f"start={config.start}: its layers see {list(reading.windows)} positions; only heads that see "
                        "all of them are trained here")  # fmt: skip
    require_expressible(reading, heads.head_shapes(reading), config.dialect, target)
    require_context(target, config.seq_len, config.decode_tokens)
    return reading


def build_student(
    config: Eagle3Config,
    target: OpenTarget,
    stored_head: heads.StoredHead | None,
    reading: Reading,
    tokens: Tensor | None,
    device: torch.device,
) -> "Eagle3Student":
    """The head on the whole target, both on `device`. tokens: the draft vocabulary of a new head."""
    stack = target.stack(dtype=frozen_dtype(config.frozen_dtype, device), device=device)
    if stored_head is not None:
        return Eagle3Student(stack, stored_head.load(torch.float32, device), config)
    seed = Streams(config.fit.seed).number("weights", bits=63)
    head = heads.new_head(reading, stack, None if tokens is None else tokens.to(device), seed)
    return Eagle3Student(stack, head, config)


class Eagle3Student(Student):
    """A head that learns in float32, on the frozen layers of a whole target: training-time test.

    Step t of `steps` predicts token j at position j − 2 − t of its document: step 0 from the target's feature there and
    the token after it, later steps from the previous step's output there and the next token of the text. So every token
    is predicted `steps` times, by drafts that began 0, 1, … tokens earlier. The weight of a step is `step_decay` times
    that of the previous step, and all weights sum to 1. With `keep` step t is drawn to run at a share of keep^t of the
    positions, with 1 / keep^t times the weight. So the expected loss and gradient are those of all positions.
    With position_weights=none each step has the weight 1 / `steps`; cat and dpace multiply that by weights of slots.
    """

    step_weights: Tensor  # [steps]

    def __init__(self, stack: LayerStack, head: Eagle3, config: Eagle3Config) -> None:
        super().__init__()
        self.stack, self.head = stack.requires_grad_(False), head.float().requires_grad_(True)
        self.objective, self.steps, self.keep = config.objective, config.draft_steps, config.keep
        self.seed, self.recomputes = config.fit.seed, False
        self.position_weights = config.position_weights
        decay = config.step_decay if self.position_weights == "decay" else 1.0
        weights = torch.tensor([decay**step for step in range(self.steps)], device=stack.device)  # [steps]
        shares = self.keep ** torch.arange(self.steps, device=stack.device)
        self.register_buffer("step_weights", weights / weights.sum() / shares, persistent=False)
        head.lm_head.requires_grad_(config.train_head)
        if head.embed_tokens is not None:
            head.embed_tokens.requires_grad_(False)

    def gradient_checkpointing_enable(self) -> None:
        """Store the output of each step and recompute its activations in the backward pass."""
        self.recomputes = True

    @property
    def saved_part(self) -> Eagle3:
        """The head, whose matrix of logits and embedding may be frozen."""
        return self.head

    def forward(
        self, input_ids: Tensor, labels: Tensor, positions: Tensor, documents: Tensor, states: Tensor | None = None
    ) -> dict[str, Tensor]:
        """{"loss_sum"} over supervised positions. All arguments are [B, T] (see `data_prep.text.rows`).

        states: the output of `target_states` for them; None: the target runs.
        """
        if states is None:
            states = self.target_states(input_ids, positions, documents)  # [B, T, k + 1, H_t]
        aux, final = states.to(self.stack.dtype).split([states.shape[2] - 1, 1], 2)
        tokens = self.head.draft_tokens if self.objective == "cross_entropy" else None
        draft_labels = draft_indices(labels, tokens, self.head.reading.vocabulary)
        loss_mask = loss_mask_per_step(draft_labels, documents, self.steps)  # [B, T, steps]
        if self.keep < 1:
            loss_mask &= draw_depths(self.keep, self.steps, self.seed, self.step, input_ids)
        predictions = self.unroll(input_ids, positions, documents, aux.flatten(2), loss_mask)
        loss_weights = self.weigh(predictions, final[:, :, 0], labels)  # [n]
        return {"loss_sum": self.loss(predictions, final[:, :, 0], labels, loss_weights)}

    def weigh(self, predictions: Predictions, target: Tensor, labels: Tensor) -> Tensor:
        """The weights [n] of the predictions. target, labels: see `loss`."""
        steps, loss_weights, head = predictions.steps, self.step_weights[predictions.steps], self.head  # [n] each
        if self.position_weights == "decay" or self.position_weights == "none":
            return loss_weights
        slots = Slots(self.position_weights, predictions.labels - steps, steps, self.steps, labels.shape)
        if slots.kind == "cat":
            product = head_product(self.stack.head, target)
            return loss_weights * cat_weights(slots, probabilities_of(labels, product, self.stack.spec.logits))
        product = head.normalise(predictions.hidden), head.lm_head.weight
        q = probabilities_of(self.classes(predictions, labels), product, PLAIN)  # [n]
        return loss_weights * dpace_weights(slots, q, torch.ones_like(steps, dtype=torch.bool))

    def classes(self, predictions: Predictions, labels: Tensor) -> Tensor:
        """The labels [n] of the predictions as indices into the draft vocabulary, `IGNORE` outside it."""
        head, flat_labels = self.head, labels.flatten()
        return draft_indices(flat_labels[predictions.labels], head.draft_tokens, head.reading.vocabulary)

    def loss(self, predictions: Predictions, target: Tensor, labels: Tensor, loss_weights: Tensor | None) -> Tensor:
        """The loss summed over n predictions, weighted by `loss_weights` [n].

        target [B, T, H_t]: the target's states after its final norm. labels [B, T].
        """
        head = self.head
        hidden, matrix = head.normalise(predictions.hidden), head.lm_head.weight  # [n, H], [V', H]
        if self.objective == "cross_entropy":
            return linear_cross_entropy(hidden, matrix, self.classes(predictions, labels), shares=loss_weights)
        positions, owners = predictions.labels.unique_consecutive(return_inverse=True)
        products = (hidden, matrix, *head_product(self.stack.head, target.flatten(0, 1)[positions]))
        rule, weights = self.stack.spec.logits, {"owners": owners, "shares": loss_weights}
        return linear_divergence(*products, None, self.objective, target_rule=rule, tokens=head.draft_tokens, **weights)

    @torch.no_grad()
    def target_states(self, input_ids: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        """The target's k aux hidden states and, last, its states after the final norm: [B, T, k + 1, H_t]."""
        stack, aux_layers = self.stack, self.head.reading.taps
        with torch.autocast(input_ids.device.type, enabled=False):
            stack.reserve(positions.shape[1])
            hidden, rotary = stack.embed(input_ids, positions), stack.rotary(positions)
            masks = stack.packed_masks(documents)
            hidden, aux = stack.run_with_aux(hidden, 0, len(stack.layers), rotary, masks, aux_layers)
            return torch.stack([*aux, stack.norm(hidden)], 2)

    def states_of(self, batch: Batch) -> Tensor:
        """`target_states` of a batch on any device."""
        inputs = (batch[name].to(self.stack.device) for name in ("input_ids", "positions", "documents"))
        return self.target_states(*inputs)

    def unroll(
        self, input_ids: Tensor, positions: Tensor, documents: Tensor, aux: Tensor, loss_mask: Tensor
    ) -> Predictions:
        """The head's predictions where `loss_mask`, bool [B, T, steps], of packed rows [B, T].

        aux [B, T, k · H_t]: the target's aux hidden states. Step 0 runs at all positions, to which later steps attend,
        and a later one where it or one after it has a loss.
        """
        head, (count, length, steps) = self.head, loss_mask.shape
        head.reserve(length + steps)
        if input_ids.device.type == "cpu":  # as one row, since attention goes from document to document
            documents = (documents + (length + 1) * torch.arange(count)[:, None]).view(1, -1)
        band = packed_band(documents)
        is_run = (loss_mask.flip(-1).cumsum(-1).flip(-1) > 0).flatten(0, 1)  # [B · T, steps]: a loss here or later
        mask, at = band, torch.arange(len(is_run), device=is_run.device).view_as(documents)  # where the step runs
        # Read from the module that holds it, unlike in `Eagle3.embed`, as launchers that shard weights expect.
        embedding = F.embedding(input_ids, (head.embed_tokens or self.stack.embed_tokens).weight).float()
        features = head.features(aux.float()).float().view(*at.shape, -1)
        cache, outputs, rows, labels = Steps(), list[Tensor](), list[Tensor](), list[Tensor]()
        for step in range(steps):
            if step and (picks := positions_to_run(is_run[at, step])) is not None:
                features, at = F.embedding(picks, features.flatten(0, 1)), at.flatten()[picks]
                cache.picks[step], mask = picks, QueriesAt.of(band, documents, at % documents.shape[1])
            cache.tokens[step] = (at + 1 + step) % len(is_run)
            run = partial(self._run_step, cache, step, mask, positions.flatten()[at])
            if self.recomputes and torch.is_grad_enabled():
                run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
            features, embedding = run(embedding, features), embedding[:, :0]
            has_loss = loss_mask.flatten(0, 1)[at, step]
            rows.append(has_loss.flatten().nonzero()[:, 0] + sum(map(len, outputs)))
            labels.append(at[has_loss] + 1 + step)
            outputs.append(features.flatten(0, 1))
        step_numbers = torch.cat([torch.full_like(part, step) for step, part in enumerate(labels)])
        label, order = torch.cat(labels).sort(stable=True)
        return Predictions(F.embedding(torch.cat(rows)[order], torch.cat(outputs)), label, step_numbers[order])

    def _run_step(
        self, cache: Steps, step: int, mask: Mask, positions: Tensor, embedding: Tensor, features: Tensor
    ) -> Tensor:
        cache.step = step
        masks = dict.fromkeys(self.head.windows, mask)
        return self.head.run(embedding, features, masks, self.head.rotary(positions + step), cache)


# --- evaluation


def make_evaluation(
    config: Eagle3Config, target: OpenTarget, heldout: PackedRows, student: Eagle3Student
) -> Callable[[int], Metrics]:
    """The evaluation during training: `score_steps`, then real decoding (`Decoding`) with the head as it would be
    served."""
    batches, steps = batches_of(heldout, config.eval_batch_rows), max(config.draft_steps, WATCHED_DRAFT)
    decoding = Decoding.of(target, heldout, config.decode_prompts, config.decode_tokens)

    def evaluate(step: int) -> Metrics:
        head = copy.deepcopy(student.head).to(student.stack.dtype).requires_grad_(False)
        if not head.reading.own_embedding:
            head.use_embedding(student.stack.embed_tokens.weight)
        return score_steps(student, batches, steps) | decoding(student.stack, Eagle3DraftModel(head))

    return evaluate


def score_steps(student: Eagle3Student, batches: Sequence[Batch], steps: int) -> Metrics:
    """The metrics of `student` on `batches` of rows.

    loss_<i>, agree_<i>: for the i-th token of a draft, the loss and the share of positions where the head's most likely
    token is the target's. tau_analytic: the expected τ of sampling (see `expected_tau`).
    """
    scores = [
        score_batch(student, batch, steps) for batch in track_progress(batches, "judging held-out text", "batches")
    ]
    metrics = Metrics()
    for i, (count, loss, right) in enumerate(torch.stack([sums for sums, _ in scores]).sum(0).tolist(), 1):
        if count:
            metrics |= {f"loss_{i}": loss / count, f"agree_{i}": right / count}
    rounds = torch.cat([tau_of_rounds(acceptance_of_drafts(accepted)) for _, accepted in scores])
    return metrics | ({"tau_analytic": rounds.double().mean().item()} if len(rounds) else {})


@torch.no_grad()
def score_batch(student: Eagle3Student, batch: Batch, steps: int) -> tuple[Tensor, Tensor]:
    """The head's results on a batch of rows in each of `steps` steps.

    Returns float64 [steps, 3]: the number of predictions, the loss summed over them, and how many have the target's
    most likely token as theirs; and the acceptance probability, by the position of the label, [B, T, steps], NaN
    where there is no prediction.
    """
    stack, head = student.stack, student.head
    input_ids, labels, positions, documents = (batch[name].to(stack.device) for name in BATCH)
    target_states = student.target_states(input_ids, positions, documents)
    loss_mask = loss_mask_per_step(labels, documents, steps)
    predictions = student.unroll(input_ids, positions, documents, target_states[:, :, :-1].flatten(2), loss_mask)
    flat, owners = predictions.labels.unique_consecutive(return_inverse=True)
    target, logits = target_states[:, :, -1].flatten(0, 1)[flat], stack.logits_after_norm
    choices, accepted = argmax_and_acceptance(
        head.logits, predictions.hidden, acceptance_by_target(logits, target[owners])
    )
    assert accepted is not None
    by_label = accepted.new_full((labels.numel(), steps), torch.nan)
    by_label[predictions.labels, predictions.steps] = accepted
    right, sums = choices == argmax_and_acceptance(logits, target, None)[0][owners], list[Tensor]()
    for step in range(steps):
        in_step = predictions.steps == step
        part = Predictions(*(values[in_step] for values in predictions))
        loss = student.loss(part, target_states[:, :, -1], labels, None)
        sums.append(torch.stack([in_step.sum(), loss.double(), (right & in_step).sum()]))
    return torch.stack(sums).cpu(), by_label.unflatten(0, labels.shape)


# --- what is saved, and the memory


def save_drafter(
    config: Eagle3Config,
    target: PreTrainedConfig,
    trained_head: Eagle3,
    made_here: bool,
    identity: Mapping[str, object],
    result: FitResult,
) -> None:
    """Write the head as serving engines load it, its card and, last, the record of its training.

    made_here: whether no other trainer's head was its start.
    """
    out_dir, reading, steps = Path(config.out_dir), trained_head.reading, min(config.draft_steps, 7)
    head = copy.deepcopy(trained_head).to(stored_dtype(target)).requires_grad_(False)
    heads.save_head(out_dir, head, config.dialect, target, config.target, steps, made_here=made_here)
    if config.features in (None, "auto"):  # begun with auto, perhaps
        shutil.rmtree(out_dir / FEATURES, ignore_errors=True)
    facts: dict[str, object] = {"taps": list(reading.taps), "objective": config.objective}
    facts |= {"draft steps": config.draft_steps, "seq_len": config.seq_len}
    facts |= {"tokens": f"{reading.draft_vocabulary} of the target's {reading.vocabulary}"}
    record = (heads.TRAINING_FILE, identity)
    write_records(config, heads.describe_use(config.dialect), facts, result, ("tau",), record)


def plan_memory(config: Eagle3Config, reading: Reading, target: PreTrainedConfig) -> Plan:
    """The memory of training a head with this reading and the whole target of this config."""
    stack = layer_stack(empty_target(config, target)[0])
    head = Eagle3(reading, all_tokens=reading.draft_vocabulary == reading.vocabulary)
    student = Eagle3Student(stack, head, config)
    trained, frozen = student.count_parameters()
    facts = {"taps": ",".join(map(str, reading.taps)), "draft_steps": config.draft_steps}
    facts |= {"trained_parameters": trained, "frozen_parameters": frozen}
    return Plan(fit_memory(config, student, len(reading.taps) * reading.target_hidden, reading.vocabulary), facts)
