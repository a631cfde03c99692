"""What the trainings refuse before a weight is read or anything is written. Settings: test_impossible_settings.py."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.base.errors import UserError
from outrider.base.run_dirs import LOCK_FILE
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.targets.settings import ReadingChanges
from outrider.draft_models.targets.tensor_files import TensorFiles
from outrider.train.calibrate import calibrate
from outrider.train.core.driver import training_run
from outrider.train.eagle3 import train_eagle3
from outrider.train.eesd import train_early_exit
from outrider.train.finetune_drafter import finetune_drafter
from outrider.train.settings.drafters import DrafterConfig
from tests.refusals import refusal
from tests.tiny import VOCABULARY, byte_tokenizer, save_target
from tests.train.jobs import calibrating, distilling, finetuning, heading, save_for_calibration, write_corpus

TARGET, OUT, NOWHERE = Path("target"), Path("out"), DataConfig(source="local", path="nowhere.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_models: Path) -> Path:
    """Targets, drafters and texts, right ones and others."""
    folder = save_for_calibration(tmp_path_factory.mktemp("refused"))
    write_corpus(folder)
    (folder / "columns.jsonl").write_text('{"body": "no such column"}\n')
    save_target(folder / "other", seed=1)
    save_target(folder / "short", max_position_embeddings=32)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
    save_target(folder / "rescaled", rope_parameters=rope)
    save_target(folder / "full", vocab_size=VOCABULARY - 1)
    (tokenizer := byte_tokenizer()).add_tokens(["<extra>"])
    tokenizer.save_pretrained(shutil.copytree(folder / "other", folder / "extra"))
    shutil.copytree(folder / "target", folder / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    for name in ("table", "small_lm"):
        (folder / name).symlink_to(tiny_models / name)
    return folder


def test_rows_that_processes_cannot_share_are_refused_before_data_is_read(tmp_path: Path) -> None:
    config = finetuning(tmp_path / "target", NOWHERE, tmp_path / "out")
    wrong = replace(config, fit=replace(config.fit, batch_rows=4, micro_batch_rows=3))
    with pytest.raises(UserError, match="micro_batch_rows=3: must divide"), training_run(wrong):
        pass


def data(**changes: Any) -> DataConfig:
    return replace(DataConfig(source="local", path="text.jsonl", layout="text", heldout_fraction=0.2), **changes)


Changes = dict[str, Any]
REFUSED: dict[Callable[[Any], Any], list[tuple[Changes, str]]] = {
    train_eagle3: [
        ({"taps": (3, 2, 1)}, r"taps=\(3, 2, 1\): expected boundaries in ascending order"),
        ({"taps": (1, 2, 9)}, r"taps=\[1, 2, 9\]: expected 0 to 4, the target's layers"),
        ({"taps": (1, 2)}, "dialect=specforge: has no word for taps"),
        ({"draft_steps": 47}, r"draft_steps=47: expected at most seq_len - 2 \(46\)"),
        ({"draft_vocabulary": 1000}, "draft_vocabulary=1000: expected at most vocabulary=260"),
        ({"seq_len": 300}, "seq_len=300: the target's context is 256"),
        ({"decode_tokens": 256}, "decode_tokens=256: expected less than the target's context of 256"),
        ({"step_decay": 1.5}, "step_decay=1.5: expected"),
        ({"keep": 0.5, "position_weights": "dpace"}, r"keep=0\.5: expected 1 with position_weights=dpace"),
        ({"data": data(heldout_fraction=0.0)}, r"data\.heldout_fraction=0"),
    ],
    train_early_exit: [
        ({"target": "nowhere"}, "no such directory"),
        ({"target": "bare"}, "expected a safetensors checkpoint"),
        ({"exit_layer": 4}, "exit_layer=4: expected 1 ≤ exit_layer < 4"),
        ({"seq_len": 999}, "seq_len=999: the target's context is 256"),
        ({"data": data(path="columns.jsonl")}, r"columns\.jsonl.*text"),  # more of the kind: tests/data_prep/text
        ({"out_dir": "/proc/eesd"}, "cannot be written"),
        ({"decode_prompts": 1, "decode_tokens": 256}, "decode_tokens=256: expected less"),
        ({"draft_vocabulary": 999, "data": NOWHERE}, "draft_vocabulary=999: the target has 260"),
    ],
    finetune_drafter: [
        ({"target": "nowhere"}, "^target=.*nowhere: no such directory"),
        ({"drafter": DrafterConfig(path="./nowhere")}, r"^drafter\.path=.*nowhere: no such directory"),
        ({"drafter": DrafterConfig(path="extra")}, "is not the target's"),
        ({"seq_len": 999}, "seq_len=999: the target's context is 256"),
        ({"decode_tokens": 256}, "decode_tokens=256: expected less"),
        ({"drafter": DrafterConfig(path="short")}, "seq_len=48: the drafter's context is 32"),
        ({"drafter": DrafterConfig(path="rescaled")}, "seq_len=48: the drafter's context is 32 "),
        ({"draft_vocabulary": 9000, "data": NOWHERE}, "draft_vocabulary=9000: the target has 260"),
        ({"target": "full", "parallel": 2, "data": NOWHERE}, "parallel=2: expected 0, as every token .* may be text"),
    ],
    calibrate: [
        ({"new_tokens": 256}, "new_tokens=256: expected less than the context of 256"),
        ({"checkpoint": "nowhere"}, "nowhere: no drafter there; expected .* eagle3 .*Hub: hf download"),
        ({"target": "other"}, "was trained for"),
        ({"checkpoint": "table"}, "ngrams has no hidden states"),
        ({"checkpoint": "small_lm"}, "target=null: expected the model .*small_lm"),
        ({"reading": ReadingChanges(norm_output=True)}, "reading.norm_output=true: expected nothing"),
        ({"data": data(heldout_fraction=1e-6)}, "no usable heldout record"),
    ],
}
SETTINGS: dict[Callable[[Any], Any], Callable[[], Any]] = {
    train_eagle3: lambda: heading(TARGET, data(), OUT),
    train_early_exit: lambda: distilling(TARGET, data(), OUT),
    finetune_drafter: lambda: finetuning(TARGET, data(), OUT),
    calibrate: lambda: calibrating(Path(), OUT),
}


@pytest.mark.parametrize(
    ("train", "changes", "words"),
    [pytest.param(train, *row, id=f"{train.__name__}-{row[1]}") for train, rows in REFUSED.items() for row in rows],
)
def test_what_cannot_be_is_refused_before_a_weight_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, train: Callable[[Any], Any], changes: Changes, words: str
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(TensorFiles, "read", None)
    refusal(words, lambda: train(replace(SETTINGS[train](), **changes)))
    assert {path.name for path in (folder / OUT).rglob("*")} <= {LOCK_FILE}
