"""Building an n-gram table: read, tokenise and count a corpus; optionally merge with other tables and prune.

`build_table` is the command. It works in the folder <out_dir>.building: `shards` has the token ids, from which an
interrupted build continues; `counts` has the arrays of the table until `TrigramTable.save` writes the table whole.

A table has a level for each order n: contexts of n − 1 tokens (`keys`), the tokens that followed each context, and
counts. Its facts are the settings and figures that are stored with it. With suffixes=true it also has the corpus, as a
suffix array.
"""

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from outrider.base.errors import UserError, require, warn
from outrider.base.files import require_writable
from outrider.base.run_dirs import check_identity, only_run
from outrider.data_prep.ngrams.counting import count_order, merge_tables, smallest_min_count
from outrider.data_prep.ngrams.token_shards import PIECE, SHARD_CHARACTERS, Shards, passages, tokenise, whole_documents
from outrider.data_prep.settings import TrigramConfig
from outrider.data_prep.text.records import Counts, warn_of_unused
from outrider.data_prep.text.sources import read_records
from outrider.draft_models.ngrams.kernels import require_vocabulary
from outrider.draft_models.ngrams.suffixes import SORT_BYTES, join_documents, sort_suffixes
from outrider.draft_models.ngrams.table import TABLE_FILE, Facts, TrigramTable, require_no_table, require_unaltered
from outrider.draft_models.targets.encoder import Encoder, open_encoder
from outrider.draft_models.targets.vocabulary import vocabulary_digest

_GB = 10**9


def build_table(config: TrigramConfig, *, shard: int = SHARD_CHARACTERS, piece: int = PIECE) -> None:
    """Read, tokenise and count a corpus. Writes a `TrigramTable` to `config.out_dir` and prints one line of figures.

    `config.resume` continues an interrupted build. Only the first process of a launcher builds, with `config.workers`
    processes; the others return. `out_dir` always holds a complete table or none. shard, piece: characters of a shard,
    and of what is tokenised at once. Raises `UserError` for a bad corpus, tokenizer or path.
    """
    if int(os.environ.get("RANK", "0")):
        return
    start_time = time.perf_counter()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the processes are the parallelism
    out_dir = Path(config.out_dir)  # also of a path that ends in /
    work = Path(f"{out_dir}.building")
    encoder = open_encoder(config.tokenizer, config.revision)
    require_vocabulary(encoder.vocabulary)
    addends = [_open_addend(path, encoder, config) for path in config.merge]
    if config.resume and (out_dir / TABLE_FILE).exists():
        _require_same_settings(TrigramTable.open(out_dir), config, encoder, addends)
        print(f"{out_dir}: finished already")
        if work.exists():  # left by a build that was killed after publishing the table
            with only_run(work, f"the table of out_dir={out_dir}"):  # a lock against other runs
                shutil.rmtree(work, ignore_errors=True)  # on NFS its lock, which is open, stays
        return
    for path, addend in zip(config.merge, addends, strict=True):
        _warn_of_pruned(path, addend)
    require_no_table(out_dir)
    require_writable(out_dir.parent)
    unfinished = (work / "shards").exists()
    with only_run(require_writable(work), f"the table of out_dir={out_dir}"):
        if unfinished and not config.resume:
            remedy = "resume=true continues it, another out_dir or removing it starts afresh"
            raise UserError(f"out_dir={out_dir}: {work} holds an unfinished build; {remedy}")
        require_writable(work / "shards")
        with _clean_up(work):
            documents = passages(read_records(config.data, "train", record_counts := Counts()), config.text, encoder)
            shards = tokenise(
                documents, config.tokenizer, config.revision, encoder, work / "shards", config.processes, shard, piece
            )
            _write_table(config, encoder, addends, work, start_time, record_counts, shards)


@contextmanager
def _clean_up(workdir: Path) -> Iterator[None]:
    """Remove `workdir` at the end of the context; after an error keep its shards, from which a build can be resumed."""
    try:
        yield
        shutil.rmtree(workdir, ignore_errors=True)  # on NFS its lock, which is open, stays
    except BaseException as error:
        shutil.rmtree(workdir / "counts", ignore_errors=True)  # never resumed
        if not any((workdir / "shards").glob("*")):
            shutil.rmtree(workdir, ignore_errors=True)
        if isinstance(error, OSError) and error.strerror:
            remedy = "free space and continue with resume=true, or choose another out_dir"
            raise UserError(f"{workdir}: cannot be written ({error.strerror}); {remedy}") from error
        raise


