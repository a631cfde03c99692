"""Prompt lookup against a search of the whole text, and lossless in the loop."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.decode import speculative
from inference.drafters.lookup import PromptLookup
from tests.tiny import ARCHITECTURES, open_stack, random_prompt, reference_generate, save_target


class FakeSession:
    def __init__(self, tokens: list[int]):
        self.tokens = torch.tensor(tokens, dtype=torch.long)


def slow_lookup(text: list[int], max_ngram: int, count: int) -> list[int]:
    """The text after the latest earlier occurrence of the longest suffix that has one."""
    for size in range(min(max_ngram, len(text)), 0, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[-size:]:
                return text[start + size :][:count]
    return []


@settings(deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    rounds=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6),
    max_ngram=st.integers(1, 4),
    limit=st.integers(0, 6),
)
def test_equals_a_search_of_the_text(prompt: list[int], rounds: list[list[int]], max_ngram: int, limit: int) -> None:
    lookup = PromptLookup(max_ngram, max_draft=5)
    lookup.begin(FakeSession(prompt), None, None)
    text = list(prompt)
    for root, *rest in rounds:
        tree = lookup.draft(torch.tensor([root]), limit)
        assert tree.tokens.tolist() == slow_lookup([*text, root], max_ngram, min(limit, 5))
        lookup.commit(None, (), [root, *rest])
        text += [root, *rest]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_generate(tmp_path: Path, architecture: str) -> None:
    model, stack = open_stack(save_target(tmp_path, architecture, kv_heads=2))
    prompt = random_prompt(10) * 3
    for max_ngram in (1, 3):
        lookup = PromptLookup(max_ngram)
        rounds = list(speculative(stack, lookup, prompt, max_new_tokens=60))
        assert [t for r in rounds for t in r.tokens] == reference_generate(model, prompt, 60)
        assert sum(r.drafted for r in rounds) > 0
