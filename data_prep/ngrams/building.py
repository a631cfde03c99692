"""Building an n-gram table: read, tokenise and count a corpus; optionally merge with other tables and prune."""

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.ngrams.counting import count_order, write_level
from data_prep.ngrams.merging import kept_from, merged_level
from data_prep.ngrams.settings import TrigramConfig
from data_prep.ngrams.token_shards import Shards, passages, tokenise, whole_documents
from data_prep.text.records import Counts, warn_of_unused
from data_prep.text.rehearsal import rehearsable
from data_prep.text.sources import read_records
from draft_models.ngrams.suffixes import SORT_BYTES, separated, sort_suffixes
from draft_models.ngrams.table import TrigramTable, merged_facts, write_suffixes
from draft_models.ngrams.table_files import TABLE_FILE, publish, read_header, require_no_table, require_vocabulary
from draft_models.targets.encoder import Encoder, open_encoder
from draft_models.targets.vocabulary import vocabulary_digest
from outrider.errors import UserError, require, warn
from outrider.files import require_writable
from outrider.run_dirs import only_run
from outrider.settings import default_at

_GB = 10**9


@rehearsable
def build_table(config: TrigramConfig) -> None:
    """Read, tokenise and count a corpus. Writes a `TrigramTable` to `config.out_dir` and prints one line of figures.

    An unfinished table is in `<out_dir>.building`; `config.resume` continues with the shards there. Only the first
    process of a launcher builds, with `config.workers` processes; the others return. Raises `UserError` for a bad
    corpus, tokenizer or path. `out_dir` always holds a complete table or none.
    """
    if int(os.environ.get("RANK", "0")):
        return
    began = time.perf_counter()
    out_dir, work = Path(config.out_dir), Path(f"{config.out_dir}.building")
    encoder = open_encoder(config.tokenizer, config.revision)
    require_vocabulary(encoder.vocabulary)
    others = [_open_other(path, encoder, config) for path in config.merge]
    if config.resume and (out_dir / TABLE_FILE).exists():
        _require_same(TrigramTable.open(out_dir), config, encoder, others)
        print(f"{out_dir}: finished already")
        if work.exists():  # left by a build that was killed after publishing the table
            with only_run(work, f"the table of out_dir={out_dir}"):
                shutil.rmtree(work)
        return
    for path, other in zip(config.merge, others, strict=True):
        _warn_of_what_was_left_out(path, other)
    require_no_table(out_dir)
    require_writable(out_dir.parent)
    unfinished = (work / "shards").exists()
    with only_run(require_writable(work), f"the table of out_dir={out_dir}"):
        if unfinished and not config.resume:
            raise UserError(
                f"out_dir={out_dir}: {work} holds an unfinished build; resume=true continues it, another out_dir or "
                "removing it starts afresh"
            )
        require_writable(work / "shards")
        _tidily(work, lambda: _build(config, encoder, others, work, began))


def _tidily(work: Path, build: Callable[[], None]) -> None:
    """Build in `work` and remove it; after a failure keep only the shards for a resumed build."""
    try:
        build()
        shutil.rmtree(work)
    except BaseException as error:
        for part in ("table", "runs"):  # never resumed
            shutil.rmtree(work / part, ignore_errors=True)
        if not any((work / "shards").iterdir()):
            shutil.rmtree(work, ignore_errors=True)
        if isinstance(error, OSError) and error.strerror:
            raise UserError(
                f"{work}: cannot be written ({error.strerror}); free space and continue with resume=true, or choose "
                "another out_dir"
            ) from error
        raise


