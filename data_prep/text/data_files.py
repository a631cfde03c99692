"""The files of a data set: which of them a path names, and the records in one, whatever its format and compression."""

import bz2
import codecs
import csv
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.base.errors import UserError
from outrider.base.files import MOST_BYTES, parse_json
from outrider.base.words import list_words

if TYPE_CHECKING:
    import pyarrow

    from outrider.data_prep.text.records import Counts

RUN_FILE, RESPONSES = "run.json", "responses-*.jsonl"  # files of generate-responses in its output directory
_ABOUT = re.compile(  # files that describe a data set: of a repository, and as `datasets` saves it
    r"(readme|licen[cs]e|copying|notice|citation|changelog)(\W.*)?|(dataset_(infos?|dict)|state)\.json", re.IGNORECASE
)
_PACKED = {".gz": gzip.GzipFile, ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile}  # suffixes of compressed files; also .zst
_BOMS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be", codecs.BOM_UTF8: ""}  # "": UTF-8
_SETTLED_NS = 10**9  # a file changed less than 1 s ago may change again with the same time: its digest is not cached
_MAX_BYTES = 2**30  # bytes of a file that is one text or one JSON value; a line, or a field of CSV, has `MOST_BYTES`


def match_paths(pattern: str) -> list[Path]:
    """The paths that `pattern` names: itself if it is there, else what it matches as a glob.

    Special characters in the part of the path that exists are not a glob.
    """
    path = Path(os.path.expanduser(pattern))
    if os.path.exists(path):
        return [path]
    root = next(filter(os.path.exists, path.parents))
    return [root / match for match in glob.glob(str(path.relative_to(root)), root_dir=root, recursive=True)]


def resolve_paths(patterns: Iterable[str]) -> list[Path]:
    """The distinct files named by paths, directories (all files that are not hidden) and globs (see `match_paths`).

    In an output directory of generate-responses only the responses count. In any other directory, files that describe
    the data (such as README.md) count only if there are no others.
    """
    distinct_files: dict[Path, None] = {}
    for pattern in patterns:
        matches = match_paths(pattern)
        path = Path(os.path.expanduser(pattern))
        if os.path.isdir(path):
            matches = list(path.glob(RESPONSES)) if (path / RUN_FILE).exists() else []
            matches = matches or _data_files(path)
        files = sorted(match for match in matches if match.is_file())
        if not files:
            raise UserError(f"path={pattern}: no file matches")
        distinct_files.update(dict.fromkeys(files))
    return list(distinct_files)


