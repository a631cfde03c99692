"""Copies: the draft is what followed an earlier occurrence of the text's last tokens.

A method drafts by copies alone (`prompt_lookup`), or by a model where there is nothing to copy (`copy`). Example with
max_ngram=3 and max_draft=4: the text is "a b c d e a b" and the last token, the root, is "c". The suffix "a b c" stands
at the beginning, too, and "d e a b" followed there. So these four tokens are the draft.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.inference.core.drafter import Drafter, Stopwatch
from outrider.inference.core.session import Session
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.core.tree import DraftTree, chain_parents
from outrider.inference.settings import MOST_NODES
from outrider.inference.sizing.node_sizes import BestNodes
from outrider.inference.sizing.policy import OWN, Tuning

# With max_draft=auto: the prior probability that a drafted token is right if the previous one is.
_FIRST = (0.3, 0.4, 0.6)  # of the first token, by the matched n-gram's length; each is in another band of q for `sizes`
_NEXT_PROB = 0.8  # of every later token
_FILLING = 1e-6  # path probability of padding tokens, which fill a draft up to a length to be timed
_PARENTS = np.arange(-1, MOST_NODES - 1)  # of a chain
_PATH_PROBS = [first * _NEXT_PROB ** np.arange(MOST_NODES) for first in _FIRST]  # by the length of the matched n-gram
_LOSS = 0.01  # see `Allowance`; half of its default, as each short generation starts with the full allowance


class PromptLookup(Drafter):
    """A drafter without a model: a round costs one dictionary look-up per n-gram length.

    The draft is up to `max_draft` tokens after the latest earlier occurrence of the longest repeated suffix of the
    text, of at most `max_ngram` tokens.

    tuning: the measured costs of passes, for max_draft=auto: `sizes` then submits only as many of these tokens as pay,
    often none. None: all of them are submitted. min_ngram: a shorter suffix is not looked up.
    """

    def __init__(self, max_ngram: int = 3, max_draft: int = 10, tuning: Tuning | None = None, min_ngram: int = 1):
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self.max_rows = max_draft  # this and `sizes`: see `Drafter`
        if tuning is not None:
            # The accuracy of copies depends on the text, so evidence from other texts weighs little: `OWN`, one trial.
            self.sizes = BestNodes(tuning, prior=OWN, neighbour=OWN, loss=_LOSS)

    def begin(self, session: Session, selector: TokenSelector, watch: Stopwatch) -> None:
        self._text: list[int] = []
        self._continuation_of: dict[tuple[int, ...], int] = {}  # n-gram → the index of the token after its last one
        self._append(session.tokens.tolist())

    def draft(self, root: Tensor, limit: int) -> DraftTree:
        ids = self._choose_tokens(int(root), min(limit, self.max_rows))
        tokens = torch.tensor(ids, dtype=torch.long, device=root.device) if ids else root[:0]
        rows = (-1,) * len(ids)  # no draft model ran these tokens
        return DraftTree(tokens, chain_parents(0, len(ids)), rows, source="text")

    def commit(self, tree: DraftTree, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        self._append(tokens)
        if self.sizes is not None:
            draft_length = len(self._path_probs)  # 0 for the draft of another drafter
            self.sizes.observe(_PARENTS[:draft_length], self._path_probs, nodes[:draft_length])

    def _choose_tokens(self, root_id: int, max_tokens: int) -> list[int]:
        """The tokens to submit after the token `root_id`, at most `max_tokens`."""
        if self.sizes is None:
            return self._find_continuation(root_id, max_tokens)[0]
        max_tokens = min(max_tokens, self.sizes.search_size())
        tokens, match_length = self._find_continuation(root_id, max_tokens) if max_tokens else ([], 0)
        path_probs = _PATH_PROBS[min(match_length, len(_FIRST)) - 1][: len(tokens)]
        if len(tokens) < max_tokens and not isinstance(self.sizes, BestNodes):  # other sizes measure costs of lengths
            missing_count = max_tokens - len(tokens)
            path_probs = np.append(path_probs, _FILLING ** np.arange(1, missing_count + 1))
            tokens += [root_id] * missing_count
        submit_count = self.sizes.count(_PARENTS[: len(tokens)], path_probs)
        self._path_probs = path_probs[:submit_count]
        return tokens[:submit_count]

    def _find_continuation(self, root_id: int, max_tokens: int) -> tuple[list[int], int]:
        """(at most `max_tokens` tokens that followed the longest suffix earlier, the suffix's length; 0: no match)."""
        suffix = [*self._text[-self.max_ngram :], root_id]
        for ngram_length in range(min(self.max_ngram, len(suffix)), self.min_ngram - 1, -1):
            copy_start = self._continuation_of.get(tuple(suffix[-ngram_length:]))
            if copy_start is not None:
                # The root is not in `_text` yet, though a match may run up to it.
                return [*self._text[copy_start : copy_start + max_tokens], root_id][:max_tokens], ngram_length
        return [], 0

    def _append(self, tokens: Sequence[int]) -> None:
        """Add tokens, and index the n-grams that end with each, which the next token follows."""
        for text_length, token in enumerate(tokens, start=len(self._text) + 1):
            self._text.append(token)
            for ngram_length in range(self.min_ngram, min(self.max_ngram, text_length) + 1):
                self._continuation_of[tuple(self._text[text_length - ngram_length :])] = text_length
