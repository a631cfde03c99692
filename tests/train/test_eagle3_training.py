"""EAGLE-3 training end to end on a tiny target: from a config to a head that decodes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.base.errors import UserError
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.card import CARD_FILE
from outrider.draft_models.eagle3.checkpoint import TRAINING_FILE, load_head, open_head, stored_tokens
from outrider.draft_models.targets.open_target import load_config
from outrider.inference.core.decode import speculative
from outrider.inference.drafters.eagle3 import PLUGIN, Eagle3Source
from outrider.inference.drafters.shaped import ModelDrafter
from outrider.inference.shapes.factory import Chain
from outrider.inference.stopping.rules import FixedLength
from outrider.train.parts.target_states import DONE_FILE, GROUP, MADE_FROM_FILE, STATES_FILE, pack, packed_width, unpack
from outrider.train.recipes.eagle3 import Eagle3Student, train_eagle3
from tests.tiny import open_stack, random_prompt, reference_generate, save_target
from tests.train.jobs import FIT, heading, log, same


@pytest.fixture(scope="module")
def sure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a peaked distribution."""
    return save_target(tmp_path_factory.mktemp("models") / "target", kv_heads=2, peak=8.0)


def weights(out_dir: Path) -> dict[str, Tensor]:
    return load_file(out_dir / "model.safetensors")


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
    assert PLUGIN.trained(str(tmp_path / "out")).seconds == record["training_seconds"] > 0
    card = (tmp_path / "out" / CARD_FILE).read_text()
    assert f"evaluate-checkpoint target={sure} eagle3={tmp_path / 'out'} " in card
    assert f"- tau: {round(record['metrics']['tau'], 3)}\n" in card

    head = load_head(str(tmp_path / "out"), load_config(str(sure)), dtype=torch.float32)
    assert head.draft_tokens is not None
    assert head.draft_tokens.tolist() == stored_tokens(str(tmp_path / "out"))
    assert len(head.draft_tokens) == 60
    model, stack = open_stack(sure)
    head.use_embedding(stack.embed_tokens.weight)
    prompt = random_prompt(20)
    rounds = list(
        speculative(stack, ModelDrafter(Eagle3Source(head), Chain(FixedLength(4))), prompt, max_new_tokens=20)
    )
    assert [t for r in rounds for t in r.tokens] == reference_generate(model, prompt, 20)


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


