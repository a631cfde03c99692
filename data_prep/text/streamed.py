"""The text of tokens that come a few at a time."""

import re
from collections.abc import Collection, Iterable

from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # part of a character, decoded together with the bytes beside it
_SPACED = "a . b ? c ! d , e ' f n't g 'm h 's i 've j 're k"  # what clean-up brings together
_REACH = 19  # how far from its end cleaned-up text may still change: what its ten patterns can span together


class StreamedText:
    """A text in pieces. Joined, with `rest`, they are `tokenizer.decode(tokens, skip_special_tokens=True)` of `tokens`,
    which are all that came, less the last one if it is of `ends`: an end token need not be a special one.

    A piece is text that no later token changes. Held back are an incomplete character, bytes that may be part of one
    (byte fallback), and the last characters where the tokenizer cleans up spaces.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Collection[int] = ()) -> None:
        self._tokenizer, self._ends, self._said, self.tokens = tokenizer, ends, "", list[int]()
        ids = tokenizer(_SPACED, add_special_tokens=False)["input_ids"]
        plain = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self._reach = 0 if self._decoded(ids) == plain else _REACH

    def add(self, tokens: Iterable[int]) -> str:
        """The piece that is known with these tokens; it may be empty."""
        self.tokens += tokens
        end = len(self.tokens)
        while end and self._is_open(self.tokens[end - 1]):
            end -= 1
        text = self._decoded(self.tokens[:end]).rstrip("\ufffd")
        return self._until(text[: max(0, len(text) - self._reach)])

    def rest(self) -> str:
        """What was held back."""
        return self._until(self._decoded(self.tokens))

    def _until(self, text: str) -> str:
        piece = text[len(self._said) :] if text.startswith(self._said) else ""
        self._said += piece
        return piece

    def _is_open(self, token: int) -> bool:
        """Whether it may be part of a character that is not complete, or is not shown."""
        return bool(_BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token)))) or not self._decoded([token])

    def _decoded(self, tokens: list[int]) -> str:
        shown = tokens[:-1] if tokens and tokens[-1] in self._ends else tokens
        return str(self._tokenizer.decode(shown, skip_special_tokens=True))
