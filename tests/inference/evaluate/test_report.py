"""From what was measured to the report: every figure and the sentence at its top, by hand."""

import json
import re
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from outrider.base.machine import describe_machine
from outrider.inference.core.rounds import Generation, Round
from outrider.inference.measure.lossless import WORST, Deviation
from outrider.inference.measure.results import PromptResult
from outrider.inference.measure.statistics import (
    ChosenSize,
    MedianInterval,
    PlainToken,
    acceptance_by_candidates,
    acceptance_by_position,
    bootstrap_median,
    chosen_sizes,
    decode_statistics,
    judge_speed,
    structure_statistics,
)
from outrider.inference.measure.threads import MachineLoad, judge_load
from outrider.inference.report.page import make_page
from outrider.inference.report.plots import plot_acceptance, plot_speedups
from outrider.inference.report.sentences import write_recommendation
from outrider.inference.report.tables import methods_tables
from outrider.inference.report.types import GenerateSpeed, MethodReport, reports_in, to_json
from outrider.inference.report.writing import write_markdown, write_reports
from outrider.inference.settings.method import AUTOREGRESSIVE, TRANSFORMERS
from tests.inference.evaluate.reports import report_of
from tests.tiers import as_many


def generation(outcomes: Sequence[tuple[int, int]], seconds: float) -> Generation:
    """Rounds of chains of (drafted, accepted) tokens, each with its bonus, after one prefill token."""
    rounds = tuple(
        Round(tuple(range(accepted + 1)), drafted, accepted, drafted, *(seconds / part for part in (10, 40, 80, 20)))
        for drafted, accepted in outcomes
    )
    tokens = (7, *(token for r in rounds for token in r.tokens))
    return Generation(tokens, 0.5, seconds, rounds)


def test_statistics_by_hand() -> None:
    """Of two answers of rounds that gave 5 and 2 tokens, and 1; and one that its prefill ended."""
    ended = Generation((7,), 0.5, 0.0)
    stats = decode_statistics([generation([(4, 4), (4, 1)], 1.0), generation([(2, 0)], 1.0), ended])
    assert stats.tau == pytest.approx((5 + 2 + 1) / 3)
    assert stats.acceptance_rate == pytest.approx(5 / 10)
    assert stats.draft_share == pytest.approx(5 / 11)  # 8 decoded tokens and 3 of the prefills
    assert stats.harmonic_mean == pytest.approx(2 * 5 / 21)
    assert stats.drafted_tokens_per_round == pytest.approx(10 / 3)
    assert stats.tau_of_requests == pytest.approx((7 / 2 + 1) / 2)
    assert stats.accepted_per_round == pytest.approx(5 / 3)
    assert stats.accepted_per_round_of_requests == pytest.approx((5 / 2 + 0) / 2)
    assert {*astuple(decode_statistics([ended])), *astuple(decode_statistics([]))} == {0.0}


def test_acceptance_by_hand() -> None:
    """The product of the conditional one along the depths is that by position, where all drafts are equally deep."""
    mixed = [generation([(3, 3), (3, 1), (1, 0), (1, 1)], 1.0)]
    assert [*map(astuple, acceptance_by_position(mixed))] == [(1, 4, 3 / 4), (2, 2, 1 / 2), (3, 2, 1 / 2)]
    conditional = acceptance_by_position(mixed, given_previous=True)
    assert [*map(astuple, conditional)] == [(1, 4, 3 / 4), (2, 2, 1 / 2), (3, 1, 1)]
    even = [generation([(3, 3), (3, 2), (3, 1), (3, 0)], 1.0)]
    shares = [row.accepted for row in acceptance_by_position(even, given_previous=True)]
    assert np.cumprod(shares) == pytest.approx([row.accepted for row in acceptance_by_position(even)])
    assert [row.position for row in acceptance_by_position([generation([(3, 0)], 1.0)], given_previous=True)] == [1]
    ended = Round((7,), 4, 1, 4, 1.0)  # the first of four drafted tokens is an end token, and no other is tested
    rows = acceptance_by_position([Generation((7,), 0.0, 1.0, (Round((1,) * 5, 4, 4, 4, 1.0), ended))])
    assert [*map(astuple, rows)] == [(1, 2, 1.0), *((depth, 1, 1.0) for depth in (2, 3, 4))]


