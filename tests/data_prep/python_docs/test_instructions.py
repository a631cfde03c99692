"""Instructions about what is documented: distinct, true to signatures, split by object, the same in every process."""

import ast
import inspect
import os
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.python_docs.instructions import as_lines, halves, make_instructions, read_subjects
from data_prep.python_docs.modules import PACKAGES, STANDARD_LIBRARY
from data_prep.python_docs.subjects import Collector
from data_prep.python_docs.templates import CATEGORIES
from data_prep.text.sources import is_heldout

ROOT = Path(__file__).parents[3]
MODULES = ["builtins", "shutil", "textwrap"]
CHARS, FRACTION = 300, 0.3
CALL = re.compile(r"the call `([^`]+)`|I call `([^`]+)`|does `(\w[^`]*\([^`]+)` do", re.IGNORECASE)
OBJECT = re.compile(r"I have an object `(\w+)` of the class `([\w.]+)`")


@pytest.fixture(scope="module")
def subjects():
    return read_subjects(MODULES, Collector(CHARS))


@pytest.fixture(scope="module")
def instructions(subjects):
    return make_instructions(subjects, per_object=len(CATEGORIES))


def test_every_category_is_there_and_no_two_say_the_same(instructions):
    assert {one.category for one in instructions} == {*CATEGORIES, "compare"}
    assert len({one.turns for one in instructions}) == len({one.id for one in instructions}) == len(instructions)
    assert [one.id for one in instructions] == sorted(one.id for one in instructions)


def test_a_limit_for_each_object_keeps_some_of_all(subjects, instructions):
    few = make_instructions(subjects, per_object=2)
    assert set(few) < set(instructions)
    alone = [one for one in few if one.category != "compare"]
    assert {one.objects for one in alone} == {(subject.name,) for subject in subjects}
    assert all([one.objects for one in alone].count((subject.name,)) <= 2 for subject in subjects)
    assert {one.category for one in few} == {one.category for one in instructions}


def test_no_object_is_in_both_halves(subjects):
    sides = {half: make_instructions(own, 4) for half, own in halves(subjects, FRACTION).items()}
    named = {half: {name for one in made for name in one.objects} for half, made in sides.items()}
    assert not named["train"] & named["heldout"]
    assert named["train"] | named["heldout"] == {subject.name for subject in subjects}
    assert named["heldout"] == {subject.name for subject in subjects if is_heldout(subject.name, FRACTION)}
    for made in sides.values():
        assert {len(one.objects) for one in made if one.category == "compare"} == {2}
    assert not {one.turns for one in sides["train"]} & {one.turns for one in sides["heldout"]}
    assert halves(subjects, 0.0)["heldout"] == []


def test_what_is_said_is_clean(instructions):
    for one in instructions:
        assert one.turns
        for turn in one.turns:
            assert turn == turn.strip() != ""
            assert turn[0].isupper()
            assert turn.count("`") % 2 == 0
            assert not re.search(r"0x[0-9a-f]{4}|[{}]| {2}|\bNone`? object|`_|\b_[a-z]|<\w+ ", turn), turn
            assert turn[-1] in '.?!"', turn
            assert len(turn) < CHARS + 150
    several = [one for one in instructions if len(one.turns) > 1]
    assert {one.category for one in several} == {"chat"}
    assert {len(one.turns) for one in several} == {2, 3}


def test_what_is_named_is_there_and_what_is_quoted_is_documented(subjects, instructions):
    documented = {subject.name: subject for subject in subjects}
    for one in instructions:
        for name in one.objects:
            subject = documented[name]
            if subject.kind != "topic":
                value = pydoc.locate(name)
                assert value is not None
                said = re.sub(r"\W+", " ", subject.text)
                assert said.strip() in re.sub(r"\W+", " ", inspect.cleandoc(value.__doc__))
            if one.category in ("rewrite", "summarise"):
                assert one.turns[0].endswith(f"\n\n{subject.text}")


def test_calls_to_be_mended_are_wrong_and_the_others_are_not(instructions):
    judged = {"fix": 0, "steps": 0}
    for one in instructions:
        found = CALL.search(one.turns[0]) if one.category in judged else None
        assert found or one.category != "fix"
        if not found or one.turns[0].count("\n"):
            continue
        signature = inspect.signature(pydoc.locate(one.objects[0]))
        call = ast.parse(next(filter(None, found.groups())), mode="eval").body
        owner = OBJECT.search(one.turns[0])
        assert ast.unparse(call.func) == (
            f"{owner[1]}.{one.objects[0].rpartition('.')[2]}" if owner else one.objects[0]
        )
        assert owner is None or owner[2] == one.objects[0].rpartition(".")[0]
        given = [None] * (len(call.args) + bool(owner))
        keywords = dict.fromkeys(keyword.arg for keyword in call.keywords)
        judged[one.category] += 1
        if one.category == "fix":
            with pytest.raises(TypeError):
                signature.bind(*given, **keywords)
        else:
            signature.bind(*given, **keywords)
    assert min(judged.values()) > 20


