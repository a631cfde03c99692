"""EESD's early-exit drafter: a transformer layer (or several), norm and head on the target's first N layers.

EESD is arXiv 2406.03853. Shapes: B texts, Q positions, d the hidden size; V tokens, of which K can be drafted.
"""

import copy

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.base.errors import require
from outrider.draft_models.targets.model_files import decoder_layers, final_norm, number_layer, spec_of
from outrider.draft_models.targets.narrowed import spread_logits
from outrider.draft_models.targets.stack import LayerStack, apply_norm_and_head, call_layer
from outrider.draft_models.targets.target import LayerCache, Mask, Rotary


def exit_layers(config: PreTrainedConfig, exit_layer: int) -> list[int]:
    """The target layers that training needs: the first `exit_layer`, and the last to initialise the exit layer."""
    expected = f"1 ≤ exit_layer < {config.num_hidden_layers} (the target's layers); the paper uses 5–10 % of them"
    require(1 <= exit_layer < config.num_hidden_layers, "exit_layer", exit_layer, expected)
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

    It begins as `depth` copies of the last layer of `model` (EESD, Fig. 5; usually one), and copies of the norm and, if
    `own_head`, the head. Without `own_layer` norm and head directly follow the first `exit_layer` layers, as in the
    paper's ablation. draft_tokens: ids [k], ascending, of its draft vocabulary, whose rows the head has; None: the
    whole `vocabulary`.

    parallel: the tokens that it drafts in one pass, all but the first from masks (PARD, arXiv 2504.18583); 0: one. A
    mask has the id `vocabulary`, and enters the target's first layer as the last token would, plus the vector `mask`.
    """

    draft_tokens: Tensor | None

    def __init__(
        self,
        model: PreTrainedModel,
        exit_layer: int,
        *,
        own_head: bool,
        own_layer: bool = True,
        depth: int = 1,
        draft_tokens: Tensor | None = None,
        parallel: int = 0,
    ):
        super().__init__()
        last_layer, family_spec, head = decoder_layers(model)[-1], spec_of(model), model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        layers: list[nn.Module] = [copy.deepcopy(last_layer) for _ in range(depth)] if own_layer else [NoLayer()]
        for layer_index, layer in enumerate(layers, exit_layer):
            number_layer(layer, layer_index)
        self.layer, self.deeper = layers[0], nn.ModuleList(layers[1:])
        self.norm = copy.deepcopy(final_norm(model))
        self.head = _head_rows(head, draft_tokens) if own_head else None
        self.exit_layer, self.vocabulary = exit_layer, model.config.vocab_size
        # How the family's model calls its last layer, and how it scales and caps the logits of its head.
        self.call, self.rule = family_spec.calls[-1], family_spec.logits
        self.window = model.config.sliding_window if self.call.slides else None
        self.register_buffer("draft_tokens", draft_tokens)
        self.parallel = parallel
        self.mask = nn.Parameter(head.weight.new_zeros(model.config.hidden_size)) if parallel else None
        self.shared_head: list[nn.Linear] = []
        if not own_head:
            self.use_head(head)

    def use_head(self, head: nn.Linear) -> None:
        """Share the target's `head` if the drafter has none; with a draft vocabulary, a copy of its rows."""
        self.shared_head = [head if self.draft_tokens is None else _head_rows(head, self.draft_tokens)]

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
        return self.rule(apply_norm_and_head(self.norm, self.output_head, hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """The same over the vocabulary [..., V], where other tokens have probability 0."""
        return self.logits_after_norm(self.norm(hidden))

    def logits_after_norm(self, hidden: Tensor) -> Tensor:
        """The same from the output of its norm."""
        logits = self.rule(self.output_head(hidden))
        return logits if self.draft_tokens is None else spread_logits(logits, self.draft_tokens, self.vocabulary)

    def embed(self, stack: LayerStack, tokens: Tensor, positions: Tensor) -> Tensor:
        """The input [B, Q, d] of the target's first layer for tokens or masks at positions [B, Q]."""
        if self.mask is None:
            return stack.embed(tokens, positions)
        embedding = stack.embed(tokens.clamp(max=self.vocabulary - 1), positions)
        return embedding + (tokens == self.vocabulary)[..., None] * self.mask.to(embedding.dtype)

    def run(self, hidden: Tensor, mask: Mask, rotary: Rotary, cache: LayerCache | None = None) -> Tensor:
        """The exit's layers on hidden states [B, Q, d] of the target's layer N → [B, Q, d]."""
        for layer in self.layers:
            hidden = call_layer(layer, self.call, hidden, mask, rotary, cache)
        return hidden


def _head_rows(head: nn.Linear, draft_tokens: Tensor | None) -> nn.Linear:
    """A copy of `head`, or of its rows for `draft_tokens`."""
    if draft_tokens is None:
        return copy.deepcopy(head)
    cut_head = nn.Linear(head.weight.shape[1], len(draft_tokens), bias=head.bias is not None, device="meta")
    for name, parameter in (("weight", head.weight), ("bias", head.bias)):  # a packed head has no parameters to list
        if parameter is not None:
            setattr(cut_head, name, nn.Parameter(parameter.detach()[draft_tokens], requires_grad=False))
    return cut_head


USE = """An EESD early-exit drafter: a layer on the first layers of the target, with which it shares their
computation. `drafter.json` names the target it belongs to; loading it for another one is refused.

```
evaluate-checkpoint checkpoint={path:option} target={target:option} method=eesd_survival
```

Serving engines have no kind of drafter that reads the target's inner layers. `outrider export checkpoint={path:option}`
writes it as an ordinary causal LM, which they take as a draft model."""
USE_IN_ONE_PASS = USE.partition("Serving")[0] + "It drafts several tokens in one pass, which no engine does with it."
