"""The check of a target or drafter at load. Its tensors must be those that transformers loads from the same place. Its
logits must be the same when this toolkit runs it and when its own forward does."""

import copy
import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from outrider.base.errors import UserError, reason
from outrider.base.progress import counted
from outrider.draft_models.targets.attention import stock_attention
from outrider.draft_models.targets.model_files import (
    decoder_layers,
    layer_stack,
    pick_layers,
    settings_by_layer,
    spec_of,
)
from outrider.draft_models.targets.model_spec import LayerCall, context_limit
from outrider.draft_models.targets.stack import WholeModel
from outrider.draft_models.targets.target import Target

# Allowed root mean square of a difference between logits, as a share of their standard deviation. In float32, rounding
# stays below a tenth of it; an ignored quirk, a wrong position or a visible sibling exceeds it by far. In 16 bits it
# catches gross errors only.
EXACT, ROUNDED = 1e-4, 0.1
LARGEST_COPY = 2 * 2**30  # bytes of the largest float32 copy that is made
LONGEST_WINDOW = 4096  # tokens of the largest window that a text is made to exceed
FEW_TOKENS = 4096  # vocabulary size of a copy of some layers
SHORT = 12  # tokens of a text that exceeds no window


class NotByLayersError(UserError):
    """A model that this toolkit cannot run layer by layer; its own forward may still do."""


def prove_weights(model: PreTrainedModel, layers: Sequence[int], theirs: PreTrainedModel, name: str) -> None:
    """Raise `UserError` unless every tensor of `model` has the type and the bits that it has in `theirs`.

    layers: the target's layers in `model`. theirs: the target as transformers loads it, or its first layers.
    """
    held, numbered = theirs.state_dict(), re.compile(rf"(?<={re.escape(spec_of(model).layers)}\.)\d+")
    for place, tensor in model.state_dict().items():
        stored = numbered.sub(lambda found: str(layers[int(found[0])]), place, count=1)
        other = held.get(stored, tensor)  # `theirs` may lack later layers: these are not compared
        pair = [one.to(tensor.device).flatten().view(torch.uint8) for one in (tensor, other)]
        if other.dtype != tensor.dtype or not torch.equal(*pair):
            raise UserError(
                f"{name}: {stored} is another tensor than the one that transformers loads from the same place, so the "
                "two would run different models; save the model again by transformers' save_pretrained"
            )


def prove_layers(model: PreTrainedModel, name: str, largest: int = LARGEST_COPY, few: int = FEW_TOKENS) -> None:
    """Raise `NotByLayersError` unless a `LayerStack` of `model` agrees with its own forward (see `_difference`).

    Weights of 16 bits are compared in float32. If a copy of the whole is too large, a copy of some layers is compared
    (see `_one_of_each_kind`), and the whole coarsely. name: the model's option and value, for the message.
    largest: bytes of a whole copy. few: vocabulary size of a copy of some layers.
    """
    floats = sum(parameter.numel() for parameter in model.parameters())
    codes = sum(buffer.nbytes for buffer in model.buffers())  # of an int8 model: they are not converted
    if next(model.parameters()).dtype not in (torch.bfloat16, torch.float16):
        _prove_layers(model, name, EXACT)
    elif 4 * floats + codes <= largest:
        _prove_layers(copy.deepcopy(model).float(), name, EXACT)
    else:
        _prove_layers(model, name, ROUNDED)
        _prove_layers(_one_of_each_kind(model, few), name, EXACT)


def _prove_layers(model: PreTrainedModel, name: str, allowed: float) -> None:
    stack = layer_stack(model)
    for length in counted(_lengths(model.config, stack.windows), f"comparing {name} with its own forward", "texts"):
        try:
            with stock_attention(model, "eager"):
                expected = _expected(model, length)
            difference, place = _difference(stack, expected, _ids(model, length))
        except Exception as error:  # any error of an architecture whose code does not support this
            raise NotByLayersError(f"{name}: cannot be run layer by layer ({reason(error)})") from None
        if not difference <= allowed:  # also true for NaN
            raise NotByLayersError(
                f"{name}: run layer by layer its logits differ from its own forward's by {difference:.2g} of their "
                f"spread at {place} (rounding: up to {allowed:.0e}), so its forward has an unknown step. "
                "Drafters that need no layers of it are not affected (prompt lookup, n-grams, small LMs)"
            )