def test_an_interval_over_few_prompts_is_not_shown() -> None:
    few, enough = (MedianInterval(1.5, (1.5, 1.5), prompts) for prompts in (4, 5))
    assert (f"{few:interval}", f"{enough:interval}") == ("1.50×", "1.50× [1.50, 1.50]")
    assert (f"{few:ms}", f"{enough:ms}") == ("1500.0", "1500.0 [1500.0, 1500.0]")


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(0.1, 9)), min_size=1, max_size=12), st.integers(0, 3))
@settings(deadline=None, max_examples=as_many(50))
def test_units_are_drawn_whole(observed: list[tuple[int, float]], seed: int) -> None:
    """The interval over conversations, as the obvious program has it: draw conversations, pool their turns."""
    units, values = [str(unit) for unit, _ in observed], [value for _, value in observed]
    names = list(dict.fromkeys(units))
    picks = default_rng(seed).integers(len(names), size=(200, len(names)))
    drawn = [[v for name in row for u, v in zip(units, values, strict=True) if u == names[name]] for row in picks]
    medians = np.quantile([statistics.median(values) for values in drawn], [0.025, 0.975])
    median, interval = bootstrap_median(values, default_rng(seed), draws=200, units=units)
    assert median == statistics.median(values)
    assert interval == pytest.approx(medians.tolist())
    alone = bootstrap_median(values, default_rng(seed), draws=200, units=[str(place) for place in range(len(values))])
    assert alone == bootstrap_median(values, default_rng(seed), draws=200)
    # Of nine, the resampled median is the smallest with probability 0.1 %, one of the two smallest with 3 %.
    assert bootstrap_median([1.0, 2, 3, 4, 5, 6, 7, 8, 99], default_rng(0)) == (5.0, (2.0, 8.0))


def test_turns_are_no_prompts() -> None:
    """Turns of one conversation say the same thing again: they make an interval no narrower, and no verdict."""
    made = results()
    talks = [replace(r, prompt_id=f"{r.prompt_id}/turn{n}", conversation=r.prompt_id) for r in made for n in (1, 2, 3)]
    report, alone = (report_of(results) for results in (talks, made))
    assert (report.figures.prompts, report.figures.turns, report.figures.speedup.prompts) == (6, 18, 6)
    for both in ((report.figures, alone.figures), (report.by_category["code"], alone.by_category["code"])):
        assert both[0].speedup == both[1].speedup
    assert (report.end_to_end, report.prefill_seconds) == (alone.end_to_end, alone.prefill_seconds)
    assert "6 prompts, 18 turns × up to 9 tokens" in write_markdown([report])
    assert "6 prompts × up to 9 tokens" in write_markdown([alone])
    few = report_of(talks[:12])  # 12 turns, all of them faster, of 4 prompts
    assert (few.verdict, alone.verdict) == ("undecided", "faster")
    assert "undecided: a verdict needs 5 timed prompts, here: 4." in write_markdown([few])


@pytest.mark.parametrize("ended", [AUTOREGRESSIVE, TRANSFORMERS, "m"])
def test_no_speedup_where_either_arm_decoded_nothing(ended: str) -> None:
    """Sampled, one arm may end with the prefill's token where another does not: there is nothing to compare."""
    made = [*results(), replace(results()[0], prompt_id="ended", generations=dict(results()[0].generations))]
    made[-1].generations[ended] = Generation((7,), 0.5, 1e-7)
    report, before = report_of(made), report_of(made[:-1])
    assert ("ended" in report.speedup_per_prompt) == (ended == TRANSFORMERS)
    against = report.figures.speedup.vs_transformers_generate
    assert against.prompts == 6 + (ended == AUTOREGRESSIVE)
    assert min(against.ci95) > 1
    if ended != TRANSFORMERS:
        assert report.speedup_per_prompt == before.speedup_per_prompt
        assert astuple(report.figures.speedup)[:3] == astuple(before.figures.speedup)[:3]
        assert report.break_even_acceptance == before.break_even_acceptance


