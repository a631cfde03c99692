"""Answers by compiled steps equal those of a growing cache; models that cannot run compiled steps do not use them."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_prep.responses import compiled_batch
from data_prep.responses.batch_decoder import Generator
from data_prep.responses.batch_state import Forward, GrowingBatch, begin_batch
from data_prep.responses.compiled_batch import CompiledBatch, CompiledSteps
from data_prep.responses.tasks import Answer, uniforms
from inference.core.sampling import Sampler
from inference.settings.sampling import SamplingConfig
from tests.tiers import quick_where
from tests.tiny import LAYERS, random_prompt, save_target

COUNTS = (14, 6, 1, 14, 10)  # tokens a prompt: rows leave on the way
WHOLE = {"use_sliding_window": False, "layer_types": None}
FAMILIES = [("llama", {"attention_bias": True}), ("mistral", {"sliding_window": None}), ("qwen2", WHOLE), ("qwen3", {})]


def load(path: Any, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def answers_of(model: Any, steps: CompiledSteps | None) -> list[Answer]:
    prompts = [random_prompt(length, seed=length) for length in (3, 30, 11, 19, 5)]
    draws = [uniforms(0, str(i), 0, count) for i, count in enumerate(COUNTS)]
    sampler = Sampler(SamplingConfig(temperature=1.0))
    return Generator(model, sampler, (), greedy_tokens=3, top_k_logits=5, steps=steps).answer(prompts, draws)


def steps_of(model: Any) -> CompiledSteps:
    steps = CompiledSteps.without_asking(model)
    assert steps is not None
    return steps


@pytest.mark.parametrize("room", [3, 256])
@pytest.mark.parametrize(("architecture", "changes"), quick_where(lambda row: row[0] == "llama", FAMILIES))
def test_answers_are_those_of_a_growing_cache(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, architecture: str, changes: dict[str, object], room: int
) -> None:
    """Tokens and distributions, for rows of any lengths, also after buffers grow and rows leave."""
    monkeypatch.setattr(compiled_batch, "_ROOM", room)
    model = load(save_target(tmp_path, architecture, peak=0.5, kv_heads=2, **changes))
    expected = answers_of(model, None)
    taken = []
    feed = CompiledBatch.feed
    monkeypatch.setattr(CompiledBatch, "feed", lambda self, tokens: taken.append(len(tokens)) or feed(self, tokens))
    found = answers_of(model, steps_of(model))
    assert taken == [4] * 5 + [3] * 4 + [2] * 4  # only rows that are not finished
    for answer, other in zip(found, expected, strict=True):
        assert answer.tokens == other.tokens
        assert answer.top is not None
        assert other.top is not None
        torch.testing.assert_close(answer.top.logprobs, other.top.logprobs, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gets_what_it_gets_alone(tmp_path: Any, dtype: torch.dtype) -> None:
    """Bit for bit, from a token to its logits."""
    steps = steps_of(load(save_target(tmp_path, "llama", kv_heads=2, vocab_size=272), dtype))
    generator = torch.Generator().manual_seed(0)
    kept = torch.randn(LAYERS, 2, 35, 2, 20, 16, generator=generator).to(dtype)
    tokens = torch.randint(272, (35,), generator=generator)
    slots = torch.tensor([[row, 3 * row % 20] for row in range(35)])
    together = steps(tokens, kept.clone(), slots)
    assert together.dtype == torch.float32
    for row in range(35):
        assert torch.equal(steps(tokens[row : row + 1], kept.clone(), slots[row : row + 1])[0], together[row])


@pytest.mark.parametrize("fault", ["one sequence", "one position", "padding"])
def test_a_planted_fault_is_found(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Rows that read another row's keys, overwrite the same position, or keep their prompts' padding."""
    model = load(save_target(tmp_path, "llama", peak=0.5, kv_heads=2))
    expected = answers_of(model, None)
    feed, packed = CompiledBatch.feed, compiled_batch._without_padding

    def faulty(batch: CompiledBatch, tokens: Any) -> Any:
        if fault == "one sequence":
            batch._slots[:, 0] = 0
        logits = feed(batch, tokens)
        if fault == "one position":
            batch._slots[:, 1] -= 1
        return logits

    monkeypatch.setattr(CompiledBatch, "feed", faulty)
    if fault == "padding":
        monkeypatch.setattr(
            compiled_batch, "_without_padding", lambda cache, lengths: packed(cache, lengths * 0 + lengths.max())
        )
    found = answers_of(model, steps_of(model))
    assert [answer.tokens for answer in found] != [answer.tokens for answer in expected]


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("mistral", torch.float32), ("opt", torch.float32), ("llama", torch.float64)],
)
def test_what_cannot_be_compiled_is_not(tmp_path: Any, architecture: str, dtype: torch.dtype) -> None:
    """A sliding window, learned positions, other dtypes; the model is unchanged."""
    model = load(save_target(tmp_path, architecture), dtype)
    expected = [answer.tokens for answer in answers_of(model, None)]
    assert CompiledSteps.without_asking(model) is None
    assert [answer.tokens for answer in answers_of(model, None)] == expected


def test_only_where_it_is_known_to_be_faster(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(save_target(tmp_path, "llama", kv_heads=2))
    monkeypatch.setattr(compiled_batch, "has_amx", lambda: False)
    assert CompiledSteps.of(model) is None
    monkeypatch.setattr(compiled_batch, "has_amx", lambda: True)
    monkeypatch.setattr(CompiledSteps, "way", "amx")
    assert CompiledSteps.of(model) is not None
    monkeypatch.setattr(CompiledSteps, "way", "pairs")
    assert CompiledSteps.of(model) is None


@pytest.mark.parametrize(("budget", "compiled"), [(254, True), (255, False)])
def test_beyond_the_limit_the_cache_grows(tmp_path: Any, budget: int, compiled: bool) -> None:
    """Up to the limit a cached key does not depend on later text."""
    model = load(save_target(tmp_path, "llama", kv_heads=2))
    steps = steps_of(model)
    assert steps.limit == 256
    ids, mask = torch.tensor([[5, 6]]), torch.ones(1, 2, dtype=torch.long)
    with torch.inference_mode():
        batch, _ = begin_batch(Forward(model, steps), ids, mask, budget)
    assert isinstance(batch, CompiledBatch) == compiled
    assert isinstance(batch, GrowingBatch) != compiled
