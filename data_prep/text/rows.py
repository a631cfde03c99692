"""Records → packed token rows on disk, built once, then memory-mapped.

`load_rows` returns the rows of a split. For each source it takes an entry of the cache or builds one: `_documents`
tokenises the records, `pack` puts the documents into rows, and `_build_rows` writes the rows. `interleave` mixes the
rows of several sources. `PackedRows` shows the layout of a row by an example. Supervised tokens are those of answers
and of plain texts, from which a drafter learns. A record is a text or the messages of a conversation.
"""

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from outrider.base.errors import UserError, require
from outrider.base.files import digest_of, lock, write_json
from outrider.base.progress import Stage, shows_progress
from outrider.base.settings import read_as
from outrider.data_prep.text.chat import warn_of_template
from outrider.data_prep.text.documents import Document, batches, encode
from outrider.data_prep.text.records import Counts, Record, warn_of_unused
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import Split, content_digest, read_records
from outrider.draft_models.losses import IGNORE
from outrider.draft_models.targets.vocabulary import KWARGS, bind_arguments, clock_of, rows_of, tokenizer_digest

FORMAT = 6  # part of every cache key: increment it when rows of the same input change
# Options that select the content, whose digest is part of the key, or stand in the chat template.
_IN_THE_CONTENT = {"packages", "path", "subset", "data_dir", "revision", "split", "streaming", "mix", KWARGS}
_RECORDS_A_BATCH, _CHARACTERS_A_BATCH = 256, 2**22
META_FILE, ROWS_FILE = "meta.json", "rows.bin"  # of an entry of the cache: `CacheMeta`, and rows of `_row_type`
_READ_NAMES = ("records", "rows", "tokens", "supervised", "clipped")  # clipped: conversations longer than a row
COUNT_NAMES = (*_READ_NAMES, "empty", "unsupervised", "malformed", "unreadable", "dropped_rows", "refused")


class PackedRows(Dataset[dict[str, Tensor]]):
    """Packed rows of seq_len tokens, memory-mapped. Every row has at least one label.

    An item is {"input_ids", "labels", "positions", "documents"}, int64 [seq_len] each. labels[t] is the id of token t+1
    if that is in the same document and supervised, else `IGNORE`. positions restart at 0 in each document. documents
    count 0, 1, 2, … within the row and are −1 on padding (input id 0). Example, with · for `IGNORE` (no loss there):

        input_ids a b c d e 0    labels b c · e · ·    positions 0 1 2 0 1 0    documents 0 0 0 1 1 −1

    `counts` has the keys `COUNT_NAMES`. `key` identifies the content of all rows.
    """

    def __init__(
        self, folders: Sequence[Path], seq_len: int, locations: np.ndarray, key: str, counts: dict[str, int]
    ) -> None:
        """locations: int64 [rows, 2], the index of a folder and the row in it."""
        self._source = (folders, seq_len, locations, key, counts)
        self.key, self.counts, self._locations = key, counts, locations
        self._entries = [np.memmap(folder / ROWS_FILE, _row_type(seq_len), "r") for folder in folders]

    @property
    def largest_id(self) -> int:
        """The largest token id in the files of the rows."""
        return max(int(entry["tokens"].max()) for entry in self._entries)

    def __len__(self) -> int:
        return len(self._locations)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        entry_index, row_index = self._locations[index]
        row = self._entries[entry_index][row_index]
        tokens, document_ids = row["tokens"].astype(np.int64), row["documents"].astype(np.int64)
        labels, positions = _labels(tokens, document_ids, row["supervised"]), _positions(document_ids)
        arrays = {"input_ids": tokens, "labels": labels, "positions": positions, "documents": document_ids}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def __reduce__(self) -> tuple[object, ...]:
        return PackedRows, self._source  # data-loader workers map the files again instead of receiving a copy


