"""The one way from the server to the model: jobs go in, the pieces of their texts come out.

    answers = workers.submit(model, jobs, seconds, encode)     # in the event loop
        _write: rounds of the model → decode_pieces → encode → answers.put → end     # in a thread, for each text
    async for record in answers.read(): ...             # in the event loop

There are as many threads as texts may be decoded at a time. A thread writes one text after another (`Decoder.rounds`).
A round: one pass of the target and the tokens that it adds. The model decides whether the rounds of several threads are
computed in turn or in one pass. All that is computed from a piece, its record for the client too, is computed in the
thread of its text. The event loop only hands records on.
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
from outrider.base.words import make_legible
from outrider.data_prep.text.chat import StreamedText
from outrider.inference.core.logprobs import ScoredRound, TokenScores
from outrider.inference.core.rounds import Round
from outrider.inference.core.stop_strings import StopStrings
from outrider.inference.settings.sampling import SamplingConfig

if TYPE_CHECKING:
    from outrider.api.decoder import Decoder


@dataclass(frozen=True)
class TextJob:
    """One text to write, by `Decoder.rounds`."""

    ids: tuple[int, ...]  # the prompt's tokens
    sampling: SamplingConfig
    max_new_tokens: int
    stops: tuple[str, ...]  # stop strings
    rule: StopStrings | None  # finds the stop strings before which the text ends
    seed: int
    speculate: bool  # False: without the drafter
    logprobs: int | None  # the number of likeliest tokens at each position to score; None: no scores


@dataclass(frozen=True)
class Piece:
    """New tokens of a text, all drafted or all the target's own, and the part of the text that is certain by now."""

    text: str  # also of earlier tokens; empty while later tokens may change it
    tokens: tuple[int, ...] = ()
    drafted: bool = False  # whether the drafter proposed these tokens
    scores: tuple[TokenScores, ...] = ()  # the log-probabilities of the tokens, if the job asks for them
    proposed: int = 0  # tokens that the drafter proposed since the piece before
    passes: int = 0  # passes of the target since the piece before, without the prefill
    reason: str | None = None  # why the text ends, "stop" or "length"; only the last piece has one, and no tokens


Event = tuple[str, bool] | UserError  # a record to send, and whether its text ends; or the error that ends the answer
EncodePiece = Callable[[int, Piece], str]  # (number of the text, its piece) → the record to send; "": nothing to send
EndText = Callable[[int, Sequence[int]], None]  # is told the number of a text and its tokens, after its last piece
GIVEN_UP = "given up: the client left, or the server ends"


class RefusedError(UserError):
    """A request that is not answered, or not to the end. status: of HTTP; param: the field that is the cause."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400):
        super().__init__(message)
        self.param, self.status = param and make_legible(param), status


class Answers:
    """The `count` texts of one request, for one reader in the event loop that submitted it.

    events: those not yet read. futures: of the threads' work. watch: a task that cancels the texts when the client
    leaves; it is referenced here, since the event loop references no task.
    """

    def __init__(self, count: int, seconds: float):
        """seconds: after these the texts are cancelled, and the reader gets an error."""
        self._loop, self._running = asyncio.get_running_loop(), count
        self.events, self._has_events = deque[Event](), asyncio.Event()
        timeout_error = RefusedError(f"no whole answer within timeout={seconds} s", status=504)
        self._timer = self._loop.call_later(seconds, self.cancel, timeout_error)
        self.futures: list[Future[None]] = []
        self.cancelled = False
        self.watch: asyncio.Task[None] | None = None

    def put(self, event: Event) -> None:
        """Hand over an event. Every thread may call this."""
        self.events.append(event)
        if not self._has_events.is_set():  # otherwise the reader is about to read all events
            with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._has_events.set)

    def cancel(self, error: RefusedError | None = None) -> None:
        """Cancel the texts: running ones after their current round, waiting ones at once. Every thread may call this.

        error: the reader gets it after the pieces that are there.
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
                await self._has_events.wait()
                self._has_events.clear()
            event = self.events.popleft()
            if isinstance(event, UserError):
                raise event
            record, text_ends = event
            self._running -= text_ends
            yield record


