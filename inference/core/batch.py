"""Many texts at once: each is decoded by the loop of one text, and passes of several texts run as one.

A row is one token of a pass over a model. A text runs in a greenlet until it asks for a pass. Once every text waits,
the passes of one kind run together over the rows of all these texts: weights are read once, and each row attends to
keys of its own text. So a row's result is what its engine computes for the same row alone.

`Batch.step` is one turn of all texts. Example: texts A and B draft two tokens, one by one, and text C drafts one.

    step 1    drafter over 3 rows    A drafts, B drafts, C drafts and waits for the target
    step 2    drafter over 2 rows    A drafts, B drafts; both wait for the target
    step 3    target over 8 rows     the roots and drafts of A (3 rows), B (3) and C (2) are verified; all rounds end

`Worker` runs such steps in a thread, for texts that other threads read.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from queue import SimpleQueue
from threading import Lock, Thread, current_thread, main_thread
from typing import TypeVar, cast

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from outrider.draft_models.targets.attention import KeysChangedError
from outrider.draft_models.targets.model_spec import slots_of
from outrider.draft_models.targets.target import Masks, Rotary, Target, TextMasks
from outrider.inference.core.cache import KVCache
from outrider.inference.core.rounds import Round
from outrider.inference.core.session import Pass, Session
from outrider.inference.core.target_session import REST, Runtime, TextView, eager_session
from outrider.inference.settings import MOST_NODES

Output = TypeVar("Output")
Outcome = tuple[Tensor, ...] | Exception  # of a pass
PIECE = 256  # tokens of a prompt that run while the other texts wait
ROUND = MOST_NODES + 1  # rows of a round for which a budget has room: a largest draft and its root


@dataclass(frozen=True)
class PassRequest:
    """The pass that a text waits for: `pass_` over its input x [1, n, …] or [n]. Passes of one kind can be joined."""

    kind: tuple[int, int, str]  # (id of the layers, the session's split, name of the pass)
    pass_: Pass
    x: Tensor
    view: TextView

    @property
    def rows(self) -> int:
        return self.view.layout.stop - self.view.layout.start

    @property
    def ends_round(self) -> bool:
        """Whether it is a pass of the target that verifies."""
        return self.kind[2].startswith(REST)  # the name of the pass


class TextCaches:
    """The caches of several texts in one pass. entries: the running layer's keys and values (see `TextMasks`)."""

    def __init__(self, requests: list[PassRequest]):
        self.rows = tuple(request.rows for request in requests)
        self.caches = tuple(request.view.cache for request in requests)
        self.entries: list[tuple[Tensor, Tensor]] = []

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write key, value [1, heads, ΣQ, head_dim] to the texts' caches; returns them as they are."""
        kv_of_texts = zip(self.caches, key.split(self.rows, dim=2), value.split(self.rows, dim=2), strict=True)
        self.entries[:] = [(key, value), *(cache.update(*states, layer_idx) for cache, *states in kv_of_texts)]
        return key, value


class JointView:
    """The view of the rows of several texts, one text after another."""

    def __init__(self, requests: list[PassRequest]):
        self.requests = requests
        self.cache = TextCaches(requests)

    @cached_property
    def positions(self) -> Tensor:
        return torch.cat([request.view.positions for request in self.requests], dim=1)

    @cached_property
    def rotary(self) -> Rotary:
        pairs_by_table = zip(*(request.view.rotary.tables for request in self.requests), strict=True)  # of every text
        tables = [tuple(torch.cat(tensors, dim=1) for tensors in zip(*pairs, strict=True)) for pairs in pairs_by_table]
        return Rotary(self.positions, tuple((cos, sin) for cos, sin in tables))

    def masks(self) -> Masks:
        masks_of_texts = [request.view.masks() for request in self.requests]
        row_counts, caches, entries = self.cache.rows, self.cache.caches, self.cache.entries
        masks_by_window = {window: tuple(masks[window] for masks in masks_of_texts) for window in masks_of_texts[0]}
        return {window: TextMasks(row_counts, masks, caches, entries) for window, masks in masks_by_window.items()}

    def logit_rows(self, hidden: Tensor) -> Tensor:
        if all(request.rows == request.view.logit_count for request in self.requests):
            return hidden
        hidden_of_texts = zip(hidden.split(self.cache.rows, dim=1), self.requests, strict=True)
        return torch.cat([request.view.logit_rows(text_hidden) for text_hidden, request in hidden_of_texts], dim=1)


