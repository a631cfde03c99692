"""The papers' claims: judged by hand-made counts, by chance no oftener than said, and again from what is committed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.inference.settings.method import MethodConfig, StopConfig
from outrider.inference.settings.sampling import SamplingConfig

Counts = dict[str, float]
RESULTS = Path(__file__).parents[2] / "benchmarks/results"
MANY = [2.0, 2.1, 1.9, 2.05, 1.95, 2.2]
GPU = {"device": "NVIDIA H100 80GB HBM3"}


def measured(**taus: list[float]) -> dict[str, dict[str, Counts]]:
    """By row, τ of every prompt, in ten rounds each."""
    return {
        row: {f"p{place}": {"tokens": 10 * tau, "rounds": 10.0} for place, tau in enumerate(values)}
        for row, values in taus.items()
    }


def judged(claim: Any, counts: Mapping[str, Mapping[str, Counts]]) -> dict[str, Any]:
    from papers.judging import judge

    return judge(claim, dict.fromkeys((term.partition("@")[0] for term in claim.terms), ""), counts)


@pytest.mark.parametrize(("kind", "bound", "terms", "taus", "verdict"), [
    ("rises", 0, "ab", {"a": MANY, "b": [x + 0.5 + x / 99 for x in MANY]}, "holds"),
    ("rises", 0, "ab", {"a": MANY, "b": [x + 0.5 for x in MANY]}, "holds"),  # the same difference everywhere
    ("rises", 0, "ba", {"a": MANY, "b": [x + 0.5 for x in MANY]}, "does not hold"),
    ("rises", 0, "ab", {"a": MANY, "b": MANY[::-1]}, "undecided"),
    ("rises", 0, "ab", {"a": MANY, "b": MANY}, "undecided"),
    ("rises", 0, "ab", {"a": MANY[:4], "b": [x + 0.5 for x in MANY[:4]]}, "undecided"),  # too few
    ("rises", 0, "abc", {"a": MANY, "b": [x - 1 for x in MANY], "c": [x + 1 for x in MANY]}, "does not hold"),
    ("rises", 0, "abc", {"a": MANY, "b": MANY[::-1], "c": [x + 1 for x in MANY]}, "undecided"),  # one step is not
    ("rises", 0, "abc", {"a": MANY, "b": [x + 1 for x in MANY], "c": [x + 2 for x in MANY]}, "holds"),
    ("level", 0.1, "ab", {"a": MANY, "b": [x * 1.05 for x in MANY]}, "holds"),
    ("level", 0.1, "ab", {"a": MANY, "b": [x * 1.5 for x in MANY]}, "does not hold"),
    (
        "level",
        0.1,
        "abc",
        {"a": MANY, "b": [x * 1.05 for x in MANY], "c": [x * 1.5 for x in MANY]},
        "does not hold",
    ),
    ("peaks", 0, "aba", {"a": MANY, "b": [x + 0.5 for x in MANY]}, "holds"),
    ("peaks", 0, "abba", {"a": MANY, "b": [x + 0.5 for x in MANY]}, "holds"),
    ("peaks", 0, "bab", {"a": MANY, "b": [x + 0.5 for x in MANY]}, "does not hold"),
    ("above", 1.5, "a", {"a": MANY}, "holds"),
    ("below", 1.5, "a", {"a": MANY}, "does not hold"),
])  # fmt: skip
def test_claims_by_hand(kind: Any, bound: float, terms: str, taus: dict[str, list[float]], verdict: str) -> None:
    from papers.claims import Claim

    found = judged(Claim("said", "tau", tuple(terms), kind, bound), measured(**taus))
    assert found["verdict"] == verdict
    means = {row: sum(values) / len(values) for row, values in taus.items()}
    assert found["values"] == pytest.approx([means[row] for row in terms])


def test_a_claim_is_scaled_reads_other_quantities_and_leaves_out_conversations() -> None:
    from papers.claims import Claim

    counts = measured(a=MANY, b=[3 * x for x in MANY])
    assert judged(Claim("twice", "tau", ("b", "a"), scale=(1, 2)), counts)["verdict"] == "does not hold"
    assert judged(Claim("four times", "tau", ("b", "a"), scale=(1, 4)), counts)["verdict"] == "holds"
    for own in counts.values():
        for place, each in enumerate(own.values()):
            each.update(tried=10.0, rank_1=5.0, rank_2=2.0 + place % 2)
    found = judged(Claim("more", "", ("a@alpha_1", "a@alpha_2")), counts)
    assert found["values"] == pytest.approx([0.5, 0.75])
    turns = {"a": {f"{n // 2}/turn{n % 2}": {"tokens": 20.0, "rounds": 10.0} for n in range(8)}}
    few = judged(Claim("four conversations", "tau", ("a",), "above", 1.0), turns)
    assert (few["prompts"], few["verdict"]) == (4, "undecided")


def test_the_interval_of_a_mean_is_students() -> None:
    """Of equally long prompts τ is a mean, and a jackknife's error is that of a mean."""
    from papers.claims import Claim

    found = judged(Claim("above", "tau", ("a",), "above", 1.0), measured(a=MANY))
    reach = 2.571 * np.std(MANY, ddof=1) / len(MANY) ** 0.5  # Student's quantile for five degrees
    assert found["ci95"] == pytest.approx([np.mean(MANY) - 1 - reach, np.mean(MANY) - 1 + reach], rel=1e-2)


