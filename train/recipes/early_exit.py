"""EESD: an early exit is trained on the few target layers that it needs.

`prepare` makes target, rows and student; `EarlyExitStudent.forward` is the training step with its loss; the loop around
it is train/core/loop.py.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState
from torch import Tensor

from outrider.base.processes import from_main, say
from outrider.data_prep.text.rows import load_rows
from outrider.draft_models.card import CARD_FILE, TAUS
from outrider.draft_models.draft_vocabulary import draft_indices
from outrider.draft_models.early_exit.checkpoint import from_pretrained, parts_below, read_meta, save_pretrained
from outrider.draft_models.early_exit.model import USE, USE_IN_ONE_PASS, EarlyExit
from outrider.draft_models.losses import head_product, linear_cross_entropy, linear_divergence, linear_topk_divergence
from outrider.draft_models.targets.open_target import OpenTarget, open_target, pick_dtype, stored_dtype
from outrider.inference.drafters.early_exit.drafter import draft_model_of
from outrider.inference.loading.models import prepare_models
from outrider.inference.settings.kinds import EARLY_EXIT
from outrider.train.core.driver import train
from outrider.train.core.training import Metrics, Trained, Training, TrainRows
from outrider.train.parts.drafter import (
    figures,
    frozen_dtype,
    parameters_of,
    pick_tokens,
    require_context,
    require_vocabulary,
    write_drafters_card,
)
from outrider.train.parts.heldout import Decoding, HeldOutText, MovedNorms
from outrider.train.parts.top_k_rows import load_top_k_rows
from outrider.train.settings.drafters import EesdConfig
from outrider.train.students.early_exit import ExitOnFrozenLayers, exit_plan, layers_read, with_shape


def train_early_exit(config: EesdConfig) -> None:
    """Train an exit layer according to `config`. The drafter is `config.out_dir` (see `early_exit.checkpoint`).

    With `decode_prompts` it contains the weights with the highest τ of all evaluations, else the last ones. Raises
    `UserError` for an unusable target, data set or directory, before any weight is read.
    """
    target = open_target(config.target, config.revision)
    shaped = with_shape(config, target.config)
    require_vocabulary(shaped.draft_vocabulary, target.config)
    train(shaped, partial(exit_plan, shaped, target.config), partial(prepare, shaped, target, config.start))


def prepare(
    config: EesdConfig, target: OpenTarget, start: str | None, state: PartialState
) -> "Training[EarlyExitStudent]":
    """The training. start: the directory of an early exit to continue from. Raises `UserError` for unusable inputs."""
    exit_layer = config.exit_layer
    assert exit_layer is not None  # see `with_shape`
    layers = layers_read(config, target.config)
    require_context(target.config, config.seq_len, config.decode_tokens if config.decode_prompts else 0)
    reads_all = config.online or config.decode_prompts > 0
    fingerprint = from_main(state, lambda: target.fingerprinted(fetch=reads_all))
    trained_on = from_main(state, lambda: parts_below(target.files, target.config, exit_layer))
    begun = None if start is None else from_pretrained(start, target.config, fingerprint, dtype=torch.float32)
    kind = load_top_k_rows if config.teacher == "cached" else load_rows
    load = partial(kind, config.data, target.tokenizer, config.seq_len)
    rows, heldout = load("train"), load("heldout", max_rows=config.eval_rows)

    if begun is None:
        tokens = from_main(state, lambda: pick_tokens(config.draft_vocabulary, target, rows, heldout))
    else:
        tokens = begun.draft_tokens
    model = target.layers(layers, dtype=frozen_dtype(config.frozen_dtype, state.device), device=state.device)
    student = EarlyExitStudent(model, config, None if tokens is None else tokens.to(state.device))
    if begun is not None:
        student.drafter.load_state_dict(begun.state_dict(), strict=False)  # it may have a mask, or need one
    trained, frozen = parameters_of(student)
    accept = "whole_target" if reads_all else "top_k_lower_bound" if config.distils else "none"
    accept = "none" if config.parallel else accept  # it is of one pass a token
    read = f"read_bytes={target.files.bytes_read} read_tensors={target.files.tensors_read}/{len(target.files.file_of)}"
    say(f"eesd exit_layer={exit_layer} {read} trained_parameters={trained} frozen_parameters={frozen} "
        f"processes={state.num_processes} objective={config.objective} tau_analytic={accept}")  # fmt: skip

    recipe = config.deciding() | {"exit_layer": exit_layer, "data_key": rows.key}
    recipe |= {} if start is None else {"start": read_meta(start).weights_sha256}
    target_record = asdict(fingerprint)
    if not reads_all:  # the local copy of a target on the Hub may have more files later
        target_record.pop("tensors")

    def save(trained: Trained) -> None:
        facts = {**recipe, "fit": asdict(config.fit), "steps": trained.result.steps, "step": trained.step}
        facts |= {"metrics": trained.metrics, "training_seconds": trained.result.seconds}
        dtype = stored_dtype(target.config)
        save_pretrained(Path(config.out_dir), student.drafter, fingerprint, facts, dtype, trained_on)
        write_card(config, target.config.num_hidden_layers, student.drafter, start, trained)

    return Training(
        student,
        rows,
        config.fit,
        identity={**recipe, "target": target_record, "trained_on": trained_on},
        # before `fit`: DeepSpeed shards every module constructed after its start
        evaluate=evaluation_of(config, target, heldout, student) if state.is_main_process else None,
        save=save,
        finished=CARD_FILE,
        keeps_best=config.decode_prompts > 0,
        on_step=student.begin_step,
        minutes=config.minutes,
    )


class EarlyExitStudent(ExitOnFrozenLayers):
    """An early exit that learns, on the target's frozen layers, with the contract of `fit`."""

    def forward(
        self, input_ids: Tensor, labels: Tensor, positions: Tensor, documents: Tensor, **top_k: Tensor
    ) -> dict[str, Tensor]:
        """{"loss_sum"} over supervised positions. All arguments are [B, T] (see `data_prep.text.rows`); labels are
        already shifted, and `IGNORE` if unsupervised; top_k: top_ids, top_logprobs [B, T, k] and tail [B, T]."""
        rows = self.rows(input_ids, labels, positions, documents)
        hidden, target = self.hidden(input_ids, positions, documents, rows)
        product = head_product(self.drafter.output_head, hidden)
        rule, tokens, vocabulary = self.drafter.rule, self.drafter.draft_tokens, self.drafter.vocabulary
        if self.objective == "cross_entropy":
            loss = linear_cross_entropy(*product, draft_indices(rows.labels, tokens, vocabulary), rule=rule)
        elif target is None:
            ids, logprobs, tail = (rows.of(top_k[name]) for name in ("top_ids", "top_logprobs", "tail"))
            cached = (draft_indices(ids, tokens, vocabulary), logprobs, tail)
            loss = linear_topk_divergence(*product, *cached, rows.labels, self.objective, rule=rule)
        else:
            sides = (*product, *head_product(self.stack.head, rows.of(target)))
            loss = linear_divergence(*sides, rows.labels, self.objective, rule=rule, target_rule=rule, tokens=tokens)
        return {"loss_sum": loss / self.predictions}


