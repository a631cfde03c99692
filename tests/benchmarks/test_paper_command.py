"""paper.py on tiny models: every row is measured or says why not."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.draft_models.targets.settings import EARLY_EXIT, SMALL_LM, TARGET


@pytest.fixture
def paper(tiny_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The command on the tiny models: the entry it writes."""
    import paper as script

    questions = [{"question": text, "answer": "7"} for text in ("to be or ", "not to be", "def add(", "once upon")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))

    def run(name: str, *options: str) -> dict[str, Any]:
        given = ["--target", str(tiny_models / TARGET), "--prompts", f"code={tmp_path}/prompts.jsonl", "--num-prompts",
                 "1", "--tokens", "5", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out.json"), "--label",
                 "tiny", "--device", "cpu", "--ignore-eos", "--template", "none", *options]  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["paper.py", name, *given])
        script.main()
        entry: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())["entries"]["tiny"]
        return entry

    return run


def drafters(models: Path) -> list[str]:
    return ["--small-lm", str(models / SMALL_LM), "--checkpoint", str(models / EARLY_EXIT)]


TIMES = {
    "drafting_per_token", "verifying_per_token", "deciding_per_token", "drafting_ms", "speedup", "milliseconds",
    "verifying_ms", "others_ms", "tree_share",
}  # fmt: skip


SOME = {
    "gsd": ["table_1", "figure_3"], "opt_tree": ["abstract", "figure_6"], "mcsd": ["table_4"],
    "eesd": ["table_4", "table_5"],
}  # fmt: skip


@pytest.mark.parametrize("name", SOME)
def test_every_row_is_measured_or_says_why_not(
    paper: Callable[..., Any], tiny_models: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import papers.opt_tree

    monkeypatch.setattr(papers.opt_tree, "SIZES", (3, 6, 150, 500))  # of which claims name two
    monkeypatch.setattr(papers.opt_tree, "DEPTH", 3)
    options = [*drafters(tiny_models), *(["--skip", "2"] if name not in ("gsd", "mcsd") else [])]
    entry = paper(name, *options, "--tables", *SOME[name])
    assert list(entry["tables"]) == SOME[name]
    for table in entry["tables"].values():
        for label, row in table["rows"].items():
            known = [value for key, value in row["here"].items() if key not in TIMES]
            assert row["never"] or any(value is not None for value in known), label
        assert all(claim["verdict"] in ("undecided", "not run") for claim in table["claims"])  # of one prompt


def test_times_are_taken_when_asked_for(paper: Callable[..., Any], tiny_models: Path) -> None:
    options = [*drafters(tiny_models), "--tables", "table_8"]
    assert paper("eesd", *options)["tables"]["table_8"]["rows"]["EESD, Beta-TS"]["here"]["milliseconds"] is None
    entry = paper("eesd", *options, "--timed", "1", "--num-prompts", "2")
    assert (entry["prompts"], entry["timed"]) == (2, 1)
    assert all(value > 0 for value in entry["tables"]["table_8"]["rows"]["EESD, Beta-TS"]["here"].values())
