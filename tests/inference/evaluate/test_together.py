"""evaluate-checkpoint batch=N: the same texts as one after another, times of all together, groups as units."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from outrider import preset
from outrider.base.streams import Streams
from outrider.inference.core import batch as core
from outrider.inference.core.batch import Batch, Request, run_jointly
from outrider.inference.core.rounds import Generation, Round
from outrider.inference.measure import arms
from outrider.inference.measure.results import read_results
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig, StopConfig
from outrider.inference.sizing.costs import Costs
from tests.inference.evaluate.evaluating import METHODS, QUESTIONS, evaluate, killed_after, refused, tokens
from tests.inference.priced import costs, price

AUTO = MethodConfig(stop=StopConfig(max_draft="auto"))
FOUR = QUESTIONS[:4]  # the second and the fourth have two turns


def report_of(config: EvaluateConfig, number: int = 0) -> dict[str, Any]:
    return json.loads((Path(config.out_dir) / "report.json").read_text())["reports"][number]


def test_texts_at_once_are_those_one_after_another(
    config: Callable[..., EvaluateConfig], alone: EvaluateConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, beside, of_one = list[int](), set[int](), Costs.of_one
    price(monkeypatch, costs(step=0.01, node=0.0))
    monkeypatch.setattr(core, "run_jointly", lambda asked: sizes.append(len(asked)) or run_jointly(asked))
    monkeypatch.setattr(Costs, "of_one", lambda costs, texts: beside.add(texts) or of_one(costs, texts))
    made = config("two", batch=2, show_prompts=1, methods=METHODS | {"auto": AUTO, "default": preset("eesd_survival")})
    evaluate(made, FOUR)
    assert (sizes.count(2) > 20, max(sizes), beside) == (True, 2, {2})
    said, own = tokens(alone), tokens(made)
    assert own.items() >= {key: text for key, text in said.items() if key[0] != "e"}.items()
    assert set(report_of(made, -2)["auto"]["chosen"]) == {"max_draft"}
    report, before = report_of(made), report_of(alone)
    assert (report["texts_at_once"], report["prompts"], report["turns"], report["speedup"]["prompts"]) == (2, 4, 6, 2)
    assert all(report_of(made, n)["lossless"].items() >= {"identical": 6, "checked": 6}.items() for n in range(4))
    parts = report["seconds"]
    assert min(parts.values()) > 0
    assert report["autoregressive"]["token_us"] == pytest.approx(1e6 / report["tokens_per_second"]["autoregressive"])
    assert sum(parts.values()) == pytest.approx((report["tokens"] - 6) / report["tokens_per_second"]["speculative"])
    assert "texts_at_once" not in before
    for one, words in ((made, "by groups of 2 texts at once"), (alone, "prompt by prompt")):
        assert f"interleaved {words}" in (Path(one.out_dir) / "report.md").read_text()


def test_seconds_are_shared_out_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 seconds 2 were prompts'; 9 tokens were decoded. An error of one text is that of all."""
    monkeypatch.setattr(arms.time, "perf_counter", iter((100.0, 120.0, 0.0, 0.0)).__next__)
    rounds = (Round((1,), 2, 0, 2, 4.0, 1.0, 1.0, 2.0), Round((1, 2), 2, 1, 2, 8.0, 2.0, 2.0, 4.0))
    made = [Generation((0, 1, 1, 2), 0.5, 12.0, rounds), Generation((0,) * 7, 1.5, 15.0), Generation((0,), 0.0, 0.0)]
    given, batch = [Streams(0, "p", repeat) for repeat in range(3)], Batch()
    found = arms.decode_all(lambda _, streams: made[streams.repeat], [[1]] * 3, given, batch)
    assert [(one.tokens, one.prefill_seconds, one.decode_seconds) for one in found] == [
        (one.tokens, one.prefill_seconds, seconds) for one, seconds in zip(made, (6.0, 12.0, 0.0), strict=True)
    ]
    halves = [(r.seconds, r.draft_seconds, r.structure_seconds, r.verify_seconds) for r in found[0].rounds]
    assert halves == [(2.0, 0.5, 0.5, 1.0), (4.0, 1.0, 1.0, 2.0)]
    with pytest.raises(IndexError):
        arms.decode_all(lambda _, streams: made[3 * streams.repeat], [[1]] * 3, given, batch)
    assert not batch.texts


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}])
def test_texts_that_change_each_other_are_not_lossless(
    config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """In half precision they are judged as they were decoded: together."""
    made = config("right", batch=2, **options)
    evaluate(made, FOUR)
    judged = [bool(r.deviations) for one in read_results(Path(made.out_dir)).values() for r in one.turns]
    assert judged == [bool(options)] * 6

    def swapped(asked: list[Request]) -> list[tuple[Tensor, ...]]:
        found = run_jointly(asked)
        same = len({one.rows for one in asked}) == 1 and asked[0].ends_round
        return found[::-1] if same else found

    monkeypatch.setattr(core, "run_jointly", swapped)
    wrong = replace(made, out_dir=made.out_dir + "!")
    with pytest.raises(SystemExit):
        evaluate(wrong, FOUR)
    report = report_of(wrong)
    assert report["verdict"] == "target differs"
    assert not options or report["lossless"]["judged"]["chain"]["peak_at"].startswith("logits")


def test_half_a_group_is_measured_again(config: Callable[..., EvaluateConfig]) -> None:
    made = config("killed", batch=2)
    killed_after(made, 3, FOUR)
    evaluate(replace(made, resume=True), FOUR)
    found = read_results(Path(made.out_dir))
    assert sorted(found) == [0, 1, 2, 3]
    assert len({found[2].spent, found[3].spent}) == 1
    assert report_of(made)["turns"] == 6


def test_what_does_not_go_together_is_named(config: Callable[..., EvaluateConfig]) -> None:
    for count in (3, 8):
        refused(config("no", batch=count), rf"batch={count}: expected a divisor of the 4 prompts", FOUR)
    refused(config("no", batch=2, runtime="graphed"), "batch=2: expected 1 with CUDA graphs", FOUR)