def _build(config: TrigramConfig, encoder: Encoder, others: list[TrigramTable], work: Path, began: float) -> None:
    counts = Counts()
    documents = passages(read_records(config.data, "train", counts), config.text, encoder)
    shards = tokenise(documents, config.tokenizer, config.revision, encoder, work / "shards", config.processes)
    if not shards.tokens:
        found = ", ".join(f"{name}={count}" for name, count in counts.items() if count) or "nothing"
        why = counts.first or "give more data"
        raise UserError(f"{_where(config)}: empty corpus: no text in it (found {found}); {why}")
    warn_of_unused(counts, counts.first)
    _warn_of_the_same_twice(shards, others)
    memory = int(config.memory_gb * _GB)
    if config.suffixes:
        _require_room_to_sort(shards, others, memory)
    tokenised, table = time.perf_counter(), work / "table"
    for part in (table, work / "runs"):  # left by a killed build
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
    # Rare n-grams of one table may be frequent in the sum of all.
    limits = (memory, 1, None) if others else (memory, config.min_count, config.max_successors)
    described = {
        order: count_order(shards, order, encoder.vocabulary, work, *limits) for order in sorted(config.orders)
    }
    _require_some(config, shards.tokens, [arrays["keys"][1] for arrays in described.values()])
    facts, kept = _facts(config, shards), {}
    if config.suffixes:
        tokens = separated(whole_documents(shards), encoder.vocabulary)
        kept = write_suffixes(sort_suffixes(tokens, encoder.vocabulary), table)
    whole: tuple[Any, ...] = (encoder.vocabulary, vocabulary_digest(encoder.pieces), described, facts, kept)
    if others:
        tables = [_published(work, "own", *whole), *others]
        whole = _joined(tables, config.min_count, config.max_successors, merged_facts(tables), work, memory)
        _require_some(config, whole[3]["tokens"], [arrays["keys"][1] for arrays in whole[2].values()])
    if config.max_mb is not None:
        large = _published(work, "large", *whole)
        count = kept_from(large, config.max_mb)
        facts = {**large.facts, "max_mb": config.max_mb, "kept_from": count}
        whole = _joined([large], count, None, facts, work, memory)
    publish(table, Path(config.out_dir), *whole)
    _report(config.out_dir, counts, tokenised - began, time.perf_counter() - tokenised)


def _published(work: Path, name: str, *whole: Any) -> TrigramTable:
    """Move the table in work/table to work/runs and open it, so that another one can be written."""
    publish(work / "table", work / "runs" / name, *whole)
    (work / "table").mkdir()
    return TrigramTable.open(work / "runs" / name)


def _joined(
    tables: Sequence[TrigramTable], min_count: int, max_successors: int | None, facts: Mapping[str, Any], work: Path,
    memory: int,
) -> tuple[Any, ...]:  # fmt: skip
    """Write the sum of the tables, pruned, to work/table. Returns the arguments of `publish`."""
    first, described = tables[0], {}
    for order in sorted(first.levels):
        levels = [table.levels[order] for table in tables]
        parts = merged_level(levels, first.vocabulary, min_count, max_successors, memory)
        described[order] = write_level(parts, order, first.vocabulary, work)
    kept = [table.suffixes for table in tables if table.suffixes is not None]
    if len(kept) > 1:
        kept = [sort_suffixes(np.concatenate([each.tokens for each in kept]), first.vocabulary)]
    return first.vocabulary, first.tokenizer, described, facts, write_suffixes(kept[0], work / "table") if kept else {}


def _where(config: TrigramConfig) -> str:
    return f"data source={config.data.source} path={config.data.path}"


def _require_some(config: TrigramConfig, tokens: int, contexts: Sequence[int]) -> None:
    """Raise `UserError` if no order has any context."""
    if not any(contexts):
        raise UserError(
            f"{_where(config)}: no n-gram of orders {list(config.orders)} occurs min_count={config.min_count} times in "
            f"{tokens} tokens; lower min_count or give more data"
        )


def _require_room_to_sort(shards: Shards, others: list[TrigramTable], memory: int) -> None:
    """Raise `UserError` if the corpus, with those of merged tables, cannot be sorted in `memory` bytes."""
    merged = sum(len(other.suffixes.tokens) for other in others if other.suffixes is not None)
    needed = SORT_BYTES * (shards.tokens + shards.documents + merged)
    expected = f"at least {needed / _GB:.1f} for suffixes=true: the corpus is sorted in memory"
    require(needed <= memory, "memory_gb", memory / _GB, expected)


