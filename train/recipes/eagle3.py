"""EAGLE-3 heads: trained with the whole target, by training-time test.

`prepare` makes target, rows and student; `Eagle3Student.forward` is the training step with its loss; the loop around it
is train/core/loop.py.
"""

import copy
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import PreTrainedConfig

from outrider.base.errors import warn
from outrider.base.processes import from_main, say
from outrider.base.streams import Streams
from outrider.data_prep.text.rows import PackedRows, load_rows
from outrider.draft_models.draft_vocabulary import draft_indices
from outrider.draft_models.eagle3 import checkpoint as heads
from outrider.draft_models.eagle3.model import Eagle3
from outrider.draft_models.eagle3.reading import Reading
from outrider.draft_models.losses import head_product, linear_cross_entropy, linear_divergence
from outrider.draft_models.targets.fingerprint import model_identity
from outrider.draft_models.targets.open_target import OpenTarget, open_target, stored_dtype
from outrider.inference.drafters.eagle3.drafter import Eagle3DraftModel
from outrider.train.core.driver import train
from outrider.train.core.training import Metrics, Trained, Training, TrainRows
from outrider.train.parts.drafter import frozen_dtype, parameters_of, pick_tokens, write_records
from outrider.train.parts.heldout import WATCHED_DRAFT, Decoding, MovedNorms, batches_of
from outrider.train.parts.on_policy import kept_depths
from outrider.train.parts.target_states import RowsInTurn, with_states
from outrider.train.settings.drafters import Eagle3Config
from outrider.train.students.eagle3 import Guesses, HeadOnTarget, head_plan, judge_steps, predictions, reading_of

FEATURES = "features"  # in out_dir, while a training with features=auto runs


def train_eagle3(config: Eagle3Config) -> None:
    """Train a head according to `config`. The result is `config.out_dir`, a directory that serving engines can load.

    It contains the weights with the highest τ of all evaluations, not the last ones. Raises `UserError` for an unusable
    target, head, data set or directory, before any weight is read.
    """
    target = open_target(config.target, config.revision)
    stored = None if config.start is None else heads.open_head(config.start, target.config, changes=config.reading)
    if stored is not None and not stored.made_here:
        warn(f"start={config.start}: another trainer's head, read as its config.json says; examine it first "
             "(evaluate-checkpoint eagle3=… doctor=true): a misread head learns to be one")  # fmt: skip
    reading = reading_of(config, stored, target.config)
    train(config, partial(head_plan, config, reading, target.config), partial(prepare, config, target, stored, reading))


