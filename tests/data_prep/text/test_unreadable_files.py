"""Files of records that cannot be read: each reader names the file, the line, what is wrong and what to do."""

import bz2
import gzip
import json
import lzma
import re
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from outrider.base.errors import UserError
from outrider.data_prep.text import data_files
from outrider.data_prep.text.prompts import read_prompts
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import read_records
from outrider.inference.measure.recordings import read_transcripts
from tests.pairwise import each_value
from tests.refusals import refusal
from tests.tiers import typical_where

TWO = '{"text": "a"}\n{"text": "b"}\n'
FILL = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
NO_ANSWERS = r"a\.jsonl:1: prompts have no answers to learn from"


def records(path: str, layout: Any = "auto") -> list[Any]:
    return [*read_records(DataConfig(source="local", path=path, layout=layout, heldout_fraction=0.0), "train")]


def messages(path: str) -> list[Any]:
    return records(path, "messages")


REFUSED: dict[Callable[[str], object], list[tuple[str, str | bytes, str]]] = {
    records: [
        ("a.jsonl", TWO + '{"text": "cut', r"a\.jsonl:3: not valid JSON .*fix or remove this line"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text": "\xff"}\n', r"a\.jsonl:3: byte 11 is 0xff, which is no UTF-8; .*iconv"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "caf\xe9"}\n', r"a\.jsonl:2: byte 14 is 0xe9.*iconv"),
        ("a.jsonl", b'{"text": "a"}\n' + TWO.encode("utf-16-le") + b"\n", r"a\.jsonl:2: .*UTF-16"),
        ("a.jsonl", TWO + '{"turns": ["q"]}', r"a\.jsonl:3: no column 'text'"),
        ("a.json", '[{"text": "x"},\n {"text": ]', r"a\.json:2: not valid JSON"),
        ("a.json", TWO + "{", r"a\.json:3: not valid JSON"),
        ("a.jsonl", TWO + '{"body": "x"}', r"a\.jsonl:3: no column 'text'; columns present: body"),
        ("a.jsonl", '{"x": 1}', r"a\.jsonl:1: cannot tell the layout from columns x; name it"),
        ("a.jsonl", '{"prompt": "q", "completion": "a"}', "prompt, completion"),
        ("a.jsonl", "[1, 2]\n", r"a\.jsonl:1: expected a record with named columns, found list"),
        ("a.jsonl", '{"turns": ["q"]}\n' * 3, NO_ANSWERS),
        ("a.jsonl", '{"prompt": "q"}\n' * 3, NO_ANSWERS),
        ("a.jsonl", '{"question": "q"}\n' * 3, NO_ANSWERS),
        ("a.jsonl.gz", gzip.compress(TWO.encode())[:-9], r"a\.jsonl\.gz: cannot be read"),
        ("a.jsonl.gz", "not compressed", r"a\.jsonl\.gz: cannot be read"),
        ("a.parquet", "PAR1 but no more", r"a\.parquet: cannot be read"),
        ("a.csv", "text,n\na,1\n1,2,3\n", r"a\.csv:[23]: "),
        ("a.csv", "text,n\na,1\n1\n", r"a\.csv:[23]: "),
        ("a.csv", 'text,n\na,1\n"1\n', r"a\.csv:[23]: "),
        ("a.csv", "text,text\na,b\n", r"a\.csv:2: .*another name"),
    ],
    messages: [
        ("a.jsonl", TWO, r"a\.jsonl:1: no column 'messages'; .*: text"),
        ("a.txt", "prose", r"a\.txt: plain text, but layout=messages needs records"),
    ],
    read_prompts: [
        (
            "p.jsonl",
            '{"prompt": "x"}\n{"body": "x"}',
            r"p\.jsonl:2: expected one of the columns turns, .*present: body",
        ),
        ("p.jsonl", '{"prompt": " "}', r"p\.jsonl:1: prompt is ' ': expected a text"),
        ("p.jsonl", '{"turns": "x"}', r"p\.jsonl:1: turns='x': expected a list of texts"),
        ("p.jsonl", json.dumps({"turns": ["a", FILL]}), r"p\.jsonl:1: a place-holder of SPEED-Bench; fill the copy"),
        ("p.jsonl", '{"prompt": []}', r"p\.jsonl:1: turns=\[\]: expected a list of texts"),
        (
            "p.jsonl",
            '{"translation": {"en": "a", "de": 1, "fr": 2}}',
            "translation=.*: expected en and one of cs, de",
        ),
        ("p.jsonl", '{"instruction": null}', r"p\.jsonl:1: expected one of the columns turns"),
        ("p.jsonl", "[1]", r"p\.jsonl:1: expected a record or a text, found list"),
        ("p.jsonl", "", r"prompts=.*p\.jsonl: no prompt in it"),
        ("p.txt", b"a\ncaf\xe9", r"p\.txt:2: byte 4 is 0xe9.*iconv"),
    ],
    read_transcripts: [
        ("t.jsonl", "", "no answer in it"),
        ("t.jsonl", "{}", ":1: not an answer record"),
        ("t.jsonl", "nonsense", ":1: "),
        ("t.jsonl", '\n{"question_id": 1, "choices": [{"turns": "text"}]}', ":2: not an answer record"),
        ("t.jsonl", b'{"question_id": 1, "choices": [{"turns": ["\xe9"]}]}', r"t\.jsonl:1: .*no UTF-8"),
    ],
}


@pytest.mark.parametrize(
    ("read", "name", "content", "words"),
    [pytest.param(read, *row, id=f"{read.__name__}-{row[2]}") for read, rows in REFUSED.items() for row in rows],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, read: Callable[[str], object], name: str, content: str | bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert str(tmp_path / name) in refusal(words, read, str(tmp_path / name))


def zstd(content: bytes) -> bytes:
    stream = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(stream, "zstd") as packed:
        packed.write(content)
    return bytes(stream.getvalue())


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": partial(lzma.compress, preset=0), ".zst": zstd,
}  # fmt: skip
# Files of a long text, which in some has many lines.
LONG: dict[str, Callable[[str], bytes]] = {
    "a.jsonl": lambda text: f'{{"text": "{text}"}}\n'.encode(),
    "b.jsonl": lambda text: b"\xff\xfe" + f'{{"text": "{text}"}}\n'.encode("utf-16-le"),
    "a.csv": lambda text: f"text\n{text}\n".encode(),
    "b.csv": lambda text: f'text\n"{text.replace("aa", "a" + chr(10))}"\n'.encode(),  # one field
    "a.json": lambda text: f'[{{"text": "{text}"}}]'.encode(),
    "a.txt": str.encode,
    "b.txt": lambda text: text.replace("aa", "a\n").encode(),
}
FILES = [(name, suffix) for suffix in PACKED for name in LONG]


@pytest.mark.parametrize(("name", "suffix"), typical_where(each_value(FILES).__contains__, FILES))
def test_no_more_of_a_record_is_unpacked_than_one_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, suffix: str
) -> None:
    monkeypatch.setattr(data_files, "MOST_BYTES", 2**14)
    monkeypatch.setattr(data_files, "_MAX_BYTES", 2**14)
    file = tmp_path / (name + suffix)
    line = "" if name.endswith(".txt") else ":[0-9]+"
    file.write_bytes(PACKED[suffix](LONG[name]("a" * 2**22)))
    tracemalloc.start()
    with pytest.raises(
        UserError,
        match=rf"{re.escape(str(file))}{line}: .*(of more than 16384 bytes: .*split|larger than field limit)",
    ):
        list(data_files.read_file(file))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    file.write_bytes(PACKED[suffix](LONG[name]("a" * 2**12)))
    assert len(list(data_files.read_file(file))) == 1


def test_only_a_json_file_of_one_value_is_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "_MAX_BYTES", len(TWO) - 1)  # one of lines may be longer
    contents = (TWO, '[{"text": "a"}]', '[\n {\n  "text": "a"\n }\n]')
    for suffix, content in [(".gz", TWO), *(("", content) for content in contents)]:
        (file := tmp_path / f"a.json{suffix}").write_bytes(PACKED[suffix](content.encode()))
        assert [record["text"] for record in records(str(file))] == ["a", "b"][: content.count("text")]