def results() -> list[PromptResult]:
    made = []
    for index, (seconds, category) in enumerate([(2.0, "code"), (3.0, "code"), (4.0, "chat")] * 2):
        draft = generation([(4, 4), (4, 1), (4, 0)], 1.0)
        plain = Generation(draft.tokens, 0.4, seconds, tuple(Round((t,), 0, 0, 0, 0.1) for t in draft.tokens[1:]))
        stock = Generation(draft.tokens, 0.3, 2 * seconds)
        generations = {AUTOREGRESSIVE: plain, TRANSFORMERS: stock, "m": draft}
        made.append(PromptResult(f"p{index}", category, (1, 2), generations, TRANSFORMERS))
    return made


def test_report_by_hand() -> None:
    report = report_of(results())
    assert report.lossless.checked == report.lossless.identical == 6
    assert report.figures.speedup.median == 3.0
    assert report.figures.speedup.vs_transformers_generate.median == 6.0
    assert report.speedup_per_prompt == {"p0": 2.0, "p1": 3.0, "p2": 4.0, "p3": 2.0, "p4": 3.0, "p5": 4.0}
    assert report.tokens_per_second["speculative"] == pytest.approx(8.0)
    assert report.tokens_per_second["autoregressive"] == pytest.approx(24 / 9)
    assert report.tokens_per_second["transformers_generate"] == pytest.approx(12 / 9)
    prefills = {"autoregressive": 0.4, "transformers_generate": 0.3, "speculative": 0.5}
    assert report.prefill_seconds == {name: MedianInterval(at, (at, at), 6) for name, at in prefills.items()}
    # Answers of 9 tokens: 0.5 + 1 s against 0.4 + 2, 3 or 4 s, and 0.3 + 4, 6 or 8 s.
    assert report.end_to_end.median == pytest.approx(3.4 / 1.5)
    assert report.end_to_end.ci95 == pytest.approx([2.4 / 1.5, 4.4 / 1.5])
    assert report.end_to_end.vs_transformers_generate.median == pytest.approx(6.3 / 1.5)
    assert report.transformers_generate.speedup.median == pytest.approx(1 / 2)
    assert report.transformers_generate.end_to_end.median == pytest.approx(3.4 / 6.3)
    # A round of 4 drafted tokens takes 1/3 s, a plain token 9/24 s: even where 1 + 4 v tokens cost the same.
    assert report.break_even_acceptance == pytest.approx((3 * 24 / 9 - 9) / 36)
    parts = {"draft": 18 / 40, "verify": 18 / 20, "structure": 18 / 80}
    assert report.seconds == pytest.approx({**parts, "other": 6.0 - sum(parts.values())})
    assert report.by_category["code"].prompts == 4
    assert report.verdict == "faster"
    profiled = [replace(r, profiles={"m": generation([(4, 4)], 2.0)}) for r in results()]
    assert report_of(profiled).seconds["draft"] == pytest.approx(6 * 2.0 / 40)


def test_a_report_of_an_earlier_run_is_read_and_written_as_it_was() -> None:
    """Every key, in its order."""
    content = json.loads((Path(__file__).parents[3] / "benchmarks/results/demo_cpu.json").read_text())
    assert json.dumps([*map(to_json, reports_in(content))]) == json.dumps(content["reports"])


def killed(plots: object) -> Any:
    """A page whose making is the end of its process."""
    raise KeyboardInterrupt