def load_rows(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, seq_len: int, split: Split, *, max_rows: int | None = None
) -> PackedRows:
    """The rows of one split, from the cache or built now. max_rows: keep this many, evenly spread; the counts
    are those of all rows.

    The cache key is a hash of everything that determines the content, so a hit is always valid. If several processes
    call this at once, one builds and the others wait. Rank 0 prints the counts on one line.

    The sources of a mix are cached separately. The rows taken from each give it its share of the supervised tokens (see
    `rows_of_sources`); they depend on the sources and weights alone. The counts of tokens and supervised tokens
    are then estimates from the sources' means.

    Raises `UserError` for bad input, a split without records, data without a supervised token, and a
    cache_dir that cannot be written.
    """
    require(seq_len >= 2, "seq_len", seq_len, "at least 2")
    require(max_rows is None or max_rows >= 1, "max_rows", max_rows, "at least 1, or null")
    if split == "train":
        warn_of_template(config, tokenizer)
    mix_parts = list(config.parts()) or [(config.source, 1.0, config)]  # name, weight and settings of each
    folders = [_cached_rows(part, tokenizer, seq_len, split) for _, _, part in mix_parts]
    metas = [_read_meta(folder) for folder in folders]
    weights = [weight for _, weight, _ in mix_parts]
    row_counts = [meta.counts["rows"] for meta in metas]
    row_quotas = rows_of_sources(row_counts, [meta.counts["supervised"] for meta in metas], weights)
    source_counts = [_scale_counts(meta.counts, row_quota) for meta, row_quota in zip(metas, row_quotas, strict=True)]
    totals = {name: sum(part[name] for part in source_counts) for name in COUNT_NAMES}
    key = metas[0].key if not config.mix else digest_of([[meta.key for meta in metas], weights])
    if config.mix and shows_progress():
        shares = (f"{part['rows']} rows ({part['supervised'] / totals['supervised']:.1%})" for part in source_counts)
        summary = ", ".join(f"{name} {share}" for (name, _, _), share in zip(mix_parts, shares, strict=True))
        print(f"data mix split={split} rows={totals['rows']}, of supervised tokens: {summary}", flush=True)
    locations = interleave(row_quotas, row_counts)
    row_count = min(len(locations), max_rows or len(locations))
    return PackedRows(folders, seq_len, locations[np.arange(row_count) * len(locations) // row_count], key, totals)


def _scale_counts(counts: Mapping[str, int], row_count: int) -> dict[str, int]:
    """The counts of a source of which `row_count` rows are taken, with tokens by the mean of all its rows."""
    scaled = {name: round(counts[name] * row_count / counts["rows"]) for name in ("tokens", "supervised")}
    return {**counts, "rows": row_count, **scaled}


@dataclass
class _OpenRow:
    """A row to which documents are added. free: the number of tokens for which there is space."""

    free: int
    segments: list[Document] = field(default_factory=list)

    def add(self, segment: Document) -> None:
        self.segments.append(segment)
        self.free -= len(segment.ids)


def pack(documents: Iterable[Document], seq_len: int, max_open: int = 32) -> Iterator[list[Document]]:
    """Pack documents, or parts of them, into rows of at most `seq_len` tokens; a pure function of their order.

    Divisible documents follow each other without a gap and continue in the next row. Whole ones (at most seq_len
    tokens) go into the fullest of up to `max_open` open rows that still fits them.
    """
    stream_row, open_rows = _OpenRow(seq_len), list[_OpenRow]()  # stream_row: of divisible documents
    for document in documents:
        if document.indivisible:
            fitting_rows = [row for row in open_rows if row.free >= len(document.ids)]
            if not fitting_rows:
                if len(open_rows) == max_open:
                    fullest_index = min(range(max_open), key=lambda i: open_rows[i].free)
                    yield open_rows.pop(fullest_index).segments
                open_rows.append(_OpenRow(seq_len))
                fitting_rows = open_rows[-1:]
            min(fitting_rows, key=lambda row: row.free).add(document)
            continue
        start = 0
        while start < len(document.ids):
            token_slice = slice(start, start + stream_row.free)
            stream_row.add(Document(document.ids[token_slice], document.supervised[token_slice], indivisible=False))
            start = token_slice.stop
            if stream_row.free == 0:
                yield stream_row.segments
                stream_row = _OpenRow(seq_len)
    for row in [*open_rows, stream_row]:
        if row.segments:
            yield row.segments


def _row_type(seq_len: int) -> np.dtype:
    """A row: tokens, documents (−1: padding) and supervised, [seq_len] each."""
    # A target may write ids beyond its tokenizer's vocabulary.
    dtypes = {"tokens": np.uint32, "documents": np.min_scalar_type(-seq_len), "supervised": bool}  # a signed type
    return np.dtype([(name, dtype, seq_len) for name, dtype in dtypes.items()])


def _to_row(segments: list[Document], seq_len: int) -> np.ndarray:
    """One row of `_row_type`, padded."""
    row, start = np.zeros((), _row_type(seq_len)), 0
    row["documents"] = -1
    for document_index, segment in enumerate(segments):
        token_slice = slice(start, start + len(segment.ids))
        row["tokens"][token_slice], row["supervised"][token_slice] = segment.ids, segment.supervised
        row["documents"][token_slice], start = document_index, token_slice.stop
    return row


def _labels(tokens: np.ndarray, document_ids: np.ndarray, supervised: np.ndarray) -> np.ndarray:
    """The labels of a row, int64 [seq_len] (see `PackedRows`)."""
    labels = np.full(len(tokens), IGNORE, np.int64)
    has_label = (document_ids[1:] == document_ids[:-1]) & supervised[1:]
    labels[:-1][has_label] = tokens[1:][has_label]
    return labels


def _positions(document_ids: np.ndarray) -> np.ndarray:
    """The positions of a row's tokens in their documents, int64 [seq_len]."""
    indices = np.arange(len(document_ids))
    is_first = np.r_[True, document_ids[1:] != document_ids[:-1]]
    return indices - np.maximum.accumulate(np.where(is_first, indices, 0))


def _documents(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, seq_len: int, split: Split, counts: Counts
) -> Iterator[Document]:
    """Tokenised records. Conversations are clipped to seq_len, and dropped without labels; both are counted."""
    with Stage(f"tokenising {split}", unit="records") as stage:
        for batch in batches(read_records(config, split, counts), _characters, _CHARACTERS_A_BATCH, _RECORDS_A_BATCH):
            for ids, supervised, indivisible in encode(batch, tokenizer, config.template, counts):
                if indivisible:
                    counts["clipped"] += len(ids) > seq_len
                    ids, supervised = ids[:seq_len], supervised[:seq_len]
                    if not supervised[1:].any():
                        counts["unsupervised"] += 1
                        continue
                yield Document(ids, supervised, indivisible)
            stage.advance(len(batch))


def _characters(record: Record) -> int:
    return len(record["text"]) if "text" in record else sum(len(message["content"]) for message in record["messages"])


def _build_rows(
    folder: Path, cache_key: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase, seq_len: int, split: Split
) -> None:
    """Write the rows of one source to `folder`, an entry of the cache, completely or not at all."""
    print(f"data source={config.source} split={split}: tokenising into {folder}", flush=True)
    partial_dir = folder.with_suffix(".partial")
    shutil.rmtree(partial_dir, ignore_errors=True)  # left by a killed process
    partial_dir.mkdir()
    counts = Counts(dict.fromkeys(COUNT_NAMES, 0))
    try:
        with open(partial_dir / ROWS_FILE, "wb") as file:
            for segments in pack(_documents(config, tokenizer, seq_len, split, counts), seq_len):
                row = _to_row(segments, seq_len)
                if _count_row(row, counts):
                    file.write(row.tobytes())
        _require_content(config, split, counts)
        write_json(partial_dir / META_FILE, asdict(CacheMeta(cache_key, dict(counts), counts.first)))
        shutil.rmtree(folder, ignore_errors=True)  # a damaged entry
        partial_dir.replace(folder)
    except BaseException:
        shutil.rmtree(partial_dir, ignore_errors=True)
        raise


def _count_row(row: np.ndarray, counts: Counter[str]) -> bool:
    """Add a row to the counts; False for a row without labels, which must be dropped."""
    label_count = int((_labels(row["tokens"], row["documents"], row["supervised"]) != IGNORE).sum())
    counts["rows" if label_count else "dropped_rows"] += 1
    if label_count:
        counts["tokens"] += int((row["documents"] >= 0).sum())
        counts["supervised"] += label_count
    return label_count > 0


def _require_content(config: DataConfig, split: Split, counts: Counts) -> None:
    """Raise `UserError` for a split without records or without labels."""
    outcomes = ", ".join(f"{name}={counts[name]}" for name in COUNT_NAMES if counts[name]) or "nothing"
    first_fault = f"; one of them: {counts.first}" if counts.first else ""
    where = f"data source={config.source} path={', '.join(config.path)}" if config.path else "data"
    if not counts["records"]:
        hint = "texts with the same first turn, and a file of text, count as one for the split"
        remedy = f"give more data or raise heldout_fraction ({hint})" if split == "heldout" else "give more data"
        raise UserError(f"{where}: empty dataset: no usable {split} record (found {outcomes}); {remedy}{first_fault}")
    if not counts["rows"]:
        why = "no assistant's answer is within seq_len; check layout, column and template, or raise seq_len"
        fault = f"no token of the {split} split is supervised (found {outcomes})"
        raise UserError(f"{where}: {fault}: {why}{first_fault}")


@dataclass(frozen=True)
class CacheMeta:
    """The content of an entry's `META_FILE`: its key, its rows' `Counts` and their `first`. It is written last."""

    key: str
    counts: dict[str, int]
    first: str = ""

    def __post_init__(self) -> None:
        require(set(self.counts) >= set(COUNT_NAMES), "counts", sorted(self.counts), ", ".join(COUNT_NAMES))


def _read_meta(folder: Path) -> CacheMeta:
    return read_as(CacheMeta, folder / META_FILE, "entry of the cache", "remove its directory")


def _is_complete(folder: Path, key: str, seq_len: int) -> bool:
    """Whether the entry of `key` exists, and has all its rows."""
    try:
        meta, file_size = _read_meta(folder), (folder / ROWS_FILE).stat().st_size
    except (OSError, UserError):
        return False
    return meta.key == key and file_size == meta.counts["rows"] * _row_type(seq_len).itemsize


def _cached_rows(config: DataConfig, tokenizer: PreTrainedTokenizerBase, seq_len: int, split: Split) -> Path:
    """The cache folder with the rows of one source, built if missing; prints its counts."""
    # From here on the chat template has the user's arguments.
    tokenizer = bind_arguments(tokenizer, config.chat_template_kwargs, config.template, f"data.{KWARGS}")
    key_fields = {key: value for key, value in config.decisions().items() if key not in _IN_THE_CONTENT}
    key_fields |= {  # clock_of: the time of the run, if the template shows the time
        "format": FORMAT,
        "content": content_digest(config),
        "tokenizer": [tokenizer_digest(tokenizer), tokenizer.chat_template, *filter(None, [clock_of(tokenizer)])],
        "seq_len": seq_len,
        "split": split,
        "embedding_rows": rows_of(tokenizer),  # a record with an id beyond them is left out
    }
    key = digest_of(key_fields)
    folder = config.cache / "rows" / key[:32]
    if not _is_complete(folder, key, seq_len):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with lock(folder.with_suffix(".lock")):
                if not _is_complete(folder, key, seq_len):
                    _build_rows(folder, key, config, tokenizer, seq_len, split)
        except OSError as error:  # reading raises UserError itself, so this is a write error
            remedy = "free space there or choose another with data.cache_dir=DIRECTORY"
            cause = error.strerror or error
            raise UserError(f"cache_dir={config.cache}: cannot be written ({cause}); {remedy}") from error
    if shows_progress():
        meta = _read_meta(folder)
        counts_text = " ".join(f"{name}={meta.counts[name]}" for name in COUNT_NAMES)
        print(f"data source={config.source} split={split} {counts_text}", flush=True)
        warn_of_unused(meta.counts, meta.first)
    return folder


def rows_of_sources(row_counts: Sequence[int], label_counts: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Rows to take from each source, so that their shares of the supervised tokens are proportional to `weights`.

    row_counts, label_counts: rows of each source, and labels in them. Every row counts as its source's mean. The total
    is as large as possible: the scarcest source is used up. Every source contributes at least one row. Example: 100 and
    300 rows of equal labels, weights 1 and 1: 100 rows of each.
    """
    labels_per_row = [labels / rows for labels, rows in zip(label_counts, row_counts, strict=True)]
    ratios = [weight / mean for weight, mean in zip(weights, labels_per_row, strict=True)]
    scale = min(rows / ratio for rows, ratio in zip(row_counts, ratios, strict=True))
    return [min(rows, max(1, round(scale * ratio))) for rows, ratio in zip(row_counts, ratios, strict=True)]


def interleave(quotas: Sequence[int], row_counts: Sequence[int]) -> np.ndarray:
    """int64 [rows, 2]: (source, row) of a mix, in which every stretch has about the overall proportions.

    The rows taken are spread evenly over a source, since neighbours share documents, and keep their order. Example:
    1 of 2 rows of source 0 and 2 of 4 rows of source 1 give [[1, 0], [0, 0], [1, 2]].
    """
    source_ids = np.repeat(np.arange(len(quotas)), quotas)
    ranks = np.concatenate([np.arange(count) for count in quotas])
    source_quotas, source_sizes = np.array(quotas)[source_ids], np.array(row_counts)[source_ids]
    order = np.argsort((ranks + 0.5) / source_quotas, kind="stable")
    return np.stack([source_ids, ranks * source_sizes // source_quotas], axis=1)[order]
