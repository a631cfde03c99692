"""Drafters to distribute: the products of a pipeline, in 16 bits and without files that only training needs.

eesd/       an early-exit drafter with its card and, if it has one, its calibration head
small_lm/   a small LM with its card, tokenizer, record of training and, if it has them, its draft vocabulary and its
            calibration head
trigrams/   an n-gram table
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from draft_models.calibration.checkpoint import META_FILE as CALIBRATION_FILE
from draft_models.calibration.checkpoint import drafter_digest, load_calibration, save_calibration
from draft_models.calibration.head import CalibrationHead
from draft_models.card import CARD_FILE, ELSEWHERE, TITLE
from draft_models.draft_vocabulary import read_draft_vocabulary, save_tokens
from draft_models.early_exit.checkpoint import read_meta, recast
from draft_models.ngrams.table import TrigramTable
from draft_models.small_lm.model import TRAINING_FILE
from draft_models.targets.architectures import read_config
from draft_models.targets.model_files import load_causal_lm
from draft_models.targets.open_target import load_tokenizer
from draft_models.targets.settings import HEAD_FOLDER
from draft_models.targets.tensor_files import open_tensors
from outrider.errors import UserError
from outrider.files import read_json, read_mapping, require_writable
from outrider.processes import from_main, join_processes, only_run_of
from train.core import run_dir
from train.settings.drafters import ShipConfig

TOKENIZER_FILE = "tokenizer.json"
_AGAIN = "train the drafter again"


def ship_drafters(config: ShipConfig) -> None:
    """Write the drafters in the folders of the pipeline `config.run` to folders of the same names in `config.out_dir`.

    Raises `UserError` if there are none, if one is damaged, and if their total size exceeds `config.max_mb`; `out_dir`
    then stays unchanged. Under a launcher, only the main process writes.
    """
    transformers_logging.disable_progress_bar()
    state, out_dir = join_processes(), require_writable(config.out_dir)
    with only_run_of(state, out_dir, "drafters"):
        from_main(state, lambda: _ship(config, out_dir))


def _ship(config: ShipConfig, out_dir: Path) -> None:
    run, staging = Path(config.run), out_dir / run_dir.STAGING
    if run.resolve() == out_dir.resolve():
        raise UserError(f"out_dir={out_dir}: is run= itself, whose trainings would be replaced; give another out_dir")
    found = [name for name in SHIPPED if (run / name).is_dir()]
    left = [name for name in ("eagle3",) if (run / name).is_dir()]
    if not found:
        raise UserError(f"run={run}: no drafters there; expected a pipeline's directory with {', '.join(SHIPPED)}")
    if not config.resume and any((out_dir / name).exists() for name in found):
        raise UserError(f"out_dir={out_dir}: holds drafters already; resume=true replaces them")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        for name in found:
            SHIPPED[name](run / name, staging / name, getattr(torch, config.dtype))
            _ship_card(run / name, staging / name, config.target)
        sizes = {name: _megabytes(staging / name) for name in found}
        said = " ".join(f"{name}={size:.2f}" for name, size in sizes.items())
        if sum(sizes.values()) > config.max_mb:
            raise UserError(
                f"max_mb={config.max_mb:g}: the drafters are {sum(sizes.values()):.2f} MB ({said}); train a smaller "
                "small LM, count with a larger min_count= or fewer orders=, or allow more"
            )
        for name in found:
            shutil.rmtree(out_dir / name, ignore_errors=True)
            (staging / name).rename(out_dir / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    print(f"ship_drafters out_dir={out_dir} dtype={config.dtype} megabytes: {said}", flush=True)
    for name in left:  # already in 16 bits and self-contained
        print(f"ship_drafters left={run / name}: a head is handed on as it is, or by export", flush=True)


def ship_early_exit(source: Path, to: Path, dtype: torch.dtype) -> None:
    """Write the drafter in `source` in `dtype`; a calibration head stays float32 and is bound to the new weights."""
    meta = recast(source, to, dtype)
    if (source / CALIBRATION_FILE).exists():
        ship_head(load_calibration(source, read_meta(source).weights_sha256), source, to, meta.weights_sha256)


def ship_small_lm(source: Path, to: Path, dtype: torch.dtype) -> None:
    """Write the causal LM in `source` in `dtype`, with its tokenizer and its record of training.

    A calibration head is included, as for an early exit.
    """
    load_causal_lm(str(source), None, role="small_lm", dtype=dtype).save_pretrained(to)
    load_tokenizer(str(source), None, role="small_lm").save_pretrained(to)
    own = read_draft_vocabulary(str(source), None, read_config(str(source), role="small_lm"))
    if own is not None:
        save_tokens(to, own)
    file = to / TOKENIZER_FILE
    if file.exists():  # a third of it is white space
        plain = read_json(file, "tokenizer", _AGAIN)
        file.write_text(json.dumps(plain, ensure_ascii=False, separators=(",", ":")))
    if (source / TRAINING_FILE).exists():
        shutil.copyfile(source / TRAINING_FILE, to / TRAINING_FILE)
    if (source / HEAD_FOLDER / CALIBRATION_FILE).exists():
        before, after = (drafter_digest(open_tensors(str(folder))) for folder in (source, to))
        head = load_calibration(source, before, folder=HEAD_FOLDER)
        ship_head(head, source / HEAD_FOLDER, require_writable(to / HEAD_FOLDER), after)


def ship_head(head: CalibrationHead, source: Path, to: Path, drafter_sha256: str) -> None:
    """Write the calibration head in `source` with its metadata, bound to other weights."""
    facts = read_mapping(source / CALIBRATION_FILE, "description of a calibration head", _AGAIN)
    save_calibration(to, head, drafter_sha256, facts)


def ship_table(source: Path, to: Path, dtype: torch.dtype) -> None:
    """Write the n-gram table in `source`; `dtype` is not used."""
    TrigramTable.open(source).save(to)


SHIPPED: dict[str, Callable[[Path, Path, torch.dtype], None]] = {
    "eesd": ship_early_exit,
    "small_lm": ship_small_lm,
    "trigrams": ship_table,
}


def _ship_card(source: Path, to: Path, target: str | None) -> None:
    """Write the card of the drafter in `source`; it names `target` if given."""
    if (source / CARD_FILE).exists():
        text = (source / CARD_FILE).read_text(errors="replace")
        if target is not None:
            text = re.sub(rf"^{TITLE}.+$", lambda _: TITLE + target, text, flags=re.MULTILINE).replace(
                ELSEWHERE, target
            )
        (to / CARD_FILE).write_text(text)


def _megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
