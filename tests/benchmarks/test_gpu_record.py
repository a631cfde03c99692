"""The record of a GPU: all parts at a tiny size, and what a stop keeps."""

import argparse
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def asked(work: Path, **changes: object) -> argparse.Namespace:
    given = {"target": None, "prompts": [], "drafters": Path("d"), "work": work, "rehearse": True, **changes}
    return argparse.Namespace(**given)


@pytest.mark.thorough
def test_a_rehearsal_of_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each leaves what it found, in the record as soon as it ends; what is done is not done again."""
    import gpu_record

    monkeypatch.chdir(ROOT)
    found = gpu_record.record(asked(tmp_path))
    states = {name: part["state"] for name, part in found.items() if "state" in part}
    assert states == dict.fromkeys(("tests", "smollm2", "answers"), "done")
    assert json.loads((tmp_path / gpu_record.RECORD).read_text()) == found
    monkeypatch.setattr(gpu_record, "run", lambda *_: pytest.fail("it is done already"))
    assert gpu_record.record(asked(tmp_path)) == found


def test_a_part_that_takes_too_long_is_cut_and_the_next_one_runs(tmp_path: Path) -> None:
    import gpu_record

    slow = gpu_record.Part("slow", 0.5, ["-c", "import time; print('began', flush=True); time.sleep(60)"])
    said = gpu_record.run(slow, tmp_path / "slow.log")
    assert (said["state"], said["said"]) == ("cut after 0 s", ["began"])
    wrong = gpu_record.run(gpu_record.Part("wrong", 60, ["-c", "raise SystemExit(3)"]), tmp_path / "wrong.log")
    assert wrong["state"] == "failed with status 3"
