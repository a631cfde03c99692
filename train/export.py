"""A drafter as a serving engine loads it, with the commands that serve it.

An early exit becomes an ordinary causal LM, a head takes another trainer's format. A dialect is a format of a head's
files; a reading says how the tensors in the files are used. `_export` checks the options, then calls the function of
the drafter's kind in the table `_EXPORTS` at the end.

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
from outrider.base.settings import require_defaults
from outrider.draft_models.card import CARD_FILE, LLAMA_CPP_DRAFT, PLAIN_ENGINES, describe_serving, write_card
from outrider.draft_models.dflash.checkpoint import describe_use as describe_block
from outrider.draft_models.dflash.checkpoint import open_drafter, require_vllm, save_drafter, vllm_method
from outrider.draft_models.dflash.gguf import write_gguf_drafter
from outrider.draft_models.draft_vocabulary import read_draft_vocabulary
from outrider.draft_models.eagle3.checkpoint import describe_use, open_head, save_head, write_gguf_head
from outrider.draft_models.early_exit.checkpoint import WHAT as WHAT_AN_EXIT_IS
from outrider.draft_models.early_exit.checkpoint import as_causal_lm, from_pretrained
from outrider.draft_models.formats.gguf_write import BLOCK, GGUF_FILE, require_gguf, write_gguf
from outrider.draft_models.formats.stored_tensors import CONFIG_FILE
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.draft_models.small_lm.model import TRAINING_FILE, load_for_engine, pass_tokens_of
from outrider.draft_models.small_lm.model import WHAT as WHAT_A_SMALL_LM_IS
from outrider.draft_models.targets.open_target import load_tokenizer, open_target, read_config, stored_dtype
from outrider.draft_models.targets.settings import ExportDialect
from outrider.draft_models.targets.vocabulary import limit_rows
from outrider.inference.drafters.ngrams.drafter import open_table
from outrider.inference.loading.target_setup import no_drafter_in, open_target_of
from outrider.inference.serving.engine_worker import ir_command
from outrider.inference.serving.proposer import serving_page
from outrider.inference.settings.engine import python_in
from outrider.inference.settings.kinds import DFLASH, EAGLE3, EARLY_EXIT, NGRAMS, SMALL_LM, kind_in
from outrider.train.parts.drafter import export_model
from outrider.train.settings.export import QUANTISED, Engine, ExportConfig

# The dialect of EAGLE-3 heads that an engine reads.
_DIALECTS: dict[Engine, ExportDialect] = {"vllm": "speculators", "sglang": "specforge", "llama_cpp": "gguf"}


def export_drafter(config: ExportConfig) -> None:
    """Write the drafter in `config.checkpoint` to `config.out_dir`. Of a launcher, one process does it.

    Raises `UserError` if the engine loads its kind unchanged or not at all, if it does not fit the target, if the
    engine's format cannot express it, and if `config.out_dir` holds a model already.
    """
    process_state, out_dir = join_processes(), require_writable(config.out_dir)
    with only_run_of(process_state, out_dir, "a drafter"):
        from_main(process_state, lambda: _export(config, out_dir))


def _export(config: ExportConfig, out_dir: Path) -> None:
    """Check the options against the drafter's kind, write the drafter and print the facts of the export."""
    folder = Path(config.checkpoint)
    expected = f"another place than checkpoint={config.checkpoint}"
    require(out_dir.resolve() != folder.resolve(), "out_dir", config.out_dir, expected)
    kind = kind_in(config.checkpoint)
    if kind is None and folder.is_dir():
        raise UserError(f"checkpoint={folder}: {no_drafter_in(folder)}")
    if kind is None:  # a name on the Hub, which only a head may have
        kind = next((head for head in (DFLASH, EAGLE3) if head.load_plugin().is_in(config.checkpoint)), EAGLE3)
    kind_name = kind.name
    if not config.resume and any((out_dir / file).exists() for file in (CARD_FILE, CONFIG_FILE, GGUF_FILE)):
        raise UserError(f"out_dir={out_dir}: holds a model already; resume=true replaces it")
    if kind_name not in _EXPORTS:
        raise UserError(f"checkpoint={config.checkpoint}: nothing loads a {kind_name}")
    write_drafter, option_names, engines = _EXPORTS[kind_name]
    expected = f"an engine of {kind_name}, which {config.checkpoint} holds: {', '.join(engines)}"
    require(config.engine in engines, "engine", config.engine, expected)
    unread_options = {"reading", "dtype"} - {*option_names}
    if kind_name == NGRAMS.name and config.target is None:
        unread_options.add("revision")  # of no target
    reason = f"{config.checkpoint} holds {kind_name}, which does not read it; leave it out"
    require_defaults(config, sorted(unread_options), reason)
    facts_text = write_drafter(config, out_dir)
    weight_files = [*out_dir.glob("*.safetensors"), *out_dir.glob(GGUF_FILE)]
    megabytes = sum(file.stat().st_size for file in weight_files) / 1e6
    print(f"export out_dir={out_dir} {facts_text}" + (f" megabytes={megabytes:.2f}" if megabytes else ""), flush=True)


