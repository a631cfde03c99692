"""From what was measured to the report: every figure by hand."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
import torch
from numpy.random import default_rng

from inference.decode import Round
from inference.evaluation import (
    AUTOREGRESSIVE,
    TRANSFORMERS,
    Generation,
    PromptResult,
)
from inference.lossless import WORST, Deviation
from inference.lossless_report import is_lossless
from inference.measures import (
    acceptance_by_candidates,
    acceptance_by_position,
    bootstrap_median,
    chosen_sizes,
    decode_statistics,
    structure_statistics,
)
from inference.report import (
    build_report,
    describe_machine,
    markdown,
    plot_acceptance,
    plot_speedups,
    relate_to_chain,
)
from inference.settings import MethodConfig, SamplingConfig


def generation(outcomes: Sequence[tuple[int, int]], seconds: float) -> Generation:
    """Rounds of chains of (drafted, accepted) tokens, each with its bonus, after one prefill token."""
    rounds = tuple(
        Round(tuple(range(accepted + 1)), drafted, accepted, drafted, *(seconds / part for part in (10, 40, 80, 20)))
        for drafted, accepted in outcomes
    )
    tokens = (7, *(token for r in rounds for token in r.tokens))
    return Generation(tokens, 0.5, seconds, rounds)


def test_statistics_by_hand() -> None:
    stats = decode_statistics([generation([(4, 4), (4, 1)], 1.0), generation([(2, 0)], 1.0)])
    assert stats["tau"] == pytest.approx((5 + 2 + 1) / 3)
    assert stats["acceptance_rate"] == pytest.approx(5 / 10)
    assert stats["draft_share"] == pytest.approx(5 / 10)  # 8 decoded tokens and 2 of the prefills
    assert stats["harmonic_mean"] == pytest.approx(0.5)
    assert stats["drafted_tokens_per_round"] == pytest.approx(10 / 3)
    assert decode_statistics([])["tau"] == 0


def test_acceptance_by_position_by_hand() -> None:
    table = acceptance_by_position([generation([(3, 3), (3, 1), (1, 0), (1, 1)], 1.0)])
    assert [(row["position"], row["rounds"]) for row in table] == [(1, 4), (2, 2), (3, 2)]
    assert [row["accepted"] for row in table] == pytest.approx([3 / 4, 1 / 2, 1 / 2])


def test_bootstrap_interval() -> None:
    values = [1.0 + i / 100 for i in range(101)]
    median, (low, high) = bootstrap_median(values, default_rng(0))
    assert median == 1.5
    assert 1.3 < low < 1.5 < high < 1.7
    assert bootstrap_median(values, default_rng(0)) == bootstrap_median(values, default_rng(0))
    assert bootstrap_median([2.0] * 5, default_rng(1)) == (2.0, [2.0, 2.0])
    # Of nine, the resampled median is the smallest with probability 0.1 %, one of the two smallest with 3 %.
    assert bootstrap_median([1.0, 2, 3, 4, 5, 6, 7, 8, 99], default_rng(0)) == (5.0, [2.0, 8.0])


def results() -> list[PromptResult]:
    made = []
    for index, (seconds, category) in enumerate([(2.0, "code"), (3.0, "code"), (4.0, "chat")] * 2):
        draft = generation([(4, 4), (4, 1), (4, 0)], 1.0)
        plain = Generation(draft.tokens, 0.4, seconds, tuple(Round((t,), 0, 0, 0, 0.1) for t in draft.tokens[1:]))
        stock = Generation(draft.tokens, 0.3, 2 * seconds)
        generations = {AUTOREGRESSIVE: plain, TRANSFORMERS: stock, "m": draft}
        made.append(PromptResult(f"p{index}", category, (1, 2), generations, TRANSFORMERS))
    return made


def facts() -> dict[str, object]:
    return {
        "target": "T", "drafter": "D", "dtype": "float32", "device": "cpu", "max_new_tokens": 9,
        "processes": 1,
        "temperature": 0.0, "sampling": asdict(SamplingConfig()), "settings": asdict(MethodConfig()),
    }  # fmt: skip


def test_report_by_hand() -> None:
    report = build_report("m", results(), facts(), seed=0)
    assert report["lossless"]["checked"] == report["lossless"]["identical"] == 6
    assert report["speedup"]["median"] == 3.0
    assert report["speedup"]["vs_transformers_generate"]["median"] == 6.0
    assert report["speedup_per_prompt"] == {"p0": 2.0, "p1": 3.0, "p2": 4.0, "p3": 2.0, "p4": 3.0, "p5": 4.0}
    assert report["tokens_per_second"]["speculative"] == pytest.approx(8.0)
    assert report["tokens_per_second"]["autoregressive"] == pytest.approx(24 / 9)
    assert report["tokens_per_second"]["transformers_generate"] == pytest.approx(12 / 9)
    assert report["prefill_seconds"] == pytest.approx({"autoregressive": 0.4, "speculative": 0.5})
    # A round of 4 drafted tokens takes 1/3 s, a plain token 9/24 s: even where 1 + 4 v tokens cost the same.
    assert report["break_even_acceptance"] == pytest.approx((3 * 24 / 9 - 9) / 36)
    parts = {"draft": 18 / 40, "verify": 18 / 20, "structure": 18 / 80}
    assert report["seconds"] == pytest.approx({**parts, "other": 6.0 - sum(parts.values())})
    assert report["by_category"]["code"]["prompts"] == 4
    assert report["verdict"] == "faster"
    assert is_lossless(report)
    assert "| m | 6/6 | 2.67 | 0.42 | 0.56 | 47.6 | 4.00 | 8.0 | 3.00× [2.00, 4.00] | 6.00× [" in markdown([report])
    profiled = [replace(r, profiles={"m": generation([(4, 4)], 2.0)}) for r in results()]
    assert build_report("m", profiled, facts(), seed=0)["seconds"]["draft"] == pytest.approx(6 * 2.0 / 40)


def test_a_category_is_reported_as_its_prompts_alone_would_be() -> None:
    made = results()
    for r in made:
        if r.category == "chat":
            r.generations["m"] = generation([(4, 4), (4, 2)], 1.0)
    parts = build_report("m", made, facts(), seed=0)["by_category"]
    assert parts["chat"]["tau"] != parts["code"]["tau"]
    for category, part in parts.items():
        alone = build_report("m", [r for r in made if r.category == category], facts(), seed=0)
        del alone["speedup"]["vs_transformers_generate"]
        assert part == {key: alone[key] for key in part}


def test_speed_counts_decoded_tokens_of_prompts_that_have_some() -> None:
    """Each arm's own tokens, as sampled ones differ; a text that ended with the prefill's token has no speed."""
    made = results()
    for r in made:
        r.generations["m"] = generation([(4, 1)], 1.0)  # 2 decoded tokens, and the others 8
    ended = dict.fromkeys(made[0].generations, Generation((7,), 0.5, 0.0))
    made.append(replace(made[0], prompt_id="ended", generations=ended))
    report = build_report("m", made, facts(), seed=0)
    assert report["prompts"] == 7
    assert report["speedup_per_prompt"] == {"p0": 0.5, "p1": 0.75, "p2": 1.0, "p3": 0.5, "p4": 0.75, "p5": 1.0}
    assert report["tokens_per_second"]["speculative"] == pytest.approx(2.0)


def judged(made: list[PromptResult], arm: str, **changes: object) -> list[PromptResult]:
    deviation = replace(Deviation(8, (0.0, 0.0, 0.0), 2.0, 1, 5), **changes)
    return [replace(r, deviations={**r.deviations, arm: deviation}) for r in made]


def differing(made: list[PromptResult], arm: str, *indices: int) -> list[PromptResult]:
    wrong = [replace(r, generations={**r.generations, arm: replace(r.generations[arm], tokens=(1,) * 9)}) for r in made]
    return [wrong[index] if index in indices else r for index, r in enumerate(made)]


def test_mismatches_are_excused_where_the_arm_was_judged_to_round_only() -> None:
    made = judged(judged(differing(differing(results(), "m", 0), AUTOREGRESSIVE, 1, 2), "m"), AUTOREGRESSIVE)
    report = build_report("m", made, facts(), seed=0)
    counts = {key: value for key, value in report["lossless"].items() if key != "judged"}
    assert counts == {
        "reference": TRANSFORMERS, "checked": 6, "identical": 5, "excused_ties": 1, "autoregressive_identical": 4,
    }  # fmt: skip
    assert report["lossless"]["judged"]["m"]["peak_at"] == "values of layer 0 at position 5"
    assert is_lossless(report)
    assert "| m | 5/6 (+1 ties) |" in markdown([report])


@pytest.mark.parametrize(
    "change",
    [{"bulk": (0.0, 0.5, 0.0)}, {"peak": 99.0}, {"gaps": (99.0,)}, {"mismatch": WORST}, {"bulk": (0.0, 0.0, 0.3)}],
)
def test_what_is_not_lossless_is_never_faster(change: dict) -> None:
    """Not a fault that was found, be every text identical; nor a mismatch that nothing excuses."""
    fast = results()
    for r in fast:
        r.generations["m"] = replace(r.generations["m"], decode_seconds=1e-3)
    assert build_report("m", judged(fast, "m"), facts(), seed=0)["verdict"] == "faster"
    for made in (judged(fast, "m", **change), judged(differing(fast, "m", 3), "m", **change), differing(fast, "m", 3)):
        report = build_report("m", made, facts(), seed=0)
        assert not is_lossless(report)
        assert report["verdict"] == "not lossless"
        assert report["lossless"]["excused_ties"] == 0
        assert "m: not lossless" in markdown([report])
    sampled = {**facts(), "temperature": 1.0}
    assert build_report("m", differing(fast, "m", 3), sampled, seed=0)["verdict"] == "faster"
    assert build_report("m", judged(fast, "m", **change), sampled, seed=0)["verdict"] == "not lossless"


@pytest.mark.parametrize(
    ("seconds", "prompts", "verdict"),
    [
        ([4.0, 4.0], 6, "slower"),
        ([0.1, 0.1], 5, "faster"),
        ([0.1, 0.1], 4, "undecided"),
        ([0.5, 2.0], 6, "undecided"),  # half of the prompts faster, half slower
    ],
)
def test_verdict(seconds: list[float], prompts: int, verdict: str) -> None:
    made = results()[:prompts]
    for index, r in enumerate(made):
        taken = seconds[index % 2] * r.generations[AUTOREGRESSIVE].decode_seconds
        r.generations["m"] = generation([(4, 4), (4, 1), (4, 0)], taken)
    report = build_report("m", made, facts(), seed=0)
    assert report["verdict"] == verdict
    assert ("Undecided with fewer than 5 prompts." in markdown([report])) == (prompts < 5)


def test_plots_of_a_method_that_drafted_nothing() -> None:
    made = [replace(r, generations={**r.generations, "m": generation([(0, 0)], 1.0)}) for r in results()]
    report = build_report("m", made, facts(), seed=0)
    with warnings.catch_warnings(action="error"):
        assert plot_acceptance([report]).axes[0].get_legend() is None
        assert plot_speedups([report]).axes[0].get_legend() is not None


def test_acceptance_by_candidates_by_hand() -> None:
    made = [
        replace(generation([(6, 1)], 1.0), totals={"nodes_tried": 4, "accepted_candidate_1": 1}),
        replace(generation([(6, 1)], 1.0), totals={"nodes_tried": 6, "accepted_candidate_3": 4, "other": 2.0}),
        generation([(6, 1)], 1.0),
    ]
    assert acceptance_by_candidates(made) == pytest.approx([0.1, 0.1, 0.5])


def test_totals_of_structures_by_hand() -> None:
    chosen = {"chosen_nodes=4": 1, "chosen_nodes=6": 1, "chosen_widths=[2,1]": 2}
    made = [
        replace(generation([(6, 1), (6, 2)], 1.0), totals={"expected_tau": 5.0, "nodes_tried": 4, **chosen}),
        replace(generation([(6, 1)], 1.0), totals={"chosen_nodes=6": 1}),
    ]
    assert structure_statistics(made) == {"expected_tau": pytest.approx(5 / 3)}
    assert chosen_sizes(made) == {
        "nodes": {"mode": "6", "share": pytest.approx(2 / 3), "mean": pytest.approx(16 / 3)},
        "widths": {"mode": "[2,1]", "share": 1.0},
    }


def test_a_graph_is_related_to_the_chain_of_its_source() -> None:
    def report(source: str, kind: str, drafted: float, **structure: float) -> dict:
        settings = {"source": source, "structure": {"kind": kind}}
        return {"settings": settings, "drafted_tokens_per_round": drafted, "structure": dict(structure)}

    reports = [
        report("small_lm", "token_graph", 30.0, drafted_by_source=12.0),
        report("small_lm", "chain", 8.0),
        report("early_exit", "token_graph", 30.0, drafted_by_source=12.0),
    ]
    relate_to_chain(reports)
    assert reports[0]["structure"]["drafted_vs_chain"] == 1.5
    assert "drafted_vs_chain" not in reports[2]["structure"]


def test_a_report_names_the_device_it_was_measured_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert describe_machine("cuda:1")["device"] == "GPU 1"
    assert describe_machine()["device"] == "GPU None"  # the current one
    assert not describe_machine("cpu")["device"].startswith("GPU")
