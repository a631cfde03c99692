"""The two arms: plain autoregressive decoding and speculative decoding, on one cache, counted by one rule."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from draft_models.target.stack import LayerStack
from inference.acceptance import Chooser
from inference.drafters.interface import Drafter, DraftModel
from inference.runtime import Eager, Runtime
from inference.session import TargetSession
from inference.structures.factory import Structure, WrappedSource
from inference.tree import ROOT, DraftTree, chain_parents
from outrider.errors import UserError

Clock = Callable[[], float]


@dataclass(frozen=True)
class Round:
    """What one pass of the target committed. The first round of a generation is the prefill.

    tokens: committed ids, never beyond the first EOS or the budget; drafted: proposed tokens; accepted: how
    many of `tokens` came from the draft; depth: the draft's, so how many could have. Seconds: of the whole
    round, and of its parts (draft: the source's forward passes; structure: everything else about drafting;
    verify: the target's pass and its transfer, in plain decoding the pass alone).
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    depth: int
    seconds: float
    draft_seconds: float = 0.0
    structure_seconds: float = 0.0
    verify_seconds: float = 0.0


def cut(tokens: Sequence[int], eos: Collection[int], budget: int) -> tuple[int, ...]:
    """`tokens` up to and including the first EOS, at most `budget` of them: the one rule for what is counted."""
    for index, token in enumerate(tokens[:budget]):
        if token in eos:
            return tuple(tokens[: index + 1])
    return tuple(tokens[:budget])


def until(
    rounds: Iterator[Round], prompt: Sequence[int], first_end: Callable[[Sequence[int], int], int | None]
) -> Iterator[Round]:
    """`rounds` up to and including the token with which the text ends; those behind it were never decoded.

    first_end: of the last n tokens of a text, prompt included, how many there are when it ends, None where it does
    not (see `StopStrings.first_end`).
    """
    text = list(prompt)
    for r in rounds:
        text += r.tokens
        count = first_end(text, len(r.tokens))
        if count is not None:
            yield replace(r, tokens=r.tokens[:count], accepted=min(r.accepted, count))
            return
        yield r


@torch.inference_mode()
def autoregressive(
    stack: LayerStack,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos: Collection[int] = (),
    chooser: Chooser | None = None,
    runtime: Runtime | None = None,
    clock: Clock = time.perf_counter,
) -> Iterator[Round]:
    """Plain decoding, one token a pass; yields a `Round` per pass. Raises `UserError` as `speculative` does.

    chooser: how tokens are chosen from logits; None: greedily. runtime: how passes run; None: eagerly.
    """
    chooser = chooser or Chooser()
    with closing(_new_session(runtime, stack, 0, prompt, max_new_tokens, spare=0)) as session:
        started = clock()
        logits = _prefill(session, prompt)
        session.commit(range(len(prompt)))
        chooser.begin(session, prompt)
        root = chooser.next_token(logits)
        token = _require_token(int(root), session, session.base - 1)
        yield Round((token,), 0, 0, 0, clock() - started)
        for _ in range(max_new_tokens - 1):
            if token in eos:
                return
            started = clock()
            if chooser.plain and session.step is not None:
                root = session.step(root)
                passed = clock()
            else:
                session.feed(root, (ROOT,))
                logits = session.finish()
                passed = clock()
                session.commit((0,))
                root = chooser.next_token(logits)
            token = _require_token(int(root), session, session.base - 1)
            yield Round((token,), 0, 0, 0, clock() - started, verify_seconds=passed - started)


@torch.inference_mode()
def speculative(
    stack: LayerStack,
    source: Drafter,
    structure: Structure,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos: Collection[int] = (),
    chooser: Chooser | None = None,
    runtime: Runtime | None = None,
    clock: Clock = time.perf_counter,
) -> Iterator[Round]:
    """Speculative decoding: the tokens, or under sampling their law, are `autoregressive`'s whatever is drafted.

    Each round `structure` drafts a tree under the last committed token, the target runs once over it, `chooser`
    (None: greedy) finds the path to keep and the next token. runtime: how passes run; None: eagerly. Raises
    `UserError` for an impossible length, and where the target's logits are not finite numbers.
    """
    chooser = chooser or Chooser()
    with closing(
        _new_session(runtime, stack, source.split, prompt, max_new_tokens, spare=structure.max_rows)
    ) as session:
        timed = _TimedSource(cast(DraftModel, source), chooser, clock)  # a structure of its own needs no distributions
        started = clock()
        logits = _prefill(session, prompt)
        source.begin(session)
        session.commit(range(len(prompt)))
        chooser.begin(session, prompt)
        root = chooser.next_token(logits)
        token = _require_token(int(root), session, session.base - 1)
        yield Round((token,), 0, 0, 0, clock() - started)
        budget = max_new_tokens - 1
        while budget > 0 and token not in eos:
            started = clock()
            timed.begin_round()
            tree = structure.draft(timed, root, budget - 1)
            drafted = clock()
            logits, node_rows = _run_target(session, root, tree)
            proposed, nodes, following, bonus = chooser.verify(tree, logits)
            if not nodes and len(tree) and not _is_token(bonus, session):
                # To the target a drafted token may be no number, and then all rows beside it are none: 0 · NaN is NaN.
                alone = session.finish([0])
                _, nodes, following, bonus = chooser.verify(DraftTree(root[:0], (), ()), alone)
            root = following
            _require_token(bonus, session, session.base + len(nodes))
            verified = clock()
            committed = [token, *(proposed[node] for node in nodes)]
            source.commit([0, *((node_rows if source.split else tree.rows)[node] for node in nodes)], committed)
            session.commit([0, *(node_rows[node] for node in nodes)])
            structure.observe(tree, nodes)
            tokens = cut([*committed[1:], bonus], eos, budget)
            budget -= len(tokens)
            token = tokens[-1]
            yield Round(
                tokens,
                len(tree),
                min(len(nodes), len(tokens)),
                tree.depth,
                seconds=clock() - started,
                draft_seconds=timed.seconds,
                structure_seconds=drafted - started - timed.seconds,
                verify_seconds=verified - drafted,
            )


class _TimedSource(WrappedSource):
    """A source during a round: counts the seconds spent in it and knows the text before each row it was fed."""

    def __init__(self, source: DraftModel, chooser: Chooser, clock: Clock):
        super().__init__(source)
        self._chooser, self._clock = chooser, clock
        self.to_probs = None if chooser.greedy else self._probabilities
        self.begin_round()

    def begin_round(self) -> None:
        self.seconds = 0.0
        self._contexts: list[Tensor] = []

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        if self._chooser.reads_context:
            for place, parent in enumerate(parents):  # the root, without a parent, ends the text already
                before = self._contexts[parent] if parent >= 0 else self._chooser.text[:-1]
                self._contexts.append(torch.cat([before, tokens[place : place + 1]]))
        started = self._clock()
        logits = self._source.extend(tokens, parents)
        self.seconds += self._clock() - started
        return logits

    def _probabilities(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        contexts = [self._contexts[row] for row in rows] if self._chooser.reads_context else None
        return self._chooser.draft_probabilities(logits, contexts)


def _is_token(token: int, session: TargetSession) -> bool:
    return 0 <= token < session.stack.config.vocab_size


def _require_token(token: int, session: TargetSession, position: int) -> int:
    """`token`, chosen by the target's logits at `position`. Raises `UserError` where they are not finite numbers."""
    if not _is_token(token, session):
        dtype = str(session.stack.dtype).removeprefix("torch.")
        raise UserError(
            f"the target's logits at position {position} are NaN or infinite in dtype={dtype}; try dtype=bfloat16, "
            "which has the range of float32, or dtype=float32, and if that is no help look for damaged weights"
        )
    return token


def _new_session(
    runtime: Runtime | None, stack: LayerStack, split: int, prompt: Sequence[int], max_new_tokens: int, spare: int
) -> TargetSession:
    if not prompt:
        raise UserError("empty prompt: the target needs at least one token to continue from")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens}: expected at least 1")
    limit = stack.config.max_position_embeddings
    if len(prompt) + max_new_tokens > limit:
        raise UserError(
            f"prompt of {len(prompt)} tokens + max_new_tokens={max_new_tokens} exceeds the target's context "
            f"of {limit}; shorten one of them"
        )
    # A tree needs more cache slots than positions: near the end of the context the slots go beyond it.
    context = len(prompt) + max_new_tokens
    return (runtime or Eager()).session(stack, split, context + spare + 1, context)


def _prefill(session: TargetSession, prompt: Sequence[int]) -> Tensor:
    """Run the prompt; returns the logits behind it [1, V]. The round is left open for the source to read."""
    tokens = torch.tensor(prompt, device=session.stack.device)
    session.feed(tokens, chain_parents(0, len(prompt)))
    return session.finish(last_only=True)


def _run_target(session: TargetSession, root: Tensor, tree: DraftTree) -> tuple[Tensor, list[int]]:
    """The target's logits after the root and after each node [n + 1, V], and each node's row in the session.

    Feeds what the source has not fed: nothing but the leaves where it shares the session, else everything.
    """
    shared = session.rows > 0
    rows = list(tree.rows) if shared else [-1] * len(tree)
    missing = [node for node, row in enumerate(rows) if row < 0]
    following = max(1, session.rows)
    for place, node in enumerate(missing):
        rows[node] = following + place
    parents = [0 if tree.parents[node] == ROOT else rows[tree.parents[node]] for node in missing]
    tokens = tree.tokens if len(missing) == len(tree) else tree.tokens[missing]
    if not shared:
        session.feed(torch.cat([root, tokens]), (ROOT, *parents))
    elif missing:
        session.feed(tokens, parents)
    order = sorted([0, *rows])
    logits = session.finish(None if len(order) == session.rows else order)
    if order != [0, *rows]:
        place_of = {row: place for place, row in enumerate(order)}
        logits = logits[[0, *(place_of[row] for row in rows)]]
    return logits, rows
