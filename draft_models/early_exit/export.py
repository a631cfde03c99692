"""An early exit as an ordinary causal LM, which serving engines load as a draft model."""

import torch
from torch import nn
from transformers import PreTrainedModel

from draft_models.early_exit.model import EarlyExit, NoLayer
from draft_models.targets.attention import stock_attention
from draft_models.targets.empty_models import decoder_layers, empty_model, final_norm
from draft_models.targets.narrowed import whole_rows
from draft_models.targets.open_target import OpenTarget
from draft_models.targets.proof import SHORT
from outrider.errors import UserError


def as_causal_lm(drafter: EarlyExit, target: OpenTarget, dtype: torch.dtype) -> PreTrainedModel:
    """A model of the target's family, in `dtype` on the CPU, whose logits are those of `drafter`.

    Its layers are the target's first N and the exit's, so it computes itself what the drafter reads of the target. A
    drafter over some of the tokens never finds another one likeliest (see `whole_rows`).
    Raises `UserError` where the target's weights cannot be read, and where a layer's number decides what it computes.
    """
    own = () if isinstance(drafter.layer, NoLayer) else drafter.layers
    last = target.config.num_hidden_layers - 1
    model = target.layers([*range(drafter.exit_layer), *(last for _ in own)], dtype=dtype)
    for layer, trained in zip(decoder_layers(model)[drafter.exit_layer :], own, strict=True):
        layer.load_state_dict(trained.state_dict(), assign=True)  # what it held may be the next one's too
    final_norm(model).load_state_dict(drafter.norm.state_dict())
    if drafter.head is None:
        head = model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        drafter.use_head(head)
    if drafter.head is not None or drafter.draft_tokens is not None:
        _put_head(model, drafter.output_head, drafter.draft_tokens)
    _require_ordinary(model, target.config.model_type)
    return model


@torch.inference_mode()
def _require_ordinary(model: PreTrainedModel, architecture: str) -> None:
    """Raise `UserError` unless the model that others make of its config and weights computes the same."""
    ordinary = empty_model(model.config)
    ordinary.load_state_dict(model.state_dict(), assign=True)
    tokens = torch.arange(min(SHORT, model.config.vocab_size))[None]
    with stock_attention(model, "eager"), stock_attention(ordinary.eval(), "eager"):
        if not torch.equal(model(tokens).logits, ordinary(tokens).logits):
            raise UserError(
                f"architecture {architecture!r}: what a layer computes depends on its number, so an exit's layer "
                "cannot stand after the first ones of an ordinary model; this drafter runs here alone"
            )


def _put_head(model: PreTrainedModel, own: nn.Linear, tokens: torch.Tensor | None) -> None:
    """Give `model` the head `own`, which may be over `tokens` alone; it is then no longer the embedding."""
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    for name, parameter in own.named_parameters():
        rows, given = parameter.detach(), getattr(head, name)
        whole = rows if tokens is None else whole_rows(rows, rows.mean(0), tokens, len(given))
        setattr(head, name, nn.Parameter(whole.to(given.dtype), requires_grad=False))
    model.config.tie_word_embeddings = False


WHAT = """An EESD early exit, written as an ordinary causal LM: the target's first layers, the exit's, norm and head. It
computes the first layers itself; Outrider's runtime shares them with the target, and there the drafter is faster."""
