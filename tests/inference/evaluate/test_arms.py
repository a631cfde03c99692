"""Arms taking turns on a prompt: what is timed."""

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.base import progress
from outrider.base.errors import UserError
from outrider.base.streams import Streams
from outrider.inference.core.rounds import Generation, Round, collect
from outrider.inference.drafters.model_plugin import Calibrated
from outrider.inference.evaluate import evaluation
from outrider.inference.loading.generation_config import TextSettings
from outrider.inference.measure.arms import Turn, make_arms, rerun_on_capture, run_arms, transformers_generate
from outrider.inference.measure.results import Arm
from outrider.inference.measure.threads import CpuWatch, warn_if_busy
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import (
    AUTOREGRESSIVE,
    MethodConfig,
    NgramConfig,
    StopConfig,
    StructureConfig,
    preset,
)
from outrider.inference.settings.sampling import SamplingConfig
from outrider.train.pipeline_run import run_pipeline
from outrider.train.settings.pipeline import PipelineConfig
from tests.inference.ngram_cases import make_table
from tests.inference.table_target import TableModel, TableRuntime
from tests.tiny import random_prompt, save_target


def test_a_run_that_captured_graphs_is_run_again() -> None:
    runtime, runs = SimpleNamespace(captures=0), []

    def arm(prompt: Sequence[int], streams: Streams) -> Generation:
        runs.append(prompt)
        runtime.captures += len(runs) < 3
        return Generation((len(runs),), 0, 0)

    assert rerun_on_capture(arm, runtime)([1], Streams(0)).tokens == (3,)


def test_measure_rotates_and_takes_the_median(tmp_path: Path) -> None:
    calls = []

    def arm(name: str, seconds: list[float]):
        def run(_prompt: Sequence[int], _streams: Streams) -> Generation:
            calls.append(name)
            return Generation((1, 2), 0.1, seconds[calls.count(name) - 1])

        return run

    arms = {AUTOREGRESSIVE: arm(AUTOREGRESSIVE, [3, 1, 2]), "m": arm("m", [5, 6, 4])}
    profilers = {"m": lambda *_: Generation((9,), 0, 0)}
    (result,) = run_arms(arms, [Turn("p", "c", [1])], repeats=3, turn=1, profilers=profilers)
    assert calls == ["m", AUTOREGRESSIVE, AUTOREGRESSIVE, "m", "m", AUTOREGRESSIVE]
    assert result.generations[AUTOREGRESSIVE].decode_seconds == 2
    assert result.generations["m"].decode_seconds == 5
    assert result.profiles == {"m": Generation((9,), 0, 0)}


def test_every_repeat_has_its_streams() -> None:
    """Whatever comes first; profilers do the first repeat again, and later turns follow what was said there."""
    given: list[tuple[str, Streams]] = []

    def arm(name: str):
        def run(_prompt: Sequence[int], streams: Streams) -> Generation:
            given.append((name, streams))
            return Generation((streams.repeat,), 0, -streams.repeat)

        return run

    arms = {AUTOREGRESSIVE: arm(AUTOREGRESSIVE), "m": arm("m")}
    options = {"repeats": 3, "turn": 1, "seed": 5, "profilers": {"m": arm("profile")}}
    (result,) = run_arms(arms, [Turn("p", "c", [1])], **options)
    assert sorted(given, key=lambda pair: (pair[0], pair[1].repeat)) == [
        *((AUTOREGRESSIVE, Streams(5, "p", repeat)) for repeat in range(3)),
        *(("m", Streams(5, "p", repeat)) for repeat in range(3)),
        ("profile", Streams(5, "p", 0)),
    ]
    assert (result.generations[AUTOREGRESSIVE].tokens, result.answer) == ((1,), (0,))


STOPS = [StopConfig(rule, max_draft=3) for rule in ("fixed", "confidence", "beta")]
METHODS = {
    **{f"{source}, {s.rule}": MethodConfig(source, stop=s) for source in ("small_lm", "early_exit") for s in STOPS},
    "twin": MethodConfig("small_lm", stop=STOPS[0]),
    "tree": MethodConfig("small_lm", StructureConfig("k_config", widths=(2, 2))),
    "lookup": MethodConfig("prompt_lookup"),
    "ngrams": MethodConfig("ngrams", ngrams=NgramConfig(search="puct", iterations=20)),
}


