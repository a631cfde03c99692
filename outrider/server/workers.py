"""The one way from the server to the model: jobs go in, the pieces of their texts come out.

There are as many threads as texts may be decoded at a time. Each reads the rounds of one text (`Decoder.rounds`) after
another. Whether the model computes the rounds of several threads in turn or in one pass is its own matter. What is
computed of a piece, its record for the client too, is computed in the thread of its text: the event loop only hands
texts on.
"""

import asyncio
import traceback
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from outrider.base.errors import UserError
from outrider.base.words import legible
from outrider.data_prep.text.chat import StreamedText
from outrider.inference.core.logprobs import ScoredRound, TokenScores
from outrider.inference.core.rounds import Round
from outrider.inference.core.stop_strings import StopStrings
from outrider.inference.settings.sampling import SamplingConfig

if TYPE_CHECKING:
    from outrider.api.decoder import Decoder


@dataclass(frozen=True)
class TextJob:
    """One text to write. rule: finds the stop strings before which it ends; the other fields are arguments of
    `Decoder.rounds`."""

    ids: tuple[int, ...]
    sampling: SamplingConfig
    max_new_tokens: int
    stops: tuple[str, ...]
    rule: StopStrings | None
    seed: int
    speculate: bool
    logprobs: int | None


@dataclass(frozen=True)
class Piece:
    """New tokens of a text, all drafted or all the target's own, and the text that is certain with them.

    The text may belong to earlier tokens; it is empty while later tokens may change it. scores: of the tokens, if asked
    for. proposed: how many tokens the drafter proposed since the piece before. passes: of the target since then, the
    prefill not counted. reason: why the text ends, "stop" or "length"; of the last piece alone, which has no tokens.
    """

    text: str
    tokens: tuple[int, ...] = ()
    drafted: bool = False
    scores: tuple[TokenScores, ...] = ()
    proposed: int = 0
    passes: int = 0
    reason: str | None = None


Event = tuple[str, bool] | UserError  # a record to send, and whether its text ends; or the error that ends all
EncodePiece = Callable[[int, Piece], str]  # the record of a piece of the text with this number; empty: nothing to send
GIVEN_UP = "given up: the client left, or the server ends"


