"""Steps over buffers at fixed addresses, and compiled ones, give the answers of steps over a growing cache."""

import warnings
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.inference.batch import batch_state, compiled_batch
from outrider.inference.batch.batch_decoder import Generator
from outrider.inference.batch.batch_state import FixedBatch, Forward, GrowingBatch, begin_batch
from outrider.inference.batch.compiled_batch import CompiledBatch, CompiledSteps
from outrider.inference.batch.tasks import Answer, uniforms
from outrider.inference.core.sampling import Sampler
from outrider.inference.settings.sampling import SamplingConfig
from tests.tiers import quick_where
from tests.tiny import LAYERS, random_prompt, save_target

COUNTS = (14, 6, 1, 14, 10)  # tokens a prompt: rows leave on the way


class StandInPool:
    """Captures like a GPU with respect to addresses: a replay reads and writes where the captured run did."""

    captures = 0

    def capture(self, run):
        batch = run.__self__
        run()
        StandInPool.captures += 1
        return StandInGraph(batch, run, batch._logits)


class StandInGraph:
    def __init__(self, batch, run, logits):
        self.batch, self.run, self.logits, self.places = batch, run, logits, addresses(batch)

    def replay(self):
        assert addresses(self.batch) == self.places
        self.run()
        self.logits.copy_(self.batch._logits)
        self.batch._logits = self.logits


def addresses(batch):
    kept = [tensor for layer in batch._layers for tensor in (layer.keys, layer.values, layer.slot)]
    return [t.data_ptr() for t in (batch._tokens, batch._mask, batch._positions, batch._slot, *kept)]


def answers_of(model, temperature=1.0):
    prompts = [random_prompt(length, seed=length) for length in (3, 30, 11, 19, 5)]
    draws = [uniforms(0, str(i), 0, count) for i, count in enumerate(COUNTS)]
    generator = Generator(model, Sampler(SamplingConfig(temperature=temperature)), (), greedy_tokens=3)
    return [answer.tokens for answer in generator.answer(prompts, draws)]


@pytest.fixture
def model(tmp_path):
    path = save_target(tmp_path, "llama", peak=0.5, kv_heads=2)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()


def fixed(monkeypatch, **names):
    """Steps run over buffers at fixed addresses; names: what else of `batch_state` is another."""
    for name, value in {"can_be_fixed": lambda *_: True, **names}.items():
        monkeypatch.setattr(batch_state, name, value)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("room", [3, 128])
def test_answers_are_those_of_a_growing_cache(model, monkeypatch, room, captured):
    expected = answers_of(model)
    capturing = {"can_capture": lambda _: True, "GraphPool": StandInPool} if captured else {}
    fixed(monkeypatch, _ROOM=room, _FEW=1, **capturing)
    StandInPool.captures = 0
    assert answers_of(model) == expected
    assert (StandInPool.captures > 1) == captured


@pytest.mark.parametrize("fault", ["_mask", "_positions", "_slot"])
def test_a_planted_fault_is_found(model, monkeypatch, fault):
    """One of the buffers that a step reads is not updated."""
    expected = answers_of(model)

    class Faulty(FixedBatch):
        def _step(self):
            whole = getattr(self, fault)
            still = torch.zeros_like(whole) if fault != "_mask" else whole & (torch.arange(whole.shape[-1]) < 31)
            setattr(self, fault, still)
            for layer in self._layers:
                layer.slot = self._slot
            super()._step()
            setattr(self, fault, whole)

    fixed(monkeypatch, FixedBatch=Faulty)
    assert answers_of(model) != expected


def test_what_cannot_be_captured_runs_uncaptured(model, monkeypatch):
    class NoPool:
        def capture(self, _):
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    expected = answers_of(model)
    fixed(monkeypatch, can_capture=lambda _: True, GraphPool=NoPool)
    with pytest.warns(UserWarning, match="LlamaForCausalLM cannot be captured as a CUDA graph.*not permitted") as found:
        assert answers_of(model) == expected
    assert len([one for one in found if "captured" in str(one.message)]) == 1


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_layers_that_forget_keys_are_not_fixed(tmp_path, monkeypatch, architecture):
    """Mistral's layers keep a window of keys."""
    monkeypatch.setattr(batch_state, "can_capture", lambda _: True)
    model = AutoModelForCausalLM.from_pretrained(save_target(tmp_path, architecture), dtype=torch.float32)
    batch, _ = begin_batch(Forward(model), torch.tensor([[5, 6]]), torch.ones(1, 2, dtype=torch.long), 4)
    assert isinstance(batch, FixedBatch) == (architecture == "llama")


@pytest.mark.gpu
def test_graphs_on_a_gpu_say_the_same(tmp_path, monkeypatch):
    path = save_target(tmp_path, "llama", peak=0.5, kv_heads=2)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa").eval().cuda()
    fixed(monkeypatch, _ROOM=5, _FEW=1, can_be_fixed=batch_state.can_be_fixed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = answers_of(model)
    monkeypatch.setattr(batch_state, "can_be_fixed", lambda *_: False)
    assert answers_of(model) == found


WHOLE = {"use_sliding_window": False, "layer_types": None}
FAMILIES = [("llama", {"attention_bias": True}), ("mistral", {"sliding_window": None}), ("qwen2", WHOLE), ("qwen3", {})]


def load(path: Any, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def answers_by(model: Any, steps: CompiledSteps | None) -> list[Answer]:
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
def test_answers_of_compiled_steps_are_those_of_a_growing_cache(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, architecture: str, changes: dict[str, object], room: int
) -> None:
    """Tokens and distributions, for rows of any lengths, also after buffers grow and rows leave."""
    monkeypatch.setattr(compiled_batch, "_ROOM", room)
    model = load(save_target(tmp_path, architecture, peak=0.5, kv_heads=2, **changes))
    expected = answers_by(model, None)
    taken = []
    feed = CompiledBatch.feed
    monkeypatch.setattr(CompiledBatch, "feed", lambda self, tokens: taken.append(len(tokens)) or feed(self, tokens))
    found = answers_by(model, steps_of(model))
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
def test_a_planted_fault_of_compiled_steps_is_found(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Rows that read another row's keys, overwrite the same position, or keep their prompts' padding."""
    model = load(save_target(tmp_path, "llama", peak=0.5, kv_heads=2))
    expected = answers_by(model, None)
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
    found = answers_by(model, steps_of(model))
    assert [answer.tokens for answer in found] != [answer.tokens for answer in expected]


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("mistral", torch.float32), ("opt", torch.float32), ("llama", torch.float64)],
)
def test_what_cannot_be_compiled_is_not(tmp_path: Any, architecture: str, dtype: torch.dtype) -> None:
    """A sliding window, learned positions, other dtypes; the model is unchanged."""
    model = load(save_target(tmp_path, architecture), dtype)
    expected = [answer.tokens for answer in answers_by(model, None)]
    assert CompiledSteps.without_asking(model) is None
    assert [answer.tokens for answer in answers_by(model, None)] == expected


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