def test_parameters_are_those_of_the_signature(instructions):
    asked = [one for one in instructions if one.category == "parameters"]
    assert len(asked) > 10
    for one in asked:
        names = {name for name in re.findall(r"`(\w+)`", one.turns[0]) if name not in one.objects}
        defaults = re.findall(r"(?:than|default is) `([^`]+)`", one.turns[0])
        parameters = inspect.signature(pydoc.locate(one.objects[0])).parameters
        assert names - set(defaults) <= set(parameters)
        for default in defaults:
            (name,) = names - set(defaults)
            assert repr(parameters[name].default) == default


def test_the_bytes_do_not_depend_on_the_process():
    script = (
        "import sys\n"
        "from data_prep.python_docs.instructions import *\n"
        f"subjects = read_subjects(['shutil', 'textwrap'], Collector({CHARS}))\n"
        "sys.stdout.buffer.write(as_lines(make_instructions(subjects, 4)))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed},
                       capture_output=True, check=True).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    here = as_lines(make_instructions(read_subjects(["shutil", "textwrap"], Collector(CHARS)), 4))
    assert runs[0] == runs[1] == here != b""


def test_an_object_counts_once_and_under_its_plainest_name():
    for modules in (["json", "json.decoder"], ["json.decoder", "json"]):
        names = [subject.name for subject in read_subjects(modules, Collector(CHARS))]
        assert [name for name in names if name.endswith("Decoder.decode")] == ["json.JSONDecoder.decode"]


def test_a_module_that_cannot_be_imported_is_said(tmp_path, monkeypatch):
    (tmp_path / "breaks_on_import.py").write_text("raise RuntimeError('no such device\\nmore')")
    monkeypatch.syspath_prepend(str(tmp_path))
    collector = Collector(CHARS)
    assert list(collector.module("breaks_on_import")) == []
    assert collector.skipped == {"breaks_on_import": "RuntimeError: no such device"}


def test_what_is_not_public_or_not_its_own_is_left_out(tmp_path, monkeypatch):
    (tmp_path / "documented.py").write_text(
        "from textwrap import dedent\n"
        "def shown(value):\n    'Return the value as it is shown.'\n"
        "def _hidden(value):\n    'Return the value as it is hidden.'\n"
        "def copy(value):\n    'Return the value as it is shown.'\n"
        "def bare(value):\n    pass\n"
        "def alias(value):\n    'Alias for shown, kept for old programs.'\n"
        "class Shop:\n"
        "    'A place where things are sold.'\n"
        "    def sell(self, thing, *, price=1):\n        'Sell one thing at a price.'\n"
        "    def _count(self):\n        'Count all the things that are left.'\n"
        "    @property\n"
        "    def stock(self):\n        'The things that are not sold yet.'\n"
        "class Closed(Exception):\n    'The shop is closed on this day.'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {subject.name: subject for subject in Collector(CHARS).module("documented")}
    kinds = {name.removeprefix("documented."): subject.kind for name, subject in found.items()}
    assert kinds.pop("copy", kinds.pop("shown", None)) == "function"  # one text, one subject
    assert kinds == {"Shop": "class", "Shop.sell": "method", "Shop.stock": "attribute", "Closed": "error"}
    thing, price = found["documented.Shop.sell"].parameters
    assert (thing.name, thing.required, thing.by_place, thing.default) == ("thing", True, True, None)
    assert (price.name, price.required, price.by_place, price.default) == ("price", False, False, "1")


def test_no_module_is_read_that_does_things_when_imported():
    listed = [*STANDARD_LIBRARY, *(name for names in PACKAGES.values() for name in names)]
    assert len(set(listed)) == len(listed)
    roots = {name.partition(".")[0] for name in listed}
    assert not roots & {"antigravity", "this", "idlelib", "turtle", "turtledemo", "test", "tkinter", "lib2to3"}
    assert {name.partition(".")[0] for name in STANDARD_LIBRARY} <= sys.stdlib_module_names
    assert all(module.partition(".")[0] == name for name, modules in PACKAGES.items() for module in modules)
