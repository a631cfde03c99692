"""A finished drafter in a format that serving engines load, with the commands that serve it."""

from collections.abc import Callable
from pathlib import Path

import torch

from data_prep.formats.original import CONFIG_FILE
from draft_models.card import CARD_FILE, write_card
from draft_models.draft_vocabulary import read_draft_vocabulary
from draft_models.eagle3.card import use_of
from draft_models.eagle3.checkpoint import make_head, open_head
from draft_models.eagle3.export import save_head
from draft_models.early_exit.checkpoint import from_pretrained, open_target_of
from draft_models.early_exit.export import USE, as_causal_lm
from draft_models.ngrams.table import TrigramTable
from draft_models.small_lm.model import USE as USE_OF_SMALL_LM
from draft_models.small_lm.model import load_whole_lm
from draft_models.targets.architectures import read_config
from draft_models.targets.open_target import load_tokenizer, open_target, stored_dtype
from inference.drafters.ngram.ngrams import open_table
from inference.serving.page import serving_page
from inference.serving.proposer import TABLE_VARIABLE, NgramProposer
from inference.settings.kinds import kind_in
from outrider.errors import UserError, require
from outrider.files import require_writable, write_atomically
from outrider.processes import from_main, join_processes, only_run_of
from train.parts.export import export
from train.settings.export import ExportConfig


def export_drafter(config: ExportConfig) -> None:
    """Write the drafter in `config.checkpoint` to `config.out_dir`. Of a launcher, one process does it.

    Raises `UserError` where it is of a kind that engines load as it is or not at all, where it does not fit the target,
    where a dialect has no word for what it is, and where `config.out_dir` holds a model already.
    """
    state, out_dir = join_processes(), require_writable(config.out_dir)
    with only_run_of(state, out_dir, "a drafter"):
        from_main(state, lambda: _export(config, out_dir))


def _export(config: ExportConfig, out_dir: Path) -> None:
    another = out_dir.resolve() != Path(config.checkpoint).resolve()
    require(another, "out_dir", config.out_dir, f"another place than checkpoint={config.checkpoint}")
    kind = kind_in(config.checkpoint)
    name = "eagle3" if kind is None else kind.name
    if not config.resume and (out_dir / (CARD_FILE if name == "ngrams" else CONFIG_FILE)).exists():
        raise UserError(f"out_dir={out_dir}: holds a model already; resume=true replaces it")
    if name not in _KINDS:
        raise UserError(f"checkpoint={config.checkpoint}: nothing loads a {name}")
    write, options = _KINDS[name]
    _require_read(config, name, options)
    said = write(config, out_dir)
    size = sum(file.stat().st_size for file in out_dir.glob("*.safetensors")) / 1e6
    print(f"export out_dir={out_dir} {said}" + (f" megabytes={size:.2f}" if size else ""), flush=True)


def _require_read(config: ExportConfig, kind: str, options: tuple[str, ...]) -> None:
    """Raise `UserError` for an option that another kind of drafter reads, and this one does not."""
    plain, unread = ExportConfig(checkpoint=config.checkpoint), {"reading", "dialect", "dtype"} - {*options}
    if kind == "ngrams" and config.target is None:
        unread.add("revision")  # of no target
    for option in sorted(unread):
        given = getattr(config, option)
        if given != getattr(plain, option):
            said = str(given) if option == "reading" else f"{option}={given}"
            raise UserError(f"{said}: {config.checkpoint} holds {kind}, which does not read it; leave it out")


def _export_early_exit(config: ExportConfig, out_dir: Path) -> str:
    target = open_target_of(config.checkpoint, config.target, config.revision)
    dtype = stored_dtype(target.config) if config.dtype is None else getattr(torch, config.dtype)
    drafter = from_pretrained(config.checkpoint, target.config, target.fingerprint, dtype=dtype)
    model = as_causal_lm(drafter, target, dtype)
    export(model, target.tokenizer, out_dir)
    layers = f"{model.config.num_hidden_layers} of {target.config.num_hidden_layers}"
    write_card(out_dir, USE, target.source, {"early exit": config.checkpoint, "layers": layers})
    return f"kind=early_exit layers={model.config.num_hidden_layers} dtype={str(dtype).removeprefix('torch.')}"


def _export_small_lm(config: ExportConfig, out_dir: Path) -> str:
    """One over some of the tokens, as one over all; every other is what engines load already."""
    own = read_draft_vocabulary(config.checkpoint, None, read_config(config.checkpoint, role="small_lm"))
    if own is None:
        said = "a small LM is an ordinary causal LM, which engines load as it is; its README.md has their commands"
        raise UserError(f"checkpoint={config.checkpoint}: {said}")
    tokenizer = load_tokenizer(config.checkpoint, None, role="small_lm")
    dtype = "auto" if config.dtype is None else getattr(torch, config.dtype)
    model = load_whole_lm(config.checkpoint, tokenizer, dtype)
    export(model, tokenizer, out_dir)
    facts = {"small LM": config.checkpoint, "drafts": f"{len(own.tokens)} of {own.vocabulary} tokens"}
    write_card(out_dir, USE_OF_SMALL_LM, config.target or "MODEL", facts)
    return f"kind=small_lm tokens={len(own.tokens)} dtype={str(model.dtype).removeprefix('torch.')}"


def _export_table(config: ExportConfig, out_dir: Path) -> str:
    """Only the page: an engine maps the table from where it lies."""
    if config.target is None:
        TrigramTable.open(config.checkpoint)
    else:
        target = open_target(config.target, config.revision, by_layers=False)
        open_table(config.checkpoint, target.vocabulary_digest, target.vocabulary_size)
    table, model = Path(config.checkpoint).resolve(), config.target or "MODEL"
    page = serving_page(NgramProposer, TABLE_VARIABLE, table, model)
    write_atomically(out_dir / CARD_FILE, page.encode())
    return f"kind=ngrams page={CARD_FILE}"


def _export_head(config: ExportConfig, out_dir: Path) -> str:
    if config.target is None:
        raise UserError("target=None: expected the model that the EAGLE-3 head was trained for")
    target = read_config(config.target, config.revision)
    stored = open_head(config.checkpoint, target, changes=config.reading)
    dtype = None if config.dtype is None else getattr(torch, config.dtype)
    reading = stored.reading
    head = make_head(reading, stored.weights(dtype), config.checkpoint)
    made_here = stored.made_here and not config.reading.stated()
    save_head(out_dir, head, config.dialect, target, config.target, made_here=made_here)
    facts: dict[str, object] = {
        "head": config.checkpoint,
        "written by": stored.dialect,
        "written for readers of": config.dialect,
    }
    facts |= {"taps": list(reading.taps), "tokens": f"{reading.draft_vocabulary} of {reading.vocabulary}"}
    write_card(out_dir, use_of(config.dialect, reading.fc_bias), config.target, facts)
    return f"kind=eagle3 dialect={config.dialect} dtype={str(head.dtype).removeprefix('torch.')}"


# What writes a drafter of each kind, and the options that it reads of those that not all kinds read.
_KINDS: dict[str, tuple[Callable[[ExportConfig, Path], str], tuple[str, ...]]] = {
    "early_exit": (_export_early_exit, ("dtype",)),
    "eagle3": (_export_head, ("dialect", "dtype", "reading")),
    "ngrams": (_export_table, ()),
    "small_lm": (_export_small_lm, ("dtype",)),
}
