"""Training an EAGLE-3 head: make or open one, fit it beside its target, choose the best by real decoding, save it."""

import copy
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import PreTrainedConfig

from data_prep.text.rehearsal import rehearsable
from data_prep.text.rows import Rows, load_rows
from draft_models.acceptance import tau_of_rounds
from draft_models.card import write_card
from draft_models.eagle3.card import TRAINING_FILE, use_of
from draft_models.eagle3.checkpoint import StoredHead, make_head, open_head
from draft_models.eagle3.export import require_said, save_head
from draft_models.eagle3.model import Eagle3
from draft_models.eagle3.new_head import new_head, new_reading
from draft_models.eagle3.reading import Reading, require_target
from draft_models.early_exit.checkpoint import provenance
from draft_models.targets.anatomy import context_limit
from draft_models.targets.model_identity import model_identity
from draft_models.targets.open_target import OpenTarget, open_target
from draft_models.targets.stack import LayerStack
from inference.drafters.eagle3 import Eagle3Source
from inference.loading.subject import end_tokens
from outrider.errors import UserError, warn
from outrider.files import require_writable, write_json
from outrider.processes import from_main, join_processes, only_run_of
from outrider.progress import counted
from outrider.streams import Streams
from train import run_dir, sharding
from train.best import BEST_FOLDER, Best
from train.draft_tokens import pick_tokens
from train.eagle3_plan import describe_plan
from train.eagle3_settings import Eagle3Config
from train.eagle3_student import Eagle3Student
from train.export import served_dtype
from train.fit import fit
from train.plan import frozen_dtype
from train.target_states import RowsWithStates, with_states
from train.watch import WATCHED_DRAFT, MovedNorms, batches_of, decode_metrics, heldout_prompts


@rehearsable
def train_eagle3(config: Eagle3Config) -> None:
    """Train a head as `config` says. It is `config.out_dir` itself, a directory that serving engines read.

    It holds the weights with the highest τ of all evaluations, not the last ones. Raises `UserError` for an unusable
    target, head, data set or directory, before any weight is read.
    """
    target = open_target(config.target, config.revision)
    stored = None if config.start is None else open_head(config.start, target.config, changes=config.reading)
    if stored is not None and not stored.made_here:
        warn(f"start={config.start}: another trainer's head, read as its config.json says; examine it first "
             "(evaluate-checkpoint eagle3=… doctor=true): a misread head learns to be one")  # fmt: skip
    reading = reading_of(config, stored, target.config)
    if config.plan:
        print(describe_plan(config, reading, target.config), flush=True)
        return
    state, out_dir = join_processes(), require_writable(config.out_dir)
    with only_run_of(state, out_dir, "a training"):
        _train(config, target, stored, reading, out_dir, state)


def reading_of(config: Eagle3Config, stored: StoredHead | None, target: PreTrainedConfig) -> Reading:
    """What the head that is trained is. Raises `UserError` where it cannot be trained so, or not be written."""
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
    require_said(empty, config.dialect, target)
    limit = context_limit(target)
    for name, most in (("seq_len", limit), ("decode_tokens", limit - 1)):
        if getattr(config, name) > most:
            raise UserError(f"{name}={getattr(config, name)}: the target's context is {limit} tokens")
    return reading


