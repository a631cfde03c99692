"""The comparison of objectives trains what it says, for as long, and reports what the trainings logged."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.tiny import save_target
from tests.train.jobs import log, save_responses
from train.settings import OBJECTIVES

SMALL = ["seq_len=48", "fit.batch_rows=2", "decode_prompts=2", "decode_tokens=6", "fit.precision=fp32"]


@pytest.mark.slow
@pytest.mark.thorough
def test_every_row_is_a_training_and_its_last_evaluation(
    tmp_path: Path, watched: Callable[[ModuleType], dict[str, Any]]
) -> None:
    import compare_objectives

    trained = watched(compare_objectives)
    objectives = ["cross_entropy", "acceptance"]
    target = save_target(tmp_path / "target", kv_heads=2)
    data = save_responses(target, tmp_path / "responses")
    path, cache = data.path[0], tmp_path / "cache"
    both = [*SMALL, "data=local", f"data.path={path}", "data.heldout_fraction=0.2", f"data.cache_dir={cache}"]
    arguments = ["--target", str(target), "--out", str(tmp_path / "out"), "--minutes", "0.0005", "--objectives",
                 *objectives, "--both", *both, "teacher=cached", "--eesd", "exit_layer=1",
                 "frozen_dtype=float32"]  # fmt: skip
    compare_objectives.main(arguments)
    found = json.loads((tmp_path / "out" / "compare_objectives.json").read_text())
    table = (tmp_path / "out" / "compare_objectives.md").read_text()
    rows = {(row["drafter"], row["objective"]): row for row in found["rows"]}
    assert list(rows) == [(kind, objective) for kind in ("early exit", "small LM") for objective in objectives]
    for kind, command in (("early exit", "eesd"), ("small LM", "finetune_drafter")):
        for objective in objectives:
            name, row = f"{command}_{objective}", rows[kind, objective]
            config, teacher = trained[name], "online" if objective == "cross_entropy" else "cached"
            assert (config.objective, config.teacher, config.minutes) == (objective, teacher, 0.0005)
            lines = log(tmp_path / "out" / name)
            assert row["steps"] == lines[-1]["step"] >= 1
            assert row["tokens"] == row["steps"] * 2 * 48
            assert row["minutes"] > 0
            assert row["tau"] == lines[-1]["eval_tau"] >= 1
            assert row["tau_analytic"] == lines[-1]["eval_tau_analytic"] > 1
            assert row["top1_target"] == lines[-1]["eval_top1_target"]
            assert f"| {kind} | {objective} | {row['steps']} | {row['tokens']} | " in table
    before = len(trained)
    compare_objectives.main(arguments)  # all is done: nothing is trained again, or `trained` would say so
    assert len(trained) == before == 2 * len(objectives)
    with pytest.raises(SystemExit, match="holds drafters of other settings"):
        compare_objectives.main([*arguments, "frozen_dtype=bfloat16"])


def test_all_objectives_are_compared_if_none_is_chosen() -> None:
    import compare_objectives

    options = compare_objectives.parse(["--target", "t", "--minutes", "1"])
    assert options.objectives == list(OBJECTIVES)
    assert options.kinds == ["eesd", "small_lm"]


@pytest.mark.usefixtures("watched")
def test_kinds_that_are_not_asked_for_are_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import compare_objectives

    def measured(kind: Any, objective: str, options: Any) -> dict[str, Any]:
        figures = dict.fromkeys(compare_objectives.WATCHED)
        return {"drafter": kind.label, "objective": objective, "steps": 1, "tokens": 1, "minutes": 1.0, **figures}

    monkeypatch.setattr(compare_objectives, "measured", measured)
    given = ["--target", "t", "--minutes", "1", "--kinds", "small_lm", "--out", str(tmp_path)]
    compare_objectives.main(given)
    rows = json.loads((tmp_path / "compare_objectives.json").read_text())["rows"]
    assert {row["drafter"] for row in rows} == {"small LM"}
    assert len(rows) == len(OBJECTIVES)
