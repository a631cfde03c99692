"""EESD's early-exit drafter: a transformer layer (or several), norm and head on the target's first N layers."""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.base.errors import UserError
from outrider.draft_models.acceptance import AcceptanceOf, acceptance_by_target, acceptance_by_top_k, judge, placed
from outrider.draft_models.draft_vocabulary import places
from outrider.draft_models.losses import (
    IGNORE,
    head_product,
    linear_cross_entropy,
    linear_divergence,
    linear_topk_divergence,
)
from outrider.draft_models.targets.model_files import (
    decoder_layers,
    empty_layers,
    final_norm,
    layer_stack,
    number_layer,
    spec_of,
)
from outrider.draft_models.targets.model_spec import LayerCall, LogitRule
from outrider.draft_models.targets.narrowed import spread
from outrider.draft_models.targets.stack import call_layer, normed_product
from outrider.draft_models.targets.target import Band, LayerCache, Rotary


def exit_layers(config: PreTrainedConfig, exit_layer: int) -> list[int]:
    """The target layers that training needs: the first `exit_layer`, and the last to initialise the exit layer."""
    if not 1 <= exit_layer < config.num_hidden_layers:
        raise UserError(
            f"exit_layer={exit_layer}: expected 1 ≤ exit_layer < {config.num_hidden_layers} (the target's layers); "
            "the paper uses 5–10 % of them"
        )
    return [*range(exit_layer), config.num_hidden_layers - 1]


class NoLayer(nn.Module):
    """An identity in place of an exit layer."""

    def forward(self, hidden: Tensor, **_: object) -> Tensor:
        return hidden


