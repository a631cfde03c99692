"""The record of a GPU: all parts at a tiny size, what a stop keeps, pieces of a file, and the prediction."""

import argparse
import json
import subprocess
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from outrider.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu_record() -> ModuleType:
    return import_module("gpu_record")


VERIFY = {str(n): {"of_width_1": cost, "seconds": 2.0 * cost} for n, cost in ((1, 1.0), (4, 1.5), (8, 2.0))}
SMALL = {"shape": "68m", "contexts": [{"verify": {"1": {"seconds": 0.2}}}]}
FLOORS = {"shapes": [{"shape": "7b", "contexts": [{"verify": VERIFY, "draft_step": {"share_of_step": 0.25}}]}, SMALL]}


def asked(work: Path, **changes: object) -> argparse.Namespace:
    given = {"target": None, "prompts": [], "drafters": Path("d"), "work": work, "rehearse": True, **changes}
    return argparse.Namespace(**given)


@pytest.mark.slow
def test_a_rehearsal_of_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_record: ModuleType) -> None:
    """Each leaves what it found, in the record as soon as it ends; what is done is not done again."""
    (tmp_path / "inflated").mkdir()
    (tmp_path / "inflated/left").write_text("by a run that was cut")
    monkeypatch.chdir(ROOT)
    found = gpu_record.record(asked(tmp_path))
    states = {name: part["state"] for name, part in found.items() if "state" in part}
    assert states == dict.fromkeys(("tests", "floors", "smollm2", "inflate", "inflated", "answers"), "done")
    assert found["inflate"]["found"]["first_line"].startswith("Inflated:")
    assert found["prediction"].keys() <= {"eesd_fixed", "ngrams", "prompt_lookup"}
    assert json.loads((tmp_path / gpu_record.RECORD).read_text()) == found
    monkeypatch.setattr(gpu_record, "run", lambda *_: pytest.fail("it is done already"))
    assert gpu_record.record(asked(tmp_path)) == found


def test_a_part_that_takes_too_long_is_cut_and_the_next_one_runs(tmp_path: Path, gpu_record: ModuleType) -> None:
    slow = gpu_record.Part("slow", 0.5, ["-c", "import time; print('began', flush=True); time.sleep(60)"])
    said = gpu_record.run(slow, tmp_path / "slow.log")
    assert (said["state"], said["said"]) == ("cut after 0 s", ["began"])
    wrong = gpu_record.run(gpu_record.Part("wrong", 60, ["-c", "raise SystemExit(3)"]), tmp_path / "wrong.log")
    assert wrong["state"] == "failed with status 3"


def test_only_what_did_not_end_well_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_record: ModuleType
) -> None:
    states, ran = iter(["done", "failed with status 1", "done"]), []

    def run(part: Any, log: Path) -> dict[str, object]:
        ran.append(part.name)
        return {"state": next(states), "seconds": 1.0, "found": None}

    monkeypatch.setattr(gpu_record, "run", run)
    monkeypatch.setattr(gpu_record, "parts", lambda _: [gpu_record.Part(n, 1.0, []) for n in ("floors", "inflated")])
    gpu_record.record(asked(tmp_path))
    gpu_record.record(asked(tmp_path))
    assert ran == ["floors", "inflated", "inflated"]


def test_a_prediction_is_tau_over_the_costs(gpu_record: ModuleType) -> None:
    floors = FLOORS
    arm = {"tau": 3.0, "drafted_tokens_per_round": 4.0, "speedup": {"median": 0.9}}
    arms = {"eesd_fixed": arm, "ngrams": {**arm, "drafted_tokens_per_round": 3.0}, "aded": {"tau": 1.0}, "gsd": arm}
    found = {"floors": {"found": floors}, "inflated": {"found": {"entries": {"bfloat16": {"arms": arms}}}}}
    assert gpu_record.predictions(found) == {
        "eesd_fixed": {"predicted": 3.0 / (2.0 + 4 * 0.25), "measured": 0.9},
        "ngrams": {"predicted": 3.0 / 1.5, "measured": 0.9},
    }


def test_a_table_of_predictions(tmp_path: Path, gpu_record: ModuleType) -> None:
    """A chain of an early exit, a tree of a small LM of three levels, and n-grams, whose steps cost nothing."""

    def one(method: str, source: str, kind: str, drafted: float) -> dict[str, object]:
        tree = {"kind": kind, "max_depth": 5, "widths": [4, 2, 2]}
        settings = {"source": source, "structure": tree, "stop": {"max_draft": 4}}
        return {"method": method, "settings": settings, "tau": 3.0, "drafted_tokens_per_round": drafted}

    made = [
        one("a", "early_exit", "chain", 4.0),
        one("b", "small_lm", "k_config", 7.0),
        one("c", "ngrams", "chain", 3.0),
    ]
    made.append(one("d", "small_lm", "opt_tree", 7.0))
    (tmp_path / "report.json").write_text(json.dumps({"reports": made}))
    (tmp_path / "floors.json").write_text(json.dumps(FLOORS))
    rows = gpu_record.predict(tmp_path / "report.json", tmp_path / "floors.json")[2:]
    costs = (2.0 + 4 * 0.25, 2.0 + 3 * 0.1, 1.5, 2.0 + 5 * 0.1)
    assert [row.split(" | ")[-1] for row in rows] == [f"{3.0 / cost:.2f}× |" for cost in costs]


def test_a_file_in_pieces_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_record: ModuleType) -> None:
    monkeypatch.setattr(gpu_record, "PIECE", 10)
    (tmp_path / "model.gguf").write_bytes(bytes(range(25)))
    pieces = gpu_record.split(tmp_path / "model.gguf", tmp_path / "pieces")
    assert [piece.stat().st_size for piece in pieces] == [10, 10, 5]
    gpu_record.join(tmp_path / "pieces/model.gguf")
    assert (tmp_path / "pieces/model.gguf").read_bytes() == bytes(range(25))


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_record: ModuleType) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="a GPU; or --rehearse"):
        gpu_record.record(asked(tmp_path, rehearse=False, target="x", prompts=["a=b"]))


def test_make_gpu_record_is_this_script() -> None:
    command = ["make", "-n", "gpu-record", "ARGS=--rehearse"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "benchmarks/gpu_record.py --rehearse" in done.stdout


def test_the_predictions_on_the_page_are_those_of_the_records(gpu_record: ModuleType) -> None:
    results = ROOT / "benchmarks/results"
    rows = gpu_record.predict(results / "tau_smollm2_cpu.json", results / "floor_cuda.json")
    assert "\n".join(rows) in (results / "gpu.md").read_text()