def _train(
    config: Eagle3Config,
    target: OpenTarget,
    stored: StoredHead | None,
    reading: Reading,
    out_dir: Path,
    state: PartialState,
) -> None:
    run_dir.require_free(out_dir, config.resume)
    rows = load_rows(config.data, target.tokenizer, config.seq_len, "train")
    heldout = load_rows(config.data, target.tokenizer, config.seq_len, "heldout", max_rows=config.eval_rows)
    tokens = from_main(state, lambda: pick_tokens(config.draft_vocabulary, target, rows, heldout))
    fingerprint = from_main(state, lambda: target.fingerprint)

    def build() -> Eagle3Student:
        return make_student(config, target, stored, reading, tokens, state.device)

    taught: Rows | RowsWithStates = rows
    if config.features is not None:
        made_from = {"target": asdict(fingerprint), "data_key": rows.key, "taps": list(reading.taps)}
        made_from["frozen_dtype"] = str(frozen_dtype(config.frozen_dtype, state.device))
        item = (config.seq_len, len(reading.taps) + 1, reading.target_hidden)
        dtype = getattr(torch, config.features_dtype)
        taught = with_states(rows, build, item, Path(config.features), dtype, made_from, state)
    student = build()
    if state.is_main_process:
        print(describe(student, config), flush=True)
    identity = config.deciding() | {"target": asdict(fingerprint), "data_key": rows.key, "taps": list(reading.taps)}
    identity["start_model"] = None if stored is None else from_main(state, lambda: model_identity(stored.files))
    best = Best(out_dir / BEST_FOLDER, identity, config)
    watch = Watch(config, target, heldout, student, best) if state.is_main_process else None
    result = fit(
        student,
        taught,
        config.fit,
        out_dir,
        resume=config.resume,
        identity=identity,
        settings=config,
        evaluate=watch or (lambda *_: {}),
        minutes=config.minutes,
    )
    sharding.make_whole(student.head, frozen=True)  # what is frozen of it is saved as well
    if state.is_main_process and result.was_finished and (out_dir / TRAINING_FILE).exists():  # the card may have more
        print(f"{out_dir}: finished already", flush=True)
    elif state.is_main_process:
        step, metrics = best.restore(student)
        head = copy.deepcopy(student.head).to(served_dtype(target.config)).requires_grad_(False)
        made_here = stored is None or stored.made_here  # of another's, a doctor has still to see how it is read
        drafted = min(config.draft_steps, 7)
        save_head(out_dir, head, config.dialect, target.config, config.target, drafted, made_here=made_here)
        facts: dict[str, Any] = {"taps": list(reading.taps), "objective": config.objective}
        facts |= {"draft steps": config.draft_steps, "seq_len": config.seq_len, "data": config.data.source}
        facts |= {"tokens": f"{reading.draft_vocabulary} of the target's {reading.vocabulary}"}
        facts |= {"steps": result.steps, "chosen step": step, "tau": round(metrics["tau"], 3)}
        write_card(out_dir, use_of(config.dialect, reading.fc_bias), config.target, facts)
        report = {"target": config.target, "step": step, "metrics": metrics, "steps": result.steps}
        report |= {"training_seconds": result.seconds, "last_metrics": result.metrics}
        report |= {"settings": identity, "fit": asdict(config.fit)}
        write_json(out_dir / TRAINING_FILE, report | {"made_with": provenance()})
        print(f"saved drafter={out_dir} step={step} tau={metrics['tau']:.4f}", flush=True)
    state.wait_for_everyone()


def make_student(
    config: Eagle3Config,
    target: OpenTarget,
    stored: StoredHead | None,
    reading: Reading,
    tokens: Tensor | None,
    device: torch.device,
) -> Eagle3Student:
    """What is trained: `stored`, or a new head of `tokens`, beside the whole target."""
    stack = target.stack(dtype=frozen_dtype(config.frozen_dtype, device), device=device)
    if stored is None:
        tokens = None if tokens is None else tokens.to(device)
        head = new_head(reading, stack, tokens, Streams(config.fit.seed).number("weights", bits=63))
    else:
        require_target(reading, target.config, stored.source)
        head = make_head(reading, stored.weights(torch.float32, device), stored.source)
    return Eagle3Student(
        stack, head, objective=config.objective, steps=config.draft_steps, decay=config.step_decay,
        train_head=config.train_head,
    )  # fmt: skip


