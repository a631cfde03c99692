"""EESD: an early exit is trained on the few target layers that it needs, layers 0 to N − 1.

The exit is `exit_depth` layers of its own, or none, with a norm and a head, on the hidden states of these layers. With
`parallel` it drafts several tokens in one pass: masks stand for all but the first.

    python train/eesd.py target=MODEL data=ultrachat

`train_early_exit` is the whole training, `EarlyExitStudent.forward` its step with the loss. The loop around the step is
train/core/loop.py.
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    from outrider.commands import run_script

    run_script("eesd")

import copy
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.base.processes import say
from outrider.draft_models import card
from outrider.draft_models.early_exit.checkpoint import digest_parts_below, from_pretrained, read_meta, save_pretrained
from outrider.draft_models.early_exit.model import USE, USE_IN_ONE_PASS, EarlyExit, exit_layers
from outrider.draft_models.losses import IGNORE, head_product
from outrider.draft_models.targets.model_files import layer_stack
from outrider.draft_models.targets.open_target import OpenTarget, open_target, stored_dtype
from outrider.inference.drafters.early_exit import KIND
from outrider.inference.drafters.early_exit.drafter import draft_model_of
from outrider.inference.loading.memory_plan import Plan
from outrider.train.core.driver import training_run
from outrider.train.core.training import Batch, FitResult, Metrics, Student, TrainRows
from outrider.train.parts.drafter import frozen_dtype, pick_tokens, require_context, require_vocabulary, write_records
from outrider.train.parts.heldout import Decoding, HeldOutText, load_to_decode
from outrider.train.parts.memory import decoding_target, empty_target, fit_memory
from outrider.train.parts.objective import draft_loss, load_taught_rows
from outrider.train.parts.parallel import DraftRows, Parallel
from outrider.train.settings.drafters import EesdConfig


def train_early_exit(config: EesdConfig) -> None:
    """Train an exit layer according to `config`. The drafter is `config.out_dir` (see `early_exit.checkpoint`).

    With `decode_prompts` it contains the weights with the highest τ of all evaluations, else the last ones. Raises
    `UserError` for an unusable target, data set or directory, before any weight is read.
    """
    target = open_target(config.target, config.revision)
    start, config = config.start, with_shape(config, target.config)
    require_vocabulary(config.draft_vocabulary, target.config)
    make_plan = partial(plan_memory, config, target.config)
    if config.plan:
        print(make_plan(), flush=True)
        return
    with training_run(config, make_plan) as run:
        require_context(target.config, config.seq_len, config.decode_tokens if config.decode_prompts else 0)
        layer_ids, reads_all_layers = layers_read(config, target.config), config.online or config.decode_prompts > 0
        fingerprint = run.from_main(lambda: target.make_fingerprint(fetch=reads_all_layers))
        part_digests = run.from_main(lambda: digest_parts_below(target.files, target.config, config.exit_layer or 0))
        start_exit = None if start is None else from_pretrained(start, target.config, fingerprint, dtype=torch.float32)

        rows = load_taught_rows(config, target, "train")
        heldout = load_taught_rows(config, target, "heldout", config.eval_rows)
        if start_exit is None:
            draft_tokens = run.from_main(lambda: pick_tokens(config.draft_vocabulary, target, rows, heldout))
        else:
            draft_tokens = start_exit.draft_tokens

        student = build_student(config, target, layer_ids, draft_tokens, start_exit, run.device)
        trained_count, frozen_count = student.count_parameters()
        files = target.files
        tau_source = "whole_target" if reads_all_layers else "top_k_lower_bound" if config.distils else "none"
        say(f"eesd exit_layer={config.exit_layer} read_bytes={files.bytes_read} "
            f"read_tensors={files.tensors_read}/{len(files.file_of)} trained_parameters={trained_count} "
            f"frozen_parameters={frozen_count} processes={run.state.num_processes} objective={config.objective} "
            f"tau_analytic={'none' if config.parallel else tau_source}")  # fmt: skip

        settings = config.decisions() | {"exit_layer": config.exit_layer, "data_key": rows.key}
        settings |= {} if start is None else {"start": read_meta(start).weights_sha256}
        target_record = asdict(fingerprint)
        if not reads_all_layers:  # the local copy of a target on the Hub may have more files later
            target_record.pop("tensors")
        # The evaluation is made before the fit: DeepSpeed shards every module that is constructed after its start.
        evaluate = make_evaluation(config, target, heldout, student) if run.is_main else None
        result = run.fit(
            student, rows, config.fit, identity={**settings, "target": target_record, "trained_on": part_digests},
            evaluate=evaluate, saved_dtype=stored_dtype(target.config), keeps_best=config.decode_prompts > 0,
            last_file=card.CARD_FILE, minutes=config.minutes,
        )  # fmt: skip
        if result is not None:
            dtype = stored_dtype(target.config)
            training_facts = {**settings, "fit": asdict(config.fit), "steps": result.steps, "step": result.step}
            training_facts |= {"metrics": result.metrics, "training_seconds": result.seconds}
            save_pretrained(run.out_dir, student.drafter, fingerprint, training_facts, dtype, part_digests)
            write_card(config, target.config.num_hidden_layers, student.drafter, start, result)


def with_shape(config: EesdConfig, target_config: PreTrainedConfig) -> EesdConfig:
    """`config` with the exit layer, and with the shape of the early exit stored in `start` instead of it."""
    if config.start is None:
        default_layer = max(1, round(0.08 * target_config.num_hidden_layers))  # of the paper's 5 to 10 %
        return replace(config, exit_layer=config.exit_layer or default_layer)
    start_meta = read_meta(config.start)
    return replace(
        config,
        start=None,
        exit_layer=start_meta.exit_layer,
        exit_depth=start_meta.exit_depth,
        train_head=start_meta.own_head,
        train_layer=start_meta.own_layer,
        draft_vocabulary=start_meta.draft_vocabulary,
    )


def layers_read(config: EesdConfig, target_config: PreTrainedConfig) -> list[int] | None:
    """The target's layers that the training reads; None: all. Raises `UserError` if there is no such exit layer."""
    assert config.exit_layer is not None  # see `with_shape`
    layer_ids = exit_layers(target_config, config.exit_layer)  # the first N, and the last, which a new exit copies
    return None if config.online else layer_ids