def _data_files(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    files = [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    docs = {path for path in files if _ABOUT.fullmatch(path.name) and _suffix(path) not in _READERS.keys() - {".json"}}
    if not docs or len(docs) == len(files):
        return files
    _print_once(f"data path={folder}: passed over {list_words(sorted({path.name for path in docs}))}")
    return [path for path in files if path not in docs]


@functools.cache
def _print_once(text: str) -> None:
    """Print a line once: both splits of a data set ask for its files."""
    print(text, flush=True)


def read_file(path: Path, counts: "Counts | None" = None) -> Iterator[tuple[int, object]]:
    """(number from 1, record) of a JSONL, JSON, CSV, TSV, parquet or Arrow file; (0, text) of any other file.

    All but parquet and Arrow also compressed (gz, bz2, xz, zst), and in UTF-16 with a byte-order mark. A JSON
    file may hold a list, one object, or one object per line. Raises `UserError` naming file and line; a text file that
    is not UTF-8 is counted as unreadable and skipped, if there are `counts`.
    """
    reader = _READERS.get(_suffix(path))
    return text_rows(path, counts) if reader is None else reader(path)


def _suffix(path: Path) -> str:
    path = Path(path.name.lower())
    return path.with_suffix("").suffix if path.suffix in {*_PACKED, ".zst"} else path.suffix


def _jsonl_rows(path: Path) -> Iterator[tuple[int, object]]:
    for number, line in enumerate(_read_lines(path, MOST_BYTES), 1):
        if line.strip():
            yield number, _parse_line(line, path, number)


def _json_rows(path: Path) -> Iterator[tuple[int, object]]:
    lines = ((number, line) for number, line in enumerate(_read_lines(path, _MAX_BYTES), 1) if line.strip())
    (number, first_line), second_item = next(lines, (1, b"")), next(lines, None)
    if second_item is not None and _is_record(_decode_line(first_line, path, number)):
        yield from _jsonl_rows(path)
        return
    del first_line, second_item, lines
    try:
        value = parse_json(_read_text(path))
    except UserError as error:
        line = f":{error.__cause__.lineno}" if isinstance(error.__cause__, json.JSONDecodeError) else ""
        raise UserError(f"{path}{line}: {error}") from None
    yield from enumerate(value if isinstance(value, list) else [value], 1)


def _csv_rows(path: Path) -> Iterator[tuple[int, object]]:
    csv.field_size_limit(MOST_BYTES)
    lines = (_decode_line(line, path, number) for number, line in enumerate(_read_lines(path, MOST_BYTES), 1))
    reader = csv.DictReader(lines, delimiter="," if _suffix(path) == ".csv" else "\t", strict=True)
    try:
        for row in reader:
            field_count = len(reader.fieldnames or ())
            if None in row or None in row.values() or len(row) < field_count:
                raise csv.Error(f"expected the {field_count} fields of the first line, each of another name")
            yield reader.line_num, row
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: {error}") from None


def drop_absent(row: dict[str, object]) -> dict[str, object]:
    """A row of a table as JSON would have it: times in seconds since 1970, other values of Arrow's as texts.

    Entries that its mappings lack are left out: Arrow gives all mappings of a column the same names, some with None.
    """

    def drop(value: object) -> object:
        if isinstance(value, dict):
            return {name: drop(inner) for name, inner in value.items() if inner is not None}
        if isinstance(value, list | tuple):
            return [drop(inner) for inner in value]
        if isinstance(value, bytes):
            try:
                return value.decode()
            except UnicodeDecodeError:
                return None  # an image, say
        if isinstance(value, datetime):
            return (value - datetime(1970, 1, 1, tzinfo=value.tzinfo and UTC)).total_seconds()
        if isinstance(value, Decimal):
            return float(value)
        return value if value is None or isinstance(value, str | int | float) else str(value)

    return {name: drop(value) for name, value in row.items()}


def _table_rows(path: Path) -> Iterator[tuple[int, object]]:
    import pyarrow

    try:
        yield from enumerate((drop_absent(raw) for batch in _record_batches(path) for raw in batch.to_pylist()), 1)
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:  # or no UTF-8
        raise _read_error(path, error) from error


def _record_batches(path: Path) -> Iterator["pyarrow.RecordBatch"]:
    """The record batches of a parquet file, or of an Arrow one, as a stream or as a file."""
    import pyarrow
    import pyarrow.parquet

    if _suffix(path) == ".parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=16)  # a row may be megabytes
        return
    with pyarrow.memory_map(str(path)) as mapped:
        try:
            yield from pyarrow.ipc.open_stream(mapped)
        except pyarrow.ArrowInvalid:
            mapped.seek(0)
            stored = pyarrow.ipc.open_file(mapped)
            yield from map(stored.get_batch, range(stored.num_record_batches))


_READERS: dict[str, Callable[[Path], Iterator[tuple[int, object]]]] = {
    **dict.fromkeys((".jsonl", ".ndjson"), _jsonl_rows), ".json": _json_rows,
    **dict.fromkeys((".csv", ".tsv"), _csv_rows), **dict.fromkeys((".parquet", ".arrow"), _table_rows),
}  # fmt: skip


def text_rows(path: Path, counts: "Counts | None") -> Iterator[tuple[int, str]]:
    """(0, text) of a file; one that is not UTF-8 is counted as unreadable, or refused if there are no `counts`."""
    try:
        text = _read_text(path)
    except UserError as error:
        if counts is None:
            raise
        counts.refuse("unreadable", str(error))
        return
    yield 0, text


def _open_unpacked(path: Path) -> io.BufferedReader:
    """A file's bytes, decompressed by its suffix."""
    suffix = path.suffix.lower()
    if suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    return io.BufferedReader(_PACKED.get(suffix, open)(path, "rb"))


def _read_lines(path: Path, max_bytes: int, *, in_total: bool = False) -> Iterator[bytes]:
    """The lines of a file, decompressed; converted to UTF-8 if it begins with the byte-order mark of another encoding.

    A compressed file may hold a thousand times its size. Raises `UserError` for a line, or with `in_total` for a
    file, of more than `max_bytes` bytes, and reads no more.
    """
    try:
        with _open_unpacked(path) as file:
            first_bytes = file.peek(4)
            bom = next((bom for bom in _BOMS if first_bytes.startswith(bom)), b"")
            file.read(len(bom))
            encoding, bytes_read = _BOMS.get(bom), 0
            stream = io.TextIOWrapper(file, encoding, newline="\n") if encoding else file
            for number in itertools.count(1):
                if not (line := stream.readline(max_bytes + 1)):
                    break
                bytes_read = len(line) + bytes_read * in_total
                if bytes_read > max_bytes:
                    subject = f"{path}: a text" if in_total else f"{path}:{number}: a line"
                    raise UserError(f"{subject} of more than {max_bytes} bytes: expected no more; split it")
                yield line.encode() if isinstance(line, str) else line
    except (OSError, EOFError, zlib.error, lzma.LZMAError, UnicodeError) as error:
        raise _read_error(path, error) from error


def _read_text(path: Path) -> str:
    """A whole file. Raises `UserError` naming the line."""
    lines = enumerate(_read_lines(path, _MAX_BYTES, in_total=True), 1)
    return "".join(_decode_line(line, path, number) for number, line in lines)


def _decode_line(line: bytes, path: Path, number: int) -> str:
    if b"\0" in line:
        raise UserError(f"{path}:{number}: a zero byte: not text, or UTF-16 with no byte-order mark; save it as UTF-8")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        fault = f"byte {error.start + 1} is {line[error.start]:#x}, which is no UTF-8"
        remedy = "convert it from the encoding it has, as latin1 or cp1252: iconv -f ENCODING -t UTF-8"
        raise UserError(f"{path}:{number}: {fault}; {remedy}") from None


def _parse_line(line: bytes, path: Path, number: int) -> object:
    text = _decode_line(line, path, number)
    try:
        return parse_json(text)
    except UserError as error:
        remedy = "a JSON list belongs in a .json file" if text.strip() == "[" else "fix or remove this line"
        raise UserError(f"{path}:{number}: {error}; {remedy}") from None


def _is_record(line: str) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except UserError:
        return False


def file_digest(path: Path) -> bytes:
    """The sha256 of its bytes, which are read once while the file does not change."""
    try:
        file_stat = path.stat()
        digest_fn = _digest_file if time.time_ns() - file_stat.st_mtime_ns > _SETTLED_NS else _digest_file.__wrapped__
        return digest_fn(path, file_stat.st_size, file_stat.st_mtime_ns)
    except OSError as error:
        raise _read_error(path, error) from error


@functools.cache
def _digest_file(path: Path, size: int, modified: int) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _read_error(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})")