def test_an_undecided_claim_says_how_many_would_decide_it() -> None:
    from papers.claims import Claim

    claim = Claim("more", "tau", ("a", "b"))
    of = {n: measured(a=[5.0] * n, b=[5.12 + (-1) ** place for place in range(n)]) for n in (60, 240, 300)}
    found = {n: judged(claim, counts) for n, counts in of.items()}
    assert [found[n]["verdict"] for n in of] == ["undecided", "undecided", "holds"]
    assert 240 < found[60]["needed"] < 300
    assert found[300]["needed"] is None


@pytest.mark.parametrize("prompts", [6, 40])
@pytest.mark.parametrize(("kind", "terms"), [("rises", "ab"), ("rises", "abcd"), ("peaks", "abcdef")])
def test_chance_decides_no_oftener_than_said(prompts: int, kind: Any, terms: str) -> None:
    """Rows that are alike: of 400 claims at most 5 % are decided, and three standard errors more."""
    from papers.claims import Claim

    draw, decided = np.random.default_rng(0), 0
    for _ in range(400):
        taus = {row: list(draw.normal(3, 0.5, prompts)) for row in terms}
        decided += judged(Claim("order", "tau", tuple(terms), kind), measured(**taus))["verdict"] != "undecided"
    assert decided / 400 < 0.05 + 3 * (0.05 * 0.95 / 400) ** 0.5
    taus = {row: list(draw.normal(3 + 3 * place, 0.5, prompts)) for place, row in enumerate("abc")}
    assert judged(Claim("order", "tau", tuple("abc")), measured(**taus))["verdict"] == "holds"


def entry_with(taus: Mapping[str, list[float]], *claims: Any) -> tuple[dict[str, Any], dict[tuple[str, str], Counts]]:
    from papers.claims import Row, Table
    from papers.judging import described

    rows = tuple(Row(name, MethodConfig(source="prompt_lookup")) for name in taus)
    table = described(Table("t", ("tau",), rows, claims), {name: name for name in taus})
    counts = {(name, prompt): own for name, each in measured(**taus).items() for prompt, own in each.items()}
    asked = dict.fromkeys(next(iter(measured(**taus).values())), "c")
    return {"asked": asked, "length": "up to 9 tokens", "machine": GPU, "tables": {"t": table}}, counts


def test_times_are_judged_on_a_gpu_only() -> None:
    from papers.claims import Claim
    from papers.judging import UNFIT, judge_entry

    entry, counts = entry_with(
        {"a": MANY}, Claim("fast", "speedup", ("a",), "above", 1.0), Claim("t", "tau", ("a",), "above")
    )
    counts = {where: {**own, "seconds": 1.0, "plain_seconds": 2.0, "timed": 9.0} for where, own in counts.items()}
    for machine, verdicts in ((GPU, ["holds", "holds"]), ({"device": "AMD EPYC"}, ["not run", "holds"])):
        found = judge_entry({**entry, "machine": machine}, counts)["tables"]["t"]["claims"]
        assert [one["verdict"] for one in found] == verdicts
    assert found[0]["reason"] == UNFIT


