"""Give a fine-tuned model its base model's MTP head back: `python data_prep/restore_mtp.py target=… base=… out_dir=…`.

An MTP head (multi-token prediction) is a further layer of a model that drafts. Trainers drop its tensors when they save
a model. The copy has links to the model's shards, one shard more with the head, and a new index. config.json is written
last: a directory without it does not load. A head's spelling is the naming of its tensors (qwen, speculators, …).
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    from outrider.commands import run_script

    run_script("restore_mtp")

import os
import shutil
from pathlib import Path

from safetensors.torch import save

from outrider.base.errors import UserError, require
from outrider.base.files import read_mapping, require_writable, write_atomically, write_json
from outrider.base.processes import from_main, join_processes, only_run_of
from outrider.base.run_dirs import HOLDER_FILE, LOCK_FILE
from outrider.base.words import list_words, quote_word, write_option
from outrider.data_prep.settings import RestoreConfig
from outrider.data_prep.targets import RECORD_FILE, require_same_conversion
from outrider.draft_models.formats.convert import fetch_folder, find_original
from outrider.draft_models.formats.stored_tensors import CONFIG_FILE, SAFETENSORS, open_safetensors
from outrider.draft_models.mtp.checkpoint import DECLARED_BY, open_mtp
from outrider.draft_models.mtp.spellings import HeadTensors, find_head, qwen_name
from outrider.draft_models.targets.fingerprint import NOT_DECIDING, config_differences, deciding_config
from outrider.draft_models.targets.open_target import read_config
from outrider.draft_models.targets.tensor_files import find_file

SHARD_FILE = "model-mtp.safetensors"  # llama.cpp's converter reads files that begin with "model" alone
_OWN_FILES = (CONFIG_FILE, RECORD_FILE, LOCK_FILE, HOLDER_FILE)
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pth", ".index.json")  # ends of files that are not copied
# Fields of config.json that a fine-tuning may change without another head. DECLARED_BY: fields that count its layers.
_MAY_DIFFER = {*DECLARED_BY, "vocab_size", "tie_word_embeddings", "max_position_embeddings"}


def restore_mtp(config: RestoreConfig) -> None:
    """Write the copy to `config.out_dir`. Raises `UserError` if the head does not belong to the model.

    Under a launcher, one process does it.
    """
    process_state, folder = join_processes(), require_writable(config.out_dir)
    with only_run_of(process_state, folder, "a target"):  # a lock against other runs
        from_main(process_state, lambda: _restore(config, folder))


def _restore(config: RestoreConfig, folder: Path) -> None:
    head = _require_head(config)
    identity: dict[str, object] = {"target": config.target, "base": config.base}
    identity["head"] = head.files.digests(head.files.file_of)  # of all the head's tensors
    require_same_conversion(folder, identity, config.resume)
    if (folder / CONFIG_FILE).exists():
        print(f"{folder}: finished already")
        return
    write_json(folder / RECORD_FILE, identity)
    model_dir = fetch_folder(config.target, revision=None, weight_format=SAFETENSORS)  # the latest revision
    file_of, tensors = link_shards(model_dir, folder), head.files.read(head.files.file_of)
    if head.spelling == "speculators":  # else they have the names that servers expect
        tensors = {qwen_name(name): tensors[stored_name] for name, stored_name in head.stored_names.items()}
    write_atomically(folder / SHARD_FILE, save(tensors, metadata={"format": "pt"}))
    weight_map = {**file_of, **dict.fromkeys(tensors, SHARD_FILE)}
    write_json(folder / SAFETENSORS.index, {"metadata": {}, "weight_map": weight_map})
    for path in model_dir.iterdir():
        if path.is_file() and path.name not in _OWN_FILES and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, folder / path.name)
    write_json(folder / CONFIG_FILE, declare_head(model_dir / CONFIG_FILE, find_file(config.base, CONFIG_FILE, None)))
    target_option = quote_word(write_option("target", str(folder)))
    print(f"restore_mtp out_dir={folder} spelling={head.spelling} tensors={len(tensors)}; examine it by "
          f"evaluate-checkpoint {target_option} mtp=target doctor=true", flush=True)  # fmt: skip


def _require_head(config: RestoreConfig) -> HeadTensors:
    """The head in `config.base`. Raises `UserError` unless it is one of `config.target`, which has none."""
    for option, source in (("target", config.target), ("base", config.base)):
        if find_original(source) is not None:
            raise UserError(
                f"{option}={source}: expected unquantised safetensors (outrider convert-target writes them)"
            )
    if find_head(config.target) is not None:
        raise UserError(f"target={config.target}: has an MTP head; expected a model that lost its head")
    head, target_config = find_head(config.base), read_config(config.target)
    if head is None:
        raise UserError(f"base={config.base}: no tensors of an MTP head there; give the base model as it was published")
    if head.spelling != "speculators":  # whose config.json has no model's fields
        configs = [deciding_config(source, revision=None) for source in (config.base, config.target)]
        text_only = any("text_config" not in fields for fields in configs)  # a fine-tune may keep the text model alone
        sections = [fields.get("text_config", fields) if text_only else fields for fields in configs]
        names = [name for name, *_ in config_differences(*sections) if not name.endswith(("_token_id", *_MAY_DIFFER))]
        names = [name for name in names if name.rpartition(".")[2] not in NOT_DECIDING]  # such as the dtype
        expected = "the model that target was fine-tuned from"
        require(not names, "base", config.base, f"{expected}; config.json differs in {list_words(names)}")
    try:
        head.require_supported()
    except UserError as error:  # Outrider cannot run this head, but servers can
        print(f"restore_mtp shapes=unchecked reason={str(error)!r}", flush=True)
    else:
        open_mtp(config.base, target_config)
    return head


def link_shards(model_dir: Path, folder: Path) -> dict[str, str]:
    """Link the safetensors of `model_dir` in `folder`, or copy them to another disk; returns tensor name → file name.

    A single file gets another name, as its own would win over an index.
    """
    if (model_dir / SAFETENSORS.single).exists():
        link_names = {SAFETENSORS.single: "model-00001-of-00001.safetensors"}
        file_of = dict.fromkeys(open_safetensors(str(model_dir / SAFETENSORS.single)), link_names[SAFETENSORS.single])
    else:
        file_of = SAFETENSORS.file_of(model_dir / SAFETENSORS.index)
        link_names = {name: name for name in file_of.values()}
    for name, link_name in link_names.items():
        (folder / link_name).unlink(missing_ok=True)
        try:
            os.link((model_dir / name).resolve(), folder / link_name)
        except OSError:  # another disk, or one without links
            shutil.copyfile(model_dir / name, folder / link_name)
    return file_of


def declare_head(path: Path, base: str | None) -> dict[str, object]:
    """The config.json at `path`, with the fields in which that at `base` declares the head; base None: its own."""
    fields, source = (read_mapping(file, "description of a model", "fetch it again") for file in (path, base or path))
    text_fields, base_text_fields = (section.get("text_config", section) for section in (fields, source))
    for section, base_section in ((fields, source), (text_fields, base_text_fields)):
        if isinstance(section, dict) and isinstance(base_section, dict):
            section.update({key: base_section[key] for key in DECLARED_BY if base_section.get(key)})
    return fields