class EarlyExit(nn.Module):
    """p(y_t) = softmax(W · RMSNorm(Layer_e(H_t^N))), EESD eq. 1, for H^N after the target's first N layers.

    `head` is None if the drafter shares the target's head. Then `use_head` must be called before `logits`. The shared
    head, or a copy of its rows for `draft_tokens`, is kept in the list `shared_head`, so that it does not become a
    submodule. The layer's `layer_idx` is N: its keys and values belong to a separate cache that starts at layer N.

    deeper: further layers after it (EESD, Fig. 5), usually none.
    draft_tokens: ids [k], ascending, of its draft vocabulary; None: the whole `vocabulary`.
    """

    draft_tokens: Tensor | None

    def __init__(
        self,
        layer: nn.Module,
        norm: nn.Module,
        head: nn.Linear | None,
        exit_layer: int,
        window: int | None,
        call: LayerCall,
        rule: LogitRule,
        vocabulary: int,
        draft_tokens: Tensor | None = None,
        deeper: Sequence[nn.Module] = (),
    ):
        super().__init__()
        self.layer = layer
        self.deeper = nn.ModuleList(deeper)
        self.norm = norm
        self.head = head
        self.exit_layer = exit_layer
        self.window = window
        self.call = call
        self.rule = rule
        self.vocabulary = vocabulary
        self.register_buffer("draft_tokens", draft_tokens)
        self.shared_head: list[nn.Linear] = []

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        exit_layer: int,
        *,
        own_head: bool,
        own_layer: bool = True,
        depth: int = 1,
        draft_tokens: Tensor | None = None,
    ) -> "EarlyExit":
        """An exit after `exit_layer` layers: `depth` copies of the last layer, and copies of the norm and, if
        `own_head`, the head of `model`.

        Without `own_layer` norm and head are directly on those layers, as in the paper's ablation. draft_tokens: own or
        shared, the head has only their rows.
        """
        last = decoder_layers(model)[-1]
        layers: list[nn.Module] = [copy.deepcopy(last) for _ in range(depth)] if own_layer else [NoLayer()]
        for number, layer in enumerate(layers, exit_layer):
            number_layer(layer, number)
        parts = spec_of(model)
        call = parts.calls[-1]
        head = model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        drafter = cls(
            layers[0],
            copy.deepcopy(final_norm(model)),
            _rows_of(head, draft_tokens) if own_head else None,
            exit_layer,
            model.config.sliding_window if call.slides else None,
            call,
            parts.logits,
            model.config.vocab_size,
            draft_tokens,
            layers[1:],
        )
        if not own_head:
            drafter.use_head(head)
        return drafter

    @classmethod
    def empty(
        cls,
        config: PreTrainedConfig,
        exit_layer: int,
        *,
        own_head: bool,
        own_layer: bool = True,
        depth: int = 1,
        draft_vocabulary: int | None = None,
    ) -> "EarlyExit":
        """An exit of `depth` layers for a target of `config`, without weights (meta device).

        draft_vocabulary: the number of tokens it predicts.
        """
        model = empty_layers(config, exit_layers(config, exit_layer))
        tokens = None if draft_vocabulary is None else torch.empty(draft_vocabulary, dtype=torch.long, device="meta")
        own = {"own_head": own_head, "own_layer": own_layer}
        return cls.from_model(model, exit_layer, **own, depth=depth, draft_tokens=tokens)

    def use_head(self, head: nn.Linear) -> None:
        """Share the target's `head` if the drafter has none; with a draft vocabulary, a copy of its rows."""
        self.shared_head = [head if self.draft_tokens is None else _rows_of(head, self.draft_tokens)]

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        """The transformer layers of the exit, in order."""
        return (self.layer, *self.deeper)

    @property
    def output_head(self) -> nn.Linear:
        """The head that turns hidden states into logits: the drafter's own, else the target's."""
        return self.head if self.head is not None else self.shared_head[0]

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., K] over the draft vocabulary, from the exit layer's output [..., d]."""
        return self.rule(normed_product(self.norm, self.output_head, hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """The same over the vocabulary [..., V], where other tokens have probability 0."""
        return self._outward(self.draft_logits(hidden))

    def logits_after_norm(self, hidden: Tensor) -> Tensor:
        """The same from the output of its norm."""
        return self._outward(self.rule(self.output_head(hidden)))

    def _outward(self, logits: Tensor) -> Tensor:
        return logits if self.draft_tokens is None else spread(logits, self.draft_tokens, self.vocabulary)

    def run(
        self, hidden: Tensor, mask: Tensor | Band | None, rotary: Rotary, cache: LayerCache | None = None
    ) -> Tensor:
        """The exit's layers on hidden states [B, Q, d] of the target's layer N → [B, Q, d]."""
        for layer in self.layers:
            hidden = call_layer(layer, self.call, hidden, mask, rotary, cache)
        return hidden

    def assign(self, weights: Mapping[str, Tensor]) -> "EarlyExit":
        """Use exactly `weights` as the parameters; returns self."""
        self.load_state_dict(dict(weights), strict=True, assign=True)
        return self


def _rows_of(head: nn.Linear, tokens: Tensor | None) -> nn.Linear:
    """A copy of `head`, or of its rows for `tokens`."""
    if tokens is None:
        return copy.deepcopy(head)
    weight, bias = head.weight, head.bias
    rows = nn.Linear(weight.shape[1], len(tokens), bias=bias is not None, device="meta")
    rows.weight = nn.Parameter(weight.detach()[tokens], requires_grad=False)
    if bias is not None:
        rows.bias = nn.Parameter(bias.detach()[tokens], requires_grad=False)
    return rows


class EarlyExitStudent(nn.Module):
    """EESD's training module: the target's frozen first N layers, and the exit layer on them.

    The exit layer, its norm and, with `train_head`, its head become float32 master weights. Everything else is frozen,
    keeps its dtype and runs without gradient.

    objective: cross_entropy on the labels, as in the paper, or one of `draft_models.losses.DIVERGENCES` from the target
    at every supervised position. For a divergence `model` is the whole target, and layers N..L−1 run too, on the hidden
    states of layer N. With `cached` the rows contain the target's top-k instead. Then, and for cross-entropy, `model`
    has only the layers of `exit_layers` (see `load_layers`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        exit_layer: int,
        *,
        train_head: bool,
        train_layer: bool = True,
        depth: int = 1,
        objective: str = "cross_entropy",
        cached: bool = False,
        draft_tokens: Tensor | None = None,
    ):
        """draft_tokens: the draft vocabulary. Cross-entropy uses only labels in it; for divergences see
        `draft_models.losses`. Without `train_head` the drafter's head is the target's rows for these tokens, and the
        target's other rows are dropped unless the target is an online teacher.
        """
        super().__init__()
        self.objective = objective
        self.online = objective != "cross_entropy" and not cached  # the whole target is part of this module
        self.drafter = EarlyExit.from_model(
            model, exit_layer, own_head=train_head, own_layer=train_layer, depth=depth, draft_tokens=draft_tokens
        ).float()
        if not train_head:
            head = model.get_output_embeddings()
            assert isinstance(head, nn.Linear)
            self.drafter.use_head(head)
        self.head_rows = self.drafter.output_head if not train_head and draft_tokens is not None else None
        self.stack = layer_stack(model, rotary_dtype=torch.float32)
        if not self.online:
            self.stack.layers = self.stack.layers[:exit_layer]
            del self.stack.norm
            if train_head or self.head_rows is not None:
                del self.stack.head
        self.stack.requires_grad_(False)
        self.drafter.requires_grad_(True)

    def train(self, mode: bool = True) -> "EarlyExitStudent":
        """Dropout and router jitter apply to the exit layer only; the frozen target stays in eval mode."""
        super().train(mode)
        self.stack.eval()
        return self

    def gradient_checkpointing_enable(self) -> None:
        """Recompute the exit layer in the backward pass instead of keeping its activations."""
        layers: Any = self.drafter.layers  # NoLayer has nothing to recompute
        for layer in layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def hidden(self, input_ids: Tensor, positions: Tensor, documents: Tensor) -> tuple[Tensor, Tensor | None]:
        """The outputs of the exit layer and, if the whole target is loaded, of the target, after norms: [B, T, d]."""
        masks = self.stack.packed_masks(positions, documents)
        self.stack.reserve(positions.shape[1])
        rotary = self.stack.rotary(positions)
        exit_layer = self.drafter.exit_layer
        with torch.no_grad(), torch.autocast(input_ids.device.type, enabled=False):
            frozen = rotary.to(self.stack.dtype)
            trunk = self.stack.run(self.stack.embed(input_ids, positions), 0, exit_layer, frozen, masks)
            target = None
            if self.online:
                target = self.stack.run(trunk, exit_layer, len(self.stack.layers), frozen, masks)
                target = self.stack.norm(target)
        hidden = self.drafter.run(trunk.float(), masks[self.drafter.window], rotary)
        return self.drafter.norm(hidden), target

    def forward(
        self, input_ids: Tensor, labels: Tensor, positions: Tensor, documents: Tensor, **top_k: Tensor
    ) -> dict[str, Tensor]:
        """{"loss_sum"} over supervised positions. All arguments are [B, T] (see `data_prep.text.rows`); labels are
        already shifted, and `IGNORE` if unsupervised; top_k: top_ids, top_logprobs [B, T, k] and tail [B, T]."""
        hidden, target = self.hidden(input_ids, positions, documents)
        mine = head_product(self.drafter.output_head, hidden)
        rule, tokens = self.drafter.rule, self.drafter.draft_tokens
        if self.objective == "cross_entropy":
            labels = labels if tokens is None else places(labels, tokens, self.drafter.vocabulary)
            return {"loss_sum": linear_cross_entropy(*mine, labels, rule=rule)}
        if target is None:
            ids = top_k["top_ids"]
            ids = ids if tokens is None else places(ids, tokens, self.drafter.vocabulary)
            known = (ids, top_k["top_logprobs"], top_k["tail"])
            return {"loss_sum": linear_topk_divergence(*mine, *known, labels, self.objective, rule=rule)}
        sides = (*mine, *head_product(self.stack.head, target))
        total = linear_divergence(*sides, labels, self.objective, rule=rule, target_rule=rule, tokens=tokens)
        return {"loss_sum": total}

    @torch.no_grad()
    def judged(
        self,
        input_ids: Tensor,
        labels: Tensor,
        positions: Tensor,
        documents: Tensor,
        accept: AcceptanceOf | None = None,
        **top_k: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """The drafter's argmax [B, T] at supervised positions, IGNORE elsewhere, and its acceptance [B, T] there, NaN
        elsewhere; None instead of acceptance if no distribution of the target is known.

        accept: the target's distribution at the supervised positions; None: that of the target in this module, or of
        its top-k. Other arguments as in `forward`.
        """
        keep, head, rule = labels != IGNORE, self.drafter.output_head, self.drafter.rule
        hidden, target = self.hidden(input_ids, positions, documents)
        if accept is None and target is not None:
            accept = acceptance_by_target(lambda states: rule(self.stack.head(states)), target[keep])
        elif accept is None and top_k:
            accept = acceptance_by_top_k(*(top_k[name][keep] for name in ("top_ids", "top_logprobs", "tail")))
        choices, accepted = judge(self.drafter.logits_after_norm, hidden[keep].to(head.weight.dtype), accept)
        return placed(choices, keep, IGNORE), None if accepted is None else placed(accepted, keep, torch.nan)


USE = """An EESD early-exit drafter: a layer on the first layers of the target, with which it shares their
computation. `drafter.json` names the target it belongs to; loading it for another one is refused.

```
evaluate-checkpoint checkpoint={path:option} target={target:option} method=eesd_survival
```

Serving engines have no kind of drafter that reads the target's inner layers. `outrider export checkpoint={path:option}`
writes it as an ordinary causal LM, which they take as a draft model."""
