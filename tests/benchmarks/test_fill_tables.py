"""The picture and the tables made of a report: what they show is what the report says."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

DEMO = Path(__file__).parents[2] / "benchmarks/results/demo_cpu.json"
PAGE = """text
<!-- demo table: begin -->
| method | τ | speed-up [95 %] | vs transformers |
|---|---|---|---|
| old | 1 | 2 | 3 |
<!-- demo table: end -->
| method | stays |
"""


@pytest.fixture
def reports() -> list[dict[str, Any]]:
    found = {report["method"]: report for report in json.loads(DEMO.read_text())["reports"]}
    return [copy.deepcopy(found[name]) for name in ("eesd_beta", "vanilla", "ngrams", "prompt_lookup")]


def test_a_table_is_filled_by_its_header(reports: list[dict[str, Any]]) -> None:
    from fill_tables import filled_page

    known = {"demo_cpu": {"reports": reports}}
    lines = filled_page(PAGE, known).splitlines()
    speedup, (low, high) = reports[1]["speedup"], reports[1]["speedup"]["ci95"]
    assert lines[4] == "| autoregressive | 1.00 | 1.00 | |"
    assert lines[5].startswith("| transformers generate | 1.00 | 0.")
    assert lines[5].endswith("] | 1.00 |")
    assert lines[7].startswith(
        f"| vanilla | {reports[1]['tau']:.2f} | {speedup['median']:.2f}× [{low:.2f}, {high:.2f}] |"
    )
    assert "old" not in "".join(lines)
    assert lines[-1] == "| method | stays |"
    assert filled_page("\n".join(lines), known) == "\n".join(lines)
    with pytest.raises(ValueError, match="speed"):
        filled_page(PAGE.replace("| τ |", "| speed |"), known)


def test_checking_writes_nothing(tmp_path: Path, reports: list[dict[str, Any]], monkeypatch: Any) -> None:
    import fill_tables

    (page := tmp_path / "page.md").write_text(PAGE)
    monkeypatch.setattr(fill_tables, "ROOT", tmp_path)
    monkeypatch.setattr(fill_tables, "records", lambda: {"demo_cpu": {"reports": reports}})
    monkeypatch.setattr(fill_tables, "pages", lambda: {"page.md": page.read_text()})
    with pytest.raises(SystemExit, match=r"page\.md: JSON files have other tables"):
        fill_tables.main(["--check"])
    assert page.read_text() == PAGE
    fill_tables.main([])
    assert page.read_text() == fill_tables.filled_page(PAGE, fill_tables.records()) != PAGE
