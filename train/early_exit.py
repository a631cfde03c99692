"""EESD training: read the few layers it needs, fit the exit layer, save the drafter."""

import copy
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import PreTrainedConfig

from data_prep.text.rehearsal import rehearsable
from data_prep.text.rows import Rows
from draft_models.acceptance import Law
from draft_models.card import CARD_FILE, write_card
from draft_models.early_exit.checkpoint import from_pretrained, parts_below, read_meta, save_pretrained
from draft_models.early_exit.model import USE, EarlyExit, EarlyExitStudent, exit_layers
from draft_models.targets.anatomy import context_limit
from draft_models.targets.fingerprint import Fingerprint
from draft_models.targets.open_target import OpenTarget, open_target, pick_dtype
from draft_models.targets.stack import LayerStack
from draft_models.targets.tensor_files import TensorFiles
from inference.drafters.calibrated import Calibrated
from inference.drafters.early_exit import EarlyExitSource
from inference.loading.drafters import prepare
from inference.loading.subject import end_tokens
from outrider.errors import UserError
from outrider.files import require_writable
from outrider.processes import from_main, join_processes, only_run_of
from outrider.progress import counted
from outrider.run_dirs import recorded_at_first
from train import run_dir
from train.best import BEST_FOLDER, Best
from train.draft_tokens import pick_tokens
from train.export import served_dtype
from train.fit import fit
from train.plan import describe_plan, frozen_dtype, make_plan
from train.settings import EesdConfig
from train.top_k_rows import TopKRows, load_taught_rows
from train.watch import (
    MovedNorms,
    agreement,
    batches_of,
    decode_metrics,
    expected_tau,
    heldout_prompts,
    supervised_hidden,
    target_choices,
    target_law,
)


@rehearsable
def train_early_exit(config: EesdConfig) -> None:
    """Train an exit layer as `config` says. The drafter is `config.out_dir` itself (see `early_exit.checkpoint`).

    With `decode_prompts` it holds the weights with the highest τ of all evaluations, else the last ones. Raises
    `UserError` for an unusable target, data set or directory, before any weight is read.
    """
    target = open_target(config.target, config.revision)
    start, config = config.start, as_started(config)
    exit_layer = config.exit_layer or default_exit_layer(target.config)
    if config.plan:
        plan = make_plan(config, target.config, exit_layer)
        print(describe_plan(plan, exit_layer, target.config.num_hidden_layers), flush=True)
        return
    state, out_dir = join_processes(), require_writable(config.out_dir)
    with only_run_of(state, out_dir, "a training"):
        _train(config, start, target, exit_layer, out_dir, state)


def as_started(config: EesdConfig) -> EesdConfig:
    """`config` with the shape of the early exit that it starts from in the place of `start`."""
    if config.start is None:
        return config
    meta = read_meta(config.start)
    shape: dict[str, Any] = {"exit_layer": meta.exit_layer, "exit_depth": meta.exit_depth}
    shape |= {"train_head": meta.own_head, "train_layer": meta.own_layer, "draft_vocabulary": meta.draft_vocabulary}
    return replace(config, start=None, **shape)