class RefusedError(UserError):
    """A request without an answer, or without the rest of it. status: of HTTP; param: the field that is the cause."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400):
        super().__init__(message)
        self.param, self.status = param and legible(param), status


class Answers:
    """The `count` texts of one request, for one reader in the event loop that submitted it. events: not yet read."""

    def __init__(self, count: int, seconds: float):
        """seconds: after which they are cancelled, and the reader is told that they are late."""
        self._loop, self._running = asyncio.get_running_loop(), count
        self.events, self._come = deque[Event](), asyncio.Event()
        late = RefusedError(f"no whole answer within timeout={seconds} s", status=504)
        self._timer = self._loop.call_later(seconds, self.cancel, late)
        self.futures: list[Future[None]] = []
        self.cancelled = False
        self.watch: asyncio.Task[None] | None = None  # cancels them; held here, as the loop holds no task

    def put(self, event: Event) -> None:
        """Hand over an event. Any thread may call it."""
        self.events.append(event)
        if not self._come.is_set():  # else the reader has yet to take what is there
            with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._come.set)

    def cancel(self, error: RefusedError | None = None) -> None:
        """Cancel the texts: running ones after their current round, the others at once. Any thread may call it.

        error: what the reader is told after the pieces that are there.
        """
        self.cancelled = True
        self._timer.cancel()
        for future in self.futures:
            future.cancel()
        self.put(error or RefusedError(GIVEN_UP, status=503))

    async def read(self) -> AsyncIterator[str]:
        """The records of all texts as they come. Raises the error of a text, and `RefusedError` if no more come."""
        while self._running:
            while not self.events:
                await self._come.wait()
                self._come.clear()
            event = self.events.popleft()
            if isinstance(event, UserError):
                raise event
            record, ends = event
            self._running -= ends
            yield record


class Workers:
    """`threads` threads that write texts. Further texts wait; running and waiting ones are `most` at most.

    open: the texts that are written or wait. counts: of all texts by how they ended, and of tokens.
    """

    def __init__(self, model: "Decoder", threads: int, most: int):
        self._model, self._most, self.counts = model, most, Counter[str]()
        self._pool, self._ended = ThreadPoolExecutor(threads), False
        self.open, self._lock = dict[Future[None], Answers](), Lock()

    def submit(self, jobs: Sequence[TextJob], seconds: float, encode: EncodePiece) -> Answers:
        """Write the texts of `jobs`, each when its turn comes. Raises `RefusedError` if they are too many to wait."""
        with self._lock:
            if self._ended:
                raise RefusedError(GIVEN_UP, status=503)
            if len(self.open) + len(jobs) > self._most:
                raise RefusedError(f"{len(self.open)} texts are written or wait already: ask again later", status=429)
            answers = Answers(len(jobs), seconds)
            answers.futures = [
                self._pool.submit(self._write, job, answers, partial(encode, number)) for number, job in enumerate(jobs)
            ]
            self.open |= dict.fromkeys(answers.futures, answers)
        for future in answers.futures:
            future.add_done_callback(self._forget)
        return answers

    def give_up(self) -> None:
        """Give up all texts, and take no more."""
        with self._lock:
            self._ended = True
        for answers in {*self.open.copy().values()}:
            answers.cancel()

    def close(self) -> None:
        """Give up all texts, and wait for the rounds that are computed."""
        self.give_up()
        self._pool.shutdown()

    def _forget(self, future: Future[None]) -> None:
        with self._lock:
            del self.open[future]
        self._count(texts=1, cancelled_texts=int(future.cancelled()))

    def _write(self, job: TextJob, answers: Answers, encode: Callable[[Piece], str]) -> None:
        """Write one text. An error is an event of it, and the thread goes on."""
        try:
            rounds = self._model.rounds(
                job.ids, job.sampling, max_new_tokens=job.max_new_tokens, stop_strings=job.stops, seed=job.seed,
                speculate=job.speculate, logprobs=job.logprobs,
            )  # fmt: skip
            self._count(prompt_tokens=len(job.ids))
            for piece in decode_pieces(rounds, job, self._model.tokenizer, self._model.ends):
                size = len(piece.tokens)
                self._count(tokens=size, drafted_tokens=piece.proposed, accepted_tokens=size * piece.drafted)
                if (record := encode(piece)) or piece.reason is not None:
                    answers.put((record, piece.reason is not None))
                if answers.cancelled and piece.reason is None:
                    self._count(cancelled_texts=1)
                    return
        except Exception as error:
            self._count(failed_texts=1)
            if not isinstance(error, UserError):
                traceback.print_exc()
                error = RefusedError("an error of the server, which its output describes", status=500)
            answers.put(error.with_traceback(None))  # which would keep the memory of the text

    def _count(self, **amounts: int) -> None:
        with self._lock:
            self.counts.update(amounts)


def decode_pieces(
    rounds: Iterator[Round], job: TextJob, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]
) -> Iterator[Piece]:
    """The pieces of the text that `rounds` decode for `job`, without the stop string that ended it.

    Text that may begin a stop string is held back.
    """
    stream, unsent, history, rule = StreamedText(tokenizer, ends), "", [*job.ids], job.rule
    for number, r in enumerate(rounds):
        scores = r.scores if isinstance(r, ScoredRound) else ()
        proposed, passes = r.drafted, int(number > 0)
        for part in (slice(0, r.accepted), slice(r.accepted, len(r.tokens))):  # each has one proposer
            if not (tokens := r.tokens[part]):
                continue
            history += tokens
            unsent += stream.add(tokens)
            tail = rule.shown_end(history, len(stream.tokens)) if rule else ""
            size = max(0, len(unsent) - len(tail))
            yield Piece(unsent[:size], tokens, part.start == 0 < r.accepted, scores[part], proposed, passes)
            unsent, proposed, passes = unsent[size:], 0, 0
    unsent += stream.flush()
    stopped = rule is not None and rule.first_end(history, 1) is not None
    if rule and stopped:
        tail = rule.shown_end(history, len(stream.tokens))
        unsent = unsent.removesuffix(tail if unsent.endswith(tail) else tokenizer.clean_up_tokenization(tail))
    ended = stopped or stream.tokens[-1] in ends or len(stream.tokens) < job.max_new_tokens
    yield Piece(unsent, reason="stop" if ended else "length")
