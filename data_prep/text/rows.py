"""Records → packed token rows on disk, built once, then memory-mapped."""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from data_prep.text.chat import Document, encode, warn_of_template
from data_prep.text.mixing import interleave, rows_taken
from data_prep.text.pieces import batches
from data_prep.text.records import Counts, Record, warn_of_unused
from data_prep.text.row_cache import (
    ARRAYS,
    COUNTS,
    META_FILE,
    is_complete,
    locked,
    map_arrays,
    read_meta,
    storage_errors,
)
from data_prep.text.settings import DataConfig
from data_prep.text.sources import Split, content_digest, read_records
from draft_models.losses import IGNORE
from draft_models.targets.fingerprint import tokenizer_digest
from draft_models.targets.vocabulary import rows_of
from outrider.errors import UserError, require
from outrider.progress import Stage

FORMAT = 3  # part of every cache key: increment it when rows of the same input change
# Options that select the content, whose digest is part of the key.
_IN_THE_CONTENT = {"packages", "path", "subset", "data_dir", "revision", "split", "streaming", "mix"}
_RECORDS_A_BATCH, _CHARACTERS_A_BATCH = 256, 2**22
_ROWS_A_WRITE = 1024


class PackedRows(Dataset[dict[str, Tensor]]):
    """Packed rows of seq_len tokens, memory-mapped. Every row has at least one label.

    An item is {"input_ids", "labels", "positions", "documents"}, int64 [seq_len] each. labels[t] is the id of token t+1
    if that is in the same document and supervised, else `IGNORE`. positions restart at 0 in each document. documents
    count 0, 1, 2, … within the row and are −1 on padding (input id 0). Example, with · for `IGNORE`:

        input_ids a b c d e 0    labels b c · e · ·    positions 0 1 2 0 1 0    documents 0 0 0 1 1 −1

    `counts` has the keys `COUNTS`. `key` identifies the content of all rows.
    """

    def __init__(self, folders: Sequence[Path], kept: np.ndarray, key: str, counts: dict[str, int]) -> None:
        """kept: int64 [rows, 2], the index of a folder and the row in it."""
        self._source = (folders, kept, key, counts)
        self.key, self.counts = key, counts
        self._arrays = [map_arrays(folder) for folder in folders]
        self._kept = kept

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        folder, row = self._kept[index]
        tokens, documents, supervised = (array[row] for array in self._arrays[folder])
        tokens, documents = tokens.astype(np.int64), documents.astype(np.int64)
        labels = _labels(tokens, documents, supervised)
        arrays = {
            "input_ids": tokens,
            "labels": labels,
            "positions": _positions(documents),
            "documents": documents,
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def __reduce__(self) -> tuple[object, ...]:
        return PackedRows, self._source  # data-loader workers map the files again instead of receiving a copy


def load_rows(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    split: Split,
    *,
    max_rows: int | None = None,
) -> PackedRows:
    """The rows of one split, from the cache or built now. max_rows: keep this many, evenly spread.

    The cache key is a hash of everything that determines the content, so a hit is always valid. If several processes
    call this at once, one builds and the others wait. Rank 0 prints the counts on one line.

    The sources of a mix are cached separately. The rows taken from each give it its share of the supervised tokens (see
    `data_prep.text.mixing`); they depend on the sources and weights alone. The counts of tokens and supervised tokens
    are then estimates from the sources' means.

    Raises `UserError` for bad input, a split without records, data without a supervised token, and a
    cache_dir that cannot be written.
    """
    require(seq_len >= 2, "seq_len", seq_len, "at least 2")
    require(max_rows is None or max_rows >= 1, "max_rows", max_rows, "at least 1, or null")
    if split == "train":
        warn_of_template(config, tokenizer)
    mix = list(config.parts()) or [(config.source, 1.0, config)]
    folders = [_prepare(part, tokenizer, seq_len, split) for _, _, part in mix]
    metas = [read_meta(folder) for folder in folders]
    weights = [weight for _, weight, _ in mix]
    available = [meta.counts["rows"] for meta in metas]
    taken = rows_taken(available, [meta.counts["supervised"] for meta in metas], weights)
    counts = [_counts_of(meta.counts, rows) for meta, rows in zip(metas, taken, strict=True)]
    total = {name: sum(part[name] for part in counts) for name in COUNTS}
    key = metas[0].key if not config.mix else _digest([[meta.key for meta in metas], weights])
    if config.mix and _is_main():
        shares = (f"{part['rows']} rows ({part['supervised'] / total['supervised']:.1%})" for part in counts)
        named = ", ".join(f"{name} {share}" for (name, _, _), share in zip(mix, shares, strict=True))
        print(f"data mix split={split} rows={total['rows']}, of supervised tokens: {named}", flush=True)
    order = interleave(taken, available)
    kept = min(len(order), max_rows or len(order))
    return PackedRows(folders, order[np.arange(kept) * len(order) // kept], key, total)


def _prepare(config: DataConfig, tokenizer: PreTrainedTokenizerBase, seq_len: int, split: Split) -> Path:
    """The cache folder with the rows of one source, built if missing; prints its counts."""
    key = _cache_key(config, tokenizer, seq_len, split)
    folder = config.cache / "rows" / key[:32]
    if not is_complete(folder, key):
        with storage_errors(config.cache):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with locked(folder.with_suffix(".lock")):
                if not is_complete(folder, key):
                    _build(folder, key, config, tokenizer, seq_len, split)
    if _is_main():
        found = read_meta(folder).counts
        counts = " ".join(f"{name}={found[name]}" for name in COUNTS)
        print(f"data source={config.source} split={split} {counts}", flush=True)
        warn_of_unused(found, read_meta(folder).first)
    return folder


def _counts_of(counts: dict[str, int], rows: int) -> dict[str, int]:
    """The counts of a source reduced to a part of its rows."""
    scaled = {name: round(counts[name] * rows / counts["rows"]) for name in ("tokens", "supervised")}
    return {**counts, **scaled, "rows": rows}


def _is_main() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


# ------------------------------------------------------------------------------------------------- packing


class Segment(NamedTuple):
    """A document, or a part of one, inside a row: ids int64 [n], supervised bool [n]."""

    ids: np.ndarray
    supervised: np.ndarray


@dataclass
class _OpenRow:
    free: int
    segments: list[Segment] = field(default_factory=list)

    def add(self, segment: Segment) -> None:
        self.segments.append(segment)
        self.free -= len(segment.ids)


def pack(documents: Iterable[Document], seq_len: int, window: int = 32) -> Iterator[list[Segment]]:
    """Pack documents into rows of at most `seq_len` tokens; a pure function of their order.

    Divisible documents follow each other without a gap and continue in the next row. Whole ones (at most seq_len
    tokens) go into the fullest of up to `window` open rows that still fits them.
    """
    stream, waiting = _OpenRow(seq_len), list[_OpenRow]()
    for document in documents:
        if document.whole:
            needed = len(document.ids)
            fitting = [row for row in waiting if row.free >= needed]
            if not fitting:
                if len(waiting) == window:
                    fullest = min(range(window), key=lambda i: waiting[i].free)
                    yield waiting.pop(fullest).segments
                waiting.append(_OpenRow(seq_len))
                fitting = waiting[-1:]
            min(fitting, key=lambda row: row.free).add(Segment(document.ids, document.supervised))
            continue
        start = 0
        while start < len(document.ids):
            part = slice(start, start + stream.free)
            stream.add(Segment(document.ids[part], document.supervised[part]))
            start = part.stop
            if stream.free == 0:
                yield stream.segments
                stream = _OpenRow(seq_len)
    for row in [*waiting, stream]:
        if row.segments:
            yield row.segments


def _lay_out(segments: list[Segment], seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One row: tokens, documents and supervised, [seq_len] each, padded."""
    tokens, supervised = np.zeros(seq_len, np.int64), np.zeros(seq_len, bool)
    documents = np.full(seq_len, -1)
    start = 0
    for number, segment in enumerate(segments):
        part = slice(start, start + len(segment.ids))
        tokens[part], supervised[part], documents[part] = segment.ids, segment.supervised, number
        start = part.stop
    return tokens, documents, supervised


def _labels(tokens: np.ndarray, documents: np.ndarray, supervised: np.ndarray) -> np.ndarray:
    labels = np.full(len(tokens), IGNORE, np.int64)
    known = (documents[1:] == documents[:-1]) & supervised[1:]
    labels[:-1][known] = tokens[1:][known]
    return labels


def _positions(documents: np.ndarray) -> np.ndarray:
    index = np.arange(len(documents))
    begins = np.r_[True, documents[1:] != documents[:-1]]
    return index - np.maximum.accumulate(np.where(begins, index, 0))


# ------------------------------------------------------------------------------------------------ building


def _documents(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    split: Split,
    counts: Counts,
) -> Iterator[Document]:
    """Tokenised records. Conversations are clipped to seq_len, and dropped without labels; both are counted."""
    with Stage(f"tokenising {split}", unit="records") as stage:
        records = read_records(config, split, counts)
        for batch in batches(records, _characters, _CHARACTERS_A_BATCH, _RECORDS_A_BATCH):
            for ids, supervised, whole in encode(batch, tokenizer, config.template, counts):
                if whole:
                    counts["clipped"] += len(ids) > seq_len
                    ids, supervised = ids[:seq_len], supervised[:seq_len]
                    if not supervised[1:].any():
                        counts["unsupervised"] += 1
                        continue
                yield Document(ids, supervised, whole)
            stage.advance(len(batch))


def _characters(record: Record) -> int:
    return len(record["text"]) if "text" in record else sum(len(message["content"]) for message in record["messages"])


def _build(
    folder: Path,
    key: str,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    split: Split,
) -> None:
    print(f"data source={config.source} split={split}: tokenising into {folder}", flush=True)
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    partial.mkdir()
    counts = Counts(dict.fromkeys(COUNTS, 0))
    # A target may write ids beyond its tokenizer's vocabulary.
    dtypes = (np.dtype(np.uint32), np.min_scalar_type(-seq_len), np.dtype(bool))
    try:
        with ExitStack() as stack:
            files = [stack.enter_context((partial / f"{name}.bin").open("wb")) for name in ARRAYS]
            packed = pack(_documents(config, tokenizer, seq_len, split, counts), seq_len)
            laid_out = (_lay_out(segments, seq_len) for segments in packed)
            kept = (row for row in laid_out if _count_row(row, counts))
            while chunk := list(islice(kept, _ROWS_A_WRITE)):
                for file, arrays, dtype in zip(files, zip(*chunk, strict=True), dtypes, strict=True):
                    file.write(np.stack(arrays).astype(dtype).tobytes())
        _require_content(config, split, counts)
        types = {name: dtype.name for name, dtype in zip(ARRAYS, dtypes, strict=True)}
        meta = {"key": key, "seq_len": seq_len, "counts": dict(counts), "types": types, "first": counts.first}
        (partial / META_FILE).write_text(json.dumps(meta, indent=1) + "\n", "utf-8")
        shutil.rmtree(folder, ignore_errors=True)  # a damaged entry
        partial.replace(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _count_row(row: tuple[np.ndarray, np.ndarray, np.ndarray], counts: Counter[str]) -> bool:
    """Add a row to the counts; False for a row without labels, which must be dropped."""
    tokens, documents, supervised = row
    labels = int((_labels(tokens, documents, supervised) != IGNORE).sum())
    counts["rows" if labels else "dropped_rows"] += 1
    if labels:
        counts["tokens"] += int((documents >= 0).sum())
        counts["supervised"] += labels
    return labels > 0


def _require_content(config: DataConfig, split: Split, counts: Counts) -> None:
    found = ", ".join(f"{name}={counts[name]}" for name in COUNTS if counts[name]) or "nothing"
    first = f"; one of them: {counts.first}" if counts.first else ""
    where = f"data source={config.source} path={', '.join(config.path)}" if config.path else "data"
    if not counts["records"]:
        remedy = "give more data or raise heldout_fraction" if split == "heldout" else "give more data"
        raise UserError(f"{where}: empty dataset: no usable {split} record (found {found}); {remedy}{first}")
    if not counts["rows"]:
        raise UserError(
            f"{where}: no token of the {split} split is supervised (found {found}): no assistant's answer "
            f"is within seq_len; check layout, column and template, or raise seq_len{first}"
        )


# --------------------------------------------------------------------------------------------------- cache


def _cache_key(config: DataConfig, tokenizer: PreTrainedTokenizerBase, seq_len: int, split: Split) -> str:
    parts = {key: value for key, value in config.deciding().items() if key not in _IN_THE_CONTENT}
    parts |= {
        "format": FORMAT,
        "content": content_digest(config),
        "tokenizer": [tokenizer_digest(tokenizer), tokenizer.chat_template],
        "seq_len": seq_len,
        "split": split,
        "embedding_rows": rows_of(tokenizer),  # which decides what is left out
    }
    return _digest(parts)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
