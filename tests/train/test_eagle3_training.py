"""EAGLE-3 training end to end on a tiny target: from a config to a head that decodes."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.base.processes import join_processes
from outrider.data_prep.text.rows import PackedRows, load_rows
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.card import CARD_FILE
from outrider.draft_models.eagle3.checkpoint import TRAINING_FILE, open_head
from outrider.draft_models.targets.open_target import load_config
from outrider.inference.drafters.eagle3.drafter import Eagle3DraftModel, Eagle3Plugin
from outrider.train.eagle3 import Eagle3Student, train_eagle3
from outrider.train.parts import target_states
from outrider.train.settings.drafters import Eagle3Config
from tests.refusals import refusal
from tests.tiny import VOCABULARY, byte_tokenizer, open_stack, save_target
from tests.train.jobs import FIT, heading, log, require_lossless, same, weights


@pytest.fixture(scope="module")
def sure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a peaked distribution."""
    return save_target(tmp_path_factory.mktemp("models") / "target", kv_heads=2, peak=8.0)


def test_a_trained_head_is_lossless_and_better(sure: Path, tmp_path: Path, corpus: DataConfig) -> None:
    """Its file is loaded like any other; every step agrees more with the target than before."""
    fit = replace(FIT, steps=36, lr=5e-3, eval_every=12, log_every=6, save_every=None)
    train_eagle3(heading(sure, corpus, tmp_path / "out", fit=fit, draft_vocabulary=60, eval_rows=16))
    lines = log(tmp_path / "out")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    evaluated = [line for line in lines if "eval_tau" in line]
    assert len(evaluated) == 3
    for step in (1, 2, 3, 4):
        assert evaluated[-1][f"eval_loss_{step}"] < evaluated[0][f"eval_loss_{step}"]
    assert evaluated[-1]["eval_agree_1"] > evaluated[0]["eval_agree_1"] > 0
    assert 1 < evaluated[0]["eval_tau_analytic"] < evaluated[-1]["eval_tau_analytic"] <= 5
    record = json.loads((tmp_path / "out" / TRAINING_FILE).read_text())
    assert record["metrics"]["tau"] == max(line["eval_tau"] for line in evaluated)
    assert Eagle3Plugin().training_record(str(tmp_path / "out")).seconds == record["training_seconds"] > 0
    card = (tmp_path / "out" / CARD_FILE).read_text()
    assert f"evaluate-checkpoint target={sure} eagle3={tmp_path / 'out'}\n" in card
    assert f"- tau: {round(record['metrics']['tau'], 3)}\n" in card

    head = open_head(str(tmp_path / "out"), load_config(str(sure))).load(torch.float32)
    assert head.draft_tokens is not None
    assert head.draft_tokens.tolist() == Eagle3Plugin().draft_vocabulary(str(tmp_path / "out"))
    assert len(head.draft_tokens) == 60
    model, stack = open_stack(sure)
    head.use_embedding(stack.embed_tokens.weight)
    require_lossless(Eagle3DraftModel(head), model, stack)


def test_the_parts_of_a_new_head(sure: Path, tmp_path: Path, corpus: DataConfig) -> None:
    """Version 3 has other tensors; the output matrix begins as the target's and stays so if it is not trained."""
    run = heading(
        sure, corpus, tmp_path / "out", fit=replace(FIT, steps=2), version="3", taps=(1, 3), intermediate=40,
        dialect="speculators", train_head=False,
    )  # fmt: skip
    train_eagle3(run)
    stored = open_head(str(tmp_path / "out"), load_config(str(sure)))
    assert stored.made_here  # the doctor does not treat it as another trainer's
    assert (stored.dialect, stored.reading.taps, stored.reading.intermediate) == ("speculators", (1, 3), 40)
    assert not stored.reading.tap_norms
    assert not stored.reading.norm_output
    saved, target = stored.tensors(), AutoModelForCausalLM.from_pretrained(sure)
    assert torch.equal(saved["lm_head.weight"], target.lm_head.weight)
    assert not torch.equal(saved["norm.weight"], target.model.norm.weight)


def reading_again(target: Path, corpus: DataConfig, out_dir: Path, features: str | None) -> Eagle3Config:
    """A training that reads half of its few rows twice."""
    few, fit = replace(corpus, max_records=12, heldout_fraction=0.3), replace(FIT, steps=None, epochs=1.5)
    return heading(target, few, out_dir, eval_rows=1, decode_prompts=1, fit=fit, features=features)


