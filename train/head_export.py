"""A finished EAGLE-3 head of any trainer, written in the dialect of another, with the commands that serve it."""

from pathlib import Path

import torch

from draft_models.card import write_card
from draft_models.eagle3.card import use_of
from draft_models.eagle3.checkpoint import make_head, open_head
from draft_models.eagle3.export import save_head
from draft_models.targets.architectures import read_config
from draft_models.targets.model_files import CONFIG_FILE
from outrider.errors import UserError, require
from outrider.files import require_writable
from outrider.processes import from_main, join_processes, only_run_of
from train.settings.eagle3 import ExportHeadConfig


def export_head(config: ExportHeadConfig) -> None:
    """Write the head in `config.head` to `config.out_dir`. Of the target config.json alone is read.

    Raises `UserError` where it is no head for this target, where the dialect has no word for what it is, and where
    `config.out_dir` holds a model already. Of a launcher, one process does it.
    """
    state, out_dir = join_processes(), require_writable(config.out_dir)
    with only_run_of(state, out_dir, "a head"):
        from_main(state, lambda: _export(config, out_dir))


def _export(config: ExportHeadConfig, out_dir: Path) -> None:
    another = out_dir.resolve() != Path(config.head).resolve()
    require(another, "out_dir", config.out_dir, f"another place than head={config.head}")
    if not config.resume and (out_dir / CONFIG_FILE).exists():
        raise UserError(f"out_dir={out_dir}: holds a model already; resume=true replaces it")
    target = read_config(config.target, config.revision)
    stored = open_head(config.head, target, changes=config.reading)
    dtype = None if config.dtype is None else getattr(torch, config.dtype)
    reading = stored.reading
    head = make_head(reading, stored.weights(dtype), config.head)
    made_here = stored.made_here and not config.reading.stated()
    save_head(out_dir, head, config.dialect, target, config.target, made_here=made_here)
    facts: dict[str, object] = {
        "head": config.head,
        "written by": stored.dialect,
        "written for readers of": config.dialect,
    }
    facts |= {"taps": list(reading.taps), "tokens": f"{reading.draft_vocabulary} of {reading.vocabulary}"}
    write_card(out_dir, use_of(config.dialect, reading.fc_bias), config.target, facts)
    size = sum(file.stat().st_size for file in out_dir.glob("*.safetensors")) / 1e6
    said = str(head.dtype).removeprefix("torch.")
    print(f"export_eagle3 out_dir={out_dir} dialect={config.dialect} dtype={said} megabytes={size:.2f}", flush=True)
