"""Plain autoregressive and speculative decoding over the same sessions, counted by the same rule."""

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing

import torch
from torch import Tensor

from outrider.base.errors import UserError
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.target import Target
from outrider.inference.core.drafter import Drafter, Stopwatch
from outrider.inference.core.rounds import Clock, Round
from outrider.inference.core.session import Session
from outrider.inference.core.target_session import Runtime
from outrider.inference.core.token_selector import TokenSelector, VerifiedDraft
from outrider.inference.core.tree import ROOT, DraftTree


def cut(tokens: Sequence[int], eos: Collection[int], budget: int) -> tuple[int, ...]:
    """`tokens` up to and including the first EOS, at most `budget` tokens. All methods count tokens by this rule."""
    for index, token in enumerate(tokens[:budget]):
        if token in eos:
            return tuple(tokens[: index + 1])
    return tuple(tokens[:budget])


@torch.inference_mode()
def autoregressive(
    target: Target,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos: Collection[int] = (),
    selector: TokenSelector | None = None,
    runtime: Runtime | None = None,
    clock: Clock = time.perf_counter,
) -> Iterator[Round]:
    """Plain decoding, one token per pass. Yields a `Round` per pass. Raises `UserError` as `speculative` does.

    selector: how tokens are chosen from logits; None: greedily. runtime: how passes run; None: eagerly.
    """
    selector = selector or TokenSelector()
    with closing(_new_session(runtime, target, 0, prompt, max_new_tokens, spare=0)) as session:  # 0: no split
        start_time = clock()
        logits = session.prefill(prompt)
        session.commit(range(len(prompt)))
        selector.begin(session, prompt)
        token_tensor = selector.next_token(logits)
        token = _require_token(int(token_tensor), session, session.base - 1)
        yield Round((token,), drafted=0, accepted=0, depth=0, seconds=clock() - start_time)
        for _ in range(max_new_tokens - 1):
            if token in eos:
                return
            start_time = clock()
            if selector.takes_argmax and session.step is not None:  # the argmax is a part of the step's graph
                token_tensor = session.step(token_tensor)
                pass_end = clock()
            else:
                session.feed(token_tensor, (ROOT,))
                logits = session.finish()
                pass_end = clock()
                session.commit((0,))  # its only row
                token_tensor = selector.next_token(logits)
            token = _require_token(int(token_tensor), session, session.base - 1)
            seconds, verify_seconds = clock() - start_time, pass_end - start_time
            yield Round((token,), drafted=0, accepted=0, depth=0, seconds=seconds, verify_seconds=verify_seconds)


@torch.inference_mode()
def speculative(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos: Collection[int] = (),
    selector: TokenSelector | None = None,
    runtime: Runtime | None = None,
    clock: Clock = time.perf_counter,
) -> Iterator[Round]:
    """Speculative decoding: tokens, or their distribution under sampling, equal `autoregressive`'s for any drafter.

    drafter: a new drafter for each generation. Other arguments are those of `autoregressive`. Raises `UserError` for an
    impossible length, and if the target's logits are not finite.
    """
    session = _new_session(runtime, target, drafter.split, prompt, max_new_tokens, spare=drafter.max_rows)
    with closing(session):
        yield from decode_rounds(session, drafter, selector or TokenSelector(), prompt, max_new_tokens, eos, clock)


def decode_rounds(
    session: Session,
    drafter: Drafter,
    selector: TokenSelector,
    prompt: Sequence[int],
    max_new_tokens: int,
    eos: Collection[int],
    clock: Clock,
) -> Iterator[Round]:
    """The loop: prefill; then draft a tree under the last token, run the target over it, verify, and commit: make the
    accepted tokens a part of the text, and their keys and values a part of the caches. Times: see `Stopwatch`."""
    watch = Stopwatch(clock)
    session.aux_layers, session.top_count = drafter.aux_layers, drafter.top_count  # states, top k it reads
    logits = session.prefill(prompt)
    drafter.begin(session, selector, watch)
    session.commit(range(len(prompt)))
    selector.begin(session, prompt)
    root = selector.next_token(logits)
    token = _require_token(int(root), session, session.base - 1)
    yield Round((token,), drafted=0, accepted=0, depth=0, seconds=watch.seconds)
    tokens_left = max_new_tokens - 1
    while tokens_left > 0 and token not in eos:
        watch.restart("structure")
        tree = drafter.draft(root, tokens_left - 1)  # the target adds one token
        watch.begin("verify")
        logits = session.run_tree(root, tree)
        drafted_tokens, nodes, root, bonus_token = _verify(session, selector, root, tree, logits)
        watch.begin("structure")
        accepted_tokens = [drafted_tokens[node] for node in nodes]
        drafter.commit(tree, nodes, [token, *accepted_tokens])
        watch.begin("other")
        session.commit(session.path(nodes))
        tokens = cut([*accepted_tokens, bonus_token], eos, tokens_left)
        tokens_left -= len(tokens)
        token = tokens[-1]
        yield Round(
            tokens, drafted=len(tree), accepted=min(len(nodes), len(tokens)), depth=tree.depth, seconds=watch.seconds,
            draft_seconds=watch.parts["draft"], structure_seconds=watch.parts["structure"],
            verify_seconds=watch.parts["verify"], source=tree.source if len(tree) else "",
        )  # fmt: skip


def _verify(session: Session, selector: TokenSelector, root: Tensor, tree: DraftTree, logits: Tensor) -> VerifiedDraft:
    """`TokenSelector.verify`. Raises `UserError` if the target's logits are not finite."""
    verified = selector.verify(tree, logits)
    if not verified.nodes and len(tree) and not 0 <= verified.bonus < session.vocabulary:
        # A drafted token can make the target produce NaN, which attention spreads to every row (0 · NaN = NaN).
        # Run the pass again over the root (row 0) alone, and verify that.
        root_logits = session.finish([0])
        verified = selector.verify(DraftTree(root[:0], (), ()), root_logits)
    _require_token(verified.bonus, session, session.base + len(verified.nodes))
    return verified


def _require_token(token: int, session: Session, position: int) -> int:
    """`token`, chosen from the target's logits at `position`. Raises `UserError` if these logits are not finite."""
    if not 0 <= token < session.vocabulary:
        dtype = str(session.dtype).removeprefix("torch.")
        raise UserError(
            f"the target's logits at position {position} are NaN or infinite in dtype={dtype}; try dtype=bfloat16, "
            "which has the range of float32, or dtype=float32, and if that is no help look for damaged weights"
        )
    return token


def _new_session(
    runtime: Runtime | None, target: Target, split: int, prompt: Sequence[int], max_new_tokens: int, spare: int
) -> Session:
    """A session for one text. split: the number of the target's first layers that the drafter shares; 0: none. spare:
    the most rows of a draft without its root."""
    if not prompt:
        raise UserError("empty prompt: the target needs at least one token to continue from")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens}: expected at least 1")
    context_size = context_limit(target.config)
    if len(prompt) + max_new_tokens > context_size:
        raise UserError(
            f"prompt of {len(prompt)} tokens + max_new_tokens={max_new_tokens} exceeds the target's context "
            f"of {context_size}; shorten one of them"
        )
    # A tree needs more cache slots than positions, so near the end of the context its slots exceed it. + 1: the root.
    context = len(prompt) + max_new_tokens
    return (runtime or Runtime()).session(target, split, context + spare + 1, context)
