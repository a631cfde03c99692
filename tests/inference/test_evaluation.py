"""Arms taking turns on a prompt: what is timed, and which mismatches are ties."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from draft_models.streams import Streams
from inference.decode import Round
from inference.evaluation import (
    AUTOREGRESSIVE,
    Generation,
    PromptResult,
    collect,
    excuse_ties,
    is_tie,
    measure,
    transformers_generate,
    without_captures,
)
from tests.tiny import random_prompt, reference_generate, save_target


def result_with(prompt: list[int], reference: tuple[int, ...], other: tuple[int, ...]) -> PromptResult:
    arms = {AUTOREGRESSIVE: Generation(reference, 0, 1), "m": Generation(other, 0, 1)}
    return PromptResult("p", "c", tuple(prompt), arms, AUTOREGRESSIVE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_real_ties_in_half_precision_are_excused(tmp_path: Path, dtype: torch.dtype) -> None:
    """A mismatch between two tokens of nearly equal logits is a tie; between any others it is an error."""
    model = AutoModelForCausalLM.from_pretrained(save_target(tmp_path), dtype=dtype)
    prompt = random_prompt(12)
    tokens = tuple(reference_generate(model, prompt, 8))
    twin = next(t for t in range(256) if t not in tokens)
    wrong = (*tokens[:3], twin, *tokens[4:])
    assert excuse_ties(model, result_with(prompt, tokens, wrong)) == frozenset()
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[tokens[3]]
    expected = {"m"} if dtype == torch.bfloat16 else frozenset()
    assert excuse_ties(model, result_with(prompt, tokens, wrong)) == expected
    assert excuse_ties(model, result_with(prompt, tokens, tokens[:-1])) == frozenset()  # shorter is not a tie


class Judge:
    """A target whose fourth logit is 0.5 larger when a text is fed at once, which is all the noise there is."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.config = SimpleNamespace(_attn_implementation="ours")

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def __call__(self, ids: torch.Tensor, use_cache: bool = False, **_: object) -> SimpleNamespace:
        assert self.config._attn_implementation == "sdpa"  # not this project's: it is to be judged
        logits = torch.tensor([5.0, 4.0, 3.0, 0.0 if use_cache else 0.5])
        return SimpleNamespace(logits=logits[None, None], past_key_values=None)


def test_ties_are_within_twice_the_noise_of_the_best_token() -> None:
    judge = Judge()
    tied = {pair for pair in itertools.permutations(range(3), 2) if is_tie(judge, [1], [2, 3], *pair)}
    assert tied == {(0, 1), (1, 0)}
    assert judge.config._attn_implementation == "ours"


def test_a_run_that_captured_graphs_is_run_again() -> None:
    runtime, runs = SimpleNamespace(captures=0), []

    def arm(prompt: Sequence[int], streams: Streams) -> Generation:
        runs.append(prompt)
        runtime.captures += len(runs) < 3
        return Generation((len(runs),), 0, 0)

    assert without_captures(arm, runtime)([1], Streams(0)).tokens == (3,)


def test_measure_rotates_and_takes_the_median(tmp_path: Path) -> None:
    calls = []

    def arm(name: str, seconds: list[float]):
        def run(_prompt: Sequence[int], _streams: Streams) -> Generation:
            calls.append(name)
            return Generation((1, 2), 0.1, seconds[calls.count(name) - 1])

        return run

    arms = {AUTOREGRESSIVE: arm(AUTOREGRESSIVE, [3, 1, 2]), "m": arm("m", [5, 6, 4])}
    profilers = {"m": lambda *_: Generation((9,), 0, 0)}
    result = measure(arms, [1], prompt_id="p", category="c", repeats=3, turn=1, profilers=profilers)
    assert calls == ["m", AUTOREGRESSIVE, AUTOREGRESSIVE, "m", "m", AUTOREGRESSIVE]
    assert result.generations[AUTOREGRESSIVE].decode_seconds == 2
    assert result.generations["m"].decode_seconds == 5
    assert result.profiles == {"m": Generation((9,), 0, 0)}


def test_prefill_is_timed_apart() -> None:
    now = 0.0

    def rounds() -> Iterator[Round]:
        nonlocal now
        for seconds in (5.0, 1.0, 2.0):
            now += seconds
            yield Round((7,), 0, 0, seconds)

    made = collect(rounds(), lambda: now)
    assert (made.prefill_seconds, made.decode_seconds, made.tokens) == (5.0, 3.0, (7, 7, 7))
    assert [r.seconds for r in made.rounds] == [1.0, 2.0]


def test_transformers_arm_times_prefill_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that counts the model's passes, of which the first is the prefill."""
    model = AutoModelForCausalLM.from_pretrained(save_target(tmp_path))
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    with monkeypatch.context() as patch:
        patch.setattr("inference.evaluation.time.perf_counter", lambda: float(len(passes)))
        out = transformers_generate(model, random_prompt(9), max_new_tokens=12, eos=())
    assert len(out.tokens) == 12
    assert (out.prefill_seconds, out.decode_seconds) == (1, 11)
    first = out.tokens[4]
    stopped = transformers_generate(model, random_prompt(9), max_new_tokens=12, eos=[first])
    assert stopped.tokens == out.tokens[: out.tokens.index(first) + 1]
