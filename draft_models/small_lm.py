"""A small causal LM as a drafter: any supported architecture that shares the target's vocabulary."""

import torch
from transformers import PreTrainedTokenizerBase

from draft_models.errors import UserError
from draft_models.target import LayerStack, load_config, load_layers, load_tokenizer, open_target


def load_small_lm(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    revision: str | None = None,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> LayerStack:
    """The causal LM in `source` (local directory or Hub), frozen, for a target with `tokenizer`.

    Its embedding may be padded to another size than the target's; the tokens themselves must agree. Raises
    `UserError` with both sizes and the first differing token where they do not, before reading weights.
    """
    config = load_config(source, revision)
    require_same_vocabulary(load_tokenizer(source, revision), tokenizer)
    files = open_target(source, revision)
    return LayerStack(load_layers(files, config, range(config.num_hidden_layers), dtype=dtype, device=device))


def require_same_vocabulary(drafter: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> None:
    """Raise `UserError` unless both tokenizers give every token the same id."""
    mine, theirs = drafter.get_vocab(), target.get_vocab()
    if mine == theirs:
        return
    differing = sorted(
        (theirs.get(token, mine.get(token, 0)), token)
        for token in mine.keys() | theirs.keys()
        if mine.get(token) != theirs.get(token)
    )
    _, token = differing[0]
    raise UserError(
        f"drafter={drafter.name_or_path}: its vocabulary ({len(mine)} tokens) is not the target's "
        f"({target.name_or_path}: {len(theirs)} tokens); {len(differing)} tokens differ, first {token!r}: drafter id "
        f"{mine.get(token)}, target id {theirs.get(token)}. Use a drafter of the target's own family"
    )
