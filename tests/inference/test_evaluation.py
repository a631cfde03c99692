"""Arms taking turns on a prompt: what is timed."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM

from draft_models.streams import Streams
from inference.decode import Round
from inference.evaluation import (
    AUTOREGRESSIVE,
    Generation,
    collect,
    measure,
    transformers_generate,
    without_captures,
)
from tests.tiny import random_prompt, save_target


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
            yield Round((7,), 0, 0, 0, seconds)

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