def _train(
    config: EesdConfig, start: str | None, target: OpenTarget, exit_layer: int, out_dir: Path, state: PartialState
) -> None:
    run_dir.require_free(out_dir, config.resume)
    layers = None if config.online else exit_layers(target.config, exit_layer)
    context = context_limit(target.config)
    if config.decode_prompts and config.decode_tokens >= context:
        raise UserError(
            f"decode_tokens={config.decode_tokens}: expected less than the target's context of {context} tokens"
        )
    if config.seq_len > context:
        raise UserError(f"seq_len={config.seq_len}: the target's context is {context} tokens")
    files, tokenizer = target.files, target.tokenizer
    reads_all = config.online or config.decode_prompts > 0

    def identify() -> tuple[Fingerprint, dict[str, str]]:
        return target.fingerprinted(fetch=reads_all), parts_below(files, target.config, exit_layer)

    fingerprint, trained_on = from_main(state, identify)
    cached = config.teacher == "cached"
    rows = load_taught_rows(config.data, tokenizer, config.seq_len, "train", cached=cached)
    heldout = load_taught_rows(
        config.data, tokenizer, config.seq_len, "heldout", cached=cached, max_rows=config.eval_rows
    )

    begun = None
    if start is not None:
        begun = from_pretrained(start, target.config, fingerprint, dtype=torch.float32)
        tokens = begun.draft_tokens
    else:
        tokens = from_main(state, lambda: pick_tokens(config.draft_vocabulary, target, rows, heldout))
    student = make_student(config, target, exit_layer, layers, state.device, tokens, begun)
    if state.is_main_process:
        print(describe(student, config, files, exit_layer), flush=True)
    recipe = config.deciding() | {"exit_layer": exit_layer, "data_key": rows.key}
    recipe |= {} if start is None else {"start": read_meta(start).weights_sha256}
    identity = {**recipe, "target": asdict(fingerprint), "trained_on": trained_on}
    if not reads_all:  # of a target on the Hub there may be more tomorrow than today
        identity["target"].pop("tensors")
    run = recorded_at_first(identity)
    best = Best(out_dir / BEST_FOLDER, run, config) if config.decode_prompts else None
    result = fit(
        student,
        rows,
        config.fit,
        out_dir,
        resume=config.resume,
        identity=identity,
        settings=config,
        evaluate=Watch(config, target, heldout, student, best, active=state.is_main_process),
        minutes=config.minutes,
    )
    if state.is_main_process and result.was_finished and (out_dir / CARD_FILE).exists():  # a report may have come to it
        print(f"{out_dir}: finished already", flush=True)
    elif state.is_main_process:
        step, metrics = (result.steps, result.metrics) if best is None else best.restore(student)
        training = {**recipe, "fit": asdict(config.fit), "steps": result.steps, "step": step, "metrics": metrics}
        training["training_seconds"] = result.seconds
        save_drafter(out_dir, student, fingerprint, training, target.config, trained_on)
        facts = {key: recipe[key] for key in ("exit_layer", "exit_depth", "train_head", "seq_len")}
        facts |= {"objective": config.loss} | ({"teacher": config.teacher} if config.distils else {})
        facts |= {} if start is None else {"went on from": start}
        facts |= {} if tokens is None else {"tokens": f"{len(tokens)} of the target's {target.config.vocab_size}"}
        facts |= {"data": config.data.source, "steps": result.steps}
        facts |= {"chosen step": step, "tau": round(metrics["tau"], 3)} if best else {}
        write_card(out_dir, USE, config.target, facts)
        layers_of_all = f"{exit_layer} of {target.config.num_hidden_layers}"
        print(f"saved drafter={out_dir} exit_layer={layers_of_all} step={step}", flush=True)
    state.wait_for_everyone()


def make_student(
    config: EesdConfig,
    target: OpenTarget,
    exit_layer: int,
    layers: list[int] | None,
    device: torch.device,
    tokens: Tensor | None,
    begun: EarlyExit | None = None,
) -> EarlyExitStudent:
    """What is trained. begun: an early exit of this shape and these tokens to go on with."""
    model = target.layers(layers, dtype=frozen_dtype(config.frozen_dtype, device), device=device)
    student = EarlyExitStudent(
        model,
        exit_layer,
        draft_tokens=None if tokens is None else tokens.to(device),
        **config.student,
    )
    if begun is not None:
        student.drafter.load_state_dict(begun.state_dict())
    return student


def default_exit_layer(target: PreTrainedConfig) -> int:
    """N where none is given: 8 % of the layers, the middle of the paper's 5–10 %, and at least one."""
    return max(1, round(0.08 * target.num_hidden_layers))


def describe(student: EarlyExitStudent, config: EesdConfig, files: TensorFiles, exit_layer: int) -> str:
    """One greppable line: what was read and what is trained, by how many processes, and what is known of tau."""
    law = "whole_target" if config.online or config.decode_prompts else "none"
    law = "top_k_lower_bound" if law == "none" and config.distils else law
    trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in student.parameters() if not p.requires_grad)
    return (
        f"eesd exit_layer={exit_layer} read_bytes={files.bytes_read} read_tensors={files.tensors_read}/"
        f"{len(files.file_of)} trained_parameters={trained} frozen_parameters={frozen} "
        f"processes={PartialState().num_processes} objective={config.objective} tau_analytic={law}"
    )