def sampled_arms(*names: str) -> dict[str, Arm]:
    """These methods' arms, over a target that is a table."""
    p, q = TableModel([[0.4, 0.3, 0.2, 0.1]] * 4), TableModel([[0.25] * 4] * 4)
    options = {"text": TextSettings(60, sampling=SamplingConfig(1.0)), "runtime": TableRuntime()}
    drafters = {"early_exit": Calibrated(q), "small_lm": q, "ngrams": make_table(4)}  # type: ignore[arg-type]
    return make_arms(p, drafters, {name: METHODS[name] for name in names}, None, **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_sampled_texts_belong_to_seed_prompt_repeat_and_arm() -> None:
    """After one and the same prompt all of them differ, and each is the same again, in any order and any company."""
    given = [Streams(*name) for name in itertools.product((0, 1), ("a", "b"), (0, 1))]

    def draw(*names: str) -> dict[tuple[str, Streams], tuple[int, ...]]:
        arms = sampled_arms(*names)
        return {(name, streams): arms[name]([0], streams).tokens for streams in given for name in arms}

    texts = draw(*METHODS)
    assert len(set(texts.values())) == len(texts) == len(given) * (1 + len(METHODS))
    given[:] = given[::-3]
    for name in METHODS:
        assert draw(name).items() <= texts.items()


def test_no_two_draws_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stream is handed out twice: not within a generation, for drafting, stopping, searching and verifying, nor to
    two of them."""
    given: list[int] = []
    number = Streams.number

    def noted(streams: Streams, *purpose: str | int, bits: int = 256) -> int:
        given.append(number(streams, *purpose))
        return number(streams, *purpose, bits=bits)

    monkeypatch.setattr(Streams, "number", noted)
    arms = sampled_arms(*METHODS)
    for turn, prompt in enumerate(("a", "b")):
        run_arms(arms, [Turn(prompt, "", [0])], repeats=2, turn=turn)
    assert len(set(given)) == len(given)
    drawn = 1 + len(METHODS)  # those that verify, and
    drawn += 6 + 1 + 1 + 2 + 1  # chains and trees that draw from q, those with Beta's coins, and a search
    assert len(given) == 4 * drawn


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
        patch.setattr("outrider.inference.measure.arms.time.perf_counter", lambda: float(len(passes)))
        out = transformers_generate(model, random_prompt(9), TextSettings(12))
    assert len(out.tokens) == 12
    assert (out.prefill_seconds, out.decode_seconds) == (1, 11)
    first = out.tokens[4]
    stopped = transformers_generate(model, random_prompt(9), TextSettings(12, [first]))
    assert stopped.tokens == out.tokens[: out.tokens.index(first) + 1]


def test_a_process_that_waits_for_its_cores_is_seen() -> None:
    """Of four threads no more than two run at once: the time of two cores is due."""
    torch.set_num_threads(4)
    got, wall = itertools.count(0, 3), itertools.count(0, 2)
    watch = CpuWatch(lambda: next(got), lambda: next(wall), lambda: 2)
    arm = watch.around(lambda prompt, streams: Generation((1,), 0.0, 1.0))
    assert watch.take() is None
    assert arm([1], Streams(0)) == arm([2], Streams(0))
    assert watch.take() == 3 / 4
    assert watch.take() is None


@pytest.mark.parametrize(("load", "step", "lines"), [(9.0, False, 1), (9.0, True, 0), (0.1, False, 0)])
def test_a_busy_machine_is_said_once_by_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], load: float, step: bool,
    lines: int,
) -> None:  # fmt: skip
    """And by a pipeline for its steps."""
    monkeypatch.setattr(os, "getloadavg", lambda: (load,))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(progress, "is_step", step)
    pipeline = PipelineConfig(steps={"target": {}}, target="given", out_dir=str(tmp_path / "out"))
    damaged = EvaluateConfig(target="t", prompts="no.jsonl", methods={"prompt_lookup": preset("prompt_lookup")})
    for command in (lambda: run_pipeline(pipeline, []), lambda: evaluation.evaluate(damaged)):
        warn_if_busy.cache_clear()
        with suppress(UserError):
            command()
        warn_if_busy()
        assert capsys.readouterr().err.count("the load average is 9.0 on 2 cores") == lines
