"""A build of an n-gram table at scale: memory, CPU seconds and disk for a corpus many times as large as the one here.

    python benchmarks/bench_scale_ngrams.py --table runs/ngrams --copies 14 --work /tmp/scale [--out benchmarks/results]
    python benchmarks/bench_scale_ngrams.py --table runs/ngrams --copies 1 --parts 2 --work /tmp/scale

--table was built with suffixes=true, so it has the tokens of its corpus. They are repeated, and in every copy but the
first one token in fifty is replaced by another of the corpus. The command that builds tables counts that. A token
stands in its text as one character, so what is left out is the tokenizer's work; `build_trigrams` prints that of the
corpus itself. Writes ngram_scale.json, "results" in it.

With --parts the table is built as several machines would: a table for each part, of so many copies, in which nothing is
left out; the last one merges the others. What is measured is the build of the last one. It becomes "merging".

Memory is that of the whole process: all resident pages, and those without pages of files, which the system may drop.
"""

import argparse
import json
import resource
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np

from data_prep.ngrams import building
from data_prep.ngrams.token_shards import Encoder
from data_prep.settings import DataConfig, TrigramConfig
from data_prep.text.records import Record
from draft_models.ngrams.table_files import Header, read_header, suffix_file

REPLACED = 0.02  # of the tokens of a copy
FIRST = 0x10000  # the character of token 0: every one from here on is a letter to nobody
_CHUNK = 2**20  # tokens read at once
_EVERY = 0.5  # seconds between two looks at memory and disk


def encoder_of(vocabulary: int) -> Encoder:
    """One token a character."""

    def encode(texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-32-le"), np.uint32) - np.uint32(FIRST) for text in texts]

    return Encoder(encode, {chr(FIRST + i): i for i in range(vocabulary)}, None, f"one of {vocabulary} a character")


def records(table: Path, copies: int, first: int = 0) -> Iterator[Record]:
    """The documents of the corpus, `copies` times over, as text; number `first` and those after it."""
    header = read_header(table)
    kind, length, _ = header.suffixes["tokens"]
    for copy in range(first, first + copies):
        rest = np.empty(0, kind)
        for begin in range(0, length, _CHUNK):
            size = min(_CHUNK, length - begin)
            read = np.fromfile(table / suffix_file("tokens"), kind, size, offset=begin * np.dtype(kind).itemsize)
            tokens = np.concatenate([rest, perturbed(read, header.vocabulary, copy, begin)])
            ends = np.flatnonzero(tokens == header.vocabulary)
            for start, stop in zip(np.r_[0, ends[:-1] + 1], ends, strict=True):
                yield {"text": (tokens[start:stop].astype("<u4") + FIRST).tobytes().decode("utf-32-le")}
            rest = tokens[ends[-1] + 1 :] if len(ends) else tokens


def perturbed(tokens: np.ndarray, end: int, copy: int, place: int) -> np.ndarray:
    """A share of `tokens` replaced by others of them, as often as those occur; what ends a document stays."""
    rng = np.random.default_rng((copy, place))
    given = rng.choice(tokens, len(tokens))
    changed = (rng.random(len(tokens)) < (REPLACED if copy else 0.0)) & (tokens != end) & (given != end)
    return np.where(changed, given, tokens)


class Watch(Thread):
    """The most anonymous memory of this process, and the most that `folder` held, in bytes."""

    def __init__(self, folder: Path):
        super().__init__(daemon=True)
        self.folder, self.memory, self.disk, self._ended = folder, 0, 0, Event()

    def run(self) -> None:
        while not self._ended.wait(_EVERY):
            status = Path("/proc/self/status").read_text()
            self.memory = max(self.memory, 1024 * int(status.split("RssAnon:")[1].split()[0]))
            sizes = [size(file) for file in self.folder.rglob("*")]
            self.disk = max(self.disk, sum(sizes))

    def end(self) -> None:
        self._ended.set()
        self.join()


def size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # gone since it was listed
        return 0


def build(args: argparse.Namespace, header: Header) -> dict[str, Any]:
    orders = tuple(sorted(map(int, header.levels)))
    config = TrigramConfig(
        tokenizer="one character a token", data=DataConfig(source="local", path=str(args.table), heldout_fraction=0.0),
        orders=orders, memory_gb=args.memory_gb, workers=1, out_dir=str(args.work / "table"),
    )  # fmt: skip
    building.open_encoder = lambda *_: encoder_of(header.vocabulary)
    args.work.mkdir(parents=True)
    others: tuple[str, ...] = ()
    for part in range(args.parts - 1):
        copies = records(args.table, args.copies, part * args.copies)
        building.read_records = lambda *_, copies=copies: copies
        others = (*others, str(args.work / f"part{part}"))
        building.build_table(replace(config, min_count=1, out_dir=others[-1]))
    building.read_records = lambda *_: records(args.table, args.copies, len(others) * args.copies)
    watch = Watch(args.work)
    watch.start()
    began, cpu = time.perf_counter(), time.process_time()
    building.build_table(replace(config, merge=others))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    watch.end()
    built = read_header(args.work / "table")
    return {
        "tokens": built.facts["tokens"],
        "documents": built.facts["documents"],
        "ngrams": {order: arrays["tokens"][1] for order, arrays in built.levels.items()},
        "table_mb": round(built.nbytes / 1e6, 1),
        "peak_resident_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 3),
        "peak_anonymous_gb": round(watch.memory / 1e9, 3),
        "peak_disk_gb": round(watch.disk / 1e9, 2),
        "cpu_seconds": round(cpu),
        "seconds": round(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--copies", type=int, default=14)
    parser.add_argument("--parts", type=int, default=1, help="tables that are merged; each has so many copies")
    parser.add_argument("--work", type=Path, required=True, help="a new folder; removed in the end")
    parser.add_argument("--memory-gb", type=float, default=1.0, help="as build_trigrams has it")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    header = read_header(args.table)
    if not header.suffixes:
        parser.error(f"--table {args.table}: expected a table built with suffixes=true, which has its corpus")
    try:
        found = build(args, header)
    finally:
        shutil.rmtree(args.work, ignore_errors=True)
    from outrider.machine import describe_machine  # only now: it loads torch, which builds no table

    conditions = {"copies": args.copies, "replaced": REPLACED, "memory_gb": args.memory_gb}
    conditions["machine"] = describe_machine("cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "ngram_scale.json"
    result = json.loads(file.read_text()) if file.exists() else {}
    if args.parts > 1:
        result["merging"] = {"parts": args.parts, **conditions, "results": found}
    else:
        result |= {**conditions, "results": found}
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