def run_jointly(requests: list[PassRequest]) -> list[Outcome]:
    """The outputs of passes of one kind, computed by one pass over all rows. The requests are split in half if memory
    is short, or if the layers cannot run several texts. The outcome of a text that fails alone is its error. Raises
    other errors of a pass of several texts."""
    first, half = requests[0], len(requests) // 2
    if not half:
        try:
            return [first.pass_(first.x, first.view)]
        except Exception as error:
            return [error]
    view, outputs = JointView(requests), None
    with suppress(torch.OutOfMemoryError, KeysChangedError):
        outputs = first.pass_(torch.cat([request.x for request in requests], dim=min(first.x.dim() - 1, 1)), view)
    if outputs is None:  # outside the handler: its traceback holds the pass's tensors
        return run_jointly(requests[:half]) + run_jointly(requests[half:])
    lengths, logit_counts = view.cache.rows, [request.view.logit_count for request in requests]
    # An output has all rows of a text, or only those whose logits were requested.
    parts = [output.split(lengths if output.shape[1] == sum(lengths) else logit_counts, dim=1) for output in outputs]
    return list(zip(*parts, strict=True))


@dataclass(eq=False)
class BatchText:
    """A text of a batch."""

    rounds: Iterator[Round]  # of its loop, in this batch's sessions
    take: Callable[[Round], None]  # called with each round
    end: Callable[[Exception | None], None]  # called at the end, with the error that ended it, if any
    positions: int = 0  # its tokens so far, the prompt included
    run: greenlet | None = None
    pending: PassRequest | None = None  # the pass that it waits for
    reader: Thread = field(default_factory=current_thread)


@dataclass(frozen=True, order=True)
class CacheBudget:
    """The memory for the KV caches of texts that are decoded together, without what a graph's fixed shapes take."""

    position_bytes: int  # of one position in all caches of a text, the drafter's included
    max_bytes: int  # of all texts

    def bytes_of(self, position_count: int) -> int:
        """Bytes that the caches of a text of so many positions take; half as much again while they grow."""
        return slots_of(position_count + ROUND) * self.position_bytes

    def count_fitting(self, text_lengths: Iterable[int]) -> int:
        """How many of the texts, of so many positions in this order, fit together; at least the first, at any size."""
        totals = accumulate(map(self.bytes_of, text_lengths))
        return max(1, sum(total_bytes <= self.max_bytes for total_bytes in totals))


