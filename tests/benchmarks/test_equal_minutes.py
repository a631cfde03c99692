"""One pass a draft against a chain: trainings of equal minutes in all."""

import json
from pathlib import Path

import pytest

from outrider.commands.composing import build, compose_config
from outrider.train.settings.drafters import FinetuneConfig
from tests.typed import status_of


def test_an_arm_has_its_minutes_and_begins_with_its_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import one_pass

    trainings = list[FinetuneConfig]()

    def train(command: list[str], check: bool) -> None:
        trainings.append(build(FinetuneConfig, compose_config("finetune_drafter", command[4:])))
        folder = Path(trainings[-1].out_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log.jsonl").write_text('{"step": 1, "eval_tau": 1.5}\n')
        (folder / one_pass.TRAINING_FILE).write_text('{"metrics": {"tau": 1.5}}')

    monkeypatch.setattr(one_pass.subprocess, "run", train)
    words = ("--target", "t", "--answers", "a.jsonl", "--minutes", "20", "--work", str(tmp_path), "decode_tokens=9")
    assert status_of(one_pass.main, "one_pass.py", *words, "--out", str(tmp_path / "out.json")) == 0
    chain, half = tmp_path / "chain_20_minutes", tmp_path / "chain_10_minutes"
    assert [(each.minutes, each.parallel, each.position_weights, each.drafter.path) for each in trainings] == [
        (20, 0, "none", None), (20, 4, "none", None), (10, 0, "none", None), (10, 4, "cat", str(half))
    ]  # fmt: skip
    assert {each.decode_tokens for each in trainings} == {9}
    assert trainings[0].out_dir == str(chain)
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [run["arm"] for run in runs] == ["chain", "one_pass", "one_pass_cat_from_chain"]
    assert all(run["record"]["metrics"]["tau"] == run["log"][0]["eval_tau"] for run in runs)
