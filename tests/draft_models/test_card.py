"""The model card: commands that name this drafter and target, and the newest report only."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.ship_drafters import portable
from outrider.draft_models.card import add_report, serving, write_card
from outrider.draft_models.eagle3.checkpoint import use_of
from outrider.draft_models.early_exit import model as early_exit
from outrider.draft_models.small_lm import model as small_lm


def test_the_commands_are_for_this_drafter(tmp_path: Path) -> None:
    write_card(tmp_path, small_lm.use_of(0), "org/target", {"objective": "kl", "steps": 7})
    text = (tmp_path / "README.md").read_text()
    assert "- target: org/target\n- objective: kl\n- steps: 7" in text
    (config,) = re.findall(r"--speculative-config '(.*)'", text)
    assert json.loads(config) == {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 5}
    assert f"--speculative-draft-model-path {tmp_path}" in text
    assert f"evaluate-checkpoint target=org/target small_lm={tmp_path}" in text
    assert text.startswith("---\nlibrary_name: outrider\nbase_model: org/target\n")


@pytest.mark.parametrize("use", [small_lm.use_of(0), small_lm.use_of(6), serving(3)])
def test_every_engine_is_told_the_same_number_of_tokens(tmp_path: Path, use: str) -> None:
    """And every command is of this drafter and target."""
    write_card(tmp_path, use, "org/target", {})
    text = (tmp_path / "README.md").read_text()
    (config,) = re.findall(r"vllm serve org/target --speculative-config '(.*)'", text)
    steps, tokens = (int(re.findall(rf"--speculative-num-{name} (\d+)", text)[0]) for name in ("steps", "draft-tokens"))
    assert json.loads(config)["num_speculative_tokens"] == steps == tokens - 1
    assert json.loads(config).get("parallel_drafting", False) == (steps == 6)
    assert f'from_pretrained("{tmp_path}")' in text
    assert not re.search(r"[{%]\w", text)


def test_an_early_exit_drafter_claims_no_serving_engine(tmp_path: Path) -> None:
    write_card(tmp_path, early_exit.USE, "org/target", {})
    text = (tmp_path / "README.md").read_text()
    assert "vllm serve" not in text
    assert f"checkpoint={tmp_path} target=org/target" in text


def test_the_upload_command_is_understood(tmp_path: Path) -> None:
    """By the Hub's own client, as far as it gets without a network."""
    write_card(tmp_path, small_lm.use_of(0), "org/target", {})
    (line,) = [line for line in (tmp_path / "README.md").read_text().splitlines() if line.startswith("hf ")]
    client, *arguments = shlex.split(line)
    command = [str(Path(sys.executable).with_name(client)), *arguments]
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    tried = subprocess.run(command, env=offline, capture_output=True, text=True, check=False)
    assert "offline mode is enabled" in tried.stdout + tried.stderr


@pytest.mark.parametrize("use", [early_exit.USE, small_lm.use_of(0)])
def test_a_target_that_lies_here_is_no_base_model_on_the_hub(tmp_path: Path, use: str) -> None:
    """An upload of a card whose base_model is a path is refused."""
    (tmp_path / "target").mkdir()
    write_card(tmp_path, use, str(tmp_path / "target"), {})
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: outrider\ntags: [speculative-decoding, draft-model]\n---\n")
    assert "# A draft model for target\n" in text


@pytest.mark.parametrize("use", [early_exit.USE, small_lm.use_of(0), small_lm.USE_OF_SOME, use_of("specforge")])
def test_a_card_for_other_machines_names_no_path_of_this_one(tmp_path: Path, use: str) -> None:
    """A target of the Hub is known everywhere; of another one the name is told, and commands have a word for it."""
    (tmp_path / "mine").mkdir()
    write_card(tmp_path / "mine", use, str(tmp_path / "of/Qwen-Q4.gguf"), {})
    text = portable((tmp_path / "mine/README.md").read_text(), None)
    assert str(tmp_path) not in text
    assert "base_model" not in text
    assert "# A draft model for Qwen-Q4\n" in text
    assert "target=TARGET " in text or text.count("TARGET") > 1
    write_card(tmp_path / "mine", use, "org/target", {})
    text = portable((tmp_path / "mine/README.md").read_text(), None)
    assert "base_model: org/target\n" in text
    assert "target=org/target" in text
    assert "hf upload USER/NAME mine " in text


@pytest.mark.parametrize(("taus", "said"), [
    ({"tau": 1.09}, 1.09),
    ({"tau": 1.1}, None),
    ({"tau": 2.5, "tau_analytic": 1.05}, None),  # what was decoded decides
    ({"tau": 1.02, "tau_analytic": 1.3}, 1.02),
    ({"tau_analytic": 1.0871, "tau_text": 2.0}, 1.09),
    ({"tau_text": 1.05}, 1.05),
    ({}, None),
])  # fmt: skip
def test_a_card_and_the_log_say_that_a_drafter_is_of_no_use(
    tmp_path: Path, taus: dict[str, float], said: float | None, capsys: pytest.CaptureFixture
) -> None:
    write_card(tmp_path, early_exit.USE, "org/target", taus)
    text, log = (tmp_path / "README.md").read_text(), capsys.readouterr().err
    assert f"**Of no use**: it reached τ = {said:.2f} tokens" in text if said else "**Of no use**" not in text
    assert ("of no use" in log) == (said is not None)


@pytest.mark.parametrize("carded", [True, False])
def test_a_report_replaces_the_one_before(tmp_path: Path, carded: bool) -> None:
    if carded:
        write_card(tmp_path, early_exit.USE, "t", {"steps": 7})
    for number in (1, 2):
        add_report(tmp_path, f"# Report {number}\n\n| row {number} |\n")
    text = (tmp_path / "README.md").read_text()
    assert "| row 2 |" in text
    assert "row 1" not in text
    assert text.count("## Measured") == 1
    assert ("- steps: 7" in text) == carded