def test_training_from_stored_features_is_the_same(
    sure: Path, tmp_path: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Bit for bit in float32. They are made once, with the announced number of bytes; then the target runs no more."""
    run = heading(sure, corpus, tmp_path / "online", eval_rows=1, fit=replace(FIT, steps=2))
    train_eagle3(run)
    kept = replace(run, features=str(tmp_path / "features"), features_dtype="float32")
    capsys.readouterr()
    train_eagle3(replace(kept, out_dir=str(tmp_path / "kept")))
    assert same(weights(tmp_path / "kept"), weights(tmp_path / "online"))
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("features="))
    assert f"gigabytes={(tmp_path / 'features' / STATES_FILE).stat().st_size / 1e9:.2f}" in said
    made = list[int]()
    states = Eagle3Student.states
    monkeypatch.setattr(Eagle3Student, "states", lambda *own, **given: made.append(1) or states(*own, **given))
    train_eagle3(replace(kept, out_dir=str(tmp_path / "again")))
    assert len(made) == 1  # the evaluation's
    assert same(weights(tmp_path / "again"), weights(tmp_path / "online"))
    (tmp_path / "features" / STATES_FILE).write_bytes(b"cut")
    train_eagle3(replace(kept, out_dir=str(tmp_path / "refilled")))
    assert len(made) > 3
    assert same(weights(tmp_path / "refilled"), weights(tmp_path / "online"))
    with pytest.raises(UserError, match=r"holds what was made with other settings: dtype='bfloat16' \(was 'float32'\)"):
        train_eagle3(replace(kept, features_dtype="bfloat16", out_dir=str(tmp_path / "other")))
    with pytest.raises(UserError, match=r"other settings: frozen_dtype='torch.float16' \(was 'torch\.\w+'\)"):
        train_eagle3(replace(kept, frozen_dtype="float16", out_dir=str(tmp_path / "other")))


def test_a_killed_filling_goes_on_with_the_rows_that_are_missing(
    sure: Path, tmp_path: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    run = heading(sure, corpus, tmp_path / "out", eval_rows=1, fit=replace(FIT, steps=2), features_dtype="float32",
                  features=str(tmp_path / "features"))  # fmt: skip
    train_eagle3(replace(run, features=str(tmp_path / "whole"), out_dir=str(tmp_path / "uninterrupted")))
    states, made = Eagle3Student.states, list[int]()

    def killed_at_the_third(*own: Any, **given: torch.Tensor) -> torch.Tensor:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(1)
        return states(*own, **given)

    with monkeypatch.context() as killed:
        killed.setattr(Eagle3Student, "states", killed_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            train_eagle3(run)
    assert (tmp_path / "features" / DONE_FILE).exists()
    capsys.readouterr()
    train_eagle3(run)
    assert "goes_on_after=2 of " in capsys.readouterr().out
    whole, resumed = ((tmp_path / name / STATES_FILE).read_bytes() for name in ("whole", "features"))
    assert whole == resumed
    assert same(weights(tmp_path / "out"), weights(tmp_path / "uninterrupted"))
    assert {path.name for path in (tmp_path / "features").glob("states*")} == {STATES_FILE, MADE_FROM_FILE}


def test_from_features_in_int8_it_learns_what_their_values_teach(
    sure: Path, tmp_path: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = heading(sure, corpus, tmp_path / "kept", eval_rows=1, fit=replace(FIT, steps=2))
    train_eagle3(replace(run, features=str(tmp_path / "features"), features_dtype="int8"))
    states = Eagle3Student.states

    def coarse(*student_and_given: Any, **given: torch.Tensor) -> torch.Tensor:
        found = states(*student_and_given, **given)
        return unpack(pack(found), found.shape[-1])

    monkeypatch.setattr(Eagle3Student, "states", coarse)
    train_eagle3(replace(run, out_dir=str(tmp_path / "online")))
    assert same(weights(tmp_path / "kept"), weights(tmp_path / "online"))


def test_features_that_a_disk_or_a_dtype_cannot_hold_are_refused(
    sure: Path, tmp_path: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, states = heading(sure, corpus, tmp_path / "out", features=str(tmp_path / "features")), Eagle3Student.states
    with monkeypatch.context() as full:
        full.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(UserError, match=r"and 0\.00 GB are free there"):
            train_eagle3(run)
    monkeypatch.setattr(Eagle3Student, "states", lambda *own, **given: 1e6 * states(*own, **given))
    with pytest.raises(UserError, match="float16 cannot hold the target's states of rows 0 to 7"):
        train_eagle3(run)
    monkeypatch.undo()
    train_eagle3(replace(run, features_dtype="bfloat16"))  # in the place of what was not finished


def test_a_finished_head_goes_on(sure: Path, tmp_path: Path, corpus: DataConfig) -> None:
    """It keeps its aux hidden states and vocabulary; with a tiny learning rate it is unchanged."""
    train_eagle3(heading(sure, corpus, tmp_path / "one", draft_vocabulary=50, taps=(1, 2, 4)))
    on = heading(sure, corpus, tmp_path / "two", start=str(tmp_path / "one"), intermediate=None)
    train_eagle3(replace(on, fit=replace(FIT, lr=1e-12)))
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-9)
    for changes, message in (
        ({"draft_vocabulary": 50}, "draft_vocabulary=50: expected None, its default: start="),
        ({"start": str(sure)}, "no tensor midlayer.hidden_norm.weight"),
    ):
        with pytest.raises(UserError, match=message):
            train_eagle3(replace(on, **changes))


def test_what_cannot_be_is_refused_before_a_weight_is_read(sure: Path, corpus: DataConfig, tmp_path: Path) -> None:
    bare = shutil.copytree(sure, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    for changes, message in (
        ({"taps": (3, 2, 1)}, r"taps=\(3, 2, 1\): expected boundaries in ascending order"),
        ({"taps": (1, 2, 9)}, r"taps=\[1, 2, 9\]: expected 0 to 4, the target's layers"),
        ({"taps": (1, 2)}, "dialect=specforge: has no word for taps"),
        ({"draft_steps": 47}, r"draft_steps=47: expected at most seq_len - 2 \(46\)"),
        ({"draft_vocabulary": 1000}, "draft_vocabulary=1000: expected at most vocabulary=260"),
        ({"seq_len": 300}, "seq_len=300: the target's context is 256"),
        ({"decode_tokens": 256}, "decode_tokens=256: expected less than the target's context of 256"),
        ({"step_decay": 1.5}, "step_decay=1.5: expected"),
        ({"data": replace(corpus, heldout_fraction=0.0)}, r"data\.heldout_fraction=0"),
    ):
        with pytest.raises(UserError, match=message):
            train_eagle3(replace(heading(bare, corpus, tmp_path / "out"), **changes))


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


def in_turn(values):
    """One vector, slowly."""
    found = []
    for start in range(0, len(values), GROUP):
        group = values[start : start + GROUP]
        scale = torch.tensor(max(abs(value) for value in group) / 127).half().item()
        found += [scale * max(-127, min(127, round(value / scale))) if scale else 0.0 for value in group]
    return found


@pytest.mark.parametrize("width", [1, 32, 33, 576])
def test_every_value_is_a_step_of_its_groups_scale(width):
    made = torch.randn(3, 2, width, generator=torch.Generator().manual_seed(width))
    made[0, 0] = 0.0
    made[1, 1, 0] = 900.0  # as the states' few large values are
    packed = pack(made)
    assert packed.dtype == torch.int8
    assert packed.shape == (3, 2, packed_width(width))
    found = unpack(packed, width)
    for row, kept in zip(made.view(-1, width).tolist(), found.view(-1, width).tolist(), strict=True):
        assert kept == pytest.approx(in_turn(row), abs=1e-6)
    largest = torch.nn.functional.pad(made.abs(), (0, -width % GROUP)).unflatten(-1, (-1, GROUP)).amax(-1)
    room = largest.repeat_interleave(GROUP, -1)[..., :width] * (1 / 254 + 2**-11) + 1e-7
    assert bool(((found - made).abs() <= room).all())


def test_it_takes_little_more_than_half_of_float16():
    assert packed_width(576) / (2 * 576) == pytest.approx(34 / 64)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e7 * 127])
def test_what_no_scale_can_hold_is_refused(value):
    with pytest.raises(OverflowError):
        pack(torch.tensor([[1.0, value]]))
