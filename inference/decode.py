"""The two arms: plain autoregressive decoding and speculative decoding, on one cache, counted by one rule."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_models.errors import UserError
from draft_models.target import LayerStack
from inference.session import TargetSession
from inference.sources import DraftModel
from inference.stop_rules import StopRule
from inference.tree import ROOT, DraftTree, chain_parents
from inference.verify import verify_greedy

Clock = Callable[[], float]


@dataclass(frozen=True)
class Round:
    """What one pass of the target committed. The first round of a generation is the prefill.

    tokens: committed ids, never beyond the first EOS or the budget; drafted: proposed tokens; accepted: how
    many of `tokens` came from the draft. Seconds: of the whole round, and of its parts (draft: the source's
    forward passes; structure: everything else about drafting; verify: the target's pass and its transfer).
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
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


@torch.inference_mode()
def autoregressive(
    stack: LayerStack,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos: Collection[int] = (),
    clock: Clock = time.perf_counter,
) -> Iterator[Round]:
    """Greedy decoding, one token a pass; yields a `Round` per pass. Raises `UserError` for an impossible length."""
    session = _new_session(stack, 0, prompt, max_new_tokens, spare=0)
    started = clock()
    choice = _prefill(session, prompt)
    session.commit(range(len(prompt)))
    token = int(choice)
    yield Round((token,), 0, 0, clock() - started)
    for _ in range(max_new_tokens - 1):
        if token in eos:
            return
        started = clock()
        session.feed(choice, (ROOT,))
        choice = session.finish().argmax(-1)
        session.commit((0,))
        token = int(choice)
        yield Round((token,), 0, 0, clock() - started)


@torch.inference_mode()
def speculative(
    stack: LayerStack,
    source: DraftModel,
    rule: StopRule,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos: Collection[int] = (),
    clock: Clock = time.perf_counter,
) -> Iterator[Round]:
    """Greedy speculative decoding with a chain draft; the tokens equal `autoregressive`'s.

    Each round drafts under the last committed token until `rule` stops, runs the target once over the draft
    and commits the longest prefix that the target would have chosen itself, plus its next choice. At most
    one transfer from the device per round. Raises `UserError` for an impossible length.
    """
    session = _new_session(stack, source.split, prompt, max_new_tokens, spare=rule.max_draft)
    started = clock()
    root = _prefill(session, prompt)
    source.begin(session)
    session.commit(range(len(prompt)))
    token = int(root)
    yield Round((token,), 0, 0, clock() - started)
    budget = max_new_tokens - 1
    while budget > 0 and token not in eos:
        started = clock()
        tree, draft_seconds = draft_chain(source, rule, root, limit=min(rule.max_draft, budget - 1), clock=clock)
        drafted = clock()
        logits = _run_target(session, root, tree)
        choices = logits.argmax(-1)
        proposed, chosen = _to_lists(tree.tokens, choices)
        verified = clock()
        nodes, token = verify_greedy(proposed, tree.parents, chosen)
        rows = [0, *(node + 1 for node in nodes)]
        source.commit(rows)
        session.commit(rows)
        rule.observe(len(tree), len(nodes))
        root = choices[rows[-1] : rows[-1] + 1]
        tokens = cut([*(proposed[node] for node in nodes), token], eos, budget)
        budget -= len(tokens)
        token = tokens[-1]
        yield Round(
            tokens,
            len(tree),
            min(len(nodes), len(tokens)),
            seconds=clock() - started,
            draft_seconds=draft_seconds,
            structure_seconds=drafted - started - draft_seconds,
            verify_seconds=verified - drafted,
        )


def draft_chain(source: DraftModel, rule: StopRule, root: Tensor, limit: int, clock: Clock) -> tuple[DraftTree, float]:
    """Draft greedily in a line under `root` [1] until `rule` stops or `limit` tokens are there.

    Returns the draft and the seconds spent in the source.
    """
    tokens = [root]
    seconds = 0.0
    while len(tokens) <= limit:
        started = clock()
        logits = source.extend(tokens[-1], (len(tokens) - 2,))
        seconds += clock() - started
        tokens.append(logits.argmax(-1))
        if rule.stop(len(tokens) - 1):
            break
    n = len(tokens) - 1
    rows = (*range(1, n), -1)[:n]  # the last token was never fed
    return DraftTree(torch.cat(tokens)[1:], chain_parents(0, n), rows), seconds


def _new_session(
    stack: LayerStack, split: int, prompt: Sequence[int], max_new_tokens: int, spare: int
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
    return TargetSession(stack, split, min(limit, len(prompt) + max_new_tokens + spare + 1))


def _prefill(session: TargetSession, prompt: Sequence[int]) -> Tensor:
    """Run the prompt; returns the target's first token [1]. The round is left open for the source to read."""
    tokens = torch.tensor(prompt, device=session.stack.device)
    session.feed(tokens, chain_parents(0, len(prompt)))
    return session.finish(last_only=True).argmax(-1)


def _run_target(session: TargetSession, root: Tensor, tree: DraftTree) -> Tensor:
    """The target's logits after the root and after each node [n + 1, V]; feeds the rows the source has not fed."""
    fed = session.rows
    if fed <= len(tree):
        rows = torch.cat([root, tree.tokens])[fed:]
        parents = (ROOT, *(parent + 1 for parent in tree.parents))[fed:]
        session.feed(rows, parents)
    return session.finish()


def _to_lists(tokens: Tensor, choices: Tensor) -> tuple[list[int], list[int]]:
    together = torch.cat([tokens, choices]).tolist()
    return together[: len(tokens)], together[len(tokens) :]
