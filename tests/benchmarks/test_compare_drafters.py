"""The comparison of kinds trains all of them on the same data for the same minutes, and measures them in pairs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from draft_models.eagle3.export import save_head
from draft_models.target.architectures import load_config
from draft_models.tiny_models import tiny_head
from outrider.errors import UserError
from tests.tiny import save_target
from tests.train.jobs import write_corpus


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What was run, by the name of its facts, in this process; the EAGLE-3 head is not trained but made."""
    import compare_drafters
    import measured_command

    seen: dict[str, list[str]] = {}

    def run(facts: Path, script: str, *arguments: str, environment: Any = None) -> None:
        assert facts.stem not in seen
        seen[facts.stem] = list(arguments)
        if script.endswith("train/eagle3.py"):
            told = dict(argument.split("=", 1) for argument in arguments)
            folder, config = Path(told["out_dir"]), load_config(told["target"])
            save_head(folder, tiny_head(config), "specforge", config, told["target"])
            known = {"steps": 3, "fit": {"batch_rows": 2}, "settings": {"seq_len": 48}}
            (folder / "eagle3.json").write_text(json.dumps(known))
            (folder / "steps.json").write_text(json.dumps({"minutes": 1, "seconds_per_step": 4.0, "steps": 3}))
            facts.write_text(json.dumps({"seconds": 1.0, "host_bytes": 1, "device_bytes": None}))
        else:
            measured_command.main(str(facts), script, *arguments)

    monkeypatch.setattr(compare_drafters, "run_measured", run)
    monkeypatch.setattr(sys, "argv", sys.argv)
    return seen


@pytest.mark.slow
@pytest.mark.thorough
def test_every_kind_is_trained_and_measured(tmp_path: Path, commands: dict[str, list[str]]) -> None:
    import compare_drafters

    target, data = save_target(tmp_path / "target", kv_heads=2), write_corpus(tmp_path)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": f"line {i}: the "}) + "\n" for i in range(2)))
    work, out = tmp_path / "work", tmp_path / "out.json"
    told = ["data=local", f"data.path={data.path[0]}", "data.layout=text", "data.heldout_fraction=0.2",
            f"data.cache_dir={data.cache_dir}"]  # fmt: skip
    arguments = ["max_new_tokens=8", "--target", str(target), "--train-minutes", "0.0005", "--data", *told,
                 "--training", "seq_len=48", "fit.batch_rows=2", "fit.precision=fp32",
                 "--eesd", "frozen_dtype=float32", "exit_layer=2", "--small-lm", "drafter=tiny", "drafter.hidden=32",
                 "decode_prompts=1", "decode_tokens=4", "--ngrams", "min_count=1", "workers=1", "--draft-tokens", "3",
                 "--tree-nodes", "9", "--tree-depth", "4", "--tree-width", "2", "--prompts", f"a={tmp_path}/a.jsonl",
                 "--device", "cpu", "--dtype", "float32", "--work", str(work), "--out", str(out)]  # fmt: skip
    compare_drafters.main([*arguments, "--train"])
    assert list(commands) == ["eagle3", "eesd", "small_lm", "ngrams"]
    for name, given in commands.items():
        assert set(told) <= set(given), name
        assert ("minutes=0.0005" in given) == (name != "ngrams")
    assert not out.exists()
    compare_drafters.main([*arguments, "--train", "--measure"])  # what is trained already is not trained again
    found = json.loads(out.read_text())
    tokens = {"eagle3": 3 * 2 * 48}
    for name in ("eesd", "small_lm"):
        tokens[name] = json.loads((work / name / "steps.json").read_text())["steps"] * 2 * 48
    for name, row in found["drafters"].items():
        known = row["trained"]
        assert known["tokens"] == tokens.get(name, known["tokens"]) > 0
        assert (known["parameters"] is None) == (name == "ngrams")
        assert known["command"]["seconds"] > 0
        for shape, most in (("chain", 3), ("tree", 9)):
            assert row[shape]["identical"] == row[shape]["prompts"] == found["prompts"] == 2
            assert 1 <= row[shape]["tau"] <= 1 + most
            assert set(row["over_others"][shape]) == set(found["drafters"]) - {name}
            assert row["memory"][shape]["host_bytes"] > 0
        pair = row["over_others"]["chain"]
        assert all(ratio["ci95"][0] <= ratio["median"] <= ratio["ci95"][1] for ratio in pair.values())
        assert row["agreement_by_position"][0]["position"] == 1
    small = json.loads((work / "small_lm/config.json").read_text())
    assert small["hidden_size"] == 32
    assert found["methods"]["ngrams chain"]["ngrams"]["nodes"] == 3
    assert found["machine"]["cores"] > 0


def test_what_two_attempts_took_adds_up() -> None:
    from measured_command import joined

    first = {"seconds": 2.0, "host_bytes": 7, "device_bytes": None}
    assert joined(first, {"seconds": 1.0, "host_bytes": 5, "device_bytes": 3}) == {
        "seconds": 3.0, "host_bytes": 7, "device_bytes": 3,
    }  # fmt: skip


def test_what_would_do_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import compare_drafters

    start = ["--target", "t", "--train-minutes", "1", "--data", "data=responses", "--work", str(tmp_path / "w"),
             "--out", str(tmp_path / "o.json")]  # fmt: skip
    for given, said in (
        ([], "expected --train, --measure or both"),
        (["device=cpu", "--train"], "device=cpu: not an option here"),
        (["--measure"], "prompts=None: expected NAME=FILE with --measure"),
        (["--measure", "--prompts", "a=f"], "no finished drafter there; train it first"),
    ):
        with pytest.raises(SystemExit):
            compare_drafters.main([*given, *start])
        assert said in capsys.readouterr().err


def test_a_command_that_fails_says_so_itself(tmp_path: Path) -> None:
    from measured_command import run_measured

    (tmp_path / "fails.py").write_text("import sys\nsys.exit(3)\n")
    for seconds in (0.0, 1e-6):  # what a failed attempt took counts
        with pytest.raises(UserError, match=r"fails.py: ended with status 3"):
            run_measured(tmp_path / "facts.json", str(tmp_path / "fails.py"))
        facts = json.loads((tmp_path / "facts.json").read_text())
        assert facts["seconds"] > seconds
        assert facts["host_bytes"] > 1e6
