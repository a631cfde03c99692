"""Prompt lookup against a search of the whole text, and lossless in the loop."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import preset
from outrider.base.streams import Streams
from outrider.inference.drafters.ngram.lookup import LookupPlugin, PromptLookup
from outrider.inference.settings.method import MethodConfig, StopConfig
from outrider.inference.sizing.costs import Costs
from outrider.inference.sizing.policy import Tuning
from tests.inference.ngram_cases import FakeSession
from tests.inference.priced import costs


def slow_lookup(text: list[int], max_ngram: int, count: int, min_ngram: int = 1) -> list[int]:
    """The text after the latest earlier occurrence of the longest suffix that has one."""
    for size in range(min(max_ngram, len(text)), min_ngram - 1, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[-size:]:
                return text[start + size :][:count]
    return []


@settings(deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    rounds=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    limit=st.integers(0, 6),
)
def test_equals_a_search_of_the_text(prompt: list[int], rounds: list, sizes: tuple[int, int], limit: int) -> None:
    lookup = PromptLookup(sizes[0], 5, min_ngram=sizes[1])
    lookup.begin(FakeSession(prompt), None, None)
    text = list(prompt)
    for root, *rest in rounds:
        tree = lookup.draft(torch.tensor([root]), limit)
        assert tree.tokens.tolist() == slow_lookup([*text, root], sizes[0], min(limit, 5), sizes[1])
        lookup.commit(None, (), [root, *rest])
        text += [root, *rest]


# ------------------------------------------------------------------------------------------------- as many as pay

N, PERIOD = 128, 40


def next_of(kind: str, share: float, seed: int) -> Callable[[list[int]], int]:
    """The target's next token after a text: one that no lookup says, or of `share` what came `PERIOD` tokens before."""
    cycle = [seed + 7 * place for place in range(PERIOD)]

    def unlike(text: list[int]) -> int:
        said = {token for size in (1, 2, 3) for token in slow_lookup(text, size, 1)}
        choices = [token for token in range(6) if token not in said]
        return random.Random(f"{seed} {len(text)}").choice(choices or [0])

    def again(text: list[int]) -> int:
        chance = random.Random(f"{seed} {len(text)}")
        return cycle[len(text) % PERIOD] if chance.random() < share else chance.randrange(500, 1000)

    return unlike if kind == "never" else again


def seconds_of(row: float) -> Costs:
    """Where each further row takes so much longer, of a pass over one."""
    return costs(step=0.002, verify=1 - row, node=row, rest=0.01)


def decoded(following: Callable[[list[int]], int], tuning: Tuning) -> tuple[float, float, float]:
    """A text of N tokens by the preset: tokens a second, where 1 is plain decoding's; the shares of rounds with a
    draft, of all and of those where one was found."""
    text: list[int] = []
    while len(text) < 2 * PERIOD:
        text.append(following(text))
    drafter = LookupPlugin().make(None, preset("prompt_lookup"), Streams(0), drawn=False, tuning=tuning)
    drafter.begin(FakeSession(text), None, None)
    root, seconds, drafts, found, rounds, left = following(text), 0.0, 0, 0, 0, N
    while left > 0:
        tree = drafter.draft(torch.tensor([root]), left - 1)
        found += bool(slow_lookup([*text, root], 3, 1))
        text.append(root)
        accepted = 0
        root = following(text)
        for token in tree.tokens.tolist():
            if token != root:
                break
            accepted += 1
            text.append(token)
            root = following(text)
        drafter.commit(tree, range(accepted), text[-accepted - 1 :])
        count = len(tree)
        seconds += tuning.costs.verify[count + 1] + 0.012 if count else 1.0
        drafts, rounds, left = drafts + bool(count), rounds + 1, left - accepted - 1
    return N / seconds, drafts / rounds, drafts / max(1, found)


NOTHING_KNOWN = ((), ())
ALL_RIGHT, ALL_WRONG = ((20.0,) * 14, (20.0,) * 14), ((20.0,) * 14, (0.0,) * 14)


@pytest.mark.parametrize("row", [0.03, 0.12, 0.3])
@pytest.mark.parametrize("known", [NOTHING_KNOWN, ALL_RIGHT, ALL_WRONG], ids=["nothing", "right", "wrong"])
def test_what_is_never_right_is_seldom_submitted(row: float, known: Any) -> None:
    """Whatever the text before it promised."""
    for seed in range(2):
        rate, share, of_found = decoded(next_of("never", 0.0, seed), Tuning(seconds_of(row), *known))
        assert rate > 0.97
        assert 0 < share < 0.25
        assert of_found < 0.25


@pytest.mark.parametrize("row", [0.03, 0.12, 0.3])
@pytest.mark.parametrize("share", [0.5, 0.7])
def test_what_hardly_pays_costs_hardly_anything(row: float, share: float) -> None:
    for seed in range(4):
        rate, _, _ = decoded(next_of("again", share, seed), Tuning(seconds_of(row)))
        assert rate > 0.97


@pytest.mark.parametrize("row", [0.03, 0.12, 0.3])
def test_what_pays_is_submitted_nearly_always(row: float) -> None:
    rate, _, of_found = decoded(next_of("again", 1.0, 1), Tuning(seconds_of(row)))
    assert of_found > 0.85
    assert rate > 2
    rate, _, of_found = decoded(next_of("again", 0.95, 2), Tuning(seconds_of(row)))
    assert of_found > 0.85
    assert rate > 1.4
    rate, _, _ = decoded(next_of("again", 1.0, 3), Tuning(seconds_of(row), *ALL_WRONG))
    assert rate > 1.2  # a text before it in which nothing was right is overcome


def test_given_lengths_are_drafted_as_they_were_told() -> None:
    """And 8 where none is given."""
    for length, tuning in itertools.product((4, None), (None, Tuning(seconds_of(0.3)))):
        method = MethodConfig("prompt_lookup", stop=StopConfig(max_draft=length))
        drafter = LookupPlugin().make(None, method, Streams(0), drawn=False, tuning=tuning)
        assert (drafter.max_rows, drafter.sizes) == (length or 8, None)
