"""Greedy verification walks down the draft along the target's own choices."""

from hypothesis import given, settings
from hypothesis import strategies as st

from inference.core.tree import ROOT
from inference.core.verify import verify_greedy


@st.composite
def drafts(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """A tree without equal siblings over three tokens, and the target's choice after every node."""
    parents, tokens = [], []
    for i in range(draw(st.integers(0, 12))):
        parent, token = draw(st.integers(ROOT, i - 1)), draw(st.integers(0, 2))
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
        if len(parents) < i + 1:
            break
    choices = draw(st.lists(st.integers(0, 2), min_size=len(tokens) + 1, max_size=len(tokens) + 1))
    return tokens, parents, choices


@settings(deadline=None)
@given(drafts())
def test_greedy_walks_the_targets_own_path(draft: tuple[list[int], list[int], list[int]]) -> None:
    tokens, parents, choices = draft
    accepted, bonus = verify_greedy(tokens, parents, choices)
    last = ROOT
    for node in accepted:
        assert parents[node] == last
        assert tokens[node] == choices[last + 1]
        last = node
    assert bonus == choices[last + 1]
    assert not any(p == last and t == bonus for p, t in zip(parents, tokens, strict=True))  # as long as possible