def test_training_from_stored_features_is_the_same(sure: Path, tmp_path: Path, corpus: DataConfig) -> None:
    """Bit for bit in float32. Those that another target, dtype or text made are refused."""
    run = reading_again(sure, corpus, tmp_path / "online", None)
    train_eagle3(run)
    kept = replace(run, features=str(tmp_path / "features"))
    for folder, one in (("filled", kept), ("read", kept), ("in turn", replace(run, features="auto"))):
        with patch.object(Eagle3Student, "states_of", autospec=True, side_effect=Eagle3Student.states_of) as made:
            train_eagle3(replace(one, out_dir=str(tmp_path / folder)))
        assert same(weights(tmp_path / folder), weights(tmp_path / "online"))
        assert (made.call_count > 0) == (folder != "read")
        assert not (tmp_path / folder / "features").exists()
    states = tmp_path / "features" / target_states.STATES_FILE
    states.write_bytes(bytes(states.stat().st_size))
    train_eagle3(replace(kept, out_dir=str(tmp_path / "of zeros")))  # from what is stored alone
    assert not same(weights(tmp_path / "of zeros"), weights(tmp_path / "online"))
    for name, value, words in (
        ("frozen_dtype", "float16", r"other settings: .*frozen_dtype='torch.float16' \(was 'torch\.\w+'\)"),
        ("features", "/proc/features", "^features=/proc/features: cannot be written"),
    ):
        refusal(words, train_eagle3, replace(kept, **{name: value}, out_dir=str(tmp_path / "other")))


class Target:
    """In the place of a target: states of a row's tokens; the batches are counted, one may be fatal."""

    def __init__(self, killed_at: int | None = None) -> None:
        self.table, self.batches, self.killed_at = torch.randn(VOCABULARY, 2, 40), 0, killed_at

    def states_of(self, batch: dict[str, Tensor]) -> Tensor:
        if self.batches == self.killed_at:
            raise KeyboardInterrupt
        self.batches += 1
        return self.table[batch["input_ids"]]

    def fill(self, rows: PackedRows, folder: Path, width: int = 40) -> target_states.RowsWithStates:
        given = (48, 2, width), str(folder), torch.float32, {"from": "text"}
        return target_states.compute_states(rows, lambda: self.states_of, *given, join_processes())


@pytest.fixture
def rows(corpus: DataConfig) -> PackedRows:
    return load_rows(corpus, byte_tokenizer(), 48, "train")