class Batch(Runtime):
    """Makes the sessions of texts that are decoded together, and runs these texts.

    A text joins by `add`, between steps, and leaves when it ends or by `drop`. All methods must be called in one
    thread. Prompts are run text by text, and so is a target that runs as a whole. yielding: texts go on between the
    layers of a long prompt. runtime: if it is not eager, it makes the sessions, and texts take turns, round by round.
    budget: of all caches; None: unbounded. While the texts exceed the budget together, the texts that came last pause
    between two rounds, or do not start.
    """

    name = "batch"

    def __init__(self, runtime: Runtime | None = None, yielding: bool = True, budget: CacheBudget | None = None):
        self.runtime, self.yielding, self.budget = runtime or Runtime(), yielding, budget
        self.texts: list[BatchText] = []
        self.rounds = 0  # the number of steps that ended rounds

    def session(self, target: Target, split: int | None, capacity: int, context: int | None = None) -> Session:
        """As `eager_session(target, split, capacity, context)`, with passes of several texts run as one."""
        if self.runtime.name != Runtime.name:
            return self.runtime.session(target, split, capacity, context)
        return eager_session(target, split, capacity, context, partial(_wait, self.yielding))

    def sharing(self, target: Target) -> tuple[int, int]:
        """The number of texts whose passes over `target` run as one now, and the number of their round."""
        runs_jointly = self.runtime.name == Runtime.name and target.layered is not None
        return max(1, len(self.texts)) if runs_jointly else 1, self.rounds

    def add(self, text: BatchText) -> None:
        """Decode `text` too, from the next step on."""
        self.texts.append(text)

    @torch.inference_mode()  # as in `step`: a decode loop that ends restores the mode in which it began
    def drop(self, text: BatchText) -> None:
        """End a text early."""
        if text.run is not None:
            with suppress(Exception):  # nobody reads what it raises at its end, and the others go on
                text.run.throw()
        self._forget(text)

    def close(self) -> None:
        for text in [*self.texts]:
            self.drop(text)

    def _forget(self, text: BatchText) -> None:
        """Remove a text that has ended, so that it keeps no session alive."""
        self.texts.remove(text)
        text.rounds, text.run, text.pending = iter(()), None, None

    @torch.inference_mode()
    def step(self) -> None:
        """Run the passes that texts wait for, then each text until its next pass. Passes of the target, which end
        rounds, run once no text waits for a draft."""
        fitting_count = self.budget.count_fitting(text.positions for text in self.texts) if self.budget else None
        for text in [text for text in self.texts[:fitting_count] if text.pending is None]:
            text.run = text.run or greenlet(partial(_decode, text))
            self._resume(text)
        drafting_texts = [text for text in self.texts if text.pending is not None and not text.pending.ends_round]
        self.rounds += not drafting_texts
        texts_by_pass: dict[Hashable, list[BatchText]] = {}
        for text in drafting_texts or self.texts:
            if text.pending is not None:
                texts_by_pass.setdefault(text.pending.kind, []).append(text)
        for texts_of_pass in texts_by_pass.values():
            try:
                outcomes = run_jointly([text.pending for text in texts_of_pass if text.pending is not None])
            except Exception as error:
                outcomes = [error for _ in texts_of_pass]
            for text, outcome in zip(texts_of_pass, outcomes, strict=True):
                self._resume(text, outcome)

    def _resume(self, text: BatchText, *outcome: Outcome) -> None:
        """Run a text until it waits, has decoded a round, or ends. outcome: of the pass that it waited for, if any."""
        assert text.run is not None
        error: Exception | None = None
        resume = text.run.throw if outcome and isinstance(outcome[0], Exception) else text.run.switch
        try:
            text.pending = resume(*outcome)  # until its greenlet switches here, with the next request or None
        except Exception as ended_by:
            error = ended_by
        if text.run.dead:
            self._forget(text)
            text.end(error)


def _decode(text: BatchText) -> None:
    for decoded_round in text.rounds:
        text.positions += len(decoded_round.tokens)
        text.take(decoded_round)
        getcurrent().parent.switch(None)  # between two rounds texts may join or leave


class _BetweenLayers:
    """The cache of a long prompt's pass. The other texts run their next passes between the prompt's layers. They wait
    as long as a prompt of `PIECE` tokens takes."""

    def __init__(self, cache: KVCache):
        self.cache, self.layers = cache, cache.layers
        self._rows = 0  # summed over the layers that ran since the other texts ran

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if self._rows >= PIECE * len(self.layers):
            self._rows = 0
            getcurrent().parent.switch(None)
        self._rows += key.shape[2]
        return self.cache.update(key, value, layer_idx)


