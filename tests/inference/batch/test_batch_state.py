"""Steps over buffers at fixed addresses, and compiled ones, give the answers of steps over a growing cache."""

import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.draft_models.targets.target import TextMasks
from outrider.inference.batch import batch_state
from outrider.inference.batch.batch_decoder import Generator
from outrider.inference.batch.batch_state import FixedBatch
from outrider.inference.batch.tasks import Answer, uniforms
from outrider.inference.core.sampling import Sampler
from outrider.inference.settings.sampling import SamplingConfig
from tests.faults import plant
from tests.inference.batch.responding import layers_of
from tests.tiny import random_prompt, save_target

COUNTS = (14, 6, 1, 14, 10)  # tokens a prompt: rows leave on the way


def load(path: Any, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def answers_by(model: Any, some: Sequence[int] = range(5)) -> Any:
    prompts = [random_prompt(length, seed=length) for length in (3, 30, 11, 19, 5)]
    draws = [uniforms(0, str(i), 0, count) for i, count in enumerate(COUNTS)]
    generator = Generator(model, Sampler(SamplingConfig(temperature=1.0)), (), greedy_tokens=3, top_k_logits=5)
    return generator.answer([prompts[number] for number in some], [draws[number] for number in some])


def answers_of(model):
    return [answer.tokens for answer in answers_by(model)]


@pytest.fixture
def model(tmp_path):
    return load(save_target(tmp_path, "llama", peak=0.5, kv_heads=2), torch.float64)


def fixed(monkeypatch, **names):
    """Steps run over buffers at fixed addresses; names: what else of `batch_state` is another."""
    for name, value in {"can_be_fixed": lambda *_: True, **names}.items():
        monkeypatch.setattr(batch_state, name, value)


@pytest.mark.parametrize("room", [3, 128])
def test_answers_are_those_of_a_growing_cache(model, monkeypatch, room):
    expected = answers_of(model)
    fixed(monkeypatch, _SPARE_SLOTS=room, _FEW_ROWS=1)
    assert answers_of(model) == expected


@pytest.mark.parametrize("fault", [
    ("_step", "self._mask,", "self._mask & (torch.arange(self._mask.shape[-1]) < 31),"),
    ("_step", "self._positions", "torch.zeros_like(self._positions)"),
    ("feed", "self._slot.fill_(self._length)", ""),
])  # fmt: skip
def test_a_planted_fault_is_found(model, monkeypatch, fault):
    """One of the buffers that a step reads is not updated."""
    expected = answers_of(model)
    plant(monkeypatch, FixedBatch, *fault)
    fixed(monkeypatch)
    assert answers_of(model) != expected


def test_a_finished_answer_waits_at_the_end_of_the_context(tmp_path, monkeypatch):
    """Learned positions have no row after it. The longest prompt and its answer fill the context."""
    model = load(save_target(tmp_path, "opt", peak=0.5, max_position_embeddings=36), torch.float64)
    alone = [answers_by(model, [number])[0].tokens for number in range(5)]
    monkeypatch.setattr(batch_state.GrowingBatch, "should_shrink", lambda *_: False)
    assert answers_of(model) == alone
    fixed(monkeypatch)
    assert answers_of(model) == alone


@pytest.mark.gpu
def test_graphs_on_a_gpu_say_the_same(tmp_path, monkeypatch):
    model = load(save_target(tmp_path, "llama", peak=0.5, kv_heads=2), torch.float64).cuda()
    fixed(monkeypatch, _SPARE_SLOTS=5, _FEW_ROWS=1, can_be_fixed=batch_state.can_be_fixed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = answers_of(model)
    monkeypatch.setattr(batch_state, "can_be_fixed", lambda *_: False)
    assert answers_of(model) == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_answer_by_a_loop_is_what_it_is_alone(tmp_path: Any, dtype: torch.dtype) -> None:
    """Bit for bit, up to its distributions."""
    stack = layers_of(save_target(tmp_path, "llama", kv_heads=2, vocab_size=272), dtype)
    for number, together in enumerate(answers_by(stack)):
        (alone,) = answers_by(stack, [number])
        assert alone.tokens == together.tokens
        assert torch.equal(alone.top.logprobs, together.top.logprobs)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_an_answer_whose_loop_fails_is_none(tmp_path: Any, error: type[Exception]) -> None:
    """A pass too large for memory is halved, and a text too large fails alone; any other error is raised."""
    stack: Any = layers_of(save_target(tmp_path, "llama", kv_heads=2))
    expected, real = answers_by(stack), stack.at_once.run

    def fail(*given: Any) -> Any:
        if isinstance(given[4], TextMasks) or given[5].capacity > max(COUNTS) + 20:
            raise error("broken")
        return real(*given)

    stack.at_once = SimpleNamespace(run=fail)
    if error is RuntimeError:
        with pytest.raises(RuntimeError, match="broken"):
            answers_by(stack)
    else:
        found = answers_by(stack)
        assert found.pop(1) == Answer(failure="memory")
        assert [answer.tokens for answer in found] == [answer.tokens for answer in (*expected[:1], *expected[2:])]
    assert not torch.is_inference_mode_enabled()