def _write_table(
    config: TrigramConfig,
    encoder: Encoder,
    addends: list[TrigramTable],
    workdir: Path,
    start_time: float,
    record_counts: Counts,
    shards: Shards,
) -> None:
    """Count `shards` and write the table. addends: tables to merge. start_time: the time at which the command started.

    record_counts: how many records were read, skipped, …; its `first` names one that could not be used.
    """
    if not shards.tokens:
        outcomes = ", ".join(f"{name}={count}" for name, count in record_counts.items() if count) or "nothing"
        why = record_counts.first or "give more data"
        raise UserError(f"{_data_words(config)}: empty corpus: no text in it (found {outcomes}); {why}")
    warn_of_unused(record_counts, record_counts.first)
    corpus_facts = [table_facts.get("corpus") or {} for addend in addends for table_facts in _all_facts(addend.facts)]
    digests = [shards.digest, *(corpus["digest"] for corpus in corpus_facts if "digest" in corpus)]
    if len(set(digests)) < len(digests):
        warn("merge: one corpus is in it more than once, so its n-grams count more than once")
    memory_bytes = int(config.memory_gb * _GB)
    if config.suffixes:
        _require_sorting_memory(shards, addends, memory_bytes)
    tokenised_at, folder = time.perf_counter(), workdir / "counts"
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed build
    table = _count_corpus(config, encoder, shards, addends, folder)
    _require_contexts(config, table)
    if addends:
        table = merge_tables([table, *addends], config.min_count, config.max_successors, folder / "sum", memory_bytes)
        _require_contexts(config, table)
    if config.max_mb is not None:
        count = smallest_min_count(table, config.max_mb)  # rarer n-grams do not fit; None, below: no other limit
        facts = {**table.facts, "max_mb": config.max_mb, "kept_from": count}  # kept_from: the min_count of this pruning
        table = replace(merge_tables([table], count, None, folder / "pruned", memory_bytes), facts=facts)
    table.save(config.out_dir)
    _print_figures(config.out_dir, table, record_counts, tokenised_at - start_time, time.perf_counter() - tokenised_at)


def _count_corpus(
    config: TrigramConfig, encoder: Encoder, shards: Shards, addends: Sequence[TrigramTable], folder: Path
) -> TrigramTable:
    """The table of the corpus alone. Its levels are mapped from files in `folder`."""
    vocab_size, memory_bytes = encoder.vocabulary, int(config.memory_gb * _GB)
    # Rare n-grams of one table may be frequent in the sum of all, so only the sum is pruned.
    min_count, max_successors = (1, None) if addends else (config.min_count, config.max_successors)
    levels = {
        order: count_order(shards, order, vocab_size, folder / str(order), memory_bytes, min_count, max_successors)
        for order in sorted(config.orders)
    }
    facts = {
        "tokens": shards.tokens,
        "documents": shards.documents,
        "min_count": config.min_count,
        "max_successors": config.max_successors,
        "corpus": {**config.corpus(), "digest": shards.digest},
    }
    suffixes = None
    if config.suffixes:
        suffixes = sort_suffixes(join_documents(whole_documents(shards), vocab_size), vocab_size)
    return TrigramTable(vocab_size, vocabulary_digest(encoder.pieces), levels, facts, suffixes)


def _data_words(config: TrigramConfig) -> str:
    return f"data source={config.data.source} path={config.data.path}"


def _require_contexts(config: TrigramConfig, table: TrigramTable) -> None:
    """Raise `UserError` if no order has any context."""
    if not any(len(level.keys) for level in table.levels.values()):
        fault = f"no n-gram of orders {list(config.orders)} occurs min_count={config.min_count} times"
        text_size = f"{table.facts['tokens']} tokens"
        raise UserError(f"{_data_words(config)}: {fault} in {text_size}; lower min_count or give more data")


