"""Building n-gram tables: against counting in memory; the same bytes by every way; resuming; bad input."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from transformers import PreTrainedTokenizerFast

from outrider.base.errors import UserError
from outrider.data_prep.ngrams import building
from outrider.data_prep.settings import TrigramConfig
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.draft_models.targets.encoder import open_encoder
from tests.data_prep.ngrams.corpora import require_same_counts, sentences
from tests.full_disk import largest_file
from tests.gguf_files import save_plain_target, write_gguf
from tests.ngram_reading import level_bytes, successors
from tests.refusals import refusal

build_table = partial(building.build_table, shard=1500)


def write_jsonl(path: Path, records: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def config(tmp_path: Path, model: str) -> TrigramConfig:
    """300 texts in about 20 shards; one process."""
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"text": text} for text in sentences(300)])
    data = DataConfig(source="local", path=str(corpus), heldout_fraction=0.0)
    return TrigramConfig(
        tokenizer=model, data=data, orders=(2, 3, 4), min_count=1, workers=1, out_dir=str(tmp_path / "table")
    )


def with_records(config: TrigramConfig, records: Sequence[object], **data: Any) -> TrigramConfig:
    path = write_jsonl(Path(config.out_dir).with_name("records.jsonl"), records)
    return replace(config, data=replace(config.data, path=str(path), **data))


def content(folder: str | Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def expected(config: TrigramConfig, texts: Sequence[str]) -> TrigramTable:
    """The table of plain texts, in memory."""
    encoder = open_encoder(config.tokenizer, None)
    documents = [[*ids, encoder.eos] for ids in encoder.encode(list(texts))]
    limits = (config.min_count, config.max_successors)
    return TrigramTable.from_documents(
        documents, config.orders, encoder.vocabulary, "", *limits, suffixes=config.suffixes
    )


@pytest.mark.parametrize("limits", [{"suffixes": True}, {"min_count": 3}, {"min_count": 2, "max_successors": 2}])
def test_a_built_table_equals_counting_in_memory(
    config: TrigramConfig, limits: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(config, **limits)
    build_table(config)
    built, reference = TrigramTable.open(config.out_dir), expected(config, sentences(300))
    require_same_counts(built, reference)
    for key in ("tokens", "documents", "min_count", "max_successors"):
        assert built.facts[key] == reference.facts[key]
    assert f"tokens={reference.facts['tokens']} documents=300 ngrams=" in capsys.readouterr().out
    assert sorted(path.name for path in Path(config.out_dir).parent.iterdir()) == ["corpus.jsonl", "table"]


def test_the_bytes_do_not_depend_on_the_number_of_processes(config: TrigramConfig) -> None:
    build_table(config)
    other = replace(config, workers=2, memory_gb=0.5, out_dir=f"{config.out_dir}2")
    build_table(other)
    assert content(config.out_dir) == content(other.out_dir)


def test_turns_are_documents_of_their_own(config: TrigramConfig) -> None:
    messages = [{"role": "user", "content": "how are you"}, {"role": "assistant", "content": "it is the first"}]
    config = with_records(config, [{"messages": messages}, {"messages": messages * 2}])
    build_table(config)
    require_same_counts(TrigramTable.open(config.out_dir), expected(config, ["it is the first"] * 3))
    everything = replace(config, text="all", out_dir=f"{config.out_dir}.all")
    build_table(everything)
    table, encoder = TrigramTable.open(everything.out_dir), open_encoder(config.tokenizer, None)
    question, answer = encoder.encode(["how are you", "it is the first"])
    assert successors(table, question[:2])[0].tolist() == [question[2]]
    assert successors(table, question[-1:])[0].tolist() == []  # neither the answer nor the end
    assert successors(table, answer[-1:])[0].tolist() == [encoder.eos]


def test_held_out_records_are_left_out(config: TrigramConfig) -> None:
    config = replace(config, data=replace(config.data, heldout_fraction=0.5))
    build_table(config)
    assert 0 < TrigramTable.open(config.out_dir).facts["documents"] < 300


def test_the_tokenizer_of_a_gguf_file(config: TrigramConfig, tmp_path: Path) -> None:
    """The table is that of the model which the file was made of."""
    source = save_plain_target(tmp_path / "target")
    tokens = {}
    for tokenizer in (source, write_gguf(source, tmp_path / "model.gguf")):
        made = replace(config, tokenizer=str(tokenizer), out_dir=f"{tokenizer}.table")
        build_table(made)
        table = TrigramTable.open(made.out_dir)
        tokens[tokenizer] = (content(made.out_dir).keys(), table.tokenizer, table.facts["tokens"])
        require_same_counts(table, TrigramTable.open(f"{source}.table"))
    assert len({str(found) for found in tokens.values()}) == 1


def test_a_path_that_ends_in_a_slash_is_the_same_folder(config: TrigramConfig, tmp_path: Path) -> None:
    build_table(replace(config, out_dir=f"{config.out_dir}/"))
    assert TrigramTable.open(config.out_dir).facts["documents"]
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    refusal("is a link or a mount point", build_table, replace(config, out_dir=str(tmp_path / "link")))


def test_processes_are_as_many_as_the_cores_of_the_job(config: TrigramConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 4, 9}, raising=False)
    assert replace(config, workers=None).processes == 3


def test_sums_of_sums_are_told_what_is_rare_or_twice_in_them(
    config: TrigramConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = [config.out_dir, *(f"{config.out_dir}.{number}" for number in range(4))]
    build_table(config)
    for number in range(4):
        merge = (folder[number],)
        texts = [{"text": text} for text in sentences(40, seed=number)]
        made = replace(with_records(config, texts), out_dir=folder[number + 1], merge=merge)
        capsys.readouterr()
        build_table(replace(made, max_mb=50.0 if number == 2 else None))
        said = capsys.readouterr().err
        assert ("max_mb=50.0: what was rare there" in said) == (number == 3)
        assert "more than once" not in said
    build_table(replace(config, out_dir=f"{config.out_dir}.twice", merge=(folder[4],)))
    assert "more than once" in capsys.readouterr().err


def test_tables_are_added_up(config: TrigramConfig) -> None:
    build_table(config)
    more = with_records(config, [{"text": text} for text in sentences(50, seed=1)])
    more = replace(more, out_dir=f"{config.out_dir}.more", merge=(config.out_dir,))
    build_table(more)
    table = TrigramTable.open(more.out_dir)
    require_same_counts(table, expected(config, sentences(50, seed=1) + sentences(300)))
    build_table(replace(more, resume=True))
    frequent = replace(more, min_count=3, max_successors=4, out_dir=f"{config.out_dir}.frequent")
    build_table(frequent)  # of all texts together, which is more than is frequent in both
    require_same_counts(TrigramTable.open(frequent.out_dir), expected(frequent, sentences(50, seed=1) + sentences(300)))
    small = replace(more, max_mb=0.01, out_dir=f"{config.out_dir}.small")
    build_table(small)
    build_table(replace(small, resume=True))
    assert level_bytes(TrigramTable.open(small.out_dir)) <= 10_000 < level_bytes(table)
    refusal(r"max_mb=null \(was 0\.01\)", build_table, replace(small, max_mb=None, resume=True))
    with pytest.raises(UserError, match=f"occurs min_count=99999 times in {table.facts['tokens']} tokens"):
        build_table(replace(more, min_count=99_999, out_dir=f"{config.out_dir}.rare"))
    with pytest.raises(UserError, match="suffixes=True: expected as in"):
        build_table(replace(more, suffixes=True, out_dir=f"{config.out_dir}.suffixes"))
    refusal("merge=", build_table, replace(more, resume=True, merge=()))
    refusal("orders", build_table, replace(more, orders=(3,), out_dir=f"{config.out_dir}.3"))


def break_off(config: TrigramConfig, records: int) -> dict[str, int]:
    """Build until a record that is damaged, then mend it; the shards that are there, with their times."""
    corpus = Path(config.data.path[0])
    whole = corpus.read_text()
    corpus.write_text("".join(whole.splitlines(keepends=True)[:records]) + "cut")
    refusal("not valid JSON", build_table, config)
    corpus.write_text(whole)
    assert not Path(config.out_dir).exists()
    return {path.name: path.stat().st_mtime_ns for path in Path(f"{config.out_dir}.building/shards").iterdir()}


def test_a_build_that_ended_early_goes_on_where_it_was(config: TrigramConfig) -> None:
    whole = replace(config, out_dir=f"{config.out_dir}.whole")
    build_table(whole)
    before = break_off(config, 120)
    refusal(r"table\.building holds an unfinished build; resume=true", build_table, config)
    after = break_off(replace(config, resume=True), 240)
    assert len(after) > len(before) > 5
    assert before.items() <= after.items()
    build_table(replace(config, resume=True))
    assert content(config.out_dir) == content(whole.out_dir)
    assert not Path(f"{config.out_dir}.building").exists()


def test_resuming_after_the_corpus_or_the_tokenizer_changed(
    config: TrigramConfig, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    texts = sentences(300)
    texts[0] = texts[0][::-1]  # of the same length, so that only its shard is another
    changed = with_records(config, [{"text": text} for text in texts])
    for other in (changed, replace(changed, tokenizer=str(tmp_path / "tokenizer"), out_dir=f"{config.out_dir}.hf")):
        break_off(replace(config, out_dir=other.out_dir), 120)
        build_table(replace(other, resume=True))
        require_same_counts(TrigramTable.open(other.out_dir), expected(other, texts))


def test_a_finished_table_is_neither_built_again_nor_overwritten(
    config: TrigramConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    build_table(config)
    before, work = content(config.out_dir), Path(f"{config.out_dir}.building")
    (work / "shards").mkdir(parents=True)  # of a build killed between its table and its end
    build_table(replace(config, resume=True, memory_gb=0.3, workers=2))
    assert "finished already" in capsys.readouterr().out
    assert not work.exists()
    for other, message in [
        (config, "holds an n-gram table already"),
        (replace(config, resume=True, min_count=2), r"min_count=2 \(was 1\)"),
        (replace(config, resume=True, orders=(3,)), "orders="),
        (replace(config, resume=True, text="all"), 'text="all"'),
    ]:
        refusal(message, build_table, other)
    with Path(config.data.path[0]).open("ab") as corpus:
        corpus.write(b'{"text": "an answer that came later"}\n')
    refusal("bytes=", build_table, replace(config, resume=True))
    assert content(config.out_dir) == before


def test_a_folder_whose_lock_cannot_be_removed_is_no_error(
    config: TrigramConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, where the name of an open file stays in the folder under another one."""
    rmtree, work = shutil.rmtree, Path(f"{config.out_dir}.building")

    def of_nfs(folder: Path, ignore_errors: bool = False) -> None:
        rmtree(folder, ignore_errors=ignore_errors)
        if Path(folder) == work:
            work.mkdir()
            if not ignore_errors:
                raise OSError(39, "Directory not empty")

    monkeypatch.setattr(shutil, "rmtree", of_nfs)
    build_table(config)
    build_table(replace(config, resume=True))


def test_looking_at_a_tokenizer_leaves_steps_their_threads(
    config: TrigramConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    open_encoder(config.tokenizer)
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_a_full_disk_is_told_before_a_mapped_file_is_written(config: TrigramConfig) -> None:
    with patch("os.posix_fallocate", create=True, side_effect=OSError(28, "No space left on device")):
        refusal("No space left on device.; free space and continue with resume=true", build_table, config)
    assert {path.name for path in Path(f"{config.out_dir}.building").iterdir()} <= {"shards", ".lock"}


@pytest.mark.parametrize("size", [4096, 12_000, 40_000])
def test_a_full_disk_leaves_no_table_and_can_be_resumed(config: TrigramConfig, size: int) -> None:
    """While tokenising, while counting, at the end."""
    with largest_file(size), pytest.raises(UserError, match="cannot be written"):
        build_table(config)
    assert not Path(config.out_dir).exists()
    work = Path(f"{config.out_dir}.building")
    assert not work.exists() or {path.name for path in work.iterdir()} <= {"shards", ".lock"}
    build_table(replace(config, resume=True))
    require_same_counts(TrigramTable.open(config.out_dir), expected(config, sentences(300)))
