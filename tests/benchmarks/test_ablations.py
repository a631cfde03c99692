"""The ablations: their rows are runs of the commands, their statistics are what they say."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from conf import CONF_DIR, build, register
from train.settings import OBJECTIVES, FinetuneConfig


@pytest.mark.slow
def test_every_row_is_a_run_of_the_command_and_differs_from_the_others() -> None:
    import ablate_small_lm

    options = ablate_small_lm.parse(["--target", "t", "--out", "o", "--steps", "30"])
    rows = ablate_small_lm.plan(options)
    runs: dict[str, FinetuneConfig] = {}
    register("finetune_drafter", FinetuneConfig)
    with initialize_config_dir(str(CONF_DIR), version_base=None):
        for name, row in rows.items():
            overrides = ["target=t", *ablate_small_lm.COMMON, f"fit.steps={row.steps}", *row.overrides]
            runs[name] = build(FinetuneConfig, compose("finetune_drafter", overrides=overrides))
    assert len({repr(run) for run in runs.values()}) == len(runs)
    for lora, weights in ((False, "all"), (True, "lora")):
        same = [runs[f"{objective}_{weights}"] for objective in OBJECTIVES]
        assert [run.objective for run in same] == list(OBJECTIVES)
        assert all((run.lora_rank > 0) == lora and run.drafter.path == "o/start" for run in same)
        assert all(run.fit == same[0].fit and run.fit.steps == 30 for run in same)
    assert next(iter(rows)) == ablate_small_lm.START
    assert {runs[name].drafter.path for name in ("start", "scratch")} == {None}


def test_statistics_of_prompts_by_hand(tmp_path: Path) -> None:
    import ablate_small_lm

    lines = [
        {"id": "a", "arm": "vanilla", "tokens": [1] * 9, "accepted": [1, 5]},  # 8 tokens in 2 rounds
        {"id": "b", "arm": "vanilla", "tokens": [1] * 4, "accepted": [0, 0, 0]},
        {"id": "c", "arm": "vanilla", "tokens": [1], "accepted": []},  # ended with the prefill's token
        {"id": "a", "arm": "autoregressive", "tokens": [1] * 9, "accepted": [0] * 8},
    ]
    (tmp_path / "generations.jsonl").write_text("\n".join(map(json.dumps, lines)))
    before = ablate_small_lm.tau_per_prompt(tmp_path)
    assert before == {"a": 4.0, "b": 1.0}
    found = ablate_small_lm.mean_difference({"a": 5.0, "b": 3.0}, before)
    assert found == {"mean": pytest.approx(1.5), "ci95": pytest.approx([1.0, 2.0]), "higher": 2}
    assert ablate_small_lm.mean_difference(before, before) == {"mean": 0.0, "ci95": [0.0, 0.0], "higher": 0}


def test_a_target_larger_than_one_gpu_is_split_where_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a launcher with as many processes; early exits train on a few layers, in one."""
    import ablate_eesd

    lines: list[list[str]] = []
    monkeypatch.setattr("commands.subprocess.run", lambda line, check: lines.append(line[1:]))
    with pytest.raises(FileNotFoundError):  # nothing was run, so there is no report
        ablate_eesd.run_all("t", tmp_path, 10, 2, 4)
    by_script = {next(Path(word).name for word in line if word.endswith(".py")): line for line in lines}
    assert by_script.keys() == {"generate_responses.py", "eesd.py", "calibrate.py", "evaluate_checkpoint.py"}
    for script, line in by_script.items():
        split = script != "eesd.py"
        assert ("tensor_parallel=4" in line) == split
        assert ("--nproc_per_node=4" in line) == split