def save_drafter(
    path: Path,
    student: EarlyExitStudent,
    fingerprint: Fingerprint,
    training: dict[str, Any],
    target: PreTrainedConfig,
    trained_on: Mapping[str, str],
) -> None:
    """Save the student's drafter in the target's own dtype; trained_on: see `save_pretrained`."""
    save_pretrained(path, student.drafter, fingerprint, training, served_dtype(target), trained_on)


class Watch:
    """What is watched while training, on the main process: the number that training is for.

    top1: share of held-out supervised positions at which the drafter's argmax is the text's next token.
    tau_analytic: see `expected_tau`. It is of the whole target where that is at hand: it runs along for the loss, or
    there are `decode_prompts`. Of its cached top-k it is a lower bound (see `top_k_law`). Else there is none.
    norms_moved: see `MovedNorms`.
    With `decode_prompts` the whole target is loaded too, for more:
    top1_target: the same share against the target's own argmax.
    tau and acceptance by position: real decoding's (`decode_metrics`). `best` then keeps the weights.

    active: whether this is the main process. Make it before `fit`: DeepSpeed shares out every module made after it has
    begun.
    """

    def __init__(
        self,
        config: EesdConfig,
        target: OpenTarget,
        heldout: Rows | TopKRows,
        student: EarlyExitStudent,
        best: Best | None,
        *,
        active: bool,
    ):
        self.config, self.best, self.active = config, best, active
        self.norms = MovedNorms(student, served_dtype(target.config))
        self.batches = batches_of(heldout, config.eval_batch_rows) if active else []
        room = context_limit(target.config) - config.decode_tokens
        self.prompts = heldout_prompts(heldout, config.decode_prompts, room)
        device = student.stack.device
        dtype = pick_dtype("auto", target.config, device)
        self.eos = end_tokens(target)
        self.whole = target.stack(dtype=dtype, device=device) if active and self.prompts else None
        self.choices: list[Tensor] = []  # the target's argmax at the supervised positions of each batch
        self.laws: list[Law | None] = []  # and its law there; None where the student has it, or nobody
        for batch in counted(self.batches, "reading held-out text", "batches"):
            law = None
            if self.whole is not None:
                hidden = supervised_hidden(self.whole, batch)
                self.choices.append(target_choices(self.whole, batch["labels"], hidden))
                law = None if student.online else target_law(self.whole, hidden)
            self.laws.append(law)

    def __call__(self, student: torch.nn.Module, step: int) -> dict[str, float]:
        if not self.active:
            return {}
        assert isinstance(student, EarlyExitStudent)
        metrics, guesses = self._judge(student)
        if self.whole is not None:
            metrics["top1_target"] = agreement(guesses, self.choices)
            metrics |= decode_student(student, self.whole, self.prompts, self.config.decode_tokens, self.eos)
        metrics |= self.norms(student, step)
        if self.best is not None:
            self.best.offer(student, step, metrics)
        return metrics

    def _judge(self, student: EarlyExitStudent) -> tuple[dict[str, float], list[Tensor]]:
        """top1 and tau_analytic, and the drafter's argmax [B, T] of each batch."""
        device, guesses, accepted = student.stack.device, list[Tensor](), list[Tensor]()
        pairs = list(zip(self.batches, self.laws, strict=True))
        for batch, law in counted(pairs, "judging held-out text", "batches"):
            choices, known = student.judged(**{key: value.to(device) for key, value in batch.items()}, law=law)
            guesses.append(choices)
            accepted += [] if known is None else [known]
        metrics = {"top1": agreement(guesses, [batch["labels"] for batch in self.batches])}
        if accepted:
            metrics |= expected_tau(accepted, [batch["documents"] for batch in self.batches])
        return metrics, guesses


def decode_student(
    student: EarlyExitStudent,
    stack: LayerStack,
    prompts: list[list[int]],
    max_new_tokens: int,
    eos: Collection[int],
) -> dict[str, float]:
    """What `decode_metrics` says of the student's drafter, over continuations of `prompts` by the whole target."""
    shared = {id(head): head for head in student.drafter.shared_head}  # the target's: not to be copied
    drafter = copy.deepcopy(student.drafter, shared).to(stack.dtype).requires_grad_(False)
    prepare(stack, {"early_exit": Calibrated(drafter)})
    return decode_metrics(stack, EarlyExitSource(drafter), prompts, max_new_tokens, eos)
