"""A drafter as a serving engine loads it, with the commands that serve it.

An early exit becomes an ordinary causal LM, a head takes another trainer's format. `_export` checks the options, then
calls the function of the drafter's kind in the table `_EXPORTS` at the end.

outrider export checkpoint=runs/eesd engine=llama_cpp out_dir=runs/served
python train/export.py checkpoint=runs/eagle3 target=MODEL engine=vllm out_dir=runs/served
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    from outrider.commands import run_script

    run_script("export")

import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.base.errors import UserError, require
from outrider.base.files import require_writable, write_atomically
from outrider.base.processes import from_main, join_processes, only_run_of
from outrider.base.settings import require_default
from outrider.draft_models.card import CARD_FILE, PLAIN_ENGINES, describe_serving, write_card
from outrider.draft_models.draft_vocabulary import read_draft_vocabulary
from outrider.draft_models.eagle3.checkpoint import describe_use, open_head, save_head, write_gguf_head
from outrider.draft_models.early_exit.checkpoint import WHAT as WHAT_AN_EXIT_IS
from outrider.draft_models.early_exit.checkpoint import as_causal_lm, from_pretrained
from outrider.draft_models.formats.gguf_write import GGUF_FILE, require_gguf, write_gguf
from outrider.draft_models.formats.stored_tensors import CONFIG_FILE
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.draft_models.small_lm.model import WHAT as WHAT_A_SMALL_LM_IS
from outrider.draft_models.small_lm.model import load_for_engine, pass_tokens_of
from outrider.draft_models.targets.open_target import load_tokenizer, open_target, read_config, stored_dtype
from outrider.draft_models.targets.settings import ExportDialect
from outrider.draft_models.targets.vocabulary import limit_rows
from outrider.inference.drafters.ngrams.drafter import open_table
from outrider.inference.loading.target_setup import no_drafter_in, open_target_of
from outrider.inference.serving.engine_worker import ir_command
from outrider.inference.serving.proposer import serving_page
from outrider.inference.settings.engine import python_in
from outrider.inference.settings.kinds import EAGLE3, EARLY_EXIT, NGRAMS, SMALL_LM, kind_in
from outrider.train.parts.drafter import export_model
from outrider.train.settings.export import Engine, ExportConfig

# The dialect of EAGLE-3 heads that an engine reads.
_DIALECTS: dict[Engine, ExportDialect] = {"vllm": "speculators", "sglang": "specforge", "llama_cpp": "gguf"}


def export_drafter(config: ExportConfig) -> None:
    """Write the drafter in `config.checkpoint` to `config.out_dir`. Of a launcher, one process does it.

    Raises `UserError` if the engine loads its kind unchanged or not at all, if it does not fit the target, if the
    engine's format cannot express it, and if `config.out_dir` holds a model already.
    """
    state, out_dir = join_processes(), require_writable(config.out_dir)
    with only_run_of(state, out_dir, "a drafter"):
        from_main(state, lambda: _export(config, out_dir))


def _export(config: ExportConfig, out_dir: Path) -> None:
    folder = Path(config.checkpoint)
    expected = f"another place than checkpoint={config.checkpoint}"
    require(out_dir.resolve() != folder.resolve(), "out_dir", config.out_dir, expected)
    kind = kind_in(config.checkpoint)
    if kind is None and folder.is_dir():
        raise UserError(f"checkpoint={folder}: {no_drafter_in(folder)}")
    name = EAGLE3.name if kind is None else kind.name  # None: a name on the Hub
    if not config.resume and any((out_dir / file).exists() for file in (CARD_FILE, CONFIG_FILE, GGUF_FILE)):
        raise UserError(f"out_dir={out_dir}: holds a model already; resume=true replaces it")
    if name not in _EXPORTS:
        raise UserError(f"checkpoint={config.checkpoint}: nothing loads a {name}")
    write, options, engines = _EXPORTS[name]
    expected = f"an engine of {name}, which {config.checkpoint} holds: {', '.join(engines)}"
    require(config.engine in engines, "engine", config.engine, expected)
    unread_options = {"reading", "dtype"} - {*options}
    if name == NGRAMS.name and config.target is None:
        unread_options.add("revision")  # of no target
    for option in sorted(unread_options):
        require_default(config, option, f"{config.checkpoint} holds {name}, which does not read it; leave it out")
    summary = write(config, out_dir)
    size = sum(file.stat().st_size for file in out_dir.glob("*.safetensors")) / 1e6
    print(f"export out_dir={out_dir} {summary}" + (f" megabytes={size:.2f}" if size else ""), flush=True)


def _require_format(config: ExportConfig, model: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `UserError` unless the causal LM `model` can be written for the engine, before its weights are read."""
    if config.engine == "llama_cpp":
        require_gguf(model, tokenizer)
    if config.engine == "openvino":
        installed = Path(ir_command(python_in(config.engine_python), "", "", "")[0]).exists()
        require(installed, "engine_python", config.engine_python, "an environment with optimum-intel (`make engines`)")


def _choose_dtype(config: ExportConfig, stored: torch.dtype) -> torch.dtype:
    if config.dtype:
        return getattr(torch, config.dtype)
    return torch.float16 if config.engine == "openvino" and stored == torch.bfloat16 else stored


def _write_lm(config: ExportConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out_dir: Path) -> str:
    """Write the files for the engine. Returns the dtype in words."""
    dtype = str(model.dtype).removeprefix("torch.")

    def convert(staged: Path) -> Path:
        folder = staged / "converted"
        folder.mkdir()
        if config.engine == "llama_cpp":
            write_gguf(model, tokenizer, folder / GGUF_FILE)
        elif config.engine == "openvino":
            command = ir_command(python_in(config.engine_python), str(staged), str(folder), dtype)
            if status := subprocess.run(command, check=False).returncode:
                raise UserError(f"engine=openvino: optimum-cli ended with status {status}; see what it said above")
        return folder

    export_model(model, tokenizer, out_dir, *([] if config.engine in PLAIN_ENGINES else [convert]))
    return f"dtype={dtype}"


