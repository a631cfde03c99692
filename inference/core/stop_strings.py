"""The end of a text at a stop string: transformers' own rule, applied to all tokens of a round at once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StopStringCriteria

from outrider.base.errors import UserError
from outrider.inference.core.rounds import Round


class StopStrings:
    """Finds the token with which the first of `stops` is complete, as `generate(stop_strings=stops)` does.

    The rule (`StopStringCriteria`) is a function of the last `span` tokens, prompt and new text alike. Their pieces,
    joined, must contain a stop string that ends in the last piece. The rule does not use the tokenizer's `decode` of
    the whole text, which may clean up spaces, for example. Raises `UserError` for stops that no token can end.
    """

    def __init__(self, stops: Sequence[str], tokenizer: PreTrainedTokenizerBase):
        try:
            self._rule = StopStringCriteria(tokenizer, list(stops))
        except ValueError as error:
            raise UserError(
                f"stop_strings={list(stops)}: transformers cannot look for them with this tokenizer "
                f"({error}); give texts that its tokens can spell"
            ) from None
        self._span = self._rule.maximum_token_len
        before = self._rule.max_valid_positions * self._rule.num_stop_strings
        overlaps = self._rule.embedding_vec[:, before:-1]  # [tokens, …]: how much of a stop's end each token can be
        self._may_end = frozenset((overlaps > 0).any(1).nonzero().flatten().tolist())

    def first_end(self, text: Sequence[int], new: int) -> int | None:
        """The number of the last `new` tokens of `text` up to its first end; None: the text continues.

        text: the prompt's tokens and all new ones. Except for the first few tokens of a text, the rule is called once,
        for all tokens that can end a stop. Most often there is no such token.
        """
        before = len(text) - new
        counts = [count for count in range(1, new + 1) if text[before + count - 1] in self._may_end]
        windows = [text[max(0, before + count - self._span) : before + count] for count in counts]
        if not windows:
            return None
        if len(windows[0]) == len(windows[-1]):
            ended = self._ends(windows)
        else:
            ended = [self._ends([window])[0] for window in windows]
        return counts[ended.index(True)] if True in ended else None

    def _ends(self, windows: Sequence[Sequence[int]]) -> list[bool]:
        """Whether a text ends with each of `windows`, which have one length."""
        found: list[bool] = self._rule(torch.tensor(windows), None).tolist()
        return found


def until(
    rounds: Iterator[Round], prompt: Sequence[int], first_end: Callable[[Sequence[int], int], int | None]
) -> Iterator[Round]:
    """`rounds` up to and including the token that ends the text; tokens after it are dropped.

    first_end(text, n): how many of the last n tokens of `text` (which includes the prompt) to keep; None if the text
    does not end (see `StopStrings.first_end`).
    """
    text = list(prompt)
    for r in rounds:
        text += r.tokens
        count = first_end(text, len(r.tokens))
        if count is not None:
            yield replace(r, tokens=r.tokens[:count], accepted=min(r.accepted, count))
            return
        yield r