def test_states_are_made_once_and_a_killed_filling_goes_on_with_what_is_missing(
    rows: PackedRows, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    target = Target(killed_at=2)
    with pytest.raises(KeyboardInterrupt):
        target.fill(rows, tmp_path)
    assert (tmp_path / target_states.DONE_FILE).exists()
    said = capsys.readouterr().out
    target.killed_at = None
    for _ in range(2):  # at the second time there is nothing to do
        found = target.fill(rows, tmp_path)
        assert target.batches == -(-len(rows) // target_states.ROWS_AT_ONCE)
        for row in (found[index] for index in range(9)):
            assert torch.equal(row["states"], target.table[row["input_ids"]])
    assert "goes_on_after=2 of " in capsys.readouterr().out
    assert f"gigabytes={(tmp_path / target_states.STATES_FILE).stat().st_size / 1e9:.2f}" in said
    assert {path.name for path in tmp_path.glob("states*")} == {target_states.STATES_FILE, target_states.MADE_FROM_FILE}


def test_in_turn_a_rows_states_are_made_once_if_the_disk_holds_them(
    rows: PackedRows, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    target, reserve = Target(killed_at=2), "outrider.train.parts.target_states.os.posix_fallocate"

    def taught(folder: str = "kept", width: int = 40, origin: str = "text") -> target_states.RowsWithLazyStates:
        given = (48, 2, width), tmp_path / folder, torch.float32, {"from": origin}
        return target_states.RowsWithLazyStates(rows, target.states_of, *given)

    def read() -> list[dict[str, Tensor]]:
        found = taught()
        return [found[index] for index in range(len(rows))]

    with pytest.raises(KeyboardInterrupt), patch(reserve, side_effect=os.posix_fallocate) as reserved:
        read()
    assert reserved.call_args.args[1:] == (0, (tmp_path / "kept" / target_states.STATES_FILE).stat().st_size)
    target.killed_at = None
    assert len(taught(origin="other")) == len(rows)  # a command that reads no row changes nothing
    with patch("shutil.disk_usage", return_value=shutil._ntuple_diskusage(1, 1, 0)):
        found = [*read(), *read()]  # their room is taken already
    for row in found:
        assert torch.equal(row["states"], target.table[row["input_ids"]])
    assert target.batches == len(rows)
    assert "states" not in taught("large", 10**11)[0]
    with patch(reserve, side_effect=OSError("quota exceeded")):
        assert "states" not in taught("over quota")[0]
    assert "(quota exceeded); free space, choose another folder" in capsys.readouterr().err
    assert not (tmp_path / "over quota" / target_states.STATES_FILE).exists()
    assert torch.equal(taught(origin="other")[0]["states"], found[0]["states"])  # made anew in the same room
    assert target.batches == len(rows) + 1


def test_states_are_kept_for_rows_that_are_read_again(tmp_path: Path, corpus: DataConfig) -> None:
    rows: Any = range(10)  # of which one pass in batches of four repeats some at its end
    run: Any = SimpleNamespace(state=join_processes(), device=torch.device("cpu"), out_dir=tmp_path)
    for epochs in (1, 2):
        config = heading(tmp_path, corpus, tmp_path, fit=replace(FIT, steps=None, epochs=epochs))
        _, rows_to_fit = target_states.add_states(config, rows, (48, 2, 40), {}, Target, run)
        assert (rows_to_fit is rows) == (epochs == 1)


def test_kept_states_go_at_the_end_of_their_training(sure: Path, tmp_path: Path, corpus: DataConfig) -> None:
    """Not by an error, nor by a command that is refused; a finished training makes none; a given folder stays."""
    out = tmp_path / "out"
    run = replace(reading_again(sure, corpus, out, "auto"), resume=True)
    broken = patch("outrider.train.parts.head_training.score_steps", side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt), broken:
        train_eagle3(run)
    kept = out / "features" / target_states.STATES_FILE
    made = kept.read_bytes()
    refusal("taps", train_eagle3, replace(run, taps=(0, 2, 4)))
    assert kept.read_bytes() == made
    for _ in range(2):
        train_eagle3(run)
        assert not kept.parent.exists()
    train_eagle3(replace(run, out_dir=str(tmp_path / "given"), features=str(tmp_path / "given" / "features")))
    assert (tmp_path / "given" / "features" / target_states.STATES_FILE).exists()


def test_states_that_a_disk_cannot_hold_are_refused(rows: PackedRows, tmp_path: Path) -> None:
    refusal(r"GB are free there", Target().fill, rows, tmp_path, width=10**11)


def test_a_finished_head_goes_on(sure: Path, tmp_path: Path, corpus: DataConfig) -> None:
    """It keeps its aux hidden states and vocabulary; with a tiny learning rate it is unchanged."""
    train_eagle3(heading(sure, corpus, tmp_path / "one", draft_vocabulary=50, taps=(1, 2, 4)))
    on = heading(sure, corpus, tmp_path / "two", start=str(tmp_path / "one"), intermediate=None)
    train_eagle3(replace(on, fit=replace(FIT, lr=1e-12)))
    torch.testing.assert_close(weights(tmp_path / "two"), weights(tmp_path / "one"), rtol=0, atol=1e-9)
    for changes, message in (
        ({"draft_vocabulary": 50}, "draft_vocabulary=50: expected None, its default: start="),
        ({"taps": (1, 2, 3)}, r"taps=\(1, 2, 3\): expected \(\), its default: start="),
        ({"start": str(sure)}, "no tensor midlayer.hidden_norm.weight"),
    ):
        refusal(message, lambda changed=changes: train_eagle3(replace(on, **changed)))


def test_a_plan_reads_no_weight(sure: Path, corpus: DataConfig, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = heading(tmp_path / "bare", corpus, tmp_path / "out", plan=True)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((sure / "config.json").read_bytes())
    train_eagle3(run)
    plan = capsys.readouterr().out.splitlines()
    assert not (tmp_path / "out").exists()
    train_eagle3(replace(run, plan=False, target=str(sure)))
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("eagle3 start=new"))
    for word in ("trained_parameters=", "frozen_parameters="):
        (planned,) = [part for part in plan[0].split() if part.startswith(word)]
        assert planned in said.split()
