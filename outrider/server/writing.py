"""A text as it is written: what is asked of the model, and the pieces in which the answer comes."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from outrider.data_prep.text.chat import StreamedText
from outrider.inference.core.logprobs import ScoredRound, TokenScores
from outrider.inference.core.rounds import Round
from outrider.inference.settings.sampling import SamplingConfig


@dataclass(frozen=True)
class Job:
    """One text to write. stops: strings before which it ends; the other fields are arguments of `Model.rounds`."""

    ids: tuple[int, ...]
    sampling: SamplingConfig
    max_new_tokens: int
    stops: tuple[str, ...]
    seed: int
    speculate: bool
    logprobs: int | None


@dataclass(frozen=True)
class Piece:
    """New tokens of a text, all drafted or all the target's own, and the text that is certain with them.

    The text may be of earlier tokens, and is empty while later ones may change it. scores: of the tokens, if asked for.
    proposed: how many tokens the drafter proposed since the piece before. reason: why the text ends, "stop" or
    "length"; of the last piece alone, which has no tokens.
    """

    text: str
    tokens: tuple[int, ...] = ()
    drafted: bool = False
    scores: tuple[TokenScores, ...] = ()
    proposed: int = 0
    reason: str | None = None


def write(
    rounds: Iterator[Round], job: Job, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]
) -> Iterator[Piece]:
    """The pieces of the text that `rounds` decode for `job`. No round is asked for after a stop string."""
    said, held, found = StreamedText(tokenizer, ends), "", False
    for r in rounds:
        proposed, start = r.drafted, 0
        while start < len(r.tokens):
            drafted = start < r.accepted
            # A stop string may end the text after any token; else a piece has one proposer.
            end = start + 1 if job.stops else r.accepted if drafted else len(r.tokens)
            tokens = r.tokens[start:end]
            scores = r.scores[start:end] if isinstance(r, ScoredRound) else ()
            text, held, found = until(held + said.add(tokens), job.stops)
            yield Piece(text, tokens, drafted, scores, proposed)
            if found:
                yield Piece("", reason="stop")
                return
            proposed, start = 0, end
    text, held, found = until(held + said.rest(), job.stops)
    ended = found or said.tokens[-1] in ends or len(said.tokens) < job.max_new_tokens
    yield Piece(text if found else text + held, reason="stop" if ended else "length")


def until(text: str, stops: Collection[str]) -> tuple[str, str, bool]:
    """What is before the first of `stops`, what is held back as it may begin one, and whether one came."""
    places = [place for place in map(text.find, stops) if place >= 0]
    if places:
        return text[: min(places)], "", True
    sizes = range(max(map(len, stops), default=1) - 1, 0, -1)
    begun = next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in stops)), 0)
    shown = max(0, len(text) - begun)
    return text[:shown], text[shown:], False
