"""What people give as inputs: paths of any characters, data of any packing and layout, prompts that share a turn."""

import ast
import bz2
import csv
import gzip
import io
import json
import lzma
import re
import shlex
import sys
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zoneinfo import ZoneInfo

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.base.errors import UserError
from outrider.base.words import write_option
from outrider.cli import print_anything, print_text
from outrider.commands import config_for
from outrider.data_prep.settings import PromptsConfig
from outrider.data_prep.text.data_files import read_file, resolve_paths
from outrider.data_prep.text.prompts import read_prompts
from outrider.data_prep.text.records import turn_key
from outrider.data_prep.text.rows import PackedRows, load_rows
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import read_records
from outrider.draft_models.card import describe_serving, write_card
from outrider.draft_models.early_exit.model import USE
from outrider.draft_models.targets.encoder import open_encoder
from outrider.draft_models.targets.open_target import open_target
from outrider.inference.batch.own_prompts import write_prompts
from outrider.train.auto_choice import Choice, FirstAnswers, configure_pipeline
from outrider.train.pipeline_run import plan_steps
from outrider.train.settings.auto import TRAINABLE, AutoConfig
from tests.conf.test_configs import COMMANDS
from tests.refusals import refusal
from tests.tiers import as_many
from tests.tiny import byte_tokenizer

ODD = "=,()[]{}$'\"#%~\\ \n\té-*?:&;|@!`<>+.01ae"
TEXTS = st.text(st.sampled_from(ODD), min_size=1, max_size=12) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12
)
VALUES = TEXTS.filter(lambda text: text != "???" and not text.startswith("~/"))  # no value, and a home directory


@settings(max_examples=as_many(30), deadline=None)
@given(VALUES, VALUES)
@example("null", "true")
@example("1e5", "007")
@example("${oc.env:HOME}", "\\${a}\\")
@example(".", "nan")
def test_any_text_is_a_value_of_a_command(one: str, other: str) -> None:
    """Through Hydra's grammar and OmegaConf's interpolations, alone and in a list, and through a shell."""
    path = f"data.path=[{write_option('', other)[1:]},b]"
    words = [write_option("target", one), write_option("out_dir", other), path, "data=local"]
    config = config_for("train/eesd.py", shlex.split(shlex.join(words)))
    assert (config.target, config.out_dir, config.data.path) == (one, other, (other, "b"))


@settings(max_examples=1, deadline=None)
@given(VALUES, VALUES, VALUES)
@example("a=b,(c)", "p [1].jsonl", "out{x}${y}")
def test_any_text_reaches_the_steps_of_auto(target: str, prompts: str, out_dir: str) -> None:
    config = AutoConfig(target=target, prompts=prompts, out_dir=out_dir)
    pipeline = configure_pipeline(config, Choice(tuple(TRAINABLE), {}, {}), FirstAnswers("cpu", 4), config_for)
    built = {step.name: step.settings for step in plan_steps(pipeline, config_for)}
    assert built["prompts"].file == prompts
    assert {built[name].target for name in ("responses", "eesd", "eagle3", "small_lm", "report")} == {target}
    assert built["trigrams"].tokenizer == target
    assert built["report"].small_lm == f"{out_dir}/small_lm"
    assert built["responses"].data.path == (f"{out_dir}/prompts/train.jsonl",)
    assert built["eesd"].data.path == (f"{out_dir}/responses/responses-*.jsonl",)


@pytest.mark.parametrize("name", ["a=b(c", "a,b", "runs/a b,'c',d", "a,\nb"])
def test_an_option_that_cannot_be_read_is_shown_as_it_can(name: str) -> None:
    with pytest.raises(UserError) as refused:
        config_for("train/eesd.py", [f"target={name}"])
    (word,) = shlex.split(str(refused.value).rpartition(" as ")[2])
    assert config_for("train/eesd.py", [word, "out_dir=o"]).target == name


