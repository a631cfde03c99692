"""A small LM as a drafter: lossless whatever it is, its cache kept, its vocabulary checked."""

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from draft_models.small_lm.model import load_small_lm
from draft_models.targets.open_target import load_tokenizer
from draft_models.targets.stack import LayerStack, WholeModel
from inference.core.decode import speculative
from inference.drafters.shaped import ModelDrafter
from inference.drafters.small_lm import SmallLMSource, fit_vocabulary
from inference.shapes.factory import Chain
from inference.stopping.plain import FixedLength
from inference.stopping.thompson import BetaThompson
from outrider.errors import UserError
from tests.pairwise import all_pairs, each_value
from tests.tiers import quick_where, typical_where
from tests.tiny import (
    ARCHITECTURES,
    VOCABULARY,
    byte_tokenizer,
    open_stack,
    random_prompt,
    reference_generate,
    save_target,
)


def load(path: Path, target: Path, dtype: torch.dtype = torch.float32) -> LayerStack:
    return load_small_lm(str(path), load_tokenizer(str(target)), dtype=dtype)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, LayerStack, list[int]]]:
    """By architecture: a target, and what it says in 30 tokens after `random_prompt(20)`."""

    @cache
    def make(architecture: str) -> tuple[Path, LayerStack, list[int]]:
        path = save_target(tmp_path_factory.mktemp("target"), architecture, kv_heads=2)
        model, stack = open_stack(path)
        return path, stack, reference_generate(model, random_prompt(20), 30)

    return make


DRAFTERS = ("itself", "other weights", "wider vocabulary", "narrower vocabulary", "another family")
RULES = {
    "fixed-4": lambda: FixedLength(4),
    "fixed-1": lambda: FixedLength(1),
    "beta": lambda: BetaThompson(8, 2.0, 1.0, "natural", random.Random(0)),
}


ROWS = all_pairs(ARCHITECTURES, DRAFTERS, RULES)
TYPICAL = {*each_value(ROWS), *(row for row in ROWS if row[0] == "llama")}


@pytest.mark.parametrize(
    ("architecture", "drafter", "rule"),
    typical_where(TYPICAL.__contains__, quick_where(lambda row: row[0] == "llama", ROWS)),
)
def test_greedy_equals_generate(
    targets: Callable[[str], tuple[Path, LayerStack, list[int]]],
    tmp_path: Path,
    architecture: str,
    drafter: str,
    rule: str,
) -> None:
    path, stack, expected = targets(architecture)
    family = {"llama": "qwen3", "qwen3": "opt", "mistral": "llama", "opt": "llama"}.get(architecture, architecture)
    family = family if drafter == "another family" else architecture
    changes = {"wider vocabulary": {"vocab_size": VOCABULARY + 60}, "narrower vocabulary": {"vocab_size": 259}}
    small = path
    if drafter != "itself":
        small = save_target(tmp_path / "small", family, num_hidden_layers=2, seed=3, **changes.get(drafter, {}))
    source = SmallLMSource(load(small, path))
    prompt = random_prompt(20)
    for count in (8, 30):  # the second begins with what the first left
        rounds = list(speculative(stack, ModelDrafter(source, Chain(RULES[rule]())), prompt, max_new_tokens=count))
        assert [t for r in rounds for t in r.tokens] == expected[:count]
        if drafter == "itself":
            assert sum(r.accepted for r in rounds) == sum(r.drafted for r in rounds) > 0
        assert source.session.base + len(source._pending) == len(prompt) + count - 1  # all but the last token


def test_its_cache_equals_a_fresh_prefill(tmp_path: Path) -> None:
    path = save_target(tmp_path / "target", kv_heads=2)
    _, stack = open_stack(path, torch.float64)
    small = load(save_target(tmp_path / "small", num_hidden_layers=2, seed=0), path, torch.float64)
    source, fresh, prompt = SmallLMSource(small), SmallLMSource(small), random_prompt(12)
    text = list(prompt)
    for r in speculative(stack, ModelDrafter(source, Chain(FixedLength(3))), prompt, max_new_tokens=30):
        text += r.tokens
    known = text[: source.session.base]
    next(speculative(stack, ModelDrafter(fresh, Chain(FixedLength(3))), known, max_new_tokens=2))
    for (key, value), (fresh_key, fresh_value) in zip(
        source.session.first.content(), fresh.session.first.content(), strict=True
    ):
        torch.testing.assert_close(key, fresh_key, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(value, fresh_value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("by_layers", [True, False])
def test_hidden_states_are_those_that_the_logits_come_from(tmp_path: Path, by_layers: bool) -> None:
    """Of the rows that were asked for, without those that go in with them for the round before."""
    path = save_target(tmp_path, kv_heads=2)
    model, stack = open_stack(path, torch.float64)
    small, head = (stack, stack.logits) if by_layers else (WholeModel(model), model.lm_head)
    waiting = set()

    class Compared(SmallLMSource):
        def extend(self, tokens: torch.Tensor, parents: Sequence[int]) -> torch.Tensor:
            waiting.add(0 if self.session.rows else len(self._pending))
            logits = super().extend(tokens, parents)
            assert len(self.hidden) == len(tokens)
            torch.testing.assert_close(head(self.hidden), logits)
            return logits

    drafter = ModelDrafter(Compared(small), Chain(FixedLength(3)))
    rounds = list(speculative(stack, drafter, random_prompt(9), max_new_tokens=14))
    assert sum(r.accepted for r in rounds) == sum(r.drafted for r in rounds)
    assert waiting == {0, 1}  # of a draft that is accepted whole the last token was never fed


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    path, other = save_target(tmp_path / "target"), save_target(tmp_path / "other")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    size = len(byte_tokenizer())
    message = rf"\({size + 1} tokens\) is not the target's .* {size} tokens\); 1 tokens differ, first '<new>'"
    with pytest.raises(UserError, match=message):
        load(other, path)
    byte_tokenizer().save_pretrained(other)
    stored = json.loads((other / "tokenizer.json").read_text())
    ids = stored["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (other / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match=rf"\({size} tokens\) .* {size} tokens\); 2 tokens differ, first"):
        load(other, path)


def test_fit_vocabulary() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert fit_vocabulary(logits, 2).tolist() == [[1.0, 2.0]]
    assert fit_vocabulary(logits, 4).softmax(-1)[0, 3] == 0