def test_a_report_is_never_beside_the_files_of_another_run(tmp_path: Path) -> None:
    """It is the first to go and the last to come: a run that is killed meanwhile leaves none."""
    made = results()
    texts = {(r.prompt_id, arm): "" for r in made for arm in r.generations}
    written = [report_of(made)], made, texts
    write_reports(tmp_path, *written, lambda plots: "a page")
    assert (tmp_path / "report.json").exists()
    with pytest.raises(KeyboardInterrupt):
        write_reports(tmp_path, *written, killed)
    assert not (tmp_path / "report.json").exists()


def test_what_the_baseline_spends_outside_of_the_model() -> None:
    """By the clock that waits for the device, where there is one; every round of it is a token."""

    def plain(seconds: float, passes: float) -> Generation:
        rounds = tuple(Round((7,), 0, 0, 0, 0.2, verify_seconds=passes) for _ in range(4))
        return Generation((7,) * 5, 0.1, seconds, rounds)

    made = [replace(r, generations={**r.generations, AUTOREGRESSIVE: plain(1.0, 0.24)}) for r in results()]
    report = report_of(made)
    assert astuple(report.autoregressive) == pytest.approx(astuple(PlainToken(250_000, 240_000, 10_000, 0.04)))
    assert "plain decoding: 250000 µs a token, of which 10000 µs (4.0 %)" in write_markdown([report])
    profiled = [replace(r, profiles={AUTOREGRESSIVE: plain(2.0, 0.25)}) for r in made]
    assert report_of(profiled).autoregressive.host_share == pytest.approx(0.5)
    nothing = [replace(r, generations={**r.generations, AUTOREGRESSIVE: Generation((7,), 0.1, 0.0)}) for r in made]
    report = report_of(nothing)
    assert report.autoregressive.host_us is None


def test_a_category_is_reported_as_its_prompts_alone_would_be() -> None:
    made = results()
    for r in made:
        if r.category == "chat":
            r.generations["m"] = generation([(4, 4), (4, 2)], 1.0)
    parts = report_of(made).by_category
    assert parts["chat"].tau != parts["code"].tau
    for category, part in parts.items():
        alone = report_of([r for r in made if r.category == category]).figures
        assert part == replace(alone, speedup=replace(alone.speedup, vs_transformers_generate=None))


def test_speed_counts_decoded_tokens_of_prompts_that_have_some() -> None:
    """Each arm's own tokens, as sampled ones differ; a text that ended with the prefill's token has no speed."""
    made = results()
    for r in made:
        r.generations["m"] = generation([(4, 1)], 1.0)  # 2 decoded tokens, and the others 8
    ended = dict.fromkeys(made[0].generations, Generation((7,), 0.5, 9.0))
    made.append(replace(made[0], prompt_id="ended", generations=ended))
    report = report_of(made)
    assert report.figures.prompts == 7
    assert report.speedup_per_prompt == {"p0": 0.5, "p1": 0.75, "p2": 1.0, "p3": 0.5, "p4": 0.75, "p5": 1.0}
    assert report.tokens_per_second["speculative"] == pytest.approx(2.0)


def judged(made: list[PromptResult], arm: str, **changes: object) -> list[PromptResult]:
    deviation = replace(Deviation(8, (0.0, 0.0, 0.0), 2.0, 1, 5), **changes)
    return [replace(r, deviations={**r.deviations, arm: deviation}) for r in made]


def differing(made: list[PromptResult], arm: str, *indices: int) -> list[PromptResult]:
    wrong = [replace(r, generations={**r.generations, arm: replace(r.generations[arm], tokens=(1,) * 9)}) for r in made]
    return [wrong[index] if index in indices else r for index, r in enumerate(made)]


