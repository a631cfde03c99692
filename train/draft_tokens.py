"""Which tokens a drafter is made of: the most frequent ones of what it learns from."""

from torch import Tensor

from data_prep.text.rows import Rows
from draft_models.draft_vocabulary import choose_tokens, count_tokens, coverage
from draft_models.targets.open_target import OpenTarget
from inference.loading.subject import end_tokens
from outrider.errors import UserError
from train.top_k_rows import TopKRows

COUNTED_ROWS = 20_000  # evenly spread, that say which tokens are frequent


def pick_tokens(
    size: int | None, target: OpenTarget, rows: Rows | TopKRows, heldout: Rows | TopKRows, limit: int | None = None
) -> Tensor | None:
    """The `size` tokens [size] that the drafter predicts; what they cover is said. None for all. Raises `UserError`.

    limit: how many tokens the model has that the drafter starts from, where they are not the target's.
    """
    if size is None:
        return None
    vocabulary = target.config.vocab_size
    most = vocabulary if limit is None else min(vocabulary, limit)
    if size > most:
        who = "the target" if most == vocabulary else "the model that training starts from"
        raise UserError(f"draft_vocabulary={size}: {who} has {most} tokens; expected at most as many")
    step = -(-len(rows) // COUNTED_ROWS)
    counts = count_tokens((rows[index] for index in range(0, len(rows), step)), vocabulary)
    always = [token for token in sorted(end_tokens(target)) if token < most][:size]
    tokens = choose_tokens(counts[:most], size, always)
    held = count_tokens((heldout[index] for index in range(len(heldout))), vocabulary)
    shares = f"coverage_train={coverage(counts, tokens):.4f} coverage_heldout={coverage(held, tokens):.4f}"
    print(f"draft_vocabulary={size} of={vocabulary} {shares}", flush=True)
    return tokens
