"""The model card: commands that name this drafter and target, and the newest report only."""

import json
import re
from pathlib import Path

import pytest

from draft_models.card import add_report, write_card


def test_the_commands_are_for_this_drafter(tmp_path: Path) -> None:
    write_card(tmp_path, "small_lm", "org/target", {"objective": "kl", "steps": 7})
    text = (tmp_path / "README.md").read_text()
    assert "- objective: kl\n- steps: 7" in text
    (config,) = re.findall(r"--speculative-config '(.*)'", text)
    assert json.loads(config) == {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 5}
    assert f"--speculative-draft-model-path {tmp_path}" in text
    assert f"evaluate-checkpoint target=org/target small_lm={tmp_path}" in text
    assert text.startswith("---\nlibrary_name: outrider\nbase_model: org/target\n")


def test_an_early_exit_drafter_claims_no_serving_engine(tmp_path: Path) -> None:
    write_card(tmp_path, "early_exit", "org/target", {})
    text = (tmp_path / "README.md").read_text()
    assert "vllm serve" not in text
    assert f"checkpoint={tmp_path} target=org/target" in text


@pytest.mark.parametrize("carded", [True, False])
def test_a_report_replaces_the_one_before(tmp_path: Path, carded: bool) -> None:
    if carded:
        write_card(tmp_path, "early_exit", "t", {"steps": 7})
    for number in (1, 2):
        add_report(tmp_path, f"# Report {number}\n\n| row {number} |\n")
    text = (tmp_path / "README.md").read_text()
    assert "| row 2 |" in text
    assert "row 1" not in text
    assert text.count("## Measured") == 1
    assert ("- steps: 7" in text) == carded
