"""What preparing data refuses: the words that the error must have. Nothing is written."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from outrider.data_prep.ngrams.building import build_table
from outrider.data_prep.settings import ConvertConfig, FetchConfig, PromptsConfig, TrigramConfig
from outrider.data_prep.targets import convert_target, fetch_target
from outrider.data_prep.text.chat import render_prompt
from outrider.data_prep.text.documents import encode
from outrider.data_prep.text.prompts import read_prompts
from outrider.data_prep.text.records import find_layout
from outrider.data_prep.text.rows import load_rows
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import read_records
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.inference.batch.own_prompts import write_prompts
from tests.refusals import refusal
from tests.tiny import save_target

Make = Callable[..., PreTrainedTokenizerFast]
TALK: Any = {"id": "1", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
ENDLESS = "{% for i in range(90000) %}0123456789abcdef{% endfor %}"


def data_of(*records: object, **options: Any) -> DataConfig:
    Path("data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataConfig(source="local", path="data.jsonl", **{"heldout_fraction": 0.0, "cache_dir": "cache", **options})


def rows(make: Make, *records: object, seq_len: int = 32, split: Any = "train", **options: Any) -> object:
    return load_rows(data_of(*records), make(), seq_len, split, **options)


def table(make: Make, *records: object, **options: Any) -> None:
    make().save_pretrained("tokenizer")
    build_table(TrigramConfig(**{"tokenizer": "tokenizer", "data": data_of(*records), "out_dir": "table", **options}))


def merged(make: Make, damage: bool) -> None:
    """A table with another one, of another tokenizer or damaged."""
    TrigramTable.from_documents([[1, 2, 3, 4]], (3,), 300, "another").save(Path("other"))
    if damage:
        file = Path("other/table.safetensors")
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    table(make, {"text": "hello"}, merge=("other",), orders=(3,))


def beside(run: Callable[[], object], make: Make) -> None:
    """In a directory that holds a file of somebody else."""
    Path("out").mkdir()
    Path("out/thesis").write_text("somebody's")
    run()


def converted() -> None:
    convert_target(ConvertConfig(target=str(save_target(Path("model"))), out_dir="out"))


FETCHED = partial(fetch_target, FetchConfig(model="tiny", out_dir="out", resume=True))
REFUSED: dict[str, Callable[[Make], object]] = {
    r"prompts=missing.jsonl: no such file; give a JSONL, JSON or parquet file": lambda _: read_prompts("missing.jsonl"),
    "no prompt in it": lambda _: read_prompts([]),
    "^limit=0: expected at least 1": lambda _: read_prompts(["a"], limit=0),
    "file=gone: no such": lambda _: write_prompts(PromptsConfig(file="gone", out_dir="out")),
    "has no chat template, which conversations need; use data.template=vicuna":
        lambda make: encode([TALK], make(chat_template=None), "tokenizer"),
    "has no chat template, .*template=vicuna.*template=none":
        lambda make: render_prompt(["a"], make(chat_template=None), "auto"),
    "template='alpaca': expected one of auto, tokenizer, vicuna":
        lambda make: render_prompt(["a"], make(), "alpaca"),  # type: ignore[arg-type]
    "lone surrogate": lambda make: render_prompt(["a\udc00b"], make(), "none"),
    "makes 1440000 characters of 2": lambda make: render_prompt(["Hi"], make(chat_template=ENDLESS)),
    r"f:1: cannot tell the layout from columns question_id, turns; name it":
        lambda _: find_layout({"question_id": 1, "turns": ["first", "second"]}, "auto", None, "f:1"),
    "^path=.*: no file matches": lambda _: [*read_records(DataConfig(source="local", path="*.txt"), "train")],
    r"data\.jsonl: empty dataset: no usable train": lambda make: rows(make, {"text": " "}),
    "no usable heldout record .*raise heldout_fraction": lambda make: rows(make, {"text": "a"}, split="heldout"),
    r"no token of the train split is supervised \(found records=1, unsupervised=1\)":
        lambda make: rows(make, {"messages": TALK["messages"][:1]}),
    r"data\.jsonl:2: no column 'text'": lambda make: rows(make, {"text": "a"}, {"body": "b"}),
    "seq_len=1: expected at least 2": lambda make: rows(make, {"text": "a"}, seq_len=1),
    "max_rows=0: expected at least 1": lambda make: rows(make, {"text": "a"}, max_rows=0),
    r"empty corpus: no text in it \(found nothing\)": lambda make: table(make),
    r"empty corpus: .*empty=2": lambda make: table(make, {"text": "  "}, {"text": ""}),
    r"data\.jsonl:2: column 'text' holds int": lambda make: table(make, {"text": "hello"}, {"text": 3}),
    "no n-gram of orders .* occurs min_count=99": lambda make: table(make, {"text": "hello"}, min_count=99),
    "tokenizer=nowhere/nothing: no usable": lambda make: table(make, {"text": "hello"}, tokenizer="nowhere/nothing"),
    r"merge=.*another tokenizer": lambda make: merged(make, damage=False),
    r"damaged n-gram table .*another sha256": lambda make: merged(make, damage=True),
    "holds 'thesis', which no conversion made": partial(beside, converted),
    r"out.*holds 'thesis', which no conversion made": partial(beside, FETCHED),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_refused(
    words: str, make_tokenizer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refusal(words, REFUSED[words], make_tokenizer)
    assert not Path("table").exists()
    assert not [path for path in Path("cache").rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert {path.name for path in Path("out").glob("*")} <= {"thesis", ".lock"}
