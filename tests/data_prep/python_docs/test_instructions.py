"""Instructions about what is documented: distinct, split by object, the same in every process."""

import inspect
import os
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.python_docs.instructions import TEMPLATES, as_lines, halves, make_instructions, read_subjects
from data_prep.python_docs.modules import PACKAGES, STANDARD_LIBRARY
from data_prep.python_docs.subjects import Collector
from data_prep.text.sources import is_heldout

ROOT = Path(__file__).parents[3]
MODULES = ["builtins", "shutil", "textwrap"]
CHARS, FRACTION = 300, 0.3


@pytest.fixture(scope="module")
def subjects():
    return read_subjects(MODULES, Collector(CHARS))


@pytest.fixture(scope="module")
def instructions(subjects):
    return make_instructions(subjects, per_object=len(TEMPLATES))


def test_every_category_is_there_and_no_two_say_the_same(instructions):
    assert {one.category for one in instructions} == {*TEMPLATES, "compare"}
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


def test_no_module_is_read_that_does_things_when_imported():
    listed = [*STANDARD_LIBRARY, *(name for names in PACKAGES.values() for name in names)]
    assert len(set(listed)) == len(listed)
    roots = {name.partition(".")[0] for name in listed}
    assert not roots & {"antigravity", "this", "idlelib", "turtle", "turtledemo", "test", "tkinter", "lib2to3"}
    assert {name.partition(".")[0] for name in STANDARD_LIBRARY} <= sys.stdlib_module_names
    assert all(module.partition(".")[0] == name for name, modules in PACKAGES.items() for module in modules)