def test_a_statement_counts_once_and_ours_not_at_all() -> None:
    from papers.judging import statements

    parts = [("p", "s", "holds", False), ("q", "s", "not run", False), ("r", "", "undecided", False),
             ("u", "r", "holds", False), ("v", "w", "does not hold", False), ("x", "w", "undecided", False),
             ("y", "", "does not hold", True), ("z", "", "not run", False)]  # fmt: skip
    claims = [dict(zip(("says", "of", "verdict", "ours"), part, strict=True)) for part in parts]
    assert statements(claims) == {"holds": 1, "undecided": 1, "does not hold": 1, "not run": 1}


def test_shuffled_labels_decide_nothing_that_the_labels_decide() -> None:
    from papers.claims import Claim
    from papers.judging import judge_entry, shuffled

    draw = np.random.default_rng(0)
    taus = {"a": list(draw.normal(2, 0.3, 30)), "b": list(draw.normal(4, 0.3, 30))}
    entry, counts = entry_with(taus, Claim("more", "tau", ("a", "b")), Claim("high", "tau", ("b",), "above", 1.0))
    assert [one["verdict"] for one in judge_entry(entry, counts)["tables"]["t"]["claims"]] == ["holds", "holds"]
    verdicts = list(shuffled(entry, counts, 200))
    assert len(verdicts) == 200  # of the one claim with labels
    assert sum(one != "undecided" for one in verdicts) < 20


def test_holms_correction_is_over_the_claims_of_an_entry() -> None:
    from papers.judging import correct

    claims = [{"verdict": "holds", "p": p} for p in (0.001, 0.04, 0.012)] + [{"verdict": "not run"}]
    correct(claims)
    assert [claim.get("stands") for claim in claims] == [True, True, True, None]
    claims = [{"verdict": "holds", "p": p} for p in (0.001, 0.04, 0.03)]
    correct(claims)
    assert [claim["stands"] for claim in claims] == [True, False, False]


def test_what_was_not_measured_says_why() -> None:
    from papers.claims import Claim
    from papers.judging import QUIET, judge

    counts = measured(a=MANY)
    timed = judged(Claim("fast", "speedup", ("a",), "above", 1.0), counts)
    assert (timed["verdict"], timed["reason"]) == ("not run", QUIET)
    for each in list(counts["a"].values())[:2]:
        each.update(seconds=1.0, plain_seconds=3.0)
    some = judged(Claim("fast", "speedup", ("a",), "above", 1.0), counts)
    assert (some["prompts"], some["values"], some["ci95"]) == (2, [3.0], [2.0, 2.0])  # those that were timed
    assert judged(Claim("more", "tau", ("a", "b")), counts)["reason"] == "b: not measured yet"
    never = {"a": "", "b": "no such drafter"}
    assert judge(Claim("more", "tau", ("a", "b")), never, counts)["reason"] == "no such drafter"


def test_the_times_that_a_table_shows_are_of_prompts_that_all_its_rows_with_times_were_timed_on() -> None:
    from papers.claims import Claim, Row, Table
    from papers.judging import described, judge_entry

    times = {"a": [3.0, 3.0, 9.0], "b": [2.0, 2.0], "c": []}
    counts = {(row, f"p{place}"): dict(each) for row, own in measured(a=MANY[:3], b=MANY[:3], c=MANY[:3]).items()
              for place, each in enumerate(own.values())}  # fmt: skip
    for row, own in times.items():
        for place, plain in enumerate(own):
            counts[row, f"p{place}"].update(seconds=1.0, plain_seconds=plain, timed=10.0 + 10 * place)
    rows = tuple(Row(name, MethodConfig()) for name in times)
    table = Table("Table", ("tau", "speedup"), rows, (Claim("fast", "speedup", ("a",), "above", 1.0),))
    asked = {f"p{place}": "" for place in range(3)}
    tables = {"t": described(table, {name: name for name in times})}
    entry = judge_entry({"asked": asked, "length": "9 tokens", "machine": GPU, "tables": tables}, counts)["tables"]["t"]
    assert entry["measured"] == "3 prompts × 9 tokens, 2 timed over 15 tokens each on average"
    assert [entry["rows"][name]["here"]["speedup"] for name in "abc"] == [3.0, 2.0, None]
    assert all(entry["rows"][name]["here"]["tau"] == pytest.approx(np.mean(MANY[:3])) for name in "abc")
    assert (entry["claims"][0]["values"], entry["claims"][0]["prompts"]) == ([5.0], 3)  # a claim's, of its own rows


