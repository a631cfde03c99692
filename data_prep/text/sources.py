"""Records from the interpreter's library, the Hugging Face Hub or local files; train and held-out split."""

import functools
import glob
import gzip
import hashlib
import json
import os
import sysconfig
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Literal

from data_prep.text.prompt_records import asked_record, asks, to_prompt
from data_prep.text.records import FileLayout, Record, SkipRecordError, content_key, find_layout, text_record, to_record
from data_prep.text.settings import DataConfig
from outrider.errors import UserError
from outrider.files import parse_json

Split = Literal["train", "heldout"]
RUN_FILE, RESPONSES = "run.json", "responses-*.jsonl"  # files of generate-responses in its output directory
_PROMPTS = FileLayout("prompts", "any")  # determined by the columns of each record
_SETTLED = 2 * 10**9  # nanoseconds: a younger file may still change without a new time stamp

# Excluded: tests and their data, installed packages, and generated tables. The character maps in encodings are
# near-copies of each other, so held-out ones would be known from training. pydoc_data is one long string.
_NOT_LIBRARY = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "encodings",
    "pydoc_data",
}


def read_records(
    config: DataConfig, split: Split, counts: Counter[str] | None = None, *, asking: bool = False
) -> Iterator[Record]:
    """The records of one split, in the order of the source.

    A record is held out if its hash is below `config.heldout_fraction`. For python_stdlib the hash is of the file's
    path, else of the content, so that copies are in the same split. It is equal on every machine, whatever else is
    read. `counts` receives records, empty, malformed and unreadable. The sources of a mix are read one after another.

    asking: the records will be answered, so prompts without an answer (see `to_prompt`) are allowed too. With
    layout=auto the first record of a file decides. Raises `UserError` that names file and record.
    """
    counts = Counter() if counts is None else counts
    for _, _, part in config.parts():
        yield from read_records(part, split, counts, asking=asking)
    if config.layout == "prompts" and not asking:
        raise UserError(
            "layout=prompts: prompts have no answers to learn from; answer them with generate_responses, and give its "
            "responses (data=responses)"
        )
    detected: set[FileLayout] = set()
    seen = 0
    for name, rows in _sources(config, counts):
        layout: FileLayout | None = None
        for number, raw in rows:
            if seen == config.max_records:
                return
            seen += 1
            identity = f"{name}:{number}" if number else name
            if layout is None and (config.layout == "prompts" or not isinstance(raw, str)):
                layout = _layout_of(raw, config, asking, identity)
                if config.layout == "auto" and layout not in detected:
                    detected.add(layout)
                    print(f"data layout={layout.name} column={layout.column} detected in {identity}", flush=True)
            record, reason = _convert(raw, layout, config, identity, number)
            key = identity if record is None or config.source == "python_stdlib" else content_key(record)
            if is_heldout(key, config.heldout_fraction) != (split == "heldout"):
                continue
            counts[reason] += 1
            if record is not None:
                yield record


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
            digest.update(path.suffix.encode() + _file_digest(path))
    else:
        for name, path in python_files(config.packages):
            digest.update(name.encode() + _file_digest(path))
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------ sources


def _sources(config: DataConfig, counts: Counter[str]) -> Iterator[tuple[str, Iterable[tuple[int, object]]]]:
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
    return find_layout(raw, config.layout, config.column, where)


