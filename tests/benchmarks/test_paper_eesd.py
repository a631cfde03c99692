"""EESD's tables: which drafter and which calibration head a row has, and the paper's predicted speed-up."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from tests.refusals import refusal


def table_4(folder: Path | None, checkpoint: str | None = None):  # type: ignore[no-untyped-def]
    from papers.eesd import tables

    options = Namespace(
        checkpoint=checkpoint, ablation=folder and str(folder), tables=["table_4"], target=None, small_lm=None,
    )  # fmt: skip
    return tables(options=options)["table_4"]


@pytest.mark.parametrize("said", [{}, {"odds": True}, {"odds": False}])
def test_every_row_of_cali_ts_says_which_head_it_asks(tmp_path: Path, said: dict[str, bool]) -> None:
    """The head of --checkpoint in a note; that of paper_head must be the paper's."""
    from papers.eesd import which_head

    folder = tmp_path / "paper_head"
    folder.mkdir()
    (folder / "calibration.json").write_text(json.dumps(said))
    assert ("log-odds" in which_head(folder)) is said.get("odds", True)
    if said.get("odds", True):
        refusal("odds=false", table_4, tmp_path)
    else:
        table = table_4(tmp_path, str(folder))
        assert "what the paper's sees" in table.note
        own = {row.name for row in table.rows if row.other == str(folder)}
        assert own == {"EESD, Cali-TS, the paper's head", "– without sampling prediction, the paper's head"}
        judged = {term for claim in table.claims if claim.says.count("the paper's head") for term in claim.terms}
        assert own < judged


def test_the_predicted_speed_up_is_equation_14() -> None:
    """From v_d, r_d and α, where every round is a pass over one token; here 40 of 100 tokens came from 80 drafted."""
    from papers.claims import quantity

    drafted, accepted, output, pass_seconds, draft_seconds = 80, 40, 100, 0.2, 0.03
    counts = {"plain_seconds": output * pass_seconds, "timed": output, "timed_rounds": output - accepted,
              "draft_seconds": drafted * draft_seconds}  # fmt: skip
    v_d, r_d, alpha = accepted / drafted, accepted / output, draft_seconds / pass_seconds
    assert quantity("predicted").of(counts) == pytest.approx(v_d / ((alpha - v_d) * r_d + v_d))
