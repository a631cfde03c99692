"""The training of a head on hidden states of its target, an EAGLE-3 head or a block drafter: rows, fit, files.

A reading has a head's sizes and says how the tensors in its files are used. Its taps are the boundaries of target
layers whose hidden states the head reads. `HeadKind` has the parts of a training that depend on the kind of head.
"""

import copy
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from outrider.base.errors import warn
from outrider.base.processes import say
from outrider.base.streams import Streams
from outrider.data_prep.text.rows import PackedRows, load_rows
from outrider.draft_models.heads.files import StoredDrafter
from outrider.draft_models.heads.layers import DraftHead
from outrider.draft_models.heads.sizes import HeadSizes
from outrider.draft_models.targets.fingerprint import model_identity
from outrider.draft_models.targets.model_files import layer_stack
from outrider.draft_models.targets.open_target import OpenTarget, stored_dtype
from outrider.inference.core.drafter import DraftModel
from outrider.inference.engines.packing import multiply_by_codes
from outrider.inference.loading.memory_plan import Plan
from outrider.train.core.driver import training_run
from outrider.train.core.training import Metrics
from outrider.train.parts.drafter import frozen_dtype, pick_tokens, write_records
from outrider.train.parts.head_student import HeadStudent, score_steps
from outrider.train.parts.heldout import Decoding, batches_of
from outrider.train.parts.memory import empty_target, fit_memory
from outrider.train.parts.target_states import FEATURES, add_states
from outrider.train.settings.drafters import HeadConfig

Stored = StoredDrafter[DraftHead]


class HeadKind(NamedTuple):
    """What is particular to one kind of head.

    command: trains heads of this kind. facts: of this training, for its printed lines and the card. module: the class.
    new: a new head, given its reading, the target, its draft vocabulary and a seed. student: of a target and a head.
    steps: the tokens of a draft that are judged. drafts: makes the draft model, which decodes, of a head. record: the
    name of the file of its training. save: writes a head and returns the text of its card.
    """

    command: str
    facts: Mapping[str, object]
    module: type[DraftHead]
    new: Callable[..., DraftHead]
    student: Callable[..., HeadStudent]
    steps: int
    drafts: Callable[..., DraftModel]
    record: str
    save: Callable[..., str]


def warn_of_other_trainer(config: HeadConfig, stored_drafter: Stored, kind: str) -> None:
    """Warn that the drafter to continue from, of `kind`, was written by another trainer, if it was."""
    if not stored_drafter.made_here:
        warn(f"start={config.start}: another trainer's drafter, read as its files say; examine it first "
             f"(evaluate-checkpoint {kind}=… doctor=true): a misread drafter learns to be one")  # fmt: skip


