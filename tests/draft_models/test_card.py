"""The model card: commands that name this drafter and target, and the newest report only."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.ship_drafters import portable
from outrider.draft_models.card import add_report, describe_serving, write_card
from outrider.draft_models.eagle3.checkpoint import describe_use
from outrider.draft_models.early_exit import model as early_exit
from outrider.draft_models.small_lm import model as small_lm


@pytest.mark.parametrize("use", [small_lm.describe_use(0), small_lm.describe_use(6), describe_serving(3)])
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


def test_a_target_that_is_a_gguf_file_is_served_as_it_is(tmp_path: Path) -> None:
    write_card(tmp_path, describe_serving(3, "llama_cpp"), "my/model.gguf", {})
    text = (tmp_path / "README.md").read_text()
    assert f"llama-server -m my/model.gguf -md {tmp_path}/model.gguf --spec-type draft-simple" in text
    assert "convert" not in text
    assert "outrider export" not in text


@pytest.mark.parametrize(
    "use", [early_exit.USE, small_lm.describe_use(0), small_lm.USE_OF_SOME, describe_use("specforge")]
)
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
    ({"tau": 2.5, "tau_analytic": 1.05}, None),  # what was decoded decides
    ({"tau_analytic": 1.0871, "tau_text": 2.0}, 1.09),
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