def test_mismatches_are_excused_where_the_arm_was_judged_to_round_only() -> None:
    made = differing(differing(results(), "m", 0), AUTOREGRESSIVE, 1, 2)
    made = judged(judged(made, "m", own_gaps=2), AUTOREGRESSIVE)
    report = report_of(made, computes_in="bfloat16")
    counts = (TRANSFORMERS, 6, 5, 3, 1, 4, 2)  # checked, identical, as plain decoding, ties; of plain decoding: two
    assert astuple(report.lossless)[:-1] == counts
    assert report.lossless.judged["m"].peak_at == "values of layer 0 at position 5"
    assert report.verdict == "faster"
    rows = [row[-2:] for row in methods_tables([report])[0].rows]
    assert rows == [["reference", "4/6 (+2 ties)"], ["4/6 (+2 ties)", "reference"], ["3/6", "5/6 (+1 ties)"]]
    for text in (write_markdown([report]), make_page([report], made, str)):
        assert "Without a drafter 2 of 6 texts part" in text
        assert "0 of 48 (transformers: 12)" in text


@pytest.mark.parametrize(
    "change",
    [{"bulk": (0.0, 0.5, 0.0)}, {"peak": 99.0}, {"gaps": (99.0,)}, {"mismatch": WORST}, {"bulk": (0.0, 0.0, 0.3)}],
)
def test_what_is_not_lossless_is_never_faster(change: dict) -> None:
    """Not a fault that was found, be every text identical; nor a mismatch that nothing excuses."""
    fast = results()
    for r in fast:
        r.generations["m"] = replace(r.generations["m"], decode_seconds=1e-3)
    assert report_of(judged(fast, "m")).verdict == "faster"
    for made in (judged(fast, "m", **change), judged(differing(fast, "m", 3), "m", **change), differing(fast, "m", 3)):
        report = report_of(made)
        assert report.verdict == "not lossless"
        assert report.lossless.excused_ties == 0
        assert "m: not lossless" in write_markdown([report])
    for arms in (("m", AUTOREGRESSIVE), (AUTOREGRESSIVE,)):  # plain decoding, too: no method is to blame
        made = differing(differing(fast, arms[0], 3), arms[-1], 3)
        report = report_of(judged(made, AUTOREGRESSIVE, **change))
        assert report.verdict == "target differs"
        assert "the target's own run differs" in write_markdown([report])
    assert report_of(differing(fast, "m", 3), temperature=1.0).verdict == "faster"
    assert report_of(judged(fast, "m", **change), temperature=1.0).verdict == "not lossless"


@pytest.mark.parametrize(("seconds", "prompts", "verdict"), [
    ([4.0, 4.0], 6, "slower"),
    ([0.1, 0.1], 5, "faster"),
    ([0.1, 0.1], 4, "undecided"),
    ([0.5, 2.0], 6, "undecided"),  # half of the prompts faster, half slower
])  # fmt: skip
def test_verdict(seconds: list[float], prompts: int, verdict: str) -> None:
    made = results()[:prompts]
    for index, r in enumerate(made):
        taken = seconds[index % 2] * r.generations[AUTOREGRESSIVE].decode_seconds
        r.generations["m"] = generation([(4, 4), (4, 1), (4, 0)], taken)
    report = report_of(made)
    assert report.verdict == verdict
    assert ("a verdict needs 5 timed prompts" in write_markdown([report])) == (prompts < 5)


def test_what_a_whole_run_has_in_common_makes_no_verdict() -> None:
    """A method of exactly 1.00 times plain decoding, runs that differ by 1 % as a whole, and 2 % of noise a prompt."""
    rng, verdicts = np.random.default_rng(0), []
    for _ in range(300):
        speedups = (1 + 0.01 * rng.standard_normal()) * (1 + 0.02 * rng.standard_t(4, 12))
        median, interval = bootstrap_median(speedups.tolist(), rng, 500)
        verdicts.append(judge_speed(MedianInterval(median, interval, 12)))
    assert verdicts.count("undecided") >= 0.95 * len(verdicts)
    margins = [((1.021, 1.1), "faster"), ((1.01, 1.1), "undecided"), ((0.9, 0.979), "slower")]
    for interval, expected in margins:
        assert judge_speed(MedianInterval(1.0, interval, 5)) == expected