def describe(student: Eagle3Student, config: Eagle3Config) -> str:
    """One greppable line: what is trained, on what, and by how many processes."""
    reading = student.head.reading
    trained, frozen = (sum(p.numel() for p in student.parameters() if p.requires_grad == on) for on in (True, False))
    return (
        f"eagle3 start={config.start or 'new'} taps={','.join(map(str, reading.taps))} "
        f"draft_steps={config.draft_steps} draft_vocabulary={reading.draft_vocabulary} trained_parameters={trained} "
        f"frozen_parameters={frozen} "
        f"processes={PartialState().num_processes} objective={config.objective}"
    )


class Watch:
    """Evaluation while training, for the main process: decodes with what would be served, and keeps the best.

    loss_<i>, agree_<i>: of the i-th token of a draft on held-out text, the loss and the share of places where the
    head's likeliest token is the target's own. tau_analytic: what sampling would come to (see `expected_tau`). Besides,
    those of `decode_metrics` and `MovedNorms`.

    Make it before `fit`: DeepSpeed shares out every module made after it has begun.
    """

    def __init__(
        self,
        config: Eagle3Config,
        target: OpenTarget,
        heldout: Rows,
        student: Eagle3Student,
        best: Best,
    ) -> None:
        self.best, self.new_tokens = best, config.decode_tokens
        self.eos = end_tokens(target)
        self.steps = max(config.draft_steps, WATCHED_DRAFT)
        self.norms = MovedNorms(student, served_dtype(target.config))
        self.batches = batches_of(heldout, config.eval_batch_rows)
        self.prompts = heldout_prompts(
            heldout, config.decode_prompts, context_limit(target.config) - config.decode_tokens
        )

    def __call__(self, student: torch.nn.Module, step: int) -> dict[str, float]:
        assert isinstance(student, Eagle3Student)
        metrics = judge_steps(student, self.batches, self.steps)
        metrics |= decode_student(student, self.prompts, self.new_tokens, self.eos)
        metrics |= self.norms(student, step)
        self.best.offer(student, step, metrics)
        return metrics


def judge_steps(student: Eagle3Student, batches: Sequence[dict[str, Tensor]], steps: int) -> dict[str, float]:
    """loss_<i>, agree_<i> and tau_analytic of `Watch`, over `batches` of rows."""
    device = student.stack.device
    found = [student.judged(**{key: value.to(device) for key, value in batch.items()}, steps=steps)
             for batch in counted(batches, "judging held-out text", "batches")]  # fmt: skip
    metrics = dict[str, float]()
    for i, count in enumerate(torch.stack([one.guesses for one in found]).sum(0).tolist()):
        if count:
            metrics[f"loss_{i + 1}"] = sum(float(one.loss[i]) for one in found) / count
            metrics[f"agree_{i + 1}"] = sum(int(one.right[i]) for one in found) / count
    rounds = torch.cat([tau_of_rounds(drafts_of(one.accepted)) for one in found])
    return metrics | ({"tau_analytic": rounds.double().mean().item()} if len(rounds) else {})


def drafts_of(accepted: Tensor) -> Tensor:
    """α of every draft of `WATCHED_DRAFT` tokens on the text, [B, places, WATCHED_DRAFT], NaN where there is none.

    accepted [B, T, S]: α by label's position and step. Step i of the draft that begins after place t has the label of
    position t + 1 + i.
    """
    count = max(0, accepted.shape[1] - WATCHED_DRAFT)
    by_step = [accepted[:, step + 1 : step + 1 + count, step] for step in range(WATCHED_DRAFT)]
    return torch.stack(by_step, -1)


def decode_student(
    student: Eagle3Student, prompts: Sequence[Sequence[int]], new_tokens: int, eos: Collection[int]
) -> dict[str, float]:
    """What `decode_metrics` says of the student's head, over continuations of `prompts` by its target."""
    stack: LayerStack = student.stack
    head = copy.deepcopy(student.head).to(stack.dtype).requires_grad_(False)
    if not head.reading.own_embedding:
        head.use_embedding(stack.embed_tokens.weight)
    return decode_metrics(stack, Eagle3Source(head), prompts, new_tokens, eos)