class Workers:
    """`threads` threads that write texts. Further texts wait. At most `max_texts` texts run or wait.

    open: the texts that run or wait. counts: texts by how they ended, and tokens.
    """

    def __init__(self, threads: int, max_texts: int):
        self._max_texts, self.counts = max_texts, Counter[str]()
        self._pool, self._ended = ThreadPoolExecutor(threads), False
        self.open, self._lock = dict[Future[None], Answers](), Lock()

    def submit(
        self,
        model: "Decoder",
        jobs: Sequence[TextJob],
        timeout_seconds: float,
        encode: EncodePiece,
        on_end: EndText = lambda *_: None,
    ) -> Answers:
        """Write the texts of `jobs` by `model`, each when its turn comes. Raises `RefusedError` if they are too many to
        wait."""
        with self._lock:
            if self._ended:
                raise RefusedError(GIVEN_UP, status=503)
            if len(self.open) + len(jobs) > self._max_texts:
                raise RefusedError(f"{len(self.open)} texts are written or wait already: ask again later", status=429)
            answers = Answers(len(jobs), timeout_seconds)
            answers.futures = [
                self._pool.submit(self._write, model, job, answers, partial(encode, index), partial(on_end, index))
                for index, job in enumerate(jobs)
            ]
            self.open |= dict.fromkeys(answers.futures, answers)
        for future in answers.futures:
            future.add_done_callback(self._forget)
        return answers

    def give_up(self) -> None:
        """Give up all texts, and take no more."""
        with self._lock:
            self._ended = True
        for answers in {*self.open.copy().values()}:  # once each; a copy, as threads change `open`
            answers.cancel()

    def close(self) -> None:
        """Give up all texts, and wait for the rounds that are computed."""
        self.give_up()
        self._pool.shutdown()

    def _forget(self, future: Future[None]) -> None:
        with self._lock:
            del self.open[future]
        self._count(texts=1, cancelled_texts=int(future.cancelled()))
        if not future.cancelled() and (error := future.exception()):  # of `on_end`: the client has its answer
            traceback.print_exception(error)

    def _write(
        self, model: "Decoder", job: TextJob, answers: Answers, encode: Callable[[Piece], str],
        on_end: Callable[[Sequence[int]], None],
    ) -> None:  # fmt: skip
        """Write one text. An error becomes an event of the text, and the thread goes on with the next text."""
        tokens = list[int]()
        try:
            rounds = model.rounds(
                job.ids, job.sampling, max_new_tokens=job.max_new_tokens, stop_strings=job.stops, seed=job.seed,
                speculate=job.speculate, logprobs=job.logprobs,
            )  # fmt: skip
            self._count(prompt_tokens=len(job.ids))
            for piece in decode_pieces(rounds, job, model.tokenizer, model.ends):
                tokens += piece.tokens
                size = len(piece.tokens)
                self._count(tokens=size, drafted_tokens=piece.proposed, accepted_tokens=size * piece.drafted)
                if (record := encode(piece)) or piece.reason is not None:
                    answers.put((record, piece.reason is not None))
                if answers.cancelled and piece.reason is None:
                    self._count(cancelled_texts=1)
                    break
        except Exception as error:
            self._count(failed_texts=1)
            if not isinstance(error, UserError):
                traceback.print_exc()
                error = RefusedError("an error of the server, which its output describes", status=500)
            answers.put(error.with_traceback(None))  # a traceback would keep the memory of the text
        if tokens:
            on_end(tokens)

    def _count(self, **amounts: int) -> None:
        with self._lock:
            self.counts.update(amounts)


def decode_pieces(
    rounds: Iterator[Round], job: TextJob, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int]
) -> Iterator[Piece]:
    """The pieces of the text that `rounds` decode for `job`, without the stop string that ends it.

    A round has up to two pieces: its drafted tokens, and the target's own. Text that may begin a stop string is kept in
    `unsent`. end_ids: the ids that end a text.
    """
    streamed_text, unsent, text_ids, stop_rule = StreamedText(tokenizer, end_ids), "", [*job.ids], job.rule
    for round_index, r in enumerate(rounds):
        scores = r.scores if isinstance(r, ScoredRound) else ()
        proposed, passes = r.drafted, int(round_index > 0)  # round 0 is the prefill
        for is_drafted, token_slice in ((True, slice(0, r.accepted)), (False, slice(r.accepted, len(r.tokens)))):
            if not (tokens := r.tokens[token_slice]):
                continue
            text_ids += tokens
            unsent += streamed_text.add(tokens)
            # The end of the text that is, or may begin, a stop string.
            tail = stop_rule.shown_end(text_ids, len(streamed_text.tokens)) if stop_rule else ""
            send_length = max(0, len(unsent) - len(tail))
            yield Piece(unsent[:send_length], tokens, is_drafted, scores[token_slice], proposed, passes)
            unsent, proposed, passes = unsent[send_length:], 0, 0
    unsent += streamed_text.flush()
    is_stopped = stop_rule is not None and stop_rule.first_end(text_ids, new_count=1) is not None
    if stop_rule and is_stopped:
        tail = stop_rule.shown_end(text_ids, len(streamed_text.tokens))  # `unsent` may have its spaces cleaned up
        unsent = unsent.removesuffix(tail if unsent.endswith(tail) else tokenizer.clean_up_tokenization(tail))
    ended = is_stopped or streamed_text.tokens[-1] in end_ids or len(streamed_text.tokens) < job.max_new_tokens
    yield Piece(unsent, reason="stop" if ended else "length")