def test_on_a_busy_machine_no_speed_is_judged_and_the_report_begins_with_it() -> None:
    load = judge_load([0.5, None, 0.7], [4.0, 4.5], cores=2)
    assert (load.cpu_share, load.load_average) == (pytest.approx(0.6), 4.25)
    report = report_of(results(), load=load, cudnn_attention=False)
    assert report.verdict == "undecided"
    assert "cuDNN" in write_markdown([report])
    page = make_page([report], results(), str)
    for text in (write_markdown([report]), re.sub("<style>.*?</style>", "", page, flags=re.DOTALL)):
        assert text.index("The machine was busy") < text.index("6 prompts")
    quiet = judge_load([0.97, 1.0], [2.2, 1.0], cores=2)
    unknown = judge_load([None], [None], cores=2)
    assert quiet.busy is unknown.busy is None
    assert report_of(results(), load=quiet).verdict == "faster"
    for signs in ([[0.5], [None]], [[None], [4.0]], [[0.5], [1.0]], [[1.0], [4.0]]):
        assert judge_load(*signs, cores=2).busy


def test_plots_of_a_method_that_drafted_nothing() -> None:
    made = [replace(r, generations={**r.generations, "m": generation([(0, 0)], 1.0)}) for r in results()]
    report = report_of(made)
    with warnings.catch_warnings(action="error"):
        assert plot_acceptance([report]).legends == []
        assert [text.get_text()[:2] for text in plot_speedups([report]).axes[0].texts] == ["m:"]


def test_acceptance_by_candidates_by_hand() -> None:
    made = [
        replace(generation([(6, 1)], 1.0), totals={"nodes_tried": 4, "accepted_candidate_1": 1}),
        replace(generation([(6, 1)], 1.0), totals={"nodes_tried": 6, "accepted_candidate_3": 4, "other": 2.0}),
        generation([(6, 1)], 1.0),
    ]
    assert acceptance_by_candidates(made) == pytest.approx([0.1, 0.1, 0.5])


def test_totals_of_structures_by_hand() -> None:
    chosen = {"chosen_nodes=4": 1, "chosen_nodes=6": 1, "chosen_max_depth=2": 2}
    made = [
        replace(generation([(6, 1), (6, 2)], 1.0), totals={"expected_tau": 5.0, "nodes_tried": 4, **chosen}),
        replace(generation([(6, 1)], 1.0), totals={"chosen_nodes=6": 1}),
    ]
    assert structure_statistics(made) == {"expected_tau": pytest.approx(5 / 3)}
    assert chosen_sizes(made) == {
        "max_depth": ChosenSize("2", 1.0, 2.0), "nodes": ChosenSize("6", pytest.approx(2 / 3), pytest.approx(16 / 3)),
    }  # fmt: skip


def test_a_report_names_the_device_it_was_measured_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert describe_machine("cuda:1")["device"] == "GPU 1"
    assert describe_machine()["device"] == "GPU None"  # the current one
    assert not describe_machine("cpu")["device"].startswith("GPU")


def one_report(
    method: str, median: float | None, low: float = 0.0, high: float = 9.0, prompts: int = 6, busy: str | None = None,
    **changes: object,
) -> MethodReport:  # fmt: skip
    """A report with this speed-up, which is also that of texts without loops."""
    speed = MedianInterval() if median is None else MedianInterval(median, (low, high), prompts)
    made = report_of(results(), load=MachineLoad(busy=busy))
    figures = replace(made.figures, speedup=speed, speedup_without_loops=speed, acceptance_rate=0.41)
    facts = {"break_even_acceptance": 0.62, "transformers_generate": None, "verdict": judge_speed(speed, busy)}
    return replace(made, method=method, figures=figures, **(facts | changes))


NGRAMS, CHAIN = one_report("ngrams", 1.95, 1.85, 2.23), one_report("chain", 0.9, 0.85, 0.95)
EVEN, WRONG = one_report("even", 1.03, 0.97, 1.1), one_report("wrong", 3.0, 2.9, 3.1, verdict="not lossless")
CLOSE = [one_report(name, 1.9, 1.7, 2.0) for name in "ab"]
FASTEST, SLOW = ("fastest", "`ngrams`", "1.95", "[1.85, 2.23]"), ("nothing pays", "`chain`", "0.90", "[0.85, 0.95]")