def test_what_is_kept_is_what_was_measured(tmp_path: Path) -> None:
    from papers.keeping import of_entry, read_kept, write_kept

    entry, counts = entry_with({"a": MANY, "b": MANY})
    others = {("a", "elsewhere"): {"tokens": 1.0}, ("c", "p0"): {"tokens": 1.0}}
    counts[("a", "p0")]["seconds"] = 0.5
    assert of_entry(entry, {**counts, **others}) == counts
    write_kept(tmp_path / "kept.jsonl.gz", counts)
    assert read_kept(tmp_path / "kept.jsonl.gz") == counts
    before = (tmp_path / "kept.jsonl.gz").read_bytes()
    write_kept(tmp_path / "kept.jsonl.gz", dict(reversed(counts.items())))
    assert (tmp_path / "kept.jsonl.gz").read_bytes() == before


def test_judging_again_needs_no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import paper
    from papers.claims import Claim
    from papers.keeping import counts_file, write_kept

    entry, counts = entry_with({"a": MANY, "b": [x + 1 for x in MANY]}, Claim("more", "tau", ("a", "b")))
    entry |= {"models": {"target": "t"}, "categories": ["c"], "dtype": "float32"}
    out = tmp_path / "out.json"
    out.write_text(json.dumps({"paper": "gsd", "entries": {"here": entry}}))
    write_kept(counts_file(out, "gsd", "here"), counts)
    monkeypatch.setattr("sys.argv", ["paper.py", "gsd", "--judge", "--shuffle", "3", "--out", str(out)])
    paper.main()
    said = capsys.readouterr().out
    assert "more: here **holds** (2.03 → 3.03; [1.00, 1.00], n = 6)" in said
    assert "3 claims with shuffled labels" in said
    assert json.loads(out.read_text())["entries"]["here"]["tables"]["t"]["claims"][0]["verdict"] == "holds"
    monkeypatch.setattr("sys.argv", ["paper.py", "gsd", "--judge", "--label", "here"])
    with pytest.raises(SystemExit):
        paper.main()


def test_pages_show_every_figure_and_verdict() -> None:
    from fill_tables import filled_page
    from papers.claims import Claim, Row, Table
    from papers.judging import described, judge_entry
    from papers.writing import markdown, plot

    row = MethodConfig(source="prompt_lookup", stop=StopConfig(max_draft=3))
    rows = (
        Row("a", row, paper=("1.5",), x=1.0),
        Row("b", row, SamplingConfig(temperature=1.0), x=2.0),
        Row("c", never="no time"),
    )
    table = Table("Table 9: all", ("tau",), rows, (Claim("b beats a", "tau", ("a", "b")),), ("MAL",), plot="tau")
    other = Table("Table 9", ("tau",), (Row("d", row),), (Claim("d", "tau", ("d",), "above", 1.0),))
    facts = {
        "models": {"target": "t"}, "categories": ["x"], "dtype": "float32", "length": "up to 8 tokens",
        "machine": GPU,
    }  # fmt: skip
    facts["asked"] = {f"p{place}": "x" for place in range(6)}
    counts = {(name, prompt): own for name, each in measured(a=MANY, b=[x + 1 for x in MANY], d=MANY).items()
              for prompt, own in each.items()}  # fmt: skip

    def entry(one: Table) -> dict[str, Any]:
        plain = described(one, {name: name for name in "abd"})
        return judge_entry({**facts, "tables": {"table_9": plain}}, counts)

    record = {"here": entry(table), "there": entry(other)}
    text = markdown({"entries": record})
    for line in ("| a | 1.5 | 2.03 | – |", "| b | – | 3.03 | – |", "| d | – | – | 2.03 |"):
        assert line in text.splitlines()
    for said in ("no time", "b beats a: here **holds**", "d: there **holds**", "`here` 6 prompts × up to 8 tokens"):
        assert said in text
    page = "before\n<!-- x tables: begin -->\nold\n<!-- x tables: end -->\n"
    filled = filled_page(page, {"paper_x": {"paper": "x", "entries": record}})
    assert filled == f"before\n<!-- x tables: begin -->\n{text}<!-- x tables: end -->\n"
    with pytest.raises(ValueError, match="x tables"):
        filled_page(page, {"paper_y": {"paper": "y", "entries": record}})
    drawn = plot({"entries": record})
    assert drawn is not None
    places = drawn.axes[0].lines[0].get_xydata().tolist()
    assert places == [[1.0, pytest.approx(12.2 / 6)], [2.0, pytest.approx(18.2 / 6)]]
