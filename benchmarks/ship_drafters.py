"""Make a pipeline's drafters small enough to distribute: in 16 bits and without files that only training needs.

    python benchmarks/ship_drafters.py runs/smollm2 drafters/smollm2 --target HuggingFaceTB/SmolLM2-135M-Instruct

eesd/       an early-exit drafter with its card and, if it has one, its calibration head
small_lm/   a small LM with its card, tokenizer and record of training, its draft vocabulary and calibration head
trigrams/   an n-gram table
"""

import argparse
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load, save
from transformers.utils import logging as transformers_logging

from outrider.base.errors import UserError
from outrider.base.files import is_local, read_json, read_mapping, require_writable
from outrider.commands.ending import report_errors
from outrider.draft_models.calibration import META_FILE as CALIBRATION_FILE
from outrider.draft_models.calibration import drafter_digest, load_calibration, save_calibration
from outrider.draft_models.calibration_head import CalibrationHead
from outrider.draft_models.card import CARD_FILE, TITLE
from outrider.draft_models.draft_vocabulary import read_draft_vocabulary, save_tokens
from outrider.draft_models.early_exit.checkpoint import WEIGHTS_FILE, read_meta, write_meta
from outrider.draft_models.formats.save_model import save_parts
from outrider.draft_models.formats.stored_tensors import read_with_digest
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.draft_models.small_lm.model import TRAINING_FILE
from outrider.draft_models.targets.model_files import load_causal_lm
from outrider.draft_models.targets.open_target import load_tokenizer, read_config
from outrider.draft_models.targets.settings import HEAD_FOLDER
from outrider.draft_models.targets.tensor_files import open_tensors

TOKENIZER_FILE = "tokenizer.json"
AGAIN = "train the drafter again"
ELSEWHERE = "TARGET"  # in commands: a target that was a path where the drafter was trained


def ship(run: Path, out_dir: Path, *, target: str | None, dtype: torch.dtype) -> str:
    """Write the drafters in `run` to folders of the same names in `out_dir`; returns their sizes.

    Raises `UserError` if there are none, if one is damaged, and if `out_dir` holds one of them.
    """
    found = [name for name in SHIPPED if (run / name).is_dir()]
    if not found:
        raise UserError(f"{run}: no drafters there; expected a pipeline's directory with {', '.join(SHIPPED)}")
    if any((out_dir / name).exists() for name in found):
        raise UserError(f"{out_dir}: holds drafters already; remove them, or give another directory")
    for name in found:
        SHIPPED[name](run / name, out_dir / name, dtype)
        ship_card(run / name, out_dir / name, target)
    return " ".join(f"{name}={megabytes(out_dir / name):.2f}" for name in found)


def ship_early_exit(source: Path, to: Path, dtype: torch.dtype) -> None:
    """Write the drafter in `source` in `dtype`; a calibration head stays float32 and is bound to the new weights."""
    meta = read_meta(source)
    blob = read_with_digest(source / WEIGHTS_FILE, meta.weights_sha256, AGAIN)
    held = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in load(blob).items()}
    blob = save(held, metadata={"format": "pt"})
    written = dataclasses.replace(
        meta, dtype=str(dtype).removeprefix("torch."), weights_sha256=hashlib.sha256(blob).hexdigest()
    )
    (require_writable(to) / WEIGHTS_FILE).write_bytes(blob)
    write_meta(to, written)
    if (source / CALIBRATION_FILE).exists():
        ship_head(load_calibration(source, meta.weights_sha256), source, to, written.weights_sha256)


def ship_small_lm(source: Path, to: Path, dtype: torch.dtype) -> None:
    """Write the causal LM in `source` in `dtype`, with its tokenizer and its record of training.

    A calibration head is included, as for an early exit.
    """
    model = load_causal_lm(str(source), None, role="small_lm", dtype=dtype)
    save_parts(to, model, load_tokenizer(str(source), None, role="small_lm"))
    own = read_draft_vocabulary(str(source), None, read_config(str(source), role="small_lm"))
    if own is not None:
        save_tokens(to, own)
    file = to / TOKENIZER_FILE
    if file.exists():  # a third of it is white space
        plain = read_json(file, "tokenizer", AGAIN)
        file.write_text(json.dumps(plain, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
    if (source / TRAINING_FILE).exists():
        record = (source / TRAINING_FILE).read_text("utf-8")
        (to / TRAINING_FILE).write_text(re.sub(r'"/[^"]*/', '"', record), "utf-8")  # no paths of this machine
    if (source / HEAD_FOLDER / CALIBRATION_FILE).exists():
        before, after = (drafter_digest(open_tensors(str(folder))) for folder in (source, to))
        head = load_calibration(source, before, folder=HEAD_FOLDER)
        ship_head(head, source / HEAD_FOLDER, require_writable(to / HEAD_FOLDER), after)


def ship_head(head: CalibrationHead, source: Path, to: Path, drafter_sha256: str) -> None:
    """Write the calibration head in `source` with its metadata, bound to other weights."""
    facts = read_mapping(source / CALIBRATION_FILE, "description of a calibration head", AGAIN)
    save_calibration(to, head, drafter_sha256, facts)


SHIPPED: dict[str, Callable[[Path, Path, torch.dtype], None]] = {
    "eesd": ship_early_exit,
    "small_lm": ship_small_lm,
    "trigrams": lambda source, to, _: TrigramTable.open(source).save(to),
}


def ship_card(source: Path, to: Path, target: str | None) -> None:
    """Write the card of the drafter in `source`; it names `target` if given."""
    if (source / CARD_FILE).exists():
        (to / CARD_FILE).write_text(portable((source / CARD_FILE).read_text("utf-8", "replace"), target), "utf-8")


def portable(card: str, target: str | None) -> str:
    """A `card` without paths of this machine. target: its name elsewhere; None: that of the card, if it is no path."""
    title = re.search(rf"^{TITLE}(.+)$", card, re.MULTILINE)
    source = re.search(r"^- target: (.+)$", card, re.MULTILINE) or title
    path = re.search(r"^hf upload USER/NAME (.+?) --exclude", card, re.MULTILINE)
    if path is not None:
        card = card.replace(path[1], Path(path[1]).name)
    if title is None or source is None or (target is None and not is_local(source[1])):
        return card
    after = (part.replace(source[1], target or ELSEWHERE) for part in card.split(title[0]))
    return f"{TITLE}{target or Path(title[1]).name}".join(after)


def megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a pipeline's directory, where the drafters are now")
    parser.add_argument("out_dir", type=Path, help="where they go")
    parser.add_argument("--target", help="name of the target for the commands on the cards, where others have it")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "float16", "bfloat16"))
    options = parser.parse_args()
    transformers_logging.disable_progress_bar()
    with report_errors():
        said = ship(options.run, options.out_dir, target=options.target, dtype=getattr(torch, options.dtype))
        print(f"{options.out_dir} {options.dtype} megabytes: {said}")


if __name__ == "__main__":
    main()