@pytest.mark.parametrize(("reports", "facts", "silent"), [
    ([CHAIN, NGRAMS, EVEN], FASTEST, ("overlap", "chain", "even")),
    ([WRONG, NGRAMS], (*FASTEST, "do not use `wrong`"), ("overlap",)),
    ([NGRAMS, *CLOSE], (*FASTEST, "`a` and `b`", "overlap"), ()),
    ([one_report("noisy", 2.5, 0.9, 3.0), NGRAMS], (*FASTEST, "`noisy`", "overlap"), ()),
    ([CHAIN], (*SLOW, "0.62", "0.41"), ("never",)),
    ([replace(CHAIN, break_even_acceptance=None)], SLOW, ("acceptance",)),
    ([CHAIN, EVEN], ("undecided", "`even`", "1.03", "[0.97, 1.10]", "1.02", "more prompts"), ("chain",)),
    ([one_report("m", 2.0, 1.9, 2.1, prompts=4)], ("undecided", "5 timed prompts", "here: 4"), ("fastest",)),
    ([one_report("m", 2.0, 1.9, 2.1, busy="So it was.")], ("undecided", "busy"), ("fastest",)),
    ([WRONG], ("undecided", "no lossless method was timed", "do not use `wrong`"), ()),
    ([one_report("tree", 2.0, 1.9, 2.1, verdict="target differs"), NGRAMS], ("the target's own run differs",),
     ("tree", "ngrams", "do not use")),
])  # fmt: skip
def test_what_is_recommended(reports: list[MethodReport], facts: Sequence[str], silent: Sequence[str]) -> None:
    said = write_recommendation(reports)
    assert [fact for fact in facts if fact not in said] == []
    assert [word for word in silent if word in said] == []


def test_every_cell_shows_its_own_figure() -> None:
    """Of a method and of both baselines; what a baseline lacks is empty."""

    def speed(median: float, over_generate: float | None = None) -> MedianInterval:
        above = None if over_generate is None else speed(over_generate)
        return MedianInterval(median, (median - 0.5, median + 0.5), 6, above)

    made = report_of(results())
    figures = {"speedup": speed(2, 3), "speedup_without_loops": speed(4), "tau": 1.1, "acceptance_rate": 0.2,
               "draft_share": 0.3, "drafted_tokens_per_round": 4.4}  # fmt: skip
    arms = ("autoregressive", TRANSFORMERS, "speculative")
    report = replace(
        made, figures=replace(made.figures, **figures), end_to_end=speed(5, 6), verdict="faster",
        transformers_generate=GenerateSpeed(speed(7), speed(8)),
        tokens_per_second=dict(zip(arms, (1, 2, 3), strict=True)),
        prefill_seconds=dict(zip(arms, map(speed, (1, 2, 3)), strict=True)),
    )  # fmt: skip

    def said(n: int) -> str:
        return f"{n}.00× [{n - 0.5:.2f}, {n + 0.5:.2f}]"

    gained, whole = methods_tables([report])
    assert gained.rows == [
        ["plain decoding", "", "1.00", "", "", "1.0", "1.00", "", "", "", "reference", "6/6"],
        ["transformers generate", "", said(7), "", "1.00", "2.0", "1.00", "", "", "", "6/6", "reference"],
        ["m", "faster", said(2), said(4), said(3), "3.0", "1.10", "0.20", "0.30", "4.40", "6/6", "6/6"],
    ]
    assert whole.rows == [
        ["plain decoding", "1000.0 [500.0, 1500.0]", "1.00", "1.00", ""],
        ["transformers generate", "2000.0 [1500.0, 2500.0]", "7.00×", said(8), "1.00"],
        ["m", "3000.0 [2500.0, 3500.0]", "2.00×", said(5), said(6)],
    ]
