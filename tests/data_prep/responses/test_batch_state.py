"""Steps over buffers at fixed addresses give the answers of steps over a growing cache."""

import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_prep.responses import batch_state
from data_prep.responses.batch_decoder import Generator
from data_prep.responses.batch_state import FixedBatch, Forward, begin_batch
from data_prep.responses.tasks import uniforms
from inference.core.sampling import Sampler
from inference.settings.sampling import SamplingConfig
from tests.tiny import random_prompt, save_target

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


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("room", [3, 128])
def test_answers_are_those_of_a_growing_cache(model, monkeypatch, room, captured):
    expected = answers_of(model)
    monkeypatch.setattr(batch_state, "can_be_fixed", lambda *_: True)
    monkeypatch.setattr(batch_state, "_ROOM", room)
    monkeypatch.setattr(batch_state, "_FEW", 1)
    if captured:
        monkeypatch.setattr(batch_state, "can_capture", lambda _: True)
        monkeypatch.setattr(batch_state, "GraphPool", StandInPool)
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

    monkeypatch.setattr(batch_state, "can_be_fixed", lambda *_: True)
    monkeypatch.setattr(batch_state, "FixedBatch", Faulty)
    assert answers_of(model) != expected


def test_what_cannot_be_captured_runs_uncaptured(model, monkeypatch):
    class NoPool:
        def capture(self, _):
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    expected = answers_of(model)
    monkeypatch.setattr(batch_state, "can_be_fixed", lambda *_: True)
    monkeypatch.setattr(batch_state, "can_capture", lambda _: True)
    monkeypatch.setattr(batch_state, "GraphPool", NoPool)
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
    monkeypatch.setattr(batch_state, "_ROOM", 5)
    monkeypatch.setattr(batch_state, "_FEW", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = answers_of(model)
    monkeypatch.setattr(batch_state, "can_be_fixed", lambda *_: False)
    assert answers_of(model) == found