def train_head(
    config: HeadConfig, target: OpenTarget, stored: Stored | None, reading: HeadSizes, kind: HeadKind
) -> None:
    """Train the head of `reading`, a new one or the `stored` one. The drafter in `config.out_dir` has the weights with
    the highest τ of all evaluations, not the last ones."""
    make_plan = partial(plan_memory, config, reading, target.config, kind)
    if config.plan:
        print(make_plan(), flush=True)
        return
    with training_run(config, make_plan) as run:
        rows = load_rows(config.data, target.tokenizer, config.seq_len, "train")
        heldout = load_rows(config.data, target.tokenizer, config.seq_len, "heldout", max_rows=config.eval_rows)
        draft_tokens = run.from_main(lambda: pick_tokens(config.draft_vocabulary, target, rows, heldout))
        fingerprint = run.from_main(lambda: target.fingerprint)
        input_identity = {"target": asdict(fingerprint), "data_key": rows.key, "taps": list(reading.taps)}

        build = partial(build_student, config, target, stored, reading, kind, draft_tokens, run.device)
        row_shape = (config.seq_len, len(reading.taps) + 1, reading.target_hidden)  # k taps, and the target's output
        student, rows_to_fit = add_states(config, rows, row_shape, input_identity, build, run)
        trained, frozen = student.count_parameters()
        facts_text = " ".join(f"{name}={value}" for name, value in kind.facts.items())
        say(f"{kind.command} start={config.start or 'new'} taps={','.join(map(str, reading.taps))} {facts_text} "
            f"draft_vocabulary={reading.draft_vocabulary} trained_parameters={trained} frozen_parameters={frozen} "
            f"processes={run.state.num_processes} objective={config.objective}")  # fmt: skip

        start_identity = None if stored is None else run.from_main(lambda: model_identity(stored.files))
        identity = {**config.decisions(), **input_identity, "start_model": start_identity}
        # The evaluation is made before the fit: DeepSpeed shards every module that is constructed after its start.
        evaluate = make_evaluation(config, target, heldout, student, kind) if run.is_main else None
        result = run.fit(
            student, rows_to_fit, config.fit, identity=identity, evaluate=evaluate,
            saved_dtype=stored_dtype(target.config), keeps_best=True, last_file=kind.record, minutes=config.minutes,
        )  # fmt: skip
        if result is None:
            return
        usage = kind.save(student.head)
        if config.features in (None, "auto"):  # a run that began with auto may be resumed without
            shutil.rmtree(Path(config.out_dir) / FEATURES, ignore_errors=True)
        card_facts: dict[str, object] = {"taps": list(reading.taps), "objective": config.objective}
        card_facts |= {name.replace("_", " "): value for name, value in kind.facts.items()}
        card_facts["tokens"] = f"{reading.draft_vocabulary} of the target's {reading.vocabulary}"
        card_facts["seq_len"] = config.seq_len
        write_records(config, usage, card_facts, result, metrics=("tau",), record_parts=(kind.record, identity))


def build_student(
    config: HeadConfig,
    target: OpenTarget,
    stored_drafter: Stored | None,
    head_reading: HeadSizes,
    kind: HeadKind,
    draft_ids: Tensor | None,
    device: torch.device,
) -> HeadStudent:
    """The head on the whole target, both on `device`. draft_ids: the draft vocabulary of a new head."""
    dtype = frozen_dtype(config.frozen_dtype, device)
    stack = target.stack(dtype=dtype, device=device, coded=device.type == "cpu")  # coded: weights stay quantised
    multiply_by_codes(stack)  # several times as fast as dequantising, and what the head sees when it is served
    if stored_drafter is not None:
        return kind.student(stack, stored_drafter.load(torch.float32, device))
    seed = Streams(config.fit.seed).number("weights", bits=63)
    return kind.student(stack, kind.new(head_reading, stack, None if draft_ids is None else draft_ids.to(device), seed))


def make_evaluation(
    config: HeadConfig, target: OpenTarget, heldout: PackedRows, student: HeadStudent, kind: HeadKind
) -> Callable[[int], Metrics]:
    """The evaluation during training: `score_steps`, then real decoding (`Decoding`) with the head as it is served."""
    batches = batches_of(heldout, config.eval_batch_rows)
    decoding = Decoding.of(target, heldout, config.decode_prompts, config.decode_tokens)

    def evaluate(step: int) -> Metrics:
        head = copy.deepcopy(student.head).to(student.stack.dtype).requires_grad_(False)
        head.use_target(student.stack)
        return score_steps(student, batches, kind.steps) | decoding(student.stack, kind.drafts(head))

    return evaluate


def plan_memory(config: HeadConfig, reading: HeadSizes, target_config: PreTrainedConfig, kind: HeadKind) -> Plan:
    """The memory of training a head with this reading and the whole target of this config."""
    stack = layer_stack(empty_target(config, target_config)[0])  # [0]: the model
    student = kind.student(stack, kind.module(reading, all_tokens=reading.draft_vocabulary == reading.vocabulary))
    parameter_counts = dict(zip(("trained_parameters", "frozen_parameters"), student.count_parameters(), strict=True))
    plan_facts = {"taps": ",".join(map(str, reading.taps)), **kind.facts, **parameter_counts}
    return Plan(fit_memory(config, student, len(reading.taps) * reading.target_hidden, reading.vocabulary), plan_facts)