def _report(out_dir: str, counts: Counter[str], tokenise_seconds: float, count_seconds: float) -> None:
    header = read_header(Path(out_dir))  # opening the arrays would load all of them into memory
    figures = {
        "tokens": header.facts["tokens"],
        "documents": header.facts["documents"],
        "ngrams": sum(arrays["tokens"][1] for arrays in header.levels.values()),
        "contexts": sum(arrays["keys"][1] for arrays in header.levels.values()),
        "seconds": f"{tokenise_seconds + count_seconds:.1f}",
        "tokenise_seconds": f"{tokenise_seconds:.1f}",
        "count_seconds": f"{count_seconds:.1f}",
        "mb": f"{header.nbytes / 1e6:.1f}",
        **{name: counts[name] for name in ("records", "empty", "malformed", "unreadable")},
    }
    print(f"trigrams {out_dir} " + " ".join(f"{key}={value}" for key, value in figures.items()), flush=True)


# ---------------------------------------------------------------------------------------------------- settings


def _facts(config: TrigramConfig, shards: Shards) -> dict[str, Any]:
    return {
        "tokens": shards.tokens,
        "documents": shards.documents,
        "min_count": config.min_count,
        "max_successors": config.max_successors,
        "corpus": {**config.corpus(), "digest": shards.digest},
    }


def _open_other(path: str, encoder: Encoder, config: TrigramConfig) -> TrigramTable:
    table = TrigramTable.open(path)
    table.require_tokenizer(vocabulary_digest(encoder.pieces), f"merge={path}")
    if sorted(table.levels) != sorted(config.orders):
        raise UserError(f"merge={path}: has orders {sorted(table.levels)}, expected {sorted(config.orders)}")
    require((table.suffixes is not None) == config.suffixes, "suffixes", config.suffixes, f"as in merge={path}")
    return table


def _warn_of_what_was_left_out(path: str, other: TrigramTable) -> None:
    """Warn if the sum will differ from one build of both corpora."""
    for part in other.facts.get("merged") or [other.facts]:
        if part.get("min_count", 1) > 1 or part.get("max_successors") or part.get("max_mb"):
            built = " ".join(f"{key}={part.get(key)}" for key in ("min_count", "max_successors", "max_mb"))
            warn(f"merge={path}: built with {built}: what was rare there is missing from the sum; min_count=1 keeps it")


def _warn_of_the_same_twice(shards: Shards, others: Sequence[TrigramTable]) -> None:
    parts = [part for other in others for part in other.facts.get("merged") or [other.facts]]
    digests = [shards.digest, *(part.get("corpus", {}).get("digest") for part in parts)]
    if len(set(digests)) < len(digests):
        warn("merge: one corpus is in it more than once, and counts as often")


def _require_same(table: TrigramTable, config: TrigramConfig, encoder: Encoder, others: list[TrigramTable]) -> None:
    """Raise `UserError` unless the finished table matches these settings, as far as it records them."""
    table.require_tokenizer(vocabulary_digest(encoder.pieces), f"out_dir={config.out_dir}")
    own, *merged = table.facts.get("merged") or [table.facts]
    found = dict(own["corpus"]) if isinstance(own.get("corpus"), dict) else {}
    found |= {key: own.get(key) for key in ("min_count", "max_successors")}
    found |= {
        "orders": sorted(table.levels),
        "merge": merged,
        "max_mb": table.facts.get("max_mb"),
        "suffixes": table.suffixes is not None,
    }
    wanted = {key: value for key, value in config.deciding().items() if key != "data"} | config.corpus()
    wanted |= {"orders": sorted(config.orders), "merge": [other.facts for other in others]}
    was = {key: found.get(key, default_at(config, key)) for key in wanted}
    differences = [f"{key}={was[key]!r}, not {wanted[key]!r}" for key in wanted if was[key] != wanted[key]]
    if differences:
        raise UserError(
            f"out_dir={config.out_dir}: holds a table built with {'; '.join(differences)}; choose another out_dir"
        )
