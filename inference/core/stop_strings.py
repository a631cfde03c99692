"""The end of a text at a stop string: transformers' own rule, applied to all new tokens of a decoding round at once."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StopStringCriteria

from outrider.base.errors import UserError
from outrider.inference.core.rounds import Round

_NO_TEXT = b"\xff"  # of an id that is no token; no stop string has this byte
_PIECES: WeakKeyDictionary[PreTrainedTokenizerBase, dict[int, bytes]] = WeakKeyDictionary()  # see `_pieces_of`


def _pieces_of(tokenizer: PreTrainedTokenizerBase, mode: str | None) -> dict[int, bytes]:
    """What each token adds to a text, by id, read once: a large vocabulary takes a second.

    mode: the tokens' spelling as transformers calls it: "byte_level", "byte_fallback", or None for plain text.
    """
    if tokenizer not in _PIECES:
        texts, ids = StopStringCriteria.clean_tokenizer_vocab(tokenizer, stop_string_matching_mode=mode)
        pieces = (text if isinstance(text, bytes) else text.encode("utf-8", "replace") for text in texts)
        _PIECES[tokenizer] = dict(zip(ids, pieces, strict=True))
    return _PIECES[tokenizer]


class StopStrings:
    """Finds the token with which the first of `stops` is complete, as `generate(stop_strings=stops)` does.

    A piece is the bytes that a token adds to a text. The rule is that of `StopStringCriteria`: the joined pieces of the
    last tokens, of the prompt too, must contain a stop string that ends in the last piece. It reads `span` tokens, the
    length of the longest stop string. The tokenizer's `decode` is not used, as it may clean up spaces. transformers'
    own class makes a table of the whole vocabulary for every new list of stop strings, which takes seconds.
    """

    def __init__(self, stops: Sequence[str], tokenizer: PreTrainedTokenizerBase, ends: Collection[int] = ()):
        """ends: ids that the shown text leaves out, as it does special tokens.

        Raises `UserError` for stops that no token can end.
        """
        mode = StopStringCriteria._get_stop_string_matching_mode(tokenizer)
        self._stops = [stop.encode() for stop in stops]
        tails = {stop[-length:] for stop in self._stops for length in range(1, len(stop) + 1)}
        try:
            self._by_id = _pieces_of(tokenizer, mode)
            # A token can end a stop string if it begins with a tail of the string, or contains the string.
            begins = (piece[:length] for piece in self._by_id.values() for length in range(1, len(piece) + 1))
            if tails.isdisjoint(begins) and not any(s in piece for s in self._stops for piece in self._by_id.values()):
                raise ValueError("no token of it ends one")
        except ValueError as error:
            raise UserError(
                f"stop_strings={list(stops)}: transformers cannot look for them with this tokenizer ({error}); "
                "give texts that its tokens can spell"
            ) from None
        special_ids = (token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
        self._hidden = {*ends, *special_ids, *tokenizer.all_special_ids}
        self._span = max(map(len, stops if mode is None else self._stops))  # as transformers: in characters or bytes

    def first_end(self, text: Sequence[int], new_count: int) -> int | None:
        """The number of the last `new_count` tokens of `text` up to its first end; None: the text continues.

        text: the prompt's tokens and all new ones. Most often one search through the last bytes finds no stop string.
        """
        old_count = len(text) - new_count
        tail_bytes = b"".join(self._pieces(text[max(0, old_count - self._span) :]))
        end_counts = range(1, new_count + 1) if any(stop in tail_bytes for stop in self._stops) else ()
        return next((count for count in end_counts if self._begin(text[: old_count + count]) is not None), None)

    def shown_end(self, text: Sequence[int], new_count: int) -> str:
        """The end of the shown text that is, or may begin, a stop string; with what the last token has after it.

        text: as for `first_end`. new_count: the number of all new tokens; only they are shown, without special tokens.
        Example with the stop string "END": of the new tokens "a" " E" it is "E", which may begin a stop string; of "a"
        " E" "ND!" it is "END!"; of "a" " E" "gg" it is "".
        """
        last_ids, shown_pieces = text[-self._span :], list[bytes]()
        pieces, stop_begin = self._pieces(last_ids), self._begin(text)
        stop_begin = self._open(b"".join(pieces)) if stop_begin is None else stop_begin
        for age, token, piece in zip(range(len(last_ids), 0, -1), last_ids, pieces, strict=True):  # age: 1 for the last
            if age <= new_count and token not in self._hidden:
                shown_pieces.append(piece[max(0, stop_begin) :])
            stop_begin -= len(piece)  # counted from the next piece
        return b"".join(shown_pieces).decode("utf-8", "replace")

    def _begin(self, text: Sequence[int]) -> int | None:
        """Where the first stop string that ends in the last token begins in the joined pieces of `span` tokens."""
        pieces = self._pieces(text[-self._span :])
        joined = b"".join(pieces)
        bytes_before = len(joined) - len(pieces[-1])  # before the last piece, in which a stop string has to end
        stop_begins = [joined.find(stop, max(0, bytes_before - len(stop) + 1)) for stop in self._stops]
        return min((begin for begin in stop_begins if begin >= 0), default=None)

    def _open(self, joined: bytes) -> int:
        """The index of the longest suffix of `joined` that is a prefix of a stop string; len(joined) without one."""
        suffix_begins = range(max(0, len(joined) - max(map(len, self._stops)) + 1), len(joined))
        return next((i for i in suffix_begins if any(stop.startswith(joined[i:]) for stop in self._stops)), len(joined))

    def _pieces(self, tokens: Sequence[int]) -> list[bytes]:
        return [self._by_id.get(token, _NO_TEXT) for token in tokens]


def cut_at_stop(
    rounds: Iterator[Round], prompt: Sequence[int], first_end: Callable[[Sequence[int], int], int | None]
) -> Iterator[Round]:
    """`rounds` up to and including the token that ends the text; tokens after it are dropped.

    first_end: as `StopStrings.first_end`, a function of all tokens and the number of new ones.
    """
    text = list(prompt)
    for r in rounds:
        text += r.tokens
        end_count = first_end(text, len(r.tokens))
        if end_count is not None:
            yield replace(r, tokens=r.tokens[:end_count], accepted=min(r.accepted, end_count))
            return
        yield r
