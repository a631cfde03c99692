"""Records from the interpreter's library, the Hugging Face Hub or local files; train and held-out split."""

import bz2
import codecs
import csv
import functools
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from outrider.base.errors import UserError, reason
from outrider.base.files import parse_json
from outrider.base.words import listed
from outrider.data_prep.text.prompt_records import asked_record, asks, to_prompt
from outrider.data_prep.text.records import (
    Counts,
    FileLayout,
    Record,
    SkipRecordError,
    find_layout,
    split_key,
    text_record,
    to_record,
)
from outrider.data_prep.text.settings import DataConfig, matching

if TYPE_CHECKING:
    import pyarrow

Split = Literal["train", "heldout"]
RUN_FILE, RESPONSES = "run.json", "responses-*.jsonl"  # files of generate-responses in its output directory
_PROMPTS = FileLayout("prompts", "any")  # determined by the columns of each record
_NO_ANSWERS = "prompts have no answers to learn from; answer them with generate_responses and give data=responses"
_ABOUT = re.compile(  # files that describe a data set: of a repository, and as `datasets` saves it
    r"(readme|licen[cs]e|copying|notice|citation|changelog)(\W.*)?|(dataset_(infos?|dict)|state)\.json", re.IGNORECASE
)
_LONGEST = 2**30  # characters of a field in CSV

# Excluded: tests and their data, installed packages, and generated tables. The character maps in encodings are
# near-copies of each other, so held-out ones would be known from training. pydoc_data is one long string.
_NOT_LIBRARY = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data",
}  # fmt: skip


def read_records(
    config: DataConfig, split: Split, counts: Counts | None = None, *, asking: bool = False
) -> Iterator[Record]:
    """The records of one split, in the order of the source.

    A record is held out if its hash is below `config.heldout_fraction`. For python_stdlib the hash is of the file's
    path, else of the user's first turn or the text, so that all that begin with one turn are in the same split. It is
    equal on every machine, whatever else is read. `counts` receives records, and what cannot be used. The sources of a
    mix are read one after another.

    asking: the records will be answered, so prompts without an answer (see `to_prompt`) are allowed too. With
    layout=auto the first record of a file decides. Raises `UserError` that names file and record.
    """
    counts = Counts() if counts is None else counts
    for _, _, part in config.parts():
        yield from read_records(part, split, counts, asking=asking)
    if config.layout == "prompts" and not asking:
        raise UserError(f"layout=prompts: {_NO_ANSWERS}")
    detected: set[FileLayout] = set()
    seen = 0
    for name, rows in _sources(config, counts):
        layout: FileLayout | None = None
        for number, raw in rows:
            if seen == config.max_records:
                return
            seen += 1
            identity = f"{name}:{number}" if number else name
            try:
                if layout is None and (config.layout == "prompts" or not isinstance(raw, str)):
                    layout = _layout_of(raw, config, asking, identity)
                    if config.layout == "auto" and layout not in detected:
                        detected.add(layout)
                        print(f"data layout={layout.name} column={layout.column} detected in {identity}", flush=True)
                record = _convert(raw, layout, config, identity, number)
                key = identity if config.source == "python_stdlib" else split_key(record)
                if is_heldout(key, config.heldout_fraction) == (split == "heldout"):
                    counts["records"] += 1
                    yield record
            except SkipRecordError as skipped:
                if is_heldout(identity, config.heldout_fraction) == (split == "heldout"):
                    counts.refuse(skipped.reason, f"{identity}: {skipped}")


def is_heldout(key: str, fraction: float) -> bool:
    """Whether the record with this key is held out: a fixed function of the key and the fraction."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def content_digest(config: DataConfig) -> str:
    """A digest of what `read_records` reads from a source: contents of files; name, revision and split of Hub data.

    A Hub dataset without `revision` counts as unchanged: pin a revision if that matters.
    """
    digest = hashlib.sha256()
    if config.source == "hub":
        named = [config.path, config.subset, config.data_dir, config.revision, config.split]
        digest.update(json.dumps(named).encode())
    elif config.source == "local":
        for path in resolve_paths(config.path):
            digest.update(path.suffix.lower().encode() + _file_digest(path))
    else:
        for name, path in python_files(config.packages):
            digest.update(name.encode() + _file_digest(path))
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------ sources


def _sources(config: DataConfig, counts: Counts) -> Iterator[tuple[str, Iterable[tuple[int, object]]]]:
    """(name, rows) of each file or dataset; a row is (number from 1, record), or (0, text) of a file."""
    if config.source == "hub":
        yield f"{config.path[0]}/{config.split}", _hub_rows(config)
    elif config.source == "local":
        for path in resolve_paths(config.path):
            yield str(path), read_file(path, counts)
    elif config.source == "python_stdlib":
        for name, path in python_files(config.packages):
            yield name, _text_rows(path, counts)


def _layout_of(raw: object, config: DataConfig, asking: bool, where: str) -> FileLayout:
    """The layout of the file that begins with the record `raw` (see `find_layout`)."""
    found_prompts = asking and config.layout == "auto" and config.column is None and asks(raw)
    if config.layout == "prompts" or found_prompts:
        return _PROMPTS
    try:
        return find_layout(raw, config.layout, config.column, where)
    except UserError as error:
        if asks(raw) and config.column is None:
            raise UserError(f"{where}: {_NO_ANSWERS}; if it has some: {error}") from error
        raise


def _convert(raw: object, layout: FileLayout | None, config: DataConfig, identity: str, number: int) -> Record:
    if layout is _PROMPTS:
        return asked_record(to_prompt(raw, identity, number), identity)
    if isinstance(raw, str):
        if config.layout not in ("auto", "text", "code"):
            raise UserError(f"{identity}: plain text, but layout={config.layout} needs records with columns")
        return text_record(raw, identity)
    assert layout is not None
    return to_record(raw, layout, identity)


def python_stdlib_files() -> list[tuple[str, Path]]:
    """(path relative to the library, file) of the interpreter's own source, sorted by relative path."""
    root = Path(sysconfig.get_path("stdlib"))
    files = _source_files(root)
    if not files:
        raise UserError(f"source=python_stdlib: no Python source under {root}; use source=local with your own files")
    return files


