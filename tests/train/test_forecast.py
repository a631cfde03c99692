"""`outrider forecast`: short trainings of a tiny target, what is said of longer ones, and how it turned out."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.inference.batch.generate import generate_responses
from outrider.inference.measure.statistics import MedianInterval
from outrider.inference.report.types import MethodReport, read_reports
from outrider.train.forecast import describe_kind, forecast, forecast_kind, judge_outcome, pipeline_of
from outrider.train.settings.forecast import FORECAST_FILE, FORECAST_KINDS, ForecastConfig
from tests.conf.test_configs import compose_and_build
from tests.refusals import refusal
from tests.train.test_auto import own_prompts
from tests.train.test_pipeline import printed_by

CONFIG = ForecastConfig(target="org/model", answers="a.jsonl", prompts="p.jsonl", minutes=16.0)


def reports_of(
    taus: dict[float, float], cost: float, verdict: str = "faster", busy: str | None = None
) -> dict[float, MethodReport]:
    """Reports of small LMs with these τ by share, whose round costs `cost` tokens of plain decoding."""
    made: dict[float, MethodReport] = {}
    for share, tau in taus.items():
        figures = SimpleNamespace(tau=tau, speedup=MedianInterval(tau / cost, None, 12))
        conditions = SimpleNamespace(load=SimpleNamespace(busy=busy))
        facts = {"method": "small_lm_survival", "verdict": verdict, "conditions": conditions}
        made[share] = SimpleNamespace(tokens=round(2000 * tau), figures=figures, **facts)  # type: ignore[assignment]
    return made


def test_a_drafter_pays_where_its_tau_exceeds_the_cost_of_a_round() -> None:
    """The sentence says when, and a costlier round takes longer to pay."""
    taus = {1 / 16: 1.2, 1 / 8: 1.35, 1 / 4: 1.5}
    cheap, dear, hopeless = (forecast_kind(CONFIG, "small_lm", reports_of(taus, cost)) for cost in (1.3, 1.6, 9.0))
    assert cheap.even == pytest.approx(1.3)
    assert cheap.minutes_to_even is not None
    assert dear.minutes_to_even is not None
    assert 1.0 <= cheap.minutes_to_even < 4.0 < dear.minutes_to_even
    assert hopeless.minutes_to_even is None
    assert "it pays already" in describe_kind(cheap, CONFIG.minutes)
    assert f"it pays from about {dear.minutes_to_even:.3g} minutes" in describe_kind(dear, CONFIG.minutes)
    assert "it will not pay within 128 minutes" in describe_kind(hopeless, CONFIG.minutes)
    undecided = forecast_kind(CONFIG, "small_lm", reports_of(taus, 1.3, "undecided"))
    assert "whether it pays already is undecided" in describe_kind(undecided, CONFIG.minutes)
    busy = forecast_kind(CONFIG, "small_lm", reports_of(taus, 1.3, busy="other work"))
    assert "its speed cannot be judged" in describe_kind(busy, CONFIG.minutes)
    inside, outside = (reports_of({1.0: add + cheap.expected[0].high}, 1.3)[1.0] for add in (0.0, 0.1))
    assert (judge_outcome(cheap, [inside]).inside, judge_outcome(cheap, [outside]).inside) == (True, False)


def test_a_short_training_has_its_share_of_minutes_and_answers() -> None:
    for share, minutes, records in ((1 / 8, 2.0, 50), (1.0, 16.0, None)):
        steps = pipeline_of(CONFIG, share, 400).steps
        assert steps["small_lm"]["minutes"] == minutes
        assert steps["small_lm"]["data.heldout_fraction"] == (0.16 if records else 0.05)  # enough of few answers
        assert [steps[name].get("data.max_records") for name in ("small_lm", "trigrams")] == [records] * 2
        assert steps["report"]["method"] == ["ngrams", "small_lm/survival"]


def test_what_cannot_be_forecast_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, words in (
        ({"kinds": ("medusa",)}, "kinds='medusa': expected one of ngrams"),
        ({"kinds": ()}, "at least one"),
        ({"shares": (0.5,)}, "two or more"),
        ({"shares": (0.5, 0.25)}, "each more than the one before"),
    ):
        refusal(words, replace, CONFIG, **options)
    monkeypatch.setenv("WORLD_SIZE", "2")
    refusal("started as several processes", forecast, CONFIG)


@pytest.mark.thorough
def test_short_trainings_and_their_outcome(
    tmp_path: Path,
    chat_target: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The record has what was measured, what was expected of it and what came; nothing is done twice."""
    monkeypatch.chdir(tmp_path)
    asked = own_prompts(tmp_path, 40)
    words = [f"target={chat_target}", "data=local", f"data.path={asked}", "data.layout=prompts", "max_new_tokens=24"]
    words += [
        "data.template=tokenizer",
        "data.heldout_fraction=0",
        "temperature=0",
        "top_k_logits=4",
        "out_dir=answers",
    ]
    generate_responses(compose_and_build("generate_responses", words))
    (tmp_path / "held.jsonl").write_text("".join(json.dumps({"turns": [f"Who is {i}?"]}) + "\n" for i in range(5)))
    config = ForecastConfig(
        target=chat_target, answers="answers/responses-*.jsonl", prompts="held.jsonl", kinds=("ngrams",),
        shares=(0.3, 0.6), num_prompts=5, max_new_tokens=8, outcome=True, out_dir="out",
    )  # fmt: skip
    said = printed_by(lambda: forecast(config))
    record = json.loads(Path("out", FORECAST_FILE).read_text())
    assert record["answers"] == 40
    for kind in record["kinds"]:
        _, method = FORECAST_KINDS[kind["kind"]]
        assert [point["size"] for point in kind["trained"]] == [0.3, 0.6]
        if kind["speedup"] is not None:  # on a busy machine there is none
            assert kind["even"] == pytest.approx(kind["trained"][-1]["tau"] / kind["speedup"])
        reports = read_reports("out/trainings/share_0.3/report/report.json", "")
        measured = next(report for report in reports if report.method == method.replace("/", "_"))
        assert kind["trained"][0]["tau"] == measured.figures.tau
        assert f"{kind['kind']}: the outcome is τ {record['outcomes'][kind['kind']]['tau']:.2f}" in said
    refusal(r"holds an earlier run", forecast, config)
    again = printed_by(lambda: forecast(replace(config, resume=True)))
    assert again.count("state=done-before") == 6