def _one_of_each_kind(model: PreTrainedModel, few: int = FEW_TOKENS) -> PreTrainedModel:
    """A float32 copy of `model` with the first layer of every kind, in their order, and its first `few` tokens.

    Layers are of the same kind if they are called in the same way, have the same entries in the config's lists, and
    consist of the same modules with the same switches: bools, strings and None.
    """
    first: dict[tuple[LayerCall, str, str], int] = {}
    by_layer = settings_by_layer(model.config).values()
    for index, (layer, call) in enumerate(zip(decoder_layers(model), spec_of(model).calls, strict=True)):
        made_of = [
            (type(module), sorted(one for one in vars(module).items() if type(one[1]) in (bool, str, type(None))))
            for module in layer.modules()
        ]
        first.setdefault((call, str([values[index] for values in by_layer]), str(made_of)), index)
    embed = model.get_input_embeddings()
    outer = [*embed.parameters(), *model.get_output_embeddings().parameters()]
    cut: dict[int, object] = {id(weight): nn.Parameter(weight[:few].detach().float(), False) for weight in outer}
    copied = pick_layers(model, list(first.values()), cut).float()
    own = copied.get_input_embeddings()
    assert isinstance(own, nn.Embedding)
    own.num_embeddings, own.padding_idx = len(own.weight), None
    copied.config.get_text_config().vocab_size = len(own.weight)
    return copied


def prove_rows(lm: WholeModel) -> None:
    """Raise `UserError` unless `lm` (float32) gives each path of a tree its own logits, and forgets dropped rows.

    A forward may apply a window in addition to the given mask. So one text exceeds every number of tokens that the
    config calls a window.
    """
    settings = lm.config.to_dict().items()
    windows = [value for name, value in settings if "window" in name and type(value) is int]
    for length in _lengths(lm.config, windows):
        try:
            difference, place = _difference(lm, _expected(lm.model, length), _ids(lm.model, length))
        except UserError:
            raise
        except Exception as error:  # as above
            raise UserError(
                f"its forward does not take a 4-D mask, positions and a cache ({type(error).__name__}: {reason(error)})"
            ) from None
        if not difference <= EXACT:
            raise UserError(
                f"its logits for a tree differ from those of each path alone by {difference:.1g} of their spread at "
                f"{place} (rounding: up to {EXACT:.0e}), so it does not go by the given mask and positions"
            )


def require_all_kept(config: PreTrainedConfig) -> None:
    """Raise `UserError` unless every layer of a model keeps every key and value: rejected rows are rolled back."""
    try:
        kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    except (KeyError, ValueError) as error:
        raise UserError(f"its layers are unknown to transformers' cache ({error})") from None
    evicting = sorted(kind.__name__ for kind in kinds - {DynamicLayer})
    if evicting:
        raise UserError(f"its layers do not keep every key and value ({', '.join(evicting)})")


def _lengths(config: PreTrainedConfig, windows: Sequence[int | None]) -> list[int]:
    """Lengths of the prompts: a short one, and one that exceeds all `windows` up to `LONGEST_WINDOW`."""
    beyond = [window + SHORT for window in windows if window is not None and 0 < window <= LONGEST_WINDOW]
    longest = context_limit(config) - 4
    return sorted({min(length, longest) for length in (SHORT, max([SHORT, *beyond]))})


def _ids(model: PreTrainedModel, length: int) -> Tensor:
    """A prompt of `length` tokens, then root, dropped, kept and follower (see `_difference`)."""
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(length)
    return torch.randint(vocabulary, (length + 4,), generator=generator).to(model.device)


@torch.inference_mode()
def _expected(model: PreTrainedModel, length: int) -> Tensor:
    """Logits of the model's own forward at prompt, root, dropped, kept and follower, each after its path as text."""
    ids = _ids(model, length)
    *prompt, root, dropped, kept, follower = range(length + 4)
    paths = [[*prompt, root, dropped], [*prompt, root, kept, follower]]
    first, second = (model(input_ids=ids[path][None], use_cache=False).logits[0] for path in paths)
    if torch.cat([first, second]).isnan().any():
        raise UserError("its logits are no numbers (NaN), so its weights are damaged: save or fetch it again")
    return torch.cat([first, second[length + 1 :]])


@torch.inference_mode()
def _difference(target: Target, expected: Tensor, ids: Tensor) -> tuple[float, str]:
    """The largest difference of the logits of `target.rows` from the `expected` ones over all tokens, and its place.

    A root and its two children are fed in one pass after the prompt. Then the first child is dropped, and a token is
    fed after the second child:

        prompt ─ root ┬ dropped
                      └ kept ─ follower
    """
    length, cache = len(ids) - 4, target.cache(len(ids))
    places = torch.arange(len(ids), device=ids.device)
    visible = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
    found = [target.rows(ids[:length], places[:length], visible, cache)[1]]
    own = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool, device=ids.device)
    visible = torch.cat([own.new_ones(3, length), own], dim=1)
    positions = places[[length, length + 1, length + 1]]
    found.append(target.rows(ids[length:-1], positions, visible, cache)[1])
    cache.keep(length, [0, 2])
    found.append(target.rows(ids[-1:], places[[length + 2]], own.new_ones(1, length + 3), cache)[1])
    off = (torch.cat(found) - expected).float().square().mean(-1).sqrt() / expected.float().std()
    worst = int(off.argmax())
    in_text = worst < length + 2
    return float(off[worst]), f"token {worst + 1} of a text of {length + 2}" if in_text else "a branch of a tree"