def build_student(
    config: EesdConfig,
    target: OpenTarget,
    layer_ids: list[int] | None,
    draft_tokens: Tensor | None,
    start_exit: EarlyExit | None,
    device: torch.device,
) -> "EarlyExitStudent":
    """The exit on the target's layers `layer_ids` (see `layers_read`). draft_tokens: its draft vocabulary.

    start_exit: the exit to go on from.
    """
    target_model = target.layers(layer_ids, dtype=frozen_dtype(config.frozen_dtype, device), device=device)
    student = EarlyExitStudent(target_model, config, None if draft_tokens is None else draft_tokens.to(device))
    if start_exit is not None:
        # Not strict: a mask, of drafts of several tokens in one pass, may be only in the one or in the other.
        student.drafter.load_state_dict(start_exit.state_dict(), strict=False)
    return student


class EarlyExitStudent(Student):
    """The target's frozen first N layers, and an exit layer on them that learns.

    The exit layer, its norm, with `train_head` its head, and its mask become float32 master weights. Everything else is
    frozen, keeps its dtype and runs without gradient, but for what masks run through.

    config: its shape (see `with_shape`) and objective: cross_entropy on the labels, as in the paper, or one of
    `draft_models.losses.DIVERGENCES` from the target at every supervised position. For a divergence `model` is the
    whole target, and layers N..L−1 run too, on the hidden states of layer N. With teacher=cached the rows contain the
    target's top-k instead. Then, and for cross-entropy, `model` has only the layers of `exit_layers`.

    draft_tokens: the draft vocabulary. Cross-entropy uses only labels in it; for divergences see
    `draft_models.losses`. Without `train_head` the drafter's head is the target's rows for these tokens, and the
    target's other rows are dropped unless the target is an online teacher.
    """

    def __init__(self, model: PreTrainedModel, config: EesdConfig, draft_tokens: Tensor | None = None):
        super().__init__()
        assert config.exit_layer is not None
        self.objective, self.online = config.objective, config.online
        self.drafter = EarlyExit(
            model, config.exit_layer, own_head=config.train_head, own_layer=config.train_layer, depth=config.exit_depth,
            draft_tokens=draft_tokens, parallel=config.parallel,
        ).float()  # fmt: skip
        mask_id = self.drafter.vocabulary  # the id after the target's last one
        self.parallel = Parallel(config.parallel or 1, mask_id, config.fit.seed, config.position_weights)
        # The target's rows for the draft vocabulary, kept here as the target's head may be dropped.
        self.head_rows = self.drafter.output_head if not config.train_head and draft_tokens is not None else None
        self.stack = layer_stack(model, rotary_dtype=torch.float32)
        if not self.online:
            self.stack.layers = self.stack.layers[: config.exit_layer]  # without the last, already copied
            del self.stack.norm
            if config.train_head or self.head_rows is not None:
                del self.stack.head
        self.stack.requires_grad_(False)
        self.drafter.requires_grad_(True)

    def gradient_checkpointing_enable(self) -> None:
        """Recompute the exit layer in the backward pass instead of keeping its activations."""
        layers: Any = self.drafter.layers  # with train_layer=false a NoLayer, which has nothing to recompute
        for layer in layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def forward(
        self, input_ids: Tensor, labels: Tensor, positions: Tensor, documents: Tensor, **top_k: Tensor
    ) -> dict[str, Tensor]:
        """{"loss_sum"} over supervised positions. All arguments are [B, T] (see `data_prep.text.rows`); labels are
        already shifted, and `IGNORE` if unsupervised; top_k: top_ids, top_logprobs [B, T, k] and tail [B, T].
        With `parallel` the N positions are the T of the text and the masks of drafts after them, else T."""
        draft_rows = self.parallel.add_masks(self, self.stack, input_ids, labels, positions, documents)
        hidden, target_hidden = self.hidden(input_ids, positions, documents, draft_rows)  # [B, N, d], [B, T, d]
        drafter, expand = self.drafter, draft_rows.expand  # from [B, T, …] of the text to [B, N, …]
        loss = draft_loss(
            self.objective,
            head_product(drafter.output_head, hidden),
            draft_rows.labels,
            drafter.draft_tokens,
            drafter.vocabulary,
            rule=drafter.rule,  # from products to logits
            target_rule=drafter.rule,
            slots=draft_rows.slots,  # which token of its draft each position predicts; None: all weigh the same
            target=None if target_hidden is None else head_product(self.stack.head, expand(target_hidden)),
            top_k={name: expand(values) for name, values in top_k.items()},
        )
        # With masks a supervised token is predicted so often on average; the loop divides by the tokens alone.
        return {"loss_sum": loss / draft_rows.expected_predictions}

    def hidden(
        self, input_ids: Tensor, positions: Tensor, documents: Tensor, rows: DraftRows | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The outputs of the exit and, if the whole target is loaded, of the target, after their norms: [B, T, d] each.

        rows: the same text and masks of drafts after it; the exit then has outputs at all of them, [B, N, d]. Gradients
        of masks run through the frozen layers, since the vector of the mask learns.
        """
        stack, exit_layer, text_length = self.stack, self.drafter.exit_layer, positions.shape[1]
        text_masks, target_out = stack.packed_masks(documents), None
        ids, all_positions, draft_masks = (input_ids, positions, None) if rows is None else rows[:3]  # see `DraftRows`
        attention_masks, needs_grad = draft_masks or text_masks, draft_masks is not None and torch.is_grad_enabled()
        stack.reserve(text_length)
        rotary = stack.rotary(all_positions)  # float32, for the exit
        frozen_rotary = rotary.to(stack.dtype)
        with torch.set_grad_enabled(needs_grad), torch.autocast(input_ids.device.type, enabled=False):
            embedded = self.drafter.embed(stack, ids, all_positions)  # [B, N, d]
            trunk = stack.run(embedded, 0, exit_layer, frozen_rotary, attention_masks)
            if self.online:
                text_trunk, text_rotary = trunk[:, :text_length].detach(), frozen_rotary.first(text_length)
                target_out = stack.norm(stack.run(text_trunk, exit_layer, len(stack.layers), text_rotary, text_masks))
        hidden = self.drafter.run(trunk.float(), attention_masks[self.drafter.window], rotary)
        return self.drafter.norm(hidden), target_out

    def run_supervised(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The exit's states [n, d] after its norm at the supervised positions of a batch of rows, and those of the
        target if it is in this module."""
        moved = {name: value.to(self.stack.device) for name, value in batch.items()}
        hidden, target_hidden = self.hidden(moved["input_ids"], moved["positions"], moved["documents"])
        supervised = moved["labels"] != IGNORE  # [B, T]
        dtype = self.drafter.output_head.weight.dtype
        return hidden[supervised].to(dtype), None if target_hidden is None else target_hidden[supervised]


def make_evaluation(
    config: EesdConfig, target: OpenTarget, heldout: TrainRows, student: EarlyExitStudent
) -> Callable[[int], Metrics]:
    """The evaluation during training: metrics of `HeldOutText.judge` and `Decoding`.

    tau_analytic, τ expected by p and q along the text, uses the whole target if it is loaded, for the loss or for
    `decode_prompts`. With the target's cached top-k it is a lower bound (see `acceptance_by_top_k`). Else, and with
    `parallel`, it is absent; tau_text, τ of greedy drafts if the target had written the text, then says how good the
    exit is, of one pass a token. With `decode_prompts` the whole target is loaded too, for top1_target and decoding.
    """
    decoding = Decoding.of(target, heldout, config.decode_prompts, config.decode_tokens)
    device = student.stack.device
    dtype = frozen_dtype(config.frozen_dtype, device)
    full_target = load_to_decode(target, dtype, device) if decoding.texts else None
    # acceptances: from full_target's distributions; an online student runs the target itself, whose states serve then.
    heldout_text = HeldOutText(heldout, config.eval_batch_rows, full_target, acceptances=not student.online)

    def evaluate(step: int) -> Metrics:
        target_logits_of = student.stack.logits_after_norm if student.online else None
        metrics = heldout_text.judge(student.drafter.logits_after_norm, student.run_supervised, target_logits_of)
        if config.parallel:
            metrics.pop("tau_analytic", None)
        if full_target is not None:
            memo = {id(head): head for head in student.drafter.shared_head}  # the target's, which must not be copied
            drafter = copy.deepcopy(student.drafter, memo).to(full_target.dtype).requires_grad_(False)
            metrics |= decoding(full_target, draft_model_of(drafter), {KIND.name: drafter})
        return metrics

    return evaluate


def write_card(config: EesdConfig, layer_count: int, drafter: EarlyExit, start: str | None, result: FitResult) -> None:
    """Write the card of the saved `drafter` of a target of so many layers."""
    option_names, draft_ids = ("exit_layer", "exit_depth", "train_head", "seq_len"), drafter.draft_tokens
    card_facts: dict[str, object] = {name: getattr(config, name) for name in option_names}
    card_facts |= {"objective": config.objective} | ({"teacher": config.teacher} if config.distils else {})
    card_facts |= {} if start is None else {"went on from": Path(start).name}
    card_facts |= {"tokens a pass": config.parallel} if config.parallel else {}
    card_facts |= {} if draft_ids is None else {"tokens": f"{len(draft_ids)} of the target's {drafter.vocabulary}"}
    tau_names = [name for name in card.TAU_NAMES if name in result.metrics][:1]
    shape_text = f"exit_layer={config.exit_layer} of {layer_count}"
    write_records(config, USE_IN_ONE_PASS if config.parallel else USE, card_facts, result, tau_names, shape=shape_text)


def plan_memory(config: EesdConfig, target: PreTrainedConfig) -> Plan:
    """The memory of training an early exit of the shape in `config` on a target of this config."""
    student, weight_count = empty_student(config, target)
    grad_layers = student.stack.layers[: config.exit_layer] if config.parallel else None  # which masks' gradients cross
    # read: the numbers that the frozen layers hand to the exit for each token, a hidden state.
    memories = fit_memory(config, student, read=target.hidden_size, vocab_size=target.vocab_size, through=grad_layers)
    memories += [decoding_target(config, target)] if config.decode_prompts else []
    plan_facts = {"exit_layer": f"{config.exit_layer}/{target.num_hidden_layers}", "read_parameters": weight_count}
    plan_facts |= {"read_gb": f"{weight_count * stored_dtype(target).itemsize / 1e9:.2f}"}
    return Plan(memories, plan_facts | {"trained_parameters": student.count_parameters()[0]})


def empty_student(config: EesdConfig, target_config: PreTrainedConfig) -> tuple[EarlyExitStudent, int]:
    """The student without weights, in its dtypes, and the number of values that are read for it."""
    model, weight_count = empty_target(config, target_config, layers_read(config, target_config))
    draft_size = config.draft_vocabulary
    draft_tokens = None if draft_size is None else torch.empty(draft_size, dtype=torch.long, device="meta")
    return EarlyExitStudent(model, config, draft_tokens), weight_count
