"""Records from the interpreter's library, the Hugging Face Hub or local files; train and held-out split."""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from outrider.base.errors import UserError, reason
from outrider.base.progress import track_progress
from outrider.data_prep.text.data_files import drop_absent, file_digest, read_file, resolve_paths, text_rows
from outrider.data_prep.text.messages import SkipRecordError
from outrider.data_prep.text.prompt_records import asks_answer, is_prompt_record, prompt_as_record, to_prompt
from outrider.data_prep.text.records import Counts, FileLayout, Record, find_layout, split_key, text_record, to_record
from outrider.data_prep.text.settings import DataConfig

Split = Literal["train", "heldout"]
_PROMPTS = FileLayout("prompts", "any")  # determined by the columns of each record
_NO_ANSWERS = "prompts have no answers to learn from; answer them with generate_responses and give data=responses"

# Excluded: tests and their data, installed packages, and generated tables. The character maps in encodings are
# near-copies of each other, so held-out ones would be known from training. pydoc_data is one long string.
_SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data",
}  # fmt: skip


def read_records(
    config: DataConfig, split: Split, counts: Counts | None = None, *, asking: bool = False
) -> Iterator[Record]:
    """The records of one split, in the order of the source.

    A record is held out if its hash is below `config.heldout_fraction`, and read at all if another one of its hashes is
    below `config.share`. For python_stdlib the hashes are of the file's path, else of the user's first turn or the
    text. So records with the same first turn are in the same split, on every machine, whatever else is read. `counts`
    receives records, and what cannot be used. The sources of a mix are read one after another.

    asking: the records will be answered, so prompts without an answer (see `to_prompt`) are allowed too. All prompts
    and conversations are then in the split train, since a training holds out answers by the same first turn. With
    layout=auto the first record of a file decides. But a file of answers that a target wrote may have texts and
    conversations. Raises `UserError` that names file and record.
    """
    counts = Counts() if counts is None else counts
    for _, _, part in config.parts():
        yield from read_records(part, split, counts, asking=asking)
    if config.layout == "prompts" and not asking:
        raise UserError(f"layout=prompts: {_NO_ANSWERS}")
    detected: set[FileLayout] = set()
    record_count = 0
    for source_name, numbered_records in _iterate_sources(config, counts):
        layout: FileLayout | None = None
        for number, raw in numbered_records:
            if record_count == config.max_records:
                return
            record_count += 1
            record_id = f"{source_name}:{number}" if number else source_name
            try:
                # A file of answers of a target may have texts and conversations, so "written" records may differ.
                changes_layout = isinstance(raw, dict) and "written" in raw and layout and layout.column not in raw
                if (layout is None and (config.layout == "prompts" or not isinstance(raw, str))) or changes_layout:
                    layout = _choose_layout(raw, config, asking, record_id)
                    if config.layout == "auto" and layout not in detected:
                        detected.add(layout)
                        print(f"data layout={layout.name} column={layout.column} detected in {record_id}", flush=True)
                record = _to_record(raw, layout, config, record_id, number, counts)
                hash_key = record_id if config.source == "python_stdlib" else split_key(record)
                heldout_fraction = 0.0 if asking and asks_answer(record) else config.heldout_fraction
                if is_in_split(hash_key, split, heldout_fraction, config.share):
                    counts["records"] += 1
                    yield record
            except SkipRecordError as skipped:
                if is_heldout(record_id, config.heldout_fraction) == (split == "heldout"):  # count it in one split only
                    counts.refuse(skipped.reason, f"{record_id}: {skipped}")


def is_in_split(key: str, split: Split, heldout_fraction: float, share: float) -> bool:
    """Whether the record with this key is among the `share` of all that is read, and in this split."""
    is_read = share == 1 or is_heldout(f"share: {key}", share)
    return is_read and is_heldout(key, heldout_fraction) == (split == "heldout")