def _export_early_exit(config: ExportConfig, out_dir: Path) -> str:
    target = open_target_of(config.checkpoint, config.target, config.revision)
    _require_format(config, target.config, target.tokenizer)
    dtype = _choose_dtype(config, stored_dtype(target.config))
    drafter = from_pretrained(config.checkpoint, target.config, target.fingerprint, dtype=dtype)
    model = as_causal_lm(drafter, target, dtype)
    precision = _write_lm(config, model, target.tokenizer, out_dir)
    layers = model.config.num_hidden_layers
    facts = {"early exit": config.checkpoint, "layers": f"{layers} of {target.config.num_hidden_layers}"}
    write_card(out_dir, f"{WHAT_AN_EXIT_IS}\n\n{describe_serving(3, config.engine)}", target.source, facts)
    return f"kind=early_exit layers={layers} {precision}"


def _export_small_lm(config: ExportConfig, out_dir: Path) -> str:
    """Widen a draft vocabulary to the target's vocabulary, and pad an embedding of another size to the target's. Any
    other model is written unchanged, only for engines with formats of their own."""
    model_config = read_config(config.checkpoint, role=SMALL_LM.name)
    mask, pass_tokens = pass_tokens_of(model_config)
    draft_vocabulary = read_draft_vocabulary(config.checkpoint, None, model_config)
    target_rows = None
    if config.target is not None:
        with suppress(UserError):  # it may be a name for the page alone
            target_rows = read_config(config.target, config.revision).get_text_config().vocab_size
    loads_unchanged = draft_vocabulary is None and target_rows in (None, model_config.vocab_size)
    if loads_unchanged and config.engine in PLAIN_ENGINES:
        reason = "a small LM is an ordinary causal LM, which engines load as it is; its README.md has their commands"
        raise UserError(f"checkpoint={config.checkpoint}: {reason}")
    count = model_config.vocab_size if draft_vocabulary is None else len(draft_vocabulary.tokens)
    size = target_rows or (count if draft_vocabulary is None else draft_vocabulary.vocabulary)
    model_config.update({"vocab_size": size})
    tokenizer = limit_rows(load_tokenizer(config.checkpoint, None, role=SMALL_LM.name), size)
    _require_format(config, model_config, tokenizer)
    dtype = _choose_dtype(config, stored_dtype(model_config))
    precision = _write_lm(config, load_for_engine(config.checkpoint, tokenizer, dtype, target_rows), tokenizer, out_dir)
    facts = {"small LM": config.checkpoint, "drafts": f"{min(count, size)} of {size} tokens"}
    use = describe_serving(pass_tokens or 5, config.engine, one_pass=mask is not None)
    write_card(out_dir, f"{WHAT_A_SMALL_LM_IS}\n\n{use}", config.target or "MODEL", facts)
    return f"kind=small_lm tokens={count} {precision}"


def _export_table(config: ExportConfig, out_dir: Path) -> str:
    """Write only the page: an engine maps the table in `config.checkpoint` itself."""
    if config.target is None:
        TrigramTable.open(config.checkpoint)
    else:
        target = open_target(config.target, config.revision, by_layers=False)
        open_table(config.checkpoint, target.vocabulary_digest, target.vocabulary_size)
    page = serving_page(Path(config.checkpoint).resolve(), config.target or "MODEL")
    write_atomically(out_dir / CARD_FILE, page.encode())
    return f"kind=ngrams page={CARD_FILE}"


def _export_head(config: ExportConfig, out_dir: Path) -> str:
    if config.target is None:
        raise UserError("target=None: expected the model that the EAGLE-3 head was trained for")
    target = read_config(config.target, config.revision)
    stored = open_head(config.checkpoint, target, changes=config.reading)
    dtype = None if config.dtype is None else getattr(torch, config.dtype)
    head, reading = stored.load(dtype), stored.reading
    made_here = stored.made_here and not config.reading.overrides
    dialect = _DIALECTS[config.engine]
    if dialect == "gguf":
        partial_file = out_dir / f"{GGUF_FILE}.part"  # a stopped run may have left one
        write_gguf_head(head, target, load_tokenizer(config.target, config.revision), partial_file)
        partial_file.replace(out_dir / GGUF_FILE)
    else:
        save_head(out_dir, head, dialect, target, config.target, made_here=made_here)
    facts: dict[str, object] = {"head": config.checkpoint, "written by": stored.dialect}
    tokens = f"{reading.draft_vocabulary} of {reading.vocabulary}"
    facts |= {"written for readers of": dialect, "taps": list(reading.taps), "tokens": tokens}
    write_card(out_dir, describe_use(dialect), config.target, facts)
    return f"kind=eagle3 dialect={dialect} dtype={str(head.dtype).removeprefix('torch.')}"


_OF_LM: tuple[Engine, ...] = ("transformers", "vllm", "sglang", "llama_cpp", "openvino")
# By kind: the function that writes a drafter, the options that only some kinds read, and the engines that load it.
_EXPORTS: dict[str, tuple[Callable[[ExportConfig, Path], str], tuple[str, ...], Sequence[Engine]]] = {
    EARLY_EXIT.name: (_export_early_exit, ("dtype",), _OF_LM),
    EAGLE3.name: (_export_head, ("dtype", "reading"), [*_DIALECTS]),
    NGRAMS.name: (_export_table, (), ("vllm",)),
    SMALL_LM.name: (_export_small_lm, ("dtype",), _OF_LM),
}