def prepare(
    config: Eagle3Config, target: OpenTarget, stored: heads.StoredHead | None, reading: Reading, state: PartialState
) -> "Training[Eagle3Student]":
    """The training of a head with this reading. stored: the finished head to continue from.

    Raises `UserError` for unusable or incompatible inputs.
    """
    rows = load_rows(config.data, target.tokenizer, config.seq_len, "train")
    heldout = load_rows(config.data, target.tokenizer, config.seq_len, "heldout", max_rows=config.eval_rows)
    tokens = from_main(state, lambda: pick_tokens(config.draft_vocabulary, target, rows, heldout))
    fingerprint = from_main(state, lambda: target.fingerprint)
    made_from = {"target": asdict(fingerprint), "data_key": rows.key, "taps": list(reading.taps)}
    dtype = frozen_dtype(config.frozen_dtype, state.device)

    def build() -> Eagle3Student:
        stack = target.stack(dtype=dtype, device=state.device)
        if stored is None:
            draft_tokens = None if tokens is None else tokens.to(state.device)
            head = heads.new_head(reading, stack, draft_tokens, Streams(config.fit.seed).number("weights", bits=63))
        else:
            head = stored.load(torch.float32, state.device)
        return Eagle3Student(stack, head, config)

    taught: TrainRows = rows
    made_by = {**made_from, "frozen_dtype": str(dtype)}
    item = (config.seq_len, len(reading.taps) + 1, reading.target_hidden)
    if config.features not in (None, "auto"):
        taught = with_states(rows, lambda: build().states_of, item, config.features, dtype, made_by, state)
    student = build()
    sharded = {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"} & os.environ.keys()
    alone = state.num_processes == 1 and not sharded  # one process that has all parameters of the target
    if config.features == "auto" and alone and config.fit.total_steps(len(rows)) * config.fit.batch_rows > len(rows):
        taught = RowsInTurn(rows, student.states_of, item, Path(config.out_dir) / FEATURES, dtype, made_by)
    trained, frozen = parameters_of(student)
    say(f"eagle3 start={config.start or 'new'} taps={','.join(map(str, reading.taps))} "
        f"draft_steps={config.draft_steps} draft_vocabulary={reading.draft_vocabulary} trained_parameters={trained} "
        f"frozen_parameters={frozen} processes={state.num_processes} objective={config.objective}")  # fmt: skip

    start = None if stored is None else from_main(state, lambda: model_identity(stored.files))
    identity = {**config.deciding(), **made_from, "start_model": start}
    made_here = stored is None or stored.made_here  # another trainer's head has to be examined still (doctor=true)
    return Training(
        student,
        taught,
        config.fit,
        identity,
        evaluation_of(config, target, heldout, student) if state.is_main_process else None,
        partial(save, config, target.config, student.head, identity, made_here),
        finished=heads.TRAINING_FILE,
        keeps_best=True,
        saved_whole=student.head,
        on_step=partial(setattr, student, "step"),
        minutes=config.minutes,
    )


class Eagle3Student(HeadOnTarget):
    """An EAGLE-3 head that learns, with the contract of `fit`."""

    def forward(
        self, input_ids: Tensor, labels: Tensor, positions: Tensor, documents: Tensor, states: Tensor | None = None
    ) -> dict[str, Tensor]:
        """{"loss_sum"} over supervised positions. All arguments are [B, T] (see `data_prep.text.rows`).

        states: the output of `states` for them; None: the target runs.
        """
        states = self.states(input_ids, positions, documents) if states is None else states.to(self.stack.dtype)
        tokens = self.head.draft_tokens if self.objective == "cross_entropy" else None
        due = predictions(draft_indices(labels, tokens, self.head.reading.vocabulary), documents, self.steps)
        if self.keep < 1:
            due &= kept_depths(self.keep, self.steps, self.seed, self.step, input_ids)
        guesses = self.guesses(input_ids, positions, documents, states[:, :, :-1].flatten(2), due)
        return {"loss_sum": self.loss(guesses, states[:, :, -1], labels, self.counts[guesses.steps])}

    def loss(self, guesses: Guesses, target: Tensor, labels: Tensor, shares: Tensor | None) -> Tensor:
        """The loss summed over n predictions, weighted by `shares` [n].

        target [B, T, H_t]: the target's states after its final norm. labels [B, T].
        """
        head = self.head
        rows, weight = head.normed(guesses.hidden), head.lm_head.weight
        if self.objective == "cross_entropy":
            classes = draft_indices(labels.flatten()[guesses.labels], head.draft_tokens, head.reading.vocabulary)
            return linear_cross_entropy(rows, weight, classes, shares=shares)
        positions, owners = guesses.labels.unique_consecutive(return_inverse=True)
        sides = (rows, weight, *head_product(self.stack.head, target.flatten(0, 1)[positions]))
        rule, tokens, weights = self.stack.spec.logits, head.draft_tokens, {"owners": owners, "shares": shares}
        return linear_divergence(*sides, None, self.objective, target_rule=rule, tokens=tokens, **weights)


def evaluation_of(
    config: Eagle3Config, target: OpenTarget, heldout: PackedRows, student: Eagle3Student
) -> Callable[[Eagle3Student, int], Metrics]:
    """The evaluation during training: `judge_steps`, then real decoding (`Decoding`) with the head as it would be
    served, and `MovedNorms`."""
    batches, steps = batches_of(heldout, config.eval_batch_rows), max(config.draft_steps, WATCHED_DRAFT)
    decoding = Decoding.of(target, heldout, config.decode_prompts, config.decode_tokens)
    norms = MovedNorms(student, stored_dtype(target.config))

    def evaluate(student: Eagle3Student, step: int) -> Metrics:
        head = copy.deepcopy(student.head).to(student.stack.dtype).requires_grad_(False)
        if not head.reading.own_embedding:
            head.use_embedding(student.stack.embed_tokens.weight)
        return (
            judge_steps(student, batches, steps)
            | decoding(student.stack, Eagle3DraftModel(head))
            | norms(student, step)
        )

    return evaluate


def save(
    config: Eagle3Config,
    target: PreTrainedConfig,
    trained_head: Eagle3,
    identity: Mapping[str, object],
    made_here: bool,
    trained: Trained,
) -> None:
    """Write the head, its card and, last, the record of its training."""
    out_dir, reading, steps = Path(config.out_dir), trained_head.reading, min(config.draft_steps, 7)
    head = copy.deepcopy(trained_head).to(stored_dtype(target)).requires_grad_(False)
    heads.save_head(out_dir, head, config.dialect, target, config.target, steps, made_here=made_here)
    facts: dict[str, object] = {"taps": list(reading.taps), "objective": config.objective}
    facts |= {"draft steps": config.draft_steps, "seq_len": config.seq_len}
    facts |= {"tokens": f"{reading.draft_vocabulary} of the target's {reading.vocabulary}"}
    if config.features in (None, "auto"):  # begun with auto, perhaps
        shutil.rmtree(out_dir / FEATURES, ignore_errors=True)
    write_records(heads.TRAINING_FILE, config, identity, trained, heads.describe_use(config.dialect), facts, ("tau",))