def _require_format(config: ExportConfig, lm_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `UserError` unless the causal LM `lm_config` can be written for the engine, before its weights are read."""
    if config.engine == "llama_cpp":
        require_gguf(lm_config, tokenizer)
        _require_blocks(config, lm_config.hidden_size)
    if config.engine == "openvino":
        has_cli = Path(ir_command(python_in(config.engine_python), "", "", "")[0]).exists()  # [0]: optimum-cli
        require(has_cli, "engine_python", config.engine_python, "an environment with optimum-intel (`make engines`)")


def _choose_dtypes(config: ExportConfig, lm_config: PreTrainedConfig, *, is_drafter: bool) -> tuple[torch.dtype, str]:
    """The dtype in which the weights of the causal LM `lm_config` are loaded, and the name of the dtype of the file.

    is_drafter: the model drafts, so that its file for llama.cpp may be quantised unasked.
    """
    model_dtype = stored_dtype(lm_config)
    quantises_by_default = is_drafter and config.engine == "llama_cpp" and lm_config.hidden_size % BLOCK == 0
    if config.dtype in QUANTISED or (config.dtype is None and quantises_by_default):  # such as q8_0
        return model_dtype, config.dtype or "q8_0"
    default_dtype = torch.float16 if config.engine == "openvino" and model_dtype == torch.bfloat16 else model_dtype
    dtype = getattr(torch, config.dtype) if config.dtype else default_dtype
    return dtype, str(dtype).removeprefix("torch.")


def _block_kind(dtype_name: str) -> str | None:
    """The name of the quantised dtype `dtype_name` in ggml, llama.cpp's library; None: a dtype of floats."""
    return dtype_name.upper() if dtype_name in QUANTISED else None


def _require_blocks(config: ExportConfig, row_width: int) -> None:
    """Raise `UserError` for a quantised dtype if rows of weights are not whole blocks: a block shares a scale."""
    expected = f"a dtype of floats: rows of {row_width} weights are no whole blocks of {BLOCK}"
    require(config.dtype not in QUANTISED or row_width % BLOCK == 0, "dtype", config.dtype, expected)


def _write_lm(
    config: ExportConfig, dtype_name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out_dir: Path
) -> None:
    """Write the files for the engine, the weights in the dtype with this name."""

    def convert(staging_dir: Path) -> Path:
        """From the model's Hugging Face directory to the folder of the files in the engine's own format."""
        folder = staging_dir / "converted"
        folder.mkdir()
        if config.engine == "llama_cpp":
            write_gguf(model, tokenizer, folder / GGUF_FILE, _block_kind(dtype_name))
        elif config.engine == "openvino":
            command = ir_command(python_in(config.engine_python), str(staging_dir), str(folder), dtype_name)
            if status := subprocess.run(command, check=False).returncode:
                raise UserError(f"engine=openvino: optimum-cli ended with status {status}; see what it said above")
        return folder

    # Plain engines read Hugging Face directories.
    export_model(model, tokenizer, out_dir, *([] if config.engine in PLAIN_ENGINES else [convert]))


def _export_early_exit(config: ExportConfig, out_dir: Path) -> str:
    target = open_target_of(config.checkpoint, config.target, config.revision)
    _require_format(config, target.config, target.tokenizer)
    dtype, dtype_name = _choose_dtypes(config, target.config, is_drafter=True)
    drafter = from_pretrained(config.checkpoint, target.config, target.fingerprint, dtype=dtype)
    model = as_causal_lm(drafter, target, dtype)
    _write_lm(config, dtype_name, model, target.tokenizer, out_dir)
    layer_count = model.config.num_hidden_layers
    card_facts = {"early exit": config.checkpoint, "layers": f"{layer_count} of {target.config.num_hidden_layers}"}
    usage = describe_serving(drafted=3, engine=config.engine)
    write_card(out_dir, f"{WHAT_AN_EXIT_IS}\n\n{usage}", target.source, card_facts)
    return f"kind=early_exit layers={layer_count} dtype={dtype_name}"


def _export_small_lm(config: ExportConfig, out_dir: Path) -> str:
    """Widen a draft vocabulary to the target's vocabulary, and pad an embedding of another size to the target's. All
    other models are written unchanged, only for engines with formats of their own."""
    model_config = read_config(config.checkpoint, role=SMALL_LM.name)
    mask_id, tokens_per_pass = pass_tokens_of(model_config)
    draft_vocabulary = read_draft_vocabulary(config.checkpoint, revision=None, config=model_config)
    target_vocab_size = None
    if config.target is not None:
        with suppress(UserError):  # it may be a name for the page alone
            target_vocab_size = read_config(config.target, config.revision).get_text_config().vocab_size
    loads_unchanged = draft_vocabulary is None and target_vocab_size in (None, model_config.vocab_size)
    if loads_unchanged and config.engine in PLAIN_ENGINES:
        reason = "a small LM is an ordinary causal LM, which engines load as it is; its README.md has their commands"
        raise UserError(f"checkpoint={config.checkpoint}: {reason}")
    token_count = model_config.vocab_size if draft_vocabulary is None else len(draft_vocabulary.tokens)
    vocab_size = target_vocab_size or (token_count if draft_vocabulary is None else draft_vocabulary.vocabulary)
    model_config.update({"vocab_size": vocab_size})
    tokenizer = limit_rows(load_tokenizer(config.checkpoint, revision=None, role=SMALL_LM.name), vocab_size)
    _require_format(config, model_config, tokenizer)
    was_trained = (Path(config.checkpoint) / TRAINING_FILE).is_file()
    is_drafter = was_trained or config.target is not None or draft_vocabulary is not None
    dtype, dtype_name = _choose_dtypes(config, model_config, is_drafter=is_drafter)
    model = load_for_engine(config.checkpoint, tokenizer, dtype, target_vocab_size)
    _write_lm(config, dtype_name, model, tokenizer, out_dir)
    card_facts = {"small LM": config.checkpoint, "drafts": f"{min(token_count, vocab_size)} of {vocab_size} tokens"}
    draft_length = LLAMA_CPP_DRAFT if config.engine == "llama_cpp" else tokens_per_pass or 5
    usage = describe_serving(draft_length, config.engine, one_pass=mask_id is not None)
    write_card(out_dir, f"{WHAT_A_SMALL_LM_IS}\n\n{usage}", config.target or "MODEL", card_facts)
    return f"kind=small_lm tokens={token_count} dtype={dtype_name}"


def _export_table(config: ExportConfig, out_dir: Path) -> str:
    """Write only the page: an engine maps the table in `config.checkpoint` itself."""
    if config.target is None:
        TrigramTable.open(config.checkpoint)
    else:
        target = open_target(config.target, config.revision, by_layers=False)
        open_table(config.checkpoint, target.vocabulary_digest, target.vocabulary_size)
    page_text = serving_page(Path(config.checkpoint).resolve(), config.target or "MODEL")
    write_atomically(out_dir / CARD_FILE, page_text.encode())
    return f"kind=ngrams page={CARD_FILE}"


def _read_target(source: str, revision: str | None) -> PreTrainedConfig:
    """The config of the target's text model, with the class name of the whole target, by which engines know it."""
    config = read_config(source, revision)
    text_config = config.get_text_config()
    text_config.architectures = config.architectures
    return text_config


def _export_head(config: ExportConfig, out_dir: Path) -> str:
    if config.target is None:
        raise UserError("target=None: expected the model that the EAGLE-3 head was trained for")
    target_config = _read_target(config.target, config.revision)
    stored_head = open_head(config.checkpoint, target_config, changes=config.reading)
    _require_blocks(config, stored_head.reading.hidden)
    float_dtype = getattr(torch, config.dtype) if config.dtype and config.dtype not in QUANTISED else None
    head, reading = stored_head.load(float_dtype), stored_head.reading
    dtype_name = config.dtype or str(head.dtype).removeprefix("torch.")
    made_here = stored_head.made_here and not config.reading.overrides  # written by this toolkit, and read as it says
    dialect = _DIALECTS[config.engine]
    if dialect == "gguf":
        partial_file = out_dir / f"{GGUF_FILE}.part"  # a stopped run may have left one
        tokenizer = load_tokenizer(config.target, config.revision)
        write_gguf_head(head, target_config, tokenizer, partial_file, _block_kind(dtype_name))
        partial_file.replace(out_dir / GGUF_FILE)
    else:
        save_head(out_dir, head, dialect, target_config, config.target, made_here=made_here)
    card_facts: dict[str, object] = {"head": config.checkpoint, "written by": stored_head.dialect}
    tokens_text = f"{reading.draft_vocabulary} of {reading.vocabulary}"
    card_facts |= {"written for readers of": dialect, "taps": list(reading.taps), "tokens": tokens_text}
    write_card(out_dir, describe_use(dialect), config.target, card_facts)
    return f"kind=eagle3 dialect={dialect} dtype={dtype_name}"


def _export_block(config: ExportConfig, out_dir: Path) -> str:
    if config.target is None:
        raise UserError("target=None: expected the model that the block drafter was trained for")
    target_config = _read_target(config.target, config.revision)
    stored_drafter = open_drafter(config.checkpoint, target_config, config.reading)
    _require_blocks(config, stored_drafter.reading.hidden)
    float_dtype = getattr(torch, config.dtype) if config.dtype and config.dtype not in QUANTISED else None
    drafter, reading = stored_drafter.load(float_dtype), stored_drafter.reading
    dtype_name = config.dtype or str(drafter.dtype).removeprefix("torch.")
    if config.engine == "llama_cpp":
        partial_file = out_dir / f"{GGUF_FILE}.part"  # a stopped run may have left one
        tokenizer = load_tokenizer(config.target, config.revision)
        write_gguf_drafter(drafter, target_config, tokenizer, partial_file, _block_kind(dtype_name))
        partial_file.replace(out_dir / GGUF_FILE)
    else:
        require_vllm(reading)
        made_here = stored_drafter.made_here and not config.reading.overrides
        save_drafter(out_dir, drafter, target_config, made_here=made_here)
    card_facts = {"drafter": config.checkpoint, "written by": stored_drafter.dialect, "taps": list(reading.taps)}
    card_facts["tokens"] = f"{reading.draft_vocabulary} of {reading.vocabulary}, {reading.drafted} in a pass"
    write_card(out_dir, describe_block(reading, config.engine), config.target, card_facts)
    return f"kind={DFLASH.name} method={vllm_method(reading)} dtype={dtype_name}"


_LM_ENGINES: tuple[Engine, ...] = ("transformers", "vllm", "sglang", "llama_cpp", "openvino")
# By kind: the function that writes a drafter, the options that only some kinds read, and the engines that load it.
_EXPORTS: dict[str, tuple[Callable[[ExportConfig, Path], str], tuple[str, ...], Sequence[Engine]]] = {
    EARLY_EXIT.name: (_export_early_exit, ("dtype",), _LM_ENGINES),
    EAGLE3.name: (_export_head, ("dtype", "reading"), [*_DIALECTS]),
    DFLASH.name: (_export_block, ("dtype", "reading"), ("vllm", "llama_cpp")),
    NGRAMS.name: (_export_table, (), ("vllm",)),
    SMALL_LM.name: (_export_small_lm, ("dtype",), _LM_ENGINES),
}
