"""Recipe for EAGLE-3 heads: trained with the whole target, by training-time test.

The training step is `Eagle3Student` (train/parts/eagle3.py).
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState

from data_prep.text.rehearsal import rehearsable
from data_prep.text.rows import PackedRows, load_rows
from draft_models.card import write_card
from draft_models.eagle3.checkpoint import TRAINING_FILE, StoredHead, open_head, save_head, use_of
from draft_models.eagle3.reading import Reading
from draft_models.targets.fingerprint import model_identity
from draft_models.targets.open_target import OpenTarget, open_target, stored_dtype
from inference.drafters.eagle3 import Eagle3Source
from inference.loading.memory_plan import describe as describe_memory
from inference.loading.memory_plan import explained, planned_device
from outrider.errors import warn
from outrider.processes import from_main, say
from train.core.driver import run_training
from train.core.training import Metrics, Trained, Training
from train.parts.drafter import frozen_dtype, parameters_of, pick_tokens, write_record
from train.parts.eagle3 import (
    Eagle3Student,
    describe,
    empty_student,
    judge_steps,
    make_student,
    memory_of,
    reading_of,
)
from train.parts.heldout import WATCHED_DRAFT, Decoding, batches_of, evaluation
from train.parts.target_states import RowsWithStates, with_states
from train.settings.eagle3 import Eagle3Config


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
        run_training(config, Recipe(config, target, stored, reading).prepare)


@dataclass(frozen=True)
class Recipe:
    """A head with this reading. stored: the finished head to continue from."""

    config: Eagle3Config
    target: OpenTarget
    stored: StoredHead | None
    reading: Reading

    def prepare(self, state: PartialState) -> Training[Eagle3Student]:
        """The training. Raises `UserError` for unusable or incompatible inputs."""
        config, target, stored = self.config, self.target, self.stored
        rows = load_rows(config.data, target.tokenizer, config.seq_len, "train")
        heldout = load_rows(config.data, target.tokenizer, config.seq_len, "heldout", max_rows=config.eval_rows)
        tokens = from_main(state, lambda: pick_tokens(config.draft_vocabulary, target, rows, heldout))
        fingerprint = from_main(state, lambda: target.fingerprint)
        build = partial(make_student, config, target, stored, self.reading, tokens, state.device)
        made_from = {"target": asdict(fingerprint), "data_key": rows.key, "taps": list(self.reading.taps)}
        taught: PackedRows | RowsWithStates = rows
        if config.features is not None:
            taught = self._with_states(rows, build, made_from, state)
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
            partial(self._save, student, identity),
            finished=TRAINING_FILE,
            best_of=identity,
            saved_whole=student.head,
            minutes=config.minutes,
        )

    def _with_states(
        self, rows: PackedRows, build: Callable[[], Eagle3Student], made_from: Mapping[str, object], state: PartialState
    ) -> RowsWithStates:
        """`rows` with the target's hidden states, stored in the folder `config.features`."""
        config, reading = self.config, self.reading
        assert config.features is not None
        made_from = {**made_from, "frozen_dtype": str(frozen_dtype(config.frozen_dtype, state.device))}
        item = (config.seq_len, len(reading.taps) + 1, reading.target_hidden)
        dtype = getattr(torch, config.features_dtype)
        return with_states(rows, build, item, Path(config.features), dtype, made_from, state)

    def _save(self, student: Eagle3Student, identity: Mapping[str, object], trained: Trained) -> None:
        """Write the head, its card and, last, the record of its training."""
        config, reading, target = self.config, self.reading, self.target.config
        out_dir, tau = Path(config.out_dir), trained.metrics["tau"]
        head = copy.deepcopy(student.head).to(stored_dtype(target)).requires_grad_(False)
        # The reading of another trainer's head still has to be examined (doctor=true).
        made_here = self.stored is None or self.stored.made_here
        drafted = min(config.draft_steps, 7)
        save_head(out_dir, head, config.dialect, target, config.target, drafted, made_here=made_here)
        facts: dict[str, object] = {"taps": list(reading.taps), "objective": config.objective}
        facts |= {"draft steps": config.draft_steps, "seq_len": config.seq_len, "data": config.data.source}
        facts |= {"tokens": f"{reading.draft_vocabulary} of the target's {reading.vocabulary}"}
        facts |= {"steps": trained.result.steps, "chosen step": trained.step, "tau": round(tau, 3)}
        write_card(out_dir, use_of(config.dialect), config.target, facts)
        write_record(out_dir / TRAINING_FILE, config.target, identity, config.fit, trained)
        say(f"saved drafter={out_dir} step={trained.step} tau={tau:.4f}")


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
