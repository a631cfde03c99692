"""A target proves itself: run layer by layer it gives what its own forward does, on a text and on a tree."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draft_models.target.anatomy import context_limit
from draft_models.target.attention import stock_attention
from draft_models.target.stack import LayerStack
from draft_models.target.whole_model import RowCache
from outrider.errors import UserError, reason

# Allowed root mean square of a difference between logits, as a share of their standard deviation. In float32 rounding
# stays below a tenth of it, and a quirk that is ignored goes far beyond. In 16 bits it is for gross mistakes only.
EXACT, ROUNDED = 1e-4, 0.1
LARGEST_COPY = 2 * 2**30  # bytes of a float32 copy that is worth its memory
LONGEST_WINDOW = 4096  # that a text is made to go beyond
SHORT = 12  # tokens of a text that goes beyond nothing


def prove(model: PreTrainedModel, name: str) -> None:
    """Raise `UserError` unless a `LayerStack` of `model` agrees with the model's own forward.

    Of a text of 12 tokens, and of one longer than any sliding window, the end is a tree: a root with two children, one
    of which goes on. Its rows are fed together, one child is dropped, the last token is fed after the other. Every row
    is compared with the forward over its path as plain text. Weights of 16 bits are compared in float32 where a copy
    is small enough. name: the option and value that gave the model, for the message.
    """
    allowed = EXACT
    if next(model.parameters()).dtype in (torch.bfloat16, torch.float16):
        if 4 * sum(parameter.numel() for parameter in model.parameters()) <= LARGEST_COPY:
            model = copy.deepcopy(model).float()
        else:
            allowed = ROUNDED
    stack = LayerStack(model)
    windows = [window for window in stack.windows if window is not None and window <= LONGEST_WINDOW]
    longest = context_limit(model.config) - 4
    for length in sorted({SHORT, max([SHORT, *(window + SHORT for window in windows)])}):
        _prove_text(model, stack, min(length, longest), name, allowed)


@torch.inference_mode()
def _prove_text(model: PreTrainedModel, stack: LayerStack, length: int, name: str, allowed: float) -> None:
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(vocabulary, (length + 4,), generator=generator).to(stack.device)
    prompt, root, dropped, kept, follower = length, length, length + 1, length + 2, length + 3
    try:
        ours = _rows(stack, ids, prompt)
        with stock_attention(model, "eager"):
            paths = [[*range(prompt), root, dropped], [*range(prompt), root, kept, follower]]
            first, second = (model(input_ids=ids[path][None], use_cache=False).logits[0] for path in paths)
    except UserError:
        raise
    except Exception as error:  # whatever the code of an architecture raises that was not made for this
        raise UserError(f"{name}: cannot be run layer by layer ({reason(error)})") from None
    expected = torch.cat([first, second[prompt + 1 :]])
    difference = (ours - expected).float().square().mean(-1).sqrt() / expected.float().std()
    worst = int(difference.argmax())
    if not float(difference[worst]) <= allowed:  # a NaN is not
        place = f"token {worst + 1} of a text of {length + 2}" if worst < prompt + 2 else "a branch of a tree after it"
        raise UserError(
            f"{name}: run layer by layer its logits differ from its own forward's by {float(difference[worst]):.2g} of "
            f"their spread at {place} (rounding: up to {allowed:.0e}), so it does something that is not known here. "
            "Drafters that need no layers of it are not affected (prompt lookup, n-grams, small LMs)"
        )


def _rows(stack: LayerStack, ids: Tensor, prompt: int) -> Tensor:
    """Logits of the prompt's tokens, root, dropped, kept and follower [prompt + 4, V], in two passes and two halves."""
    cache: Any = RowCache(len(ids))
    root, dropped, kept, follower = range(prompt, prompt + 4)
    text = _feed(stack, cache, ids[:prompt], list(range(prompt)), None)
    lineages = [[root], [root, dropped], [root, kept]]
    seen = torch.zeros(3, prompt + 3, dtype=torch.bool, device=ids.device)
    seen[:, :prompt] = True
    for row, lineage in enumerate(lineages):
        seen[row, lineage] = True
    tree = _feed(stack, cache, ids[[root, dropped, kept]], [prompt, prompt + 1, prompt + 1], seen)
    cache.keep(prompt, [0, 2])
    whole = torch.ones(1, prompt + 3, dtype=torch.bool, device=ids.device)
    last = _feed(stack, cache, ids[[follower]], [prompt + 2], whole)
    return torch.cat([text, tree, last])


def _feed(stack: LayerStack, cache: Any, tokens: Tensor, places: Sequence[int], seen: Tensor | None) -> Tensor:
    """Logits of `tokens` at positions `places`, which see what `seen` [n, keys] says; None: they begin a text."""
    positions = torch.tensor(places, device=tokens.device)
    earlier = torch.arange(min(places), device=tokens.device)
    keys = torch.cat([earlier, positions])
    visible = keys <= positions[:, None] if seen is None else seen
    masks: dict[int | None, Tensor | None] = {}
    for window in set(stack.windows):
        if window is None or window >= len(keys):
            masks[window] = None if seen is None else _additive(visible, stack.dtype)
        else:
            masks[window] = _additive(visible & (keys > positions[:, None] - window), stack.dtype)
    stack.reserve(int(positions.max()) + 1)
    rotary, middle = stack.rotary(positions[None]), len(stack.layers) // 2
    hidden = stack.embed(tokens[None], positions[None])
    for part in ((0, middle), (middle, len(stack.layers))):
        hidden = stack.run(hidden, *part, rotary, masks, cache)
    return stack.logits(hidden)[0]


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[None, None]