def is_heldout(key: str, fraction: float) -> bool:
    """Whether the record with this key is held out: a fixed function of the key and the fraction."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def content_digest(config: DataConfig) -> str:
    """A digest of what `read_records` reads from a source: contents of files; name, revision and split of Hub data.

    A Hub dataset without `revision` counts as unchanged: pin a revision if that matters.
    """
    hasher = hashlib.sha256()
    if config.source == "hub":
        hasher.update(json.dumps([config.path, config.subset, config.data_dir, config.revision, config.split]).encode())
    elif config.source == "local":
        for path in track_progress(resolve_paths(config.path), "hashing the data", "files"):
            hasher.update(path.suffix.lower().encode() + file_digest(path))
    else:
        for name, path in python_files(config.packages):
            hasher.update(name.encode() + file_digest(path))
    return hasher.hexdigest()


def _iterate_sources(config: DataConfig, counts: Counts) -> Iterator[tuple[str, Iterable[tuple[int, object]]]]:
    """(name, rows) of each file or dataset; a row is (number from 1, record), or (0, text) of a file."""
    if config.source == "hub":
        yield f"{config.path[0]}/{config.split}", _hub_rows(config)
    elif config.source == "local":
        for path in resolve_paths(config.path):
            yield str(path), read_file(path, counts)
    elif config.source == "python_stdlib":
        for name, path in python_files(config.packages):
            yield name, text_rows(path, counts)


def _choose_layout(raw: object, config: DataConfig, asking: bool, where: str) -> FileLayout:
    """The layout of the file that begins with the record `raw` (see `find_layout`)."""
    holds_prompts = asking and config.layout == "auto" and config.column is None and is_prompt_record(raw)
    if config.layout == "prompts" or holds_prompts:
        return _PROMPTS
    try:
        return find_layout(raw, config.layout, config.column, where)
    except UserError as error:
        if is_prompt_record(raw) and config.column is None:
            raise UserError(f"{where}: {_NO_ANSWERS}; if it has some: {error}") from error
        raise


def _to_record(
    raw: object, layout: FileLayout | None, config: DataConfig, record_id: str, number: int, counts: Counts
) -> Record:
    if layout is _PROMPTS:
        return prompt_as_record(to_prompt(raw, record_id, number, counts), record_id)
    if isinstance(raw, str):
        if config.layout not in ("auto", "text", "code"):
            raise UserError(f"{record_id}: plain text, but layout={config.layout} needs records with columns")
        return text_record(raw, record_id)
    assert layout is not None
    return to_record(raw, layout, record_id, counts)


def python_files(packages: bool) -> list[tuple[str, Path]]:
    """(path relative to the library, file) of the interpreter's own source, sorted by relative path; with `packages`
    followed by the installed packages' source as "site-packages/…".

    Files of packages with repeated content are skipped: many packages vendor others or parts of the library, whose
    held-out files must not reappear as training text.
    """
    library = Path(sysconfig.get_path("stdlib"))
    named_paths = _source_files(library)
    if not named_paths:
        raise UserError(f"source=python_stdlib: no Python source under {library}; use source=local with your own files")
    if not packages:
        return named_paths
    roots = dict.fromkeys(Path(sysconfig.get_path(key)) for key in ("purelib", "platlib"))
    seen_digests = {file_digest(path) for _, path in named_paths}
    for name, path in (pair for root in roots for pair in _source_files(root)):
        digest = file_digest(path)
        if digest not in seen_digests:
            seen_digests.add(digest)
            named_paths.append((f"site-packages/{name}", path))
    return named_paths


def _source_files(root: Path) -> list[tuple[str, Path]]:
    """(path relative to `root`, file) of the Python source under `root` that is used as training text, sorted."""
    named_paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - _SKIPPED_FOLDERS
        paths = [Path(folder, name) for name in names if name.endswith(".py")]
        named_paths += [(path.relative_to(root).as_posix(), path) for path in paths]
    return sorted(named_paths)


def _hub_rows(config: DataConfig) -> Iterator[tuple[int, object]]:
    import datasets

    try:
        load = partial(datasets.load_dataset, config.path[0], name=config.subset, data_dir=config.data_dir)
        dataset = load(split=config.split, revision=config.revision, streaming=config.streaming)
        yield from enumerate(map(drop_absent, dataset), 1)
    except Exception as error:  # whatever the Hub client, the network or a loader raises
        raise UserError(
            f"path={config.path[0]}: cannot read split {config.split!r} from the Hugging Face Hub "
            f"({type(error).__name__}: {reason(error)}). Check name, subset, split and revision; for a gated or "
            "private dataset set HF_TOKEN; without network use a copy in the Hub cache (HF_HUB_OFFLINE=1, "
            "streaming=false) or source=local with path=FILES"
        ) from error