def python_files(packages: bool) -> list[tuple[str, Path]]:
    """`python_stdlib_files`, followed with `packages` by the installed packages' source as "site-packages/…".

    Files of packages with repeated content are skipped: many packages vendor others or parts of the library, whose
    held-out files must not reappear as training text.
    """
    files = python_stdlib_files()
    if not packages:
        return files
    roots = dict.fromkeys(Path(sysconfig.get_path(key)) for key in ("purelib", "platlib"))
    seen = {_file_digest(path) for _, path in files}
    for name, path in (found for root in roots for found in _source_files(root)):
        digest = _file_digest(path)
        if digest not in seen:
            seen.add(digest)
            files.append((f"site-packages/{name}", path))
    return files


def _source_files(root: Path) -> list[tuple[str, Path]]:
    """(path relative to `root`, file) of the Python source under `root` that is used as training text, sorted."""
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - _NOT_LIBRARY
        paths = [Path(folder, name) for name in names if name.endswith(".py")]
        files += [(path.relative_to(root).as_posix(), path) for path in paths]
    return sorted(files)


def resolve_paths(patterns: Iterable[str]) -> list[Path]:
    """The distinct files named by paths, directories (all files that are not hidden) and globs (see `matching`).

    An output directory of generate-responses stands for its responses only; any other directory not for what describes
    its data, as README.md does, unless there is nothing else.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        matches = matching(pattern)
        path = Path(os.path.expanduser(pattern))
        if os.path.isdir(path):
            matches = list(path.glob(RESPONSES)) if (path / RUN_FILE).exists() else []
            matches = matches or _data_files(path)
        files = sorted(match for match in matches if match.is_file())
        if not files:
            raise UserError(f"path={pattern}: no file matches")
        found.update(dict.fromkeys(files))
    return list(found)


def _data_files(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    files = [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    about = {path for path in files if _ABOUT.fullmatch(path.name) and _kind(path) not in _RECORDS.keys() - {".json"}}
    if not about or len(about) == len(files):
        return files
    _say(f"data path={folder}: passed over {listed(sorted({path.name for path in about}))}")
    return [path for path in files if path not in about]


@functools.cache
def _say(text: str) -> None:
    """Print a line once: both splits of a data set ask for its files."""
    print(text, flush=True)


def read_file(path: Path, counts: Counts | None = None) -> Iterator[tuple[int, object]]:
    """(number from 1, record) of a JSONL, JSON, CSV, TSV, parquet or Arrow file; (0, text) of any other file.

    All but parquet and Arrow also packed (gz, bz2, xz, zst), and in UTF-16 with a byte-order mark. A JSON
    file may hold a list, one object, or one object per line. Raises `UserError` naming file and line; a text file that
    is not UTF-8 is counted as unreadable and skipped, if there are `counts`.
    """
    reader = _RECORDS.get(_kind(path))
    return _text_rows(path, counts) if reader is None else reader(path)


def _kind(path: Path) -> str:
    path = Path(path.name.lower())
    return path.with_suffix("").suffix if path.suffix in {*_PACKED, ".zst"} else path.suffix


def _jsonl_rows(path: Path) -> Iterator[tuple[int, object]]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            yield number, _parse(line, path, number)


def _json_rows(path: Path) -> Iterator[tuple[int, object]]:
    content = _text_of(path)
    try:
        value = parse_json(content)
    except UserError as error:
        if len(content.strip().splitlines()) > 1 and _is_record(content.strip().splitlines()[0]):
            yield from _jsonl_rows(path)
            return
        line = f":{error.__cause__.lineno}" if isinstance(error.__cause__, json.JSONDecodeError) else ""
        raise UserError(f"{path}{line}: {error}") from None
    yield from enumerate(value if isinstance(value, list) else [value], 1)


def _csv_rows(path: Path) -> Iterator[tuple[int, object]]:
    csv.field_size_limit(_LONGEST)
    lines = (_decoded(line, path, number) for number, line in enumerate(_lines(path), 1))
    rows = csv.DictReader(lines, delimiter="," if _kind(path) == ".csv" else "\t", strict=True)
    try:
        for raw in rows:
            count = len(rows.fieldnames or ())
            if None in raw or None in raw.values() or len(raw) < count:
                raise csv.Error(f"expected the {count} fields of the first line, each of another name")
            yield rows.line_num, raw
    except csv.Error as error:
        raise UserError(f"{path}:{rows.line_num}: {error}") from None


def _table_rows(path: Path) -> Iterator[tuple[int, object]]:
    import pyarrow

    try:
        yield from enumerate((raw for batch in _batches(path) for raw in batch.to_pylist()), 1)
    except (OSError, ValueError, pyarrow.ArrowException) as error:  # ValueError: text that is not UTF-8
        raise _unreadable(path, error) from error


def _batches(path: Path) -> Iterator["pyarrow.RecordBatch"]:
    """The record batches of a parquet file, or of an Arrow one, as a stream or as a file."""
    import pyarrow
    import pyarrow.parquet

    if _kind(path) == ".parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=1024)
        return
    with pyarrow.memory_map(str(path)) as mapped:
        try:
            yield from pyarrow.ipc.open_stream(mapped)
        except pyarrow.ArrowInvalid:
            mapped.seek(0)
            stored = pyarrow.ipc.open_file(mapped)
            yield from map(stored.get_batch, range(stored.num_record_batches))


_RECORDS: dict[str, Callable[[Path], Iterator[tuple[int, object]]]] = {
    **dict.fromkeys((".jsonl", ".ndjson"), _jsonl_rows), ".json": _json_rows,
    **dict.fromkeys((".csv", ".tsv"), _csv_rows), **dict.fromkeys((".parquet", ".arrow"), _table_rows),
}  # fmt: skip


def _text_rows(path: Path, counts: Counts | None) -> Iterator[tuple[int, str]]:
    try:
        text = _text_of(path)
    except UserError as error:
        if counts is None:
            raise
        counts.refuse("unreadable", str(error))
        return
    yield 0, text


def _hub_rows(config: DataConfig) -> Iterator[tuple[int, object]]:
    import datasets

    try:
        dataset = datasets.load_dataset(
            config.path[0],
            name=config.subset,
            data_dir=config.data_dir,
            split=config.split,
            revision=config.revision,
            streaming=config.streaming,
        )
        yield from enumerate(dataset, 1)
    except Exception as error:  # whatever the Hub client, the network or a loader raises
        raise UserError(
            f"path={config.path[0]}: cannot read split {config.split!r} from the Hugging Face Hub "
            f"({type(error).__name__}: {reason(error)}). Check name, subset, split and revision; for a gated or "
            "private dataset set HF_TOKEN; without network use a copy in the Hub cache (HF_HUB_OFFLINE=1, "
            "streaming=false) or source=local with path=FILES"
        ) from error


# ------------------------------------------------------------------------------------------------- reading


def _open(path: Path) -> io.BufferedReader:
    """A file's bytes, unpacked by its suffix."""
    suffix = path.suffix.lower()
    if suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    return io.BufferedReader(_PACKED.get(suffix, open)(path, "rb"))


