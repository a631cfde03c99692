"""The comparison of shapes trains the shapes that it names, and measures them on the same prompts."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from draft_models.checkpoint import read_meta
from draft_models.target.architectures import load_config
from tests.tiny import save_target
from tests.train.jobs import write_corpus


@pytest.mark.slow
@pytest.mark.thorough
def test_every_shape_is_trained_and_measured(
    tmp_path: Path, watched: Callable[[ModuleType], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    import compare_shapes

    trained = watched(compare_shapes)
    target, data = save_target(tmp_path / "target", kv_heads=2), write_corpus(tmp_path)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": f"line {i}: the "}) + "\n" for i in range(2)))
    work = tmp_path / "work"
    both = ["seq_len=48", "fit.batch_rows=2", "decode_prompts=2", "decode_tokens=6", "fit.precision=fp32",
            "data=local", f"data.path={data.path[0]}", "data.layout=text", "data.heldout_fraction=0.2",
            f"data.cache_dir={data.cache_dir}"]  # fmt: skip
    arguments = ["max_new_tokens=12", "--target", str(target), "--train-minutes", "0.0005", "--layers", "3",
                 "--heads", "shared", "own:100", "--small-lm-layers", "2", "--draft-tokens", "2", "4", "--both", *both,
                 "--eesd", "frozen_dtype=float32", "--prompts", f"a={tmp_path / 'a.jsonl'}", "--work",
                 str(work)]  # fmt: skip
    with pytest.raises(SystemExit):
        compare_shapes.main([*arguments, "--measure-only"])
    assert "no finished drafter there" in capsys.readouterr().err
    compare_shapes.main([*arguments, "--train-only"])
    assert not (work / "measured").exists()
    assert {config.minutes for config in trained.values()} == {0.0005}
    compare_shapes.main([*arguments, "--measure-only"])
    found = json.loads((work / "compare_shapes.json").read_text())
    rows = {(row["drafter"], row["layers"], row["draft_tokens"]): row for row in found["rows"]}
    drafters = [("early exit, shared head", 3), ("early exit, own:100 head", 3), ("small LM", 2)]
    assert list(rows) == [(*drafter, k) for drafter in drafters for k in (2, 4)]
    for (label, layers, k), row in rows.items():
        command = "finetune_drafter_2" if label == "small LM" else f"eesd_{layers}_{label.split()[2].replace(':', '_')}"
        method = found["methods"][f"{command.removesuffix(',')} K={k}"]
        assert method["stop"]["max_draft"] == k
        assert method["source"] == ("small_lm" if label == "small LM" else "early_exit")
        assert row["identical"] == row["prompts"] == found["prompts"] == 2
        assert 1 <= row["tau"] <= 1 + k
        steps = json.loads((work / command / "steps.json").read_text())
        assert row["trained"]["steps"] == steps["steps"]
        if label == "small LM":
            assert load_config(str(work / command)).num_hidden_layers == layers
        else:
            meta = read_meta(work / command)
            assert (meta.exit_layer, meta.own_head) == (layers, "own" in label)
            assert meta.draft_vocabulary == (100 if "own" in label else None)
    assert found["baselines"]["autoregressive"]["tau"] == 1
    assert (work / "compare_shapes.png").stat().st_size > 0


def test_what_would_do_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import compare_shapes

    start = ["--target", "t", "--train-minutes", "1", "--prompts", "a=f", "--work", str(tmp_path)]
    for given, said in (
        ([], "nothing to compare"),
        (["--layers", "1", "--heads", "half"], "heads=half: expected shared"),
        (["method=[gsd]", "--layers", "1"], "method=[gsd]: not an option here"),
        (["--layers", "1", "--without", "eesd_2_shared"], "without='eesd_2_shared': expected one of ['eesd_1_shared']"),
        (["--layers", "1", "--without", "eesd_1_shared"], "nothing to compare"),
    ):
        with pytest.raises(SystemExit):
            compare_shapes.main([*given, *start])
        assert said in capsys.readouterr().err


def test_shapes_are_left_out() -> None:
    import compare_shapes

    given = ["--layers", "1", "2", "--heads", "shared", "own:64", "--small-lm-layers", "1"]
    start = ["--target", "t", "--train-minutes", "1", "--prompts", "a=f"]
    options = compare_shapes.parse([*given, *start, "--without", "eesd_2_own_64"])
    assert [shape.folder for shape in compare_shapes.shapes_of(options)] == [
        "eesd_1_shared", "eesd_2_shared", "eesd_1_own_64", "finetune_drafter_1"
    ]  # fmt: skip
