"""The comparison of objectives trains what it says, for as long, and reports what the trainings logged."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import compare_objectives
from tests.tiny import save_target
from tests.train.jobs import log, save_responses
from train.settings import OBJECTIVES, EesdConfig, FinetuneConfig

SMALL = ["seq_len=48", "fit.batch_rows=2", "decode_prompts=2", "decode_tokens=6", "fit.precision=fp32"]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings of every training that is made, by the name of its directory; two lines of one step are timed."""
    seen: dict[str, Any] = {}

    def watched(kind: compare_objectives.Kind) -> compare_objectives.Kind:
        def train(config: EesdConfig | FinetuneConfig) -> None:
            assert Path(config.out_dir).name not in seen
            seen[Path(config.out_dir).name] = config
            kind.train(config)

        return replace(kind, train=train)

    monkeypatch.setattr(compare_objectives, "TIMED", 1)
    monkeypatch.setattr(compare_objectives, "LINES", 2)
    kinds = {name: watched(kind) for name, kind in compare_objectives.KINDS.items()}
    monkeypatch.setattr(compare_objectives, "KINDS", kinds)
    return seen


@pytest.mark.slow
def test_every_row_is_a_training_and_its_last_evaluation(tmp_path: Path, trained: dict[str, Any]) -> None:
    objectives = ["cross_entropy", "acceptance"]
    target = save_target(tmp_path / "target", kv_heads=2)
    data = save_responses(target, tmp_path / "responses")
    path, cache = data.path[0], tmp_path / "cache"
    both = [*SMALL, "data=local", f"data.path={path}", "data.heldout_fraction=0.2", f"data.cache_dir={cache}"]
    arguments = ["--target", str(target), "--out", str(tmp_path / "out"), "--minutes", "0.001", "--objectives",
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
            assert (config.objective, config.teacher) == (objective, teacher)
            assert config.fit.steps == row["steps"] >= 1
            assert row["tokens"] == row["steps"] * 2 * 48
            assert trained[f"{name}_timed"].fit.steps == 2
            lines = log(tmp_path / "out" / name)
            assert row["tau"] == lines[-1]["eval_tau"] >= 1
            assert row["tau_analytic"] == lines[-1]["eval_tau_analytic"] > 1
            assert row["top1_target"] == lines[-1]["eval_top1_target"]
            assert f"| {kind} | {objective} | {row['steps']} | {row['tokens']} | " in table
    before = len(trained)
    compare_objectives.main(arguments)  # all is done: nothing is trained again, or `trained` would say so
    assert len(trained) == before == 4 * len(objectives)
    with pytest.raises(SystemExit, match="holds drafters of other settings"):
        compare_objectives.main([*arguments, "frozen_dtype=bfloat16"])


def test_steps_are_those_of_the_minutes_at_the_median_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of half a minute at 4096 tokens a second, by 8 rows of 256. The first line, of warming up, does not count."""

    def train(_: object, out_dir: Path, overrides: list[str]) -> Any:
        assert "decode_tokens=2" in overrides
        rates = [1.0, 2048.0, 8192.0, 4096.0]
        lines = [{"step": step, "tokens_per_s": rate} for step, rate in enumerate(rates)]
        (out_dir / "log.jsonl").write_text("\n".join(map(json.dumps, [*lines, {"step": 4, "eval_tau": 1.0}])))
        return SimpleNamespace(fit=SimpleNamespace(batch_rows=8), seq_len=256)

    monkeypatch.setattr(compare_objectives, "train", train)
    kind = compare_objectives.KINDS["eesd"]
    assert compare_objectives.steps_of(kind, ["decode_tokens=64"], 0.5, tmp_path) == 60
    assert compare_objectives.steps_of(kind, ["decode_tokens=64"], 1e-6, tmp_path) == 1
    options = compare_objectives.parse(["--target", "t", "--minutes", "1"])
    assert options.objectives == list(OBJECTIVES)  # if none is chosen