def _wait(yielding: bool, kind: tuple[int, int, str], pass_: Pass, x: Tensor, view: TextView) -> tuple[Tensor, ...]:
    """The outputs of a pass, which a text of a batch requests and waits for. Outside of a batch the pass runs here, and
    so does the pass over a prompt. yielding: see `Batch`."""
    batch_greenlet = getcurrent().parent  # None outside of a batch
    if batch_greenlet is not None and view.layout.base:  # positions are committed: after the prompt
        return batch_greenlet.switch(PassRequest(kind, pass_, x, view))
    if batch_greenlet is not None and yielding and view.layout.stop > PIECE:
        view.cache = cast("KVCache", _BetweenLayers(view.cache))
    return pass_(x, view)


class Worker:
    """Runs a batch of up to `max_texts` texts in a thread, which ends when there is nothing to do. Further texts wait
    until a text ends. Every thread may call the methods. begin: called first in each thread that runs the batch."""

    def __init__(self, batch: Batch, max_texts: int, begin: Callable[[], None] = lambda: None):
        self.batch, self.max_texts, self._begin = batch, max_texts, begin
        self._jobs: list[Callable[[], None]] = []
        self._waiting: list[BatchText] = []
        self._busy, self._lock = False, Lock()

    def do(self, job: Callable[[], Output]) -> Output:
        """The result of `job`, run between two steps of the texts."""
        future: Future[Output] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)

        self._put(run)
        return future.result()

    def rounds(self, rounds: Iterator[Round], prompt: int = 0) -> Iterator[Round]:
        """`rounds`, which use sessions of this batch, each as soon as it is decoded. prompt: the number of prompt
        tokens. The text starts when the first round is requested, and is decoded whether or not anybody reads. Closing
        this iterator drops the text."""
        result_queue: SimpleQueue[Round | Exception | None] = SimpleQueue()
        text = BatchText(rounds, take=result_queue.put, end=result_queue.put, positions=prompt)
        del rounds  # only the text holds them, so that the batch's thread closes them
        give_up = partial(self._give_up, text)  # created now, as the interpreter may be ending later
        self._put(partial(self._waiting.append, text))
        try:
            while (result := result_queue.get()) is not None:
                if isinstance(result, Exception):
                    raise result
                yield result
        finally:
            with self._lock:  # starts no thread: without one, no text is decoded
                self._jobs.append(give_up)

    def _give_up(self, text: BatchText) -> None:
        if text in self._waiting:
            self._waiting.remove(text)
        if text in self.batch.texts:
            self.batch.drop(text)

    def _put(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._jobs.append(job)
            if not self._busy:
                try:
                    Thread(target=self._run).start()
                except RuntimeError:  # the process may have no further thread
                    self._jobs.remove(job)
                    raise
                self._busy = True

    def _run(self) -> None:
        try:
            self._begin()
            self._run_texts()
        except BaseException as error:  # no reader waits for ever
            while self._run_jobs():
                for text in [*self._waiting, *self.batch.texts]:
                    self._give_up(text)
                    text.end(RuntimeError(f"the thread that decodes has ended: {error!r}"))
            raise

    def _run_jobs(self) -> bool:
        """Run the jobs that there are. False, and the thread must end, if there are neither jobs nor texts."""
        with self._lock:
            jobs, self._jobs = self._jobs, []
            self._busy = bool(jobs or self._waiting or self.batch.texts)
        for job in jobs:
            job()
        return self._busy

    def _run_texts(self) -> None:
        while self._run_jobs():
            if not main_thread().is_alive():  # at exit, only texts with a living reader go on
                for text in [*self._waiting, *self.batch.texts]:
                    if not text.reader.is_alive():
                        self._give_up(text)
            while self._waiting and len(self.batch.texts) < self.max_texts:
                self.batch.add(self._waiting.pop(0))
            try:
                self.batch.step()
            except Exception as error:  # of the batch itself, not of one text
                for text in [*self.batch.texts]:
                    self.batch.drop(text)
                    text.end(error)
