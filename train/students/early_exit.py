"""The early exit in training: its shape, the module that its recipe trains, and what that holds."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.draft_models.acceptance import AcceptanceOf, acceptance_by_target, acceptance_by_top_k
from outrider.draft_models.early_exit.checkpoint import read_meta
from outrider.draft_models.early_exit.model import EarlyExit, exit_layers
from outrider.draft_models.losses import IGNORE
from outrider.draft_models.targets.model_files import empty_layers, layer_stack
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.open_target import stored_dtype
from outrider.draft_models.targets.target import Rotary
from outrider.inference.loading.memory_plan import GB, Memory, Storage, cache_bytes, planned_device, weight_bytes
from outrider.train.core.training import Batch, Plan
from outrider.train.parts.drafter import fit_memory, frozen_dtype, parameters_of
from outrider.train.parts.parallel import DraftRows, DraftStudent, Parallel
from outrider.train.settings.drafters import EesdConfig


def with_shape(config: EesdConfig, target: PreTrainedConfig) -> EesdConfig:
    """`config` with the exit layer, and with the shape of the early exit stored in `start` instead of it."""
    if config.start is None:
        middle = max(1, round(0.08 * target.num_hidden_layers))  # of the paper's 5 to 10 %
        return replace(config, exit_layer=config.exit_layer or middle)
    meta = read_meta(config.start)
    return replace(
        config,
        start=None,
        exit_layer=meta.exit_layer,
        exit_depth=meta.exit_depth,
        train_head=meta.own_head,
        train_layer=meta.own_layer,
        draft_vocabulary=meta.draft_vocabulary,
    )


class ExitOnFrozenLayers(DraftStudent):
    """The target's frozen first N layers, and a trainable exit layer on them: EESD's training module, without the loss.

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
        if config.parallel:
            self.parallel = Parallel(config.parallel, self.drafter.vocabulary, config.fit.seed)
        self.head_rows = self.drafter.output_head if not config.train_head and draft_tokens is not None else None
        self.stack = layer_stack(model, rotary_dtype=torch.float32)
        if not self.online:
            self.stack.layers = self.stack.layers[: config.exit_layer]
            del self.stack.norm
            if config.train_head or self.head_rows is not None:
                del self.stack.head
        self.stack.requires_grad_(False)
        self.drafter.requires_grad_(True)

    def gradient_checkpointing_enable(self) -> None:
        """Recompute the exit layer in the backward pass instead of keeping its activations."""
        layers: Any = self.drafter.layers  # NoLayer has nothing to recompute
        for layer in layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def hidden(
        self, input_ids: Tensor, positions: Tensor, documents: Tensor, rows: DraftRows | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The outputs of the exit layer and, if the whole target is loaded, of the target, after norms: [B, T, d].

        rows: these and masks after them, of which the exit has outputs too, [B, N, d]. Their gradients run through the
        frozen layers.
        """
        text, length = self.stack.packed_masks(documents), positions.shape[1]
        ids, where, seen = (input_ids, positions, None) if rows is None else rows[:3]
        masked, seen = seen is not None and torch.is_grad_enabled(), seen or text
        self.stack.reserve(length)
        rotary, exit_layer, target = self.stack.rotary(where), self.drafter.exit_layer, None
        tables = tuple((cos.to(self.stack.dtype), sin.to(self.stack.dtype)) for cos, sin in rotary.tables)
        with torch.set_grad_enabled(masked), torch.autocast(input_ids.device.type, enabled=False):
            embedded = self.drafter.embed(self.stack, ids, where)
            trunk = self.stack.run(embedded, 0, exit_layer, Rotary(where, tables), seen)
            if self.online:
                text_rotary = Rotary(positions, tuple((cos[:, :length], sin[:, :length]) for cos, sin in tables))
                target = trunk[:, :length].detach()
                target = self.stack.norm(self.stack.run(target, exit_layer, len(self.stack.layers), text_rotary, text))
        hidden = self.drafter.run(trunk.float(), seen[self.drafter.window], rotary)
        return self.drafter.norm(hidden), target

    def supervised(self, batch: Batch) -> tuple[Tensor, AcceptanceOf | None]:
        """The exit's states [n, d] after its norm at the supervised positions of a batch of rows, and the distributions
        there of the target in this module, or by its top-k; None: neither is known."""
        moved = {name: value.to(self.stack.device) for name, value in batch.items()}
        hidden, target = self.hidden(moved["input_ids"], moved["positions"], moved["documents"])
        keep, accept = moved["labels"] != IGNORE, None
        if target is not None:
            accept = acceptance_by_target(self.stack.logits_after_norm, target[keep])
        elif "tail" in moved:
            accept = acceptance_by_top_k(*(moved[name][keep] for name in ("top_ids", "top_logprobs", "tail")))
        return hidden[keep].to(self.drafter.output_head.weight.dtype), accept


def exit_plan(config: EesdConfig, target: PreTrainedConfig) -> Plan:
    """The memory of training an early exit of the shape in `config`."""
    student, values = empty_exit(config, target)
    read = target.hidden_size
    if config.parallel:  # gradients run through the frozen layers, see `fit_memory`
        through = student.stack.layers[: config.exit_layer].parameters()
        read += 3 * sum(sum(matrix.shape) for matrix in through if matrix.ndim == 2) // 4
    held = fit_memory(config, student, read, target.vocab_size)
    if config.decode_prompts:  # in addition to the student, in the dtype for serving
        storage = Storage.of("auto", target, context_limit(target), planned_device())
        target_bytes = weight_bytes(target, storage) + cache_bytes(target, storage)
        held.append(Memory("the whole target, to decode with", target_bytes, "decode_prompts=0"))
    facts = {"exit_layer": f"{config.exit_layer}/{target.num_hidden_layers}", "read_parameters": values}
    facts |= {"read_gb": f"{values * stored_dtype(target).itemsize / GB:.2f}"}
    return Plan(held, facts | {"trained_parameters": parameters_of(student)[0]})


def empty_exit(config: EesdConfig, target: PreTrainedConfig) -> tuple[ExitOnFrozenLayers, int]:
    """The student without weights, in its dtypes, and the number of values that are read for it."""
    layers = layers_read(config, target) or range(target.num_hidden_layers)
    model = nn.Module.to(empty_layers(target, layers), frozen_dtype(config.frozen_dtype, planned_device()))
    if target.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    stored = {id(tensor): tensor.numel() for tensor in model.state_dict(keep_vars=True).values()}  # tied ones once
    size = config.draft_vocabulary
    tokens = None if size is None else torch.empty(size, dtype=torch.long, device="meta")
    return ExitOnFrozenLayers(model, config, tokens), sum(stored.values())


def layers_read(config: EesdConfig, target: PreTrainedConfig) -> list[int] | None:
    """The target's layers that the training reads; None: all. Raises `UserError` if there is no such exit layer."""
    assert config.exit_layer is not None
    layers = exit_layers(target, config.exit_layer)
    return None if config.online else layers