def evaluation_of(
    config: EesdConfig, target: OpenTarget, heldout: TrainRows, student: EarlyExitStudent
) -> Callable[[EarlyExitStudent, int], Metrics]:
    """The evaluation during training: metrics of `HeldOutText.judge`, `Decoding` and `MovedNorms`.

    tau_analytic uses the whole target if it is loaded, for the loss or for `decode_prompts`. With the target's cached
    top-k it is a lower bound (see `acceptance_by_top_k`). Else, and with `parallel`, it is absent; tau_text then says
    how good the exit is, of one pass a token. With `decode_prompts` the whole target is loaded too, for top1_target and
    real decoding.
    """
    device, full_target = student.stack.device, None
    decoding = Decoding.of(target, heldout, config.decode_prompts, config.decode_tokens)
    if decoding.prompts:
        dtype, coded = pick_dtype("auto", target.config, device), device.type == "cpu"
        full_target = target.stack(dtype=dtype, device=device, coded=coded)
    text = HeldOutText(heldout, config.eval_batch_rows, full_target, acceptances=not student.online)
    norms = MovedNorms(student, stored_dtype(target.config))

    def evaluate(_: EarlyExitStudent, step: int) -> Metrics:
        metrics = text.judge(student.drafter.logits_after_norm, student.supervised)
        if student.parallel is not None:
            metrics.pop("tau_analytic", None)
        if full_target is not None:
            shared = {id(head): head for head in student.drafter.shared_head}  # the target's, which must not be copied
            drafter = copy.deepcopy(student.drafter, shared).to(full_target.dtype).requires_grad_(False)
            prepare_models(full_target, {EARLY_EXIT.name: drafter})
            metrics |= decoding(full_target, draft_model_of(drafter))
        return metrics | norms(student, step)

    return evaluate


def write_card(config: EesdConfig, layers: int, drafter: EarlyExit, start: str | None, trained: Trained) -> None:
    """Write the card of the saved `drafter` of a target of so many layers, and say that it is saved."""
    names, tokens = ("exit_layer", "exit_depth", "train_head", "seq_len"), drafter.draft_tokens
    facts: dict[str, object] = {name: getattr(config, name) for name in names}
    facts |= {"objective": config.objective} | ({"teacher": config.teacher} if config.distils else {})
    facts |= {} if start is None else {"went on from": Path(start).name}
    facts |= {"tokens a pass": config.parallel} if config.parallel else {}
    facts |= {} if tokens is None else {"tokens": f"{len(tokens)} of the target's {drafter.vocabulary}"}
    taus = [name for name in TAUS if name in trained.metrics][:1]
    write_drafters_card(config, USE_IN_ONE_PASS if config.parallel else USE, facts, trained, taus)
    summary = f"exit_layer={config.exit_layer} of {layers} step={trained.step} {figures(trained, taus)}"
    say(f"saved drafter={Path(config.out_dir)} {summary}".rstrip())
