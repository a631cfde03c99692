"""Drafters that are handed on: they load, they are their target's and no other's, and they are small."""

import hashlib
import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.draft_models.calibration import META_FILE as CALIBRATION_FILE
from outrider.draft_models.early_exit.checkpoint import WEIGHTS_FILE, read_meta
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.draft_models.small_lm.model import TRAINING_FILE
from outrider.draft_models.targets.open_target import load_tokenizer, open_target
from outrider.draft_models.targets.settings import EARLY_EXIT, SMALL_LM, TABLE, TARGET
from outrider.draft_models.tiny.models import LLAMA, save_tiny_model, save_tiny_models, shrink_config
from outrider.inference.loading.drafters import load_drafters
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kinds import KINDS
from outrider.inference.settings.method import MethodConfig, StopConfig
from tests.refusals import refusal

ROOT = Path(__file__).parents[2]
METHODS = {
    "calibrated": MethodConfig(stop=StopConfig(rule="calibrated")),
    "small": MethodConfig(source="small_lm", stop=StopConfig(rule="calibrated")),
    "table": MethodConfig(source="ngrams"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline's directory with a target and, in float32, a drafter of each kind."""
    folder = tmp_path_factory.mktemp("run")
    save_tiny_models(folder)
    for made, name in ((EARLY_EXIT, "eesd"), (SMALL_LM, "small_lm"), (TABLE, "trigrams")):
        (folder / made).rename(folder / name)
    (folder / "eesd/README.md").write_text("evaluate-checkpoint checkpoint=eesd\n")
    (folder / "eesd/checkpoint-3").mkdir()
    (folder / "eesd/checkpoint-3/model.safetensors").write_bytes(b"of no use")
    (folder / "small_lm" / TRAINING_FILE).write_text('{"training_seconds": 200.4, "target": "/home/me/model.gguf"}')
    return folder


def ship(run: Path, out_dir: Path, target: str | None = None) -> None:
    from ship_drafters import ship

    ship(run, out_dir, target=target, dtype=torch.bfloat16)


def load(folder: Path, target: Path, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    checkpoint, small_lm, table = (str(folder / name) for name in ("eesd", "small_lm", "trigrams"))
    own = EvaluateConfig(checkpoint=checkpoint, small_lm=small_lm, table=table, target=str(target), methods=METHODS)
    seconds = {kind: record.seconds for kind, record in own.training_records().items() if record.seconds}
    assert seconds == {"small_lm": 200.4}
    return dict(load_drafters(own, open_target(str(target)), dtype=dtype, device="cpu"))


def test_what_is_shipped_drafts_for_its_target_and_for_no_other(run: Path, tmp_path: Path) -> None:
    out_dir = tmp_path / "out"
    ship(run, out_dir)
    before, shipped = load(run, run / TARGET, torch.bfloat16), load(out_dir, run / TARGET, torch.bfloat16)
    for kind, part in product(("early_exit", "small_lm"), ("drafter", "head")):
        got, expected = (getattr(one[kind], part).state_dict() for one in (shipped, before))
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    text = "def f():\n    return 'ü'"
    assert load_tokenizer(str(out_dir / "small_lm"))(text) == load_tokenizer(str(run / "small_lm"))(text)
    for order, level in TrigramTable.open(out_dir / "trigrams").levels.items():
        assert level.counts.tolist() == before["ngrams"].levels[order].counts.tolist()
    meta = read_meta(out_dir / "eesd")
    assert (meta.dtype, meta.fingerprint) == ("bfloat16", read_meta(run / "eesd").fingerprint)
    assert (out_dir / "eesd/README.md").read_text() == "evaluate-checkpoint checkpoint=eesd\n"
    files = [load_file(out_dir / file) for file in (f"eesd/{WEIGHTS_FILE}", "small_lm/model.safetensors")]
    assert {tensor.dtype for file in files for tensor in file.values()} == {torch.bfloat16}
    assert '"model.gguf"' in (out_dir / "small_lm" / TRAINING_FILE).read_text()  # no path of a machine
    assert not (out_dir / "eesd/checkpoint-3").exists()

    save_tiny_model(tmp_path / "other", shrink_config(LLAMA), seed=7)
    refusal(r"was trained for another target .*Give the target it was trained for", load, out_dir, tmp_path / "other")
    shutil.copy(run / "eesd" / CALIBRATION_FILE, out_dir / "eesd" / CALIBRATION_FILE)  # of the weights in float32
    refusal("its calibration head belongs to an earlier training", load, out_dir, run / TARGET)


def test_what_is_there_already_nothing_and_damage_are_refused(run: Path, tmp_path: Path) -> None:
    refusal("holds drafters already; remove them", ship, run, run)
    refusal("no drafters there; expected a pipeline's directory with eesd, small_lm", ship, tmp_path, tmp_path / "none")
    damaged = shutil.copytree(run, tmp_path / "damaged")
    (damaged / "eesd" / WEIGHTS_FILE).write_bytes(b"")
    refusal("truncated or altered", ship, damaged, tmp_path / "out")


@pytest.mark.parametrize("folder", sorted((ROOT / "drafters").glob("[!.]*")), ids=lambda path: path.name)
def test_the_drafters_of_the_repository_are_whole_and_small(folder: Path) -> None:
    kinds = {"eesd", "small_lm", "trigrams"} if folder.name == "smollm2" else {"small_lm"}
    assert {path.name: (path / "README.md").exists() for path in folder.glob("[!.]*")} == dict.fromkeys(kinds, True)
    assert sum(path.stat().st_size for path in folder.rglob("*")) <= (20e6 if "eesd" in kinds else 25e6)
    assert '"/' not in (folder / "small_lm" / TRAINING_FILE).read_text()  # paths of a machine
    if "eesd" in kinds:
        meta = read_meta(folder / "eesd")
        assert hashlib.sha256((folder / "eesd" / WEIGHTS_FILE).read_bytes()).hexdigest() == meta.weights_sha256
        assert json.loads((folder / "eesd" / CALIBRATION_FILE).read_text())["drafter_sha256"] == meta.weights_sha256
        assert (meta.dtype, bool(meta.fingerprint.tensors)) == ("bfloat16", True)
    assert {tensor.dtype for tensor in load_file(folder / "small_lm/model.safetensors").values()} == {torch.bfloat16}
    KINDS["small_lm"].load_plugin().draft_vocabulary(str(folder / "small_lm"))  # raises if file and config disagree
    assert "trigrams" not in kinds or sorted(TrigramTable.open(folder / "trigrams").levels) == [2, 3, 4]
