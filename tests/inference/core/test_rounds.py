"""Between rounds: caches equal a fresh prefill after every one of them, and a broken generation leaves no trace."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.base.streams import Streams
from outrider.inference.core.cache import KVCache
from outrider.inference.core.decode import speculative
from outrider.inference.core.drafter import Drafter
from outrider.inference.core.rounds import Generation, Round
from outrider.inference.core.sampling import Sampler
from outrider.inference.core.target_session import Runtime, TargetSession
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.core.tree import DraftTree, chain_parents
from outrider.inference.drafters.dflash.drafter import BlockPasses
from outrider.inference.drafters.draft_model import OnePass
from outrider.inference.drafters.eagle3.drafter import Eagle3DraftModel
from outrider.inference.drafters.early_exit.drafter import EarlyExitDraftModel
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.drafters.skip_layers.drafter import SkipLayersDraftModel
from outrider.inference.drafters.small_lm.drafter import Pard2Passes, SmallLMDraftModel
from outrider.inference.measure.statistics import SourceRounds, count_rounds_by_source
from outrider.inference.settings.method import MethodConfig, StructureConfig
from outrider.inference.settings.sampling import SamplingConfig
from outrider.inference.shapes.factory import Structure, make_structure
from tests import known_targets, tiny
from tests.known_targets import OTHER_LMS, Target, targets, tokens_of
from tests.pairwise import all_pairs, each_value
from tests.tiers import typical_where
from tests.tiny import method_of, random_prompt

SOURCES = [source for source in known_targets.SOURCES if not source.endswith(("tokens", "head", *OTHER_LMS))]
STRUCTURES = {
    **tiny.STRUCTURES,
    "k_config, with_replacement": StructureConfig(kind="k_config", widths=(3, 2, 2), draw="with_replacement"),
}


# --- caches --------------------------------------------------------------------------------------------------------


make = pytest.fixture(scope="module")(targets)


@pytest.fixture
def target(make: Callable[..., Target]) -> Target:
    """Of mistral and its sliding window."""
    return make()


def assert_starts_with(cache: KVCache, fresh: KVCache) -> None:
    """What `cache` holds is the beginning of what `fresh` holds."""
    assert cache.layers == fresh.layers
    for pair, fresh_pair in zip(cache.content(), fresh.content(), strict=True):
        for tensor, expected in zip(pair, fresh_pair, strict=True):
            torch.testing.assert_close(tensor, expected[:, :, : cache.length], rtol=1e-9, atol=1e-9)


def assert_as_after_prefill(target: Target, source: Drafter, session: TargetSession, text: list[int]) -> None:
    """Session and drafter stand as if `text` had just been their prompt, but for what waits for the next extension."""
    source = source.model if isinstance(source, OnePass) else source
    fresh = TargetSession(target.stack, source.split, len(text) + 1)
    fresh.aux_layers = source.aux_layers
    fresh.feed(torch.tensor(text), chain_parents(0, len(text)))
    hidden = fresh.hidden
    fresh.finish()
    kind: dict[type, Callable[[], Any]] = {
        EarlyExitDraftModel: lambda: EarlyExitDraftModel(source.drafter),
        Eagle3DraftModel: lambda: Eagle3DraftModel(source.head),
        Pard2Passes: lambda: Pard2Passes(source.pard2),
        BlockPasses: lambda: BlockPasses(source.drafter),
    }
    made = (make for one, make in kind.items() if isinstance(source, one))
    other = next(made, lambda: SmallLMDraftModel(target.small("small_lm")))()
    other.begin(fresh)
    fresh_aux = fresh.aux_hidden(range(len(text))) if source.aux_layers else None
    fresh.commit(range(len(text)))

    assert (session.base, session.rows) == (len(text), 0)
    assert session.first_cache.length == session.second_cache.length == len(text)
    assert_starts_with(session.first_cache, fresh.first_cache)
    assert_starts_with(session.second_cache, fresh.second_cache)
    torch.testing.assert_close(session.target_hidden, fresh.target_hidden, rtol=1e-9, atol=1e-9)
    if isinstance(source, EarlyExitDraftModel):
        assert_starts_with(source.cache, other.cache)
        torch.testing.assert_close(source._pending, hidden[:, source.cache.length :], rtol=1e-9, atol=1e-9)
    elif isinstance(source, Eagle3DraftModel):
        known = source.session.base
        assert source.session.first_cache.length == known
        assert_starts_with(source.session.first_cache, other.session.first_cache)
        assert source._tokens.tolist() == text[known + 1 :]
        torch.testing.assert_close(source._aux_hidden, fresh_aux[:, known:], rtol=1e-9, atol=1e-9)
    elif isinstance(source, BlockPasses):
        known = source.session.base
        assert source.session.first_cache.length == known
        assert_starts_with(source.session.first_cache, other.session.first_cache)
        torch.testing.assert_close(source._aux_hidden, fresh_aux[:, known:], rtol=1e-9, atol=1e-9)
    elif isinstance(source, SmallLMDraftModel):
        assert source.session.first_cache.length == source.session.base
        assert_starts_with(source.session.first_cache, other.session.first_cache)
        assert source._pending.tolist() == text[source.session.base :]
        if isinstance(source, Pard2Passes):
            states = source.pard2.projection.join_states(fresh_aux, target.stack.norm)
            torch.testing.assert_close(source._states, states[:, source.session.base - 1 :], rtol=1e-9, atol=1e-9)
    else:
        assert isinstance(source, SkipLayersDraftModel)  # which has no cache but the session's


def checked(
    target: Target,
    runtime: Runtime,
    drafter: Any,
    prompt: list[int],
    count: int,
    selector: TokenSelector | None = None,
) -> Iterator[Round]:
    """The rounds of a generation, the caches compared after each."""
    sessions: list[TargetSession] = []
    text = list(prompt)
    begin = drafter.begin
    drafter.begin = lambda session, *rest: (sessions.append(session), begin(session, *rest))
    options: Any = {"max_new_tokens": count, "selector": selector, "runtime": runtime}
    for r in speculative(target.stack, drafter, prompt, **options):
        text += r.tokens
        assert_as_after_prefill(target, drafter.model, sessions[0], text[:-1])
        yield r


DRAWN = ("chain", "k_config", "k_config, with_replacement")  # the structures that draw their tokens when sampling
SHAPES = [(name, False) for name in STRUCTURES if "replacement" not in name] + [(name, True) for name in DRAWN]
RUNTIMES = ("eager", "graphed")
ROWS = all_pairs(SOURCES, SHAPES, RUNTIMES, (None, 1))


@pytest.mark.parametrize(
    ("source", "shape", "runtime", "copied"),
    typical_where(each_value(ROWS).__contains__, ROWS),
    indirect=["runtime"],
)
@pytest.mark.slow
def test_after_every_round_every_cache_equals_a_fresh_prefill(
    target: Target, runtime: Runtime, source: str, shape: tuple[str, bool], copied: int | None
) -> None:
    structure, drawn = shape
    streams = Streams(0)
    selector = TokenSelector(Sampler(SamplingConfig(temperature=0.7)), streams.of("verify")) if drawn else None
    method = replace(method_of(STRUCTURES[structure]), copy=copied)
    shaping, moved, turns = make_structure(method, streams, drawn), [], itertools.count()
    observe, draft = shaping.observe, shaping.draft

    def note(tree: DraftTree, nodes: list[int]) -> None:
        moved.append(nodes != list(range(len(nodes))))
        observe(tree, nodes)

    shaping.observe = note  # type: ignore[method-assign]
    # The third and fourth round draft nothing, so that two tokens and more wait for the drafter.
    shaping.draft = lambda s, r, limit: draft(s, r, limit * (next(turns) not in (2, 3)))  # type: ignore[method-assign]
    guesses = source != "early_exit, first layer" and copied is None  # that one is right next to never
    count = 28 if guesses or copied else 9
    drafter = target.shaped(source, method, shaping, 0.3)
    rounds = list(checked(target, runtime, drafter, random_prompt(9), count, selector))
    assert len(rounds) > 5
    if guesses and not (drawn and source.startswith(("eagle3", "mtp", "dflash"))):  # fitted to the greedy text
        assert len({r.accepted for r in rounds[1:] if r.drafted}) >= 2
        assert structure == "chain" or any(moved)  # a path that had to be gathered


# --- generations that break off ------------------------------------------------------------------------------------


class BrokenError(Exception):
    """What the tests raise in the middle of a round."""


def breaks(function: Callable[..., Any], at: int) -> Callable[..., Any]:
    """`function`, raising in its `at`-th call when its work is done and nobody knows."""
    calls = 0

    def broken(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        result = function(*args, **kwargs)
        if calls == at:
            raise BrokenError
        return result

    return broken


def read_into(tokens: list[int], rounds: Iterator[Round]) -> None:
    """Read `rounds` to their end; what came before an exception is kept in `tokens`."""
    for r in rounds:
        tokens += r.tokens


def drafter_layer(source: Any) -> torch.nn.Module:
    """The layer that drafts last."""
    if isinstance(source, Eagle3DraftModel):
        return source.head.layers[-1]
    return source.drafter.layer if isinstance(source, EarlyExitDraftModel) else source.lm.layers[-1]


# What breaks, in which of its calls: (target, source, structure, selector) → (object, attribute).
Place = Callable[[Target, Any, Structure, TokenSelector], tuple[Any, str]]
FAULTS: dict[str, tuple[Place, int]] = {
    "the prefill": (lambda target, _d, _s, _c: (target.stack.layers[2], "forward"), 1),
    "a layer of the drafter": (lambda _t, source, _s, _c: (drafter_layer(source), "forward"), 4),
    "the source, extending": (lambda _t, source, _s, _c: (source, "extend"), 3),
    "the source, committing": (lambda _t, source, _s, _c: (source, "commit"), 2),
    "the structure, drafting": (lambda _t, _d, structure, _c: (structure, "draft"), 2),
    "the structure, observing": (lambda _t, _d, structure, _c: (structure, "observe"), 2),
    "a layer of the target": (lambda target, _d, _s, _c: (target.stack.layers[-1], "forward"), 3),
    "the verification": (lambda _t, _d, _s, selector: (selector, "verify"), 2),
}
BROKEN = all_pairs([("early_exit", "opt_tree"), ("small_lm", "chain"), ("eagle3", "opt_tree")], FAULTS, RUNTIMES)


@pytest.mark.parametrize(
    ("shaped", "fault", "runtime"),
    typical_where(each_value(BROKEN).__contains__, BROKEN),
    indirect=["runtime"],
)
def test_after_an_exception_in_a_round_the_next_generation_is_right(
    target: Target, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, shaped: tuple[str, str], fault: str
) -> None:
    """The same stack, source and structure are used again, for a shorter text and for a longer one.

    So they are after a generation that nobody reads to its end.
    """
    source, structure = shaped
    drafter, selector = target.source(source), TokenSelector()
    # Drafts of one token are often right as a whole, which leaves a token waiting for the drafter.
    shape = make_structure(method_of(STRUCTURES[structure], 1), Streams(0))
    place, at = FAULTS[fault]
    owner, name = place(target, drafter, shape, selector)
    emitted: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, breaks(getattr(owner, name), at))
        options: Any = {"max_new_tokens": 20, "selector": selector, "runtime": runtime}
        rounds = speculative(target.stack, ModelDrafter(drafter, shape), random_prompt(30), **options)
        with pytest.raises(BrokenError):
            read_into(emitted, rounds)
    assert bool(emitted) == (fault != "the prefill")
    assert emitted == target.text_after(random_prompt(30), 20)[: len(emitted)]
    assert not torch.is_inference_mode_enabled()
    abandoned = speculative(target.stack, ModelDrafter(drafter, shape), random_prompt(30), **options)
    for _ in zip(range(2), abandoned, strict=False):
        pass
    del abandoned
    assert not torch.is_inference_mode_enabled()
    for length, count in ((4, 12), (50, 12)):
        rounds = list(checked(target, runtime, ModelDrafter(drafter, shape), random_prompt(length), count))
        assert tokens_of(rounds) == target.text_after(random_prompt(length), count)


@pytest.mark.parametrize(
    ("source", "lengths"), [("early_exit", (40, 5)), ("small_lm", (40, 5)), ("early_exit", (5, 40))]
)
@pytest.mark.slow
def test_two_generations_at_once_on_one_target_and_drafter(
    target: Target, runtime: Runtime, source: str, lengths: tuple[int, int]
) -> None:
    """Nothing of a sequence is kept in the models: rounds of two texts may take turns.

    Where the second is the shorter one, the buffers of the first would hold it.
    """
    options: Any = {"max_new_tokens": 24, "runtime": runtime}
    drafters = [target.drafter(source, MethodConfig(structure=STRUCTURES["opt_tree"])) for _ in lengths]
    running = [
        speculative(target.stack, drafter, random_prompt(length), **options)
        for drafter, length in zip(drafters, lengths, strict=True)
    ]
    turns = [*itertools.zip_longest(*running)]
    assert sum(None not in both for both in turns) > 4
    for length, rounds in zip(lengths, zip(*turns, strict=True), strict=True):
        assert tokens_of(filter(None, rounds)) == target.text_after(random_prompt(length), 24)


def test_rounds_are_counted_by_who_drafted() -> None:
    emitted = ((1, "model"), (3, "model"), (4, "text"))
    rounds = [Round((7,) * n, 3, n - 1, 3, 0.1, source=source) for n, source in emitted]  # type: ignore[arg-type]
    generation = Generation((), 0.0, 0.0, (*rounds, Round((7,), 0, 0, 0, 0.1)))
    expected = {"model": SourceRounds(2, 2.0), "none": SourceRounds(1, 1.0), "text": SourceRounds(1, 4.0)}
    assert count_rounds_by_source([generation]) == expected