def _require_sorting_memory(shards: Shards, addends: list[TrigramTable], memory_bytes: int) -> None:
    """Raise `UserError` if the corpus, with those of merged tables, cannot be sorted in `memory_bytes` bytes."""
    merged_tokens = sum(len(addend.suffixes.tokens) for addend in addends if addend.suffixes is not None)
    sorting_bytes = SORT_BYTES * (shards.tokens + shards.documents + merged_tokens)  # a separator follows each document
    expected = f"at least {sorting_bytes / _GB:.1f} for suffixes=true: the corpus is sorted in memory"
    require(sorting_bytes <= memory_bytes, "memory_gb", memory_bytes / _GB, expected)


def _print_figures(
    out_dir: str, table: TrigramTable, record_counts: Counts, tokenise_seconds: float, count_seconds: float
) -> None:
    figures = {
        "tokens": table.facts["tokens"],
        "documents": table.facts["documents"],
        "ngrams": sum(len(level.tokens) for level in table.levels.values()),
        "contexts": sum(len(level.keys) for level in table.levels.values()),
        "seconds": f"{tokenise_seconds + count_seconds:.1f}",
        "tokenise_seconds": f"{tokenise_seconds:.1f}",
        "count_seconds": f"{count_seconds:.1f}",
        "mb": f"{table.nbytes / 1e6:.1f}",
        **{name: record_counts[name] for name in ("records", "empty", "malformed", "unreadable")},
    }
    print(f"trigrams {out_dir} " + " ".join(f"{key}={value}" for key, value in figures.items()), flush=True)


def _open_addend(path: str, encoder: Encoder, config: TrigramConfig) -> TrigramTable:
    """The finished table in `path`, to be merged. Raises `UserError` if tokenizer, orders or suffixes differ."""
    require_unaltered(Path(path))  # a damaged count would go into the sum unnoticed
    table = TrigramTable.open(path)
    table.require_tokenizer(vocabulary_digest(encoder.pieces), f"merge={path}")
    if sorted(table.levels) != sorted(config.orders):
        raise UserError(f"merge={path}: has orders {sorted(table.levels)}, expected {sorted(config.orders)}")
    require((table.suffixes is not None) == config.suffixes, "suffixes", config.suffixes, f"as in merge={path}")
    return table


def _all_facts(facts: Facts) -> Iterator[Facts]:
    """The facts of a table, and of all that were merged into it."""
    yield facts
    for merged_facts in facts.get("merged") or ():
        yield from _all_facts(merged_facts)


def _warn_of_pruned(path: str, addend: TrigramTable) -> None:
    """Warn if the sum will differ from one build of both corpora."""
    for part in _all_facts(addend.facts):
        if part.get("min_count", 1) > 1 or part.get("max_successors") or part.get("max_mb"):
            built = " ".join(f"{key}={part[key]}" for key in ("min_count", "max_successors", "max_mb") if part.get(key))
            warn(f"merge={path}: built with {built}: what was rare there is missing from the sum; min_count=1 keeps it")


def _require_same_settings(
    table: TrigramTable, config: TrigramConfig, encoder: Encoder, addends: list[TrigramTable]
) -> None:
    """Raise `UserError` unless the finished table matches the settings that affect it, as far as it records them."""
    table.require_tokenizer(vocabulary_digest(encoder.pieces), f"out_dir={config.out_dir}")
    corpus_facts, *merged_facts = table.facts.get("merged") or [table.facts]  # the corpus's own first
    recorded = dict(corpus_facts["corpus"]) if isinstance(corpus_facts.get("corpus"), dict) else {}
    recorded |= {key: corpus_facts.get(key) for key in ("min_count", "max_successors")}
    recorded |= {"orders": sorted(table.levels), "merge": merged_facts, "max_mb": table.facts.get("max_mb")}
    recorded["suffixes"] = table.suffixes is not None
    settings = {key: value for key, value in config.decisions().items() if key != "data"} | config.corpus()
    settings |= {"orders": sorted(config.orders), "merge": [addend.facts for addend in addends]}
    check_identity({key: recorded[key] for key in settings if key in recorded}, settings, Path(config.out_dir))