@pytest.mark.parametrize("name", ['it\'s (a) [b] {c} $d,e=f "g"', "plain"])
def test_lines_of_a_card_can_be_copied(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    write_card(folder, f"{USE}\n\n{describe_serving(3)}", name, {})
    lines = (folder / "README.md").read_text("utf-8").splitlines()
    (measured,) = [shlex.split(line) for line in lines if line.startswith("evaluate-checkpoint")]
    built = config_for(COMMANDS["evaluate_checkpoint"][1], measured[1:])
    assert (built.target, built.checkpoint) == (name, str(folder))
    (served,) = [shlex.split(line) for line in lines if line.startswith("vllm")]
    assert served[2] == name
    assert json.loads(served[4])["model"] == str(folder)
    (loaded,) = [line for line in lines if line.startswith("drafter = ")]
    assert eval(loaded.partition("(")[2].rstrip(")")) == str(folder)


@pytest.mark.parametrize("name", ["a[1].jsonl", "a*.jsonl", "b?", "d[x]/a.jsonl", "-a", "~a", "$HOME", "a b{c}.json"])
def test_a_file_that_is_there_is_no_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also below a directory whose name could be one."""
    monkeypatch.chdir(tmp_path)
    for path in (Path(name), Path("o[1]*"), Path("o[1]*/r-1.txt"), Path("o1x/r-2.txt")):
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if path.name == "o[1]*" else path.write_text("text")
    assert resolve_paths([name]) == [Path(name)]
    assert resolve_paths([str(tmp_path / name)]) == [tmp_path / name]
    assert resolve_paths(["o[1]*/r-*.txt", "o?x/*"]) == [Path("o[1]*/r-1.txt"), Path("o1x/r-2.txt")]
    DataConfig(source="local", path=["o[1]*/r-*.txt", name]).require_paths(lambda _: True, "data")


LONG = "x" * 300  # longer than a file's name can be


@pytest.mark.parametrize("name", [LONG, f"a/{LONG}", f"{LONG}/a", "a\0b", "a\udc80b"])
def test_what_can_be_no_files_name_is_refused_as_any_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for ask in (
        lambda: resolve_paths([name]),
        lambda: data_of(Path(name)).require_paths(lambda _: True, "data"),
        lambda: read_prompts(name),
        lambda: open_target(name),
        lambda: open_encoder(name),
        lambda: AutoConfig(prompts=name).require_paths(lambda _: True),
    ):
        with pytest.raises(UserError):
            ask()


TALKS = [
    {"messages": [{"role": "user", "content": f"Größe {i}?"}, {"role": "assistant", "content": f"é {i}"}]}
    for i in range(6)
]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.town }}){% endfor %}</s>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def jsonl(records: Sequence[object]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def data_of(path: Path, **values: Any) -> DataConfig:
    return DataConfig(source="local", path=str(path), heldout_fraction=0.0, **values)


def read(path: Path, **values: Any) -> list[Any]:
    return [*read_records(data_of(path, **values), "train")]


def rows_of(path: Path, template: str = TEMPLATE) -> PackedRows:
    data = data_of(path, cache_dir=str(path.parent / f"{path.name}.cache"))
    return load_rows(data, byte_tokenizer(template), 512, "train")


def zst(content: bytes) -> bytes:
    packed = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(packed, "zstd") as file:
        file.write(content)
    return packed.getvalue().to_pybytes()


def csv_file(path: Path) -> None:
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerows(
            [("n", "messages"), *((i, json.dumps(one["messages"], indent=1)) for i, one in enumerate(TALKS))]
        )


def arrow_file(path: Path) -> None:
    table = pyarrow.Table.from_pylist(TALKS)
    with pyarrow.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)


CONTENT = jsonl(TALKS)
WRITERS: dict[str, Callable[[Path], object]] = {
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(CONTENT.encode())),
    "a.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(CONTENT.encode())),
    "a.jsonl.xz": lambda path: path.write_bytes(lzma.compress(CONTENT.encode())),
    "a.json.zst": lambda path: path.write_bytes(zst(json.dumps(TALKS).encode()) + zst(b"\n")),
    "a.jsonl": lambda path: path.write_bytes(CONTENT.encode("utf-16")),
    "b.jsonl": lambda path: path.write_bytes(CONTENT.encode("utf-8-sig")),
    "c.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(TALKS).encode("utf-16"))),
    "A.JSONL": lambda path: path.write_text(CONTENT),
    "a.Jsonl.GZ": lambda path: path.write_bytes(gzip.compress(CONTENT.encode())),
    "a.JSON.ZST": lambda path: path.write_bytes(zst(json.dumps(TALKS).encode())),
    "a.PARQUET": lambda path: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TALKS), path),
    "model.jsonl": lambda path: path.write_text(CONTENT.replace("assistant", "model")),
    "a.arrow": arrow_file,
    "a.parquet": lambda path: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TALKS), path),
    "saved": lambda path: Dataset.from_list(TALKS).save_to_disk(path),
    "strings.jsonl": lambda path: path.write_text(jsonl([{"messages": json.dumps(one["messages"])} for one in TALKS])),
    "strings.csv": csv_file,
    "lists.jsonl": lambda path: path.write_text(
        jsonl(
            [
                {"messages": {key: [one[key] for one in talk["messages"]] for key in ("role", "content")}}
                for talk in TALKS
            ]
        )
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_data_is_read_in_the_form_it_has(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    assert [record["messages"] for record in read(tmp_path / name)] == [one["messages"] for one in TALKS]


@pytest.mark.parametrize("name", ["a.parquet", "saved"])
def test_a_table_gives_a_call_no_argument_of_another(tmp_path: Path, name: str) -> None:
    """Arrow stores all mappings of a column with the same names."""
    calls = [{"name": "f", "arguments": {"town": "Ulm"}}, {"name": "g", "arguments": {"city": "Ulm", "n": [1, None]}}]
    rows = [{"messages": [{"role": "assistant", "tool_calls": [{"function": call}]}], "id": None} for call in calls]
    if name == "saved":
        Dataset.from_list(rows).save_to_disk(tmp_path / name)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
    read_rows = [raw for path in resolve_paths([str(tmp_path / name)]) for _, raw in read_file(path)]
    assert read_rows == rows


def test_times_and_numbers_of_arrow_are_what_json_has(tmp_path: Path) -> None:
    created, far = (
        datetime(2026, 7, 1, tzinfo=ZoneInfo("America/New_York")),
        pyarrow.array([2**62], pyarrow.timestamp("us")),
    )
    table = pyarrow.table({"text": ["a"], "created": [created], "sum": [Decimal("1.50")], "raw": [b"caf\xc3\xa9"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    [(_, row)] = read_file(tmp_path / "a.parquet")
    assert json.loads(json.dumps(row)) == {"text": "a", "created": created.timestamp(), "sum": 1.5, "raw": "café"}
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"], "until": far}), tmp_path / "far.parquet")
    refusal(r"far\.parquet: cannot be read", lambda: [*read_file(tmp_path / "far.parquet")])


def test_what_describes_a_folder_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clone = tmp_path / "clone"
    (clone / "data").mkdir(parents=True)
    for name in ("README.md", "LICENSE", "LICENSE-MIT.txt", ".gitattributes", "dataset_infos.json"):
        (clone / name).write_text("{}")
    WRITERS["a.parquet"](clone / "data/train-0.parquet")
    (clone / "data/readme.jsonl").write_text(CONTENT)
    assert [path.name for path in resolve_paths([str(clone)])] == ["readme.jsonl", "train-0.parquet"]
    said = capsys.readouterr().out
    assert all(name in said for name in (str(clone), "README.md", "LICENSE-MIT.txt", "dataset_infos.json"))
    assert [path.name for path in resolve_paths([str(clone / "*.md")])] == ["README.md"]
    (tmp_path / "only").mkdir()
    (tmp_path / "only/README.md").write_text("text")
    assert len(resolve_paths([str(tmp_path / "only")])) == 1


def tool_talk(i: int, arguments: object = '{"town": "Ulm"}') -> dict[str, object]:
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": f"Weather {i}?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": '{"degrees": 11}'},
            {"role": "assistant", "content": "11 degrees."},
        ],
        "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}],
    }


@pytest.mark.parametrize("arguments", ['{"town": "Ulm"}', {"town": "Ulm"}])
def test_calls_of_tools_are_rendered_by_a_template_that_has_them(tmp_path: Path, arguments: object) -> None:
    (tmp_path / "a.jsonl").write_text(jsonl([tool_talk(0, arguments)]))
    (row,) = rows_of(tmp_path / "a.jsonl", TOOLS)
    text = byte_tokenizer().decode(row["input_ids"][row["positions"] < 512])
    assert "get_weather(Ulm)" in text
    assert text.startswith('[{"type": "function"')
    supervised = byte_tokenizer().decode(row["labels"][row["labels"] >= 0])
    assert supervised == "get_weather(Ulm)</s>11 degrees.</s>"


def test_held_out_prompts_share_no_first_turn_with_the_others(tmp_path: Path) -> None:
    """Of a user's file, and of answers to it."""
    prompts = [
        turns for i in range(40) for turns in ([f"Q {i}?"], [f"Q {i}?", "More."], [f" q  {i}? "], [f"Q {i}?", "Why?"])
    ]
    (tmp_path / "p.jsonl").write_text(jsonl([{"turns": turns} for turns in prompts]))
    write_prompts(PromptsConfig(file=str(tmp_path / "p.jsonl"), out_dir=str(tmp_path / "out")))
    files = [read_prompts(str(tmp_path / f"out/{name}.jsonl")) for name in ("train", "heldout")]
    train, heldout = ({turn_key(prompt.turns[0]) for prompt in some} for some in files)
    assert len(train) + len(heldout) == 40
    assert len(heldout) == 12
    assert sum(map(len, files)) == len(prompts)
    talks = [
        {"messages": [{"role": "user", "content": turns[0]}, {"role": "assistant", "content": str(i)}]}
        for i, turns in enumerate(prompts)
    ]
    (tmp_path / "a.jsonl").write_text(jsonl(talks))
    data = replace(data_of(tmp_path / "a.jsonl"), heldout_fraction=0.3)
    sides = [{turn_key(r["messages"][0]["content"]) for r in read_records(data, side)} for side in ("train", "heldout")]
    assert sides[0].isdisjoint(sides[1])
    assert len(sides[0] | sides[1]) == 40
    assert min(map(len, sides)) > 2


def test_one_turn_in_two_spellings_of_unicode_is_one_turn() -> None:
    for text in ("Größe é", "\ufb01nd ２", "a\u00a0b"):
        spellings = {unicodedata.normalize(form, text) for form in ("NFC", "NFD", "NFKC", "NFKD")}
        assert len({turn_key(one) for one in spellings}) == 1


def test_only_the_beginning_of_a_long_text_is_normalised() -> None:
    assert turn_key("A b " * 2**20 + "x") == turn_key("A b " * 2**20 + "y")  # all would take 16 times its memory


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_of_any_encoding_prints_anything(encoding: str) -> None:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2))
    with patch("sys.stdout", out), patch("sys.stderr", err):
        print_anything()
        print_text("τ = 4.1 × \udce9")
        print("warning: α …", file=sys.stderr, flush=True)
    for stream, whole in ((out, "τ = 4.1 × ?"), (err, "warning: α …")):
        printed = stream.buffer.getvalue().decode(encoding).strip()
        assert len(printed) == len(whole)
        assert printed == whole or encoding != "utf-8"


def test_files_are_read_and_written_as_utf_8() -> None:
    """Whatever the locale: every text that is opened has its encoding named."""
    root = Path(__file__).parents[3]
    for path in (path for folder in ("outrider", "train", "data_prep", "inference", "draft_models", "conf")
                 for path in (root / folder).rglob("*.py")):  # fmt: skip
        for call in (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            said = ast.unparse(call)
            if name in ("read_text", "write_text") or (name == "open" and re.search(r"""['"][rwax]\+?['"]""", said)):
                assert "utf-8" in said, f"{path}:{call.lineno}"