_PACKED = {".gz": gzip.GzipFile, ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile}
_MARKS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be", codecs.BOM_UTF8: ""}


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, unpacked, and in UTF-8 if its byte-order mark says in what they are."""
    try:
        with _open(path) as file:
            begin = file.peek(4)
            mark = next((mark for mark in _MARKS if begin.startswith(mark)), b"")
            file.read(len(mark))
            if encoding := _MARKS.get(mark):
                yield from (line.encode() for line in io.TextIOWrapper(file, encoding, newline="\n"))
            else:
                yield from file
    except (OSError, EOFError, zlib.error, lzma.LZMAError, UnicodeError) as error:
        raise _unreadable(path, error) from error


def _text_of(path: Path) -> str:
    """A whole file. Raises `UserError` naming the line."""
    return "".join(_decoded(line, path, number) for number, line in enumerate(_lines(path), 1))


def _decoded(line: bytes, path: Path, number: int) -> str:
    if b"\0" in line:
        raise UserError(f"{path}:{number}: a byte 0: no text, or UTF-16 with no byte-order mark; save it as UTF-8")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        said = f"byte {error.start + 1} is {line[error.start]:#x}, which is no UTF-8"
        remedy = "convert it from the encoding it has, as latin1 or cp1252: iconv -f ENCODING -t UTF-8"
        raise UserError(f"{path}:{number}: {said}; {remedy}") from None


def _parse(line: bytes, path: Path, number: int) -> object:
    text = _decoded(line, path, number)
    try:
        return parse_json(text)
    except UserError as error:
        raise UserError(f"{path}:{number}: {error}; fix or remove this line") from None


def _is_record(line: str) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except UserError:
        return False


def _file_digest(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})")