def _convert(
    raw: object, layout: FileLayout | None, config: DataConfig, identity: str, number: int
) -> tuple[Record | None, Literal["records", "empty", "malformed"]]:
    try:
        if layout is _PROMPTS:
            return asked_record(to_prompt(raw, identity, number), identity), "records"
        if isinstance(raw, str):
            if config.layout not in ("auto", "text", "code"):
                raise UserError(f"{identity}: plain text, but layout={config.layout} needs records with columns")
            return text_record(raw, identity), "records"
        assert layout is not None
        return to_record(raw, layout, identity), "records"
    except SkipRecordError as skipped:
        return None, skipped.reason


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
    """The distinct files named by paths, directories (all files that are not hidden) and globs.

    An output directory of generate-responses stands for its responses only.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            matches = list(path.glob(RESPONSES)) if (path / RUN_FILE).exists() else []
            if not matches:
                matches = [p for p in path.rglob("*") if not any(q.startswith(".") for q in p.relative_to(path).parts)]
        else:
            matches = [path] if path.exists() else [Path(p) for p in glob.glob(str(path), recursive=True)]
        files = sorted(match for match in matches if match.is_file())
        if not files:
            raise UserError(f"path={pattern}: no file matches")
        found.update(dict.fromkeys(files))
    return list(found)


def read_file(path: Path, counts: Counter[str] | None = None) -> Iterator[tuple[int, object]]:
    """(number from 1, record) of a JSONL, JSON or parquet file, also gzipped; (0, text) of any other file.

    A JSON file may hold a list, one object, or one object per line. Raises `UserError` naming file and line; a text
    file that is not UTF-8 is counted as unreadable and skipped.
    """
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    readers = {".jsonl": _jsonl_rows, ".ndjson": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}
    if kind in readers:
        return readers[kind](path)
    return _text_rows(path, Counter() if counts is None else counts)


def _jsonl_rows(path: Path) -> Iterator[tuple[int, object]]:
    try:
        with _open(path) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _parse(line, f"{path}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def _json_rows(path: Path) -> Iterator[tuple[int, object]]:
    content = _read(path)
    try:
        value = parse_json(content)
    except UserError as error:
        if len(content.strip().splitlines()) > 1 and _is_record(content.strip().splitlines()[0]):
            yield from _jsonl_rows(path)
            return
        line = f":{error.__cause__.lineno}" if isinstance(error.__cause__, json.JSONDecodeError) else ""
        raise UserError(f"{path}{line}: {error}") from None
    yield from enumerate(value if isinstance(value, list) else [value], 1)


def _parquet_rows(path: Path) -> Iterator[tuple[int, object]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for raw in batch.to_pylist():
                    number += 1
                    yield number, raw
    except (OSError, ValueError, pyarrow.ArrowException) as error:  # ValueError: text that is not UTF-8
        raise _unreadable(path, error) from error


def _text_rows(path: Path, counts: Counter[str]) -> Iterator[tuple[int, str]]:
    try:
        text = _read(path).decode("utf-8")
    except UnicodeDecodeError:
        counts["unreadable"] += 1
        return
    if "\0" in text:
        counts["unreadable"] += 1
        return
    yield 0, text


def _hub_rows(config: DataConfig) -> Iterator[tuple[int, object]]:
    import datasets

    number = 0
    try:
        dataset = datasets.load_dataset(
            config.path[0],
            name=config.subset,
            data_dir=config.data_dir,
            split=config.split,
            revision=config.revision,
            streaming=config.streaming,
        )
        rows = iter(dataset)
    except Exception as error:  # whatever the Hub client, the network or a loader raises
        raise _hub_error(config, error) from error
    while True:
        try:
            raw = next(rows)
        except StopIteration:
            return
        except Exception as error:
            raise _hub_error(config, error) from error
        number += 1
        yield number, raw


# ------------------------------------------------------------------------------------------------- reading


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _read(path: Path) -> bytes:
    try:
        with _open(path) as file:
            return file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def _parse(line: bytes, where: str) -> object:
    try:
        return parse_json(line)
    except UserError as error:
        raise UserError(f"{where}: {error}; fix or remove this line") from None


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except UserError:
        return False


def _file_digest(path: Path) -> bytes:
    try:
        state = path.stat()
        settled = time.time_ns() - state.st_mtime_ns > _SETTLED
        digest = _digest_of if settled else _digest_of.__wrapped__
        return digest(path, state.st_ino, state.st_size, state.st_mtime_ns)
    except OSError as error:
        raise _unreadable(path, error) from error


@functools.lru_cache(maxsize=2**18)
def _digest_of(path: Path, *_state: int) -> bytes:
    """Cached until the file changes, since every split of a data set asks for all its files."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})")


def _hub_error(config: DataConfig, error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [""])[0]
    return UserError(
        f"path={config.path[0]}: cannot read split {config.split!r} from the Hugging Face Hub "
        f"({type(error).__name__}: {reason}). Check name, subset, split and revision; for a gated or private "
        "dataset set HF_TOKEN; without network use a copy in the Hub cache (HF_HUB_OFFLINE=1, "
        "streaming=false) or source=local with path=FILES"
    )
