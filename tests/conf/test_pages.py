"""What the README and docs/ say holds: every command composes, every link leads somewhere, figures are the files'."""

import argparse
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch

from outrider.base import settings
from outrider.data_prep.text.documents import encode
from outrider.inference.settings.kinds import KINDS
from outrider.inference.settings.method import MethodConfig
from tests.conf.test_configs import COMMANDS, ROOT, as_typed, written_commands
from tests.families import FAMILIES
from tests.refusals import refusal
from tests.tiny import byte_tokenizer

BENCHMARKS = ROOT / "benchmarks"
TABLES = sorted((BENCHMARKS / "results").glob("*.md"))
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *TABLES])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`((?:python |make |evaluate-checkpoint )[^`]*)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
INSTALLING = {
    "python3 -m venv .venv && . .venv/bin/activate",
    "make install && . .venv/bin/activate",
    "pip install -c constraints.txt -e '.[dev]'",
}
RUN_ELSEWHERE = {"python docs/make_options.py"}  # test_options.py
READERS_OWN = "mine"  # a file that a page has its reader write
MADE_BY_MAKE = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


class ParsedError(BaseException):
    """Raised in the place of what a script does once it has read its command line; no script catches it."""


def code_of(text: str) -> list[str]:
    """Lines of blocks without a language, which are commands, and commands within sentences."""
    blocks = [line for language, block in FENCE.findall(text) if not language for line in block.splitlines()]
    return [line for line in blocks if line.strip()] + SPAN.findall(FENCE.sub("", text))


def commands() -> list[tuple[str, str]]:
    return [(name, line) for name, page in zip(NAMES, PAGES, strict=True) for line in code_of(page.read_text())]


def entries() -> list[tuple[str, list[str]]]:
    return [found for _, line in commands() for found in written_commands([line])]


def anchor(heading: str) -> str:
    """How GitHub names a heading in a link."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def read_command_line(monkeypatch: pytest.MonkeyPatch, script: Path, words: list[str]) -> None:
    """Run a script of benchmarks/ as far as its command line. Raises what argparse raises on a wrong one."""
    parse = argparse.ArgumentParser.parse_args

    def only_parse(parser: argparse.ArgumentParser, *given: object) -> None:
        parse(parser, *given)  # type: ignore[call-overload]
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    monkeypatch.syspath_prepend(str(script.parent))
    with pytest.raises(ParsedError):
        runpy.run_path(str(script), run_name="__main__")


def test_every_entry_is_on_a_page() -> None:
    assert {command for command, _ in entries()} == set(COMMANDS)


def test_the_example_of_an_option_is_one() -> None:
    """CONTRIBUTING.md: the three fields are checked as it says there."""
    [block] = [code for language, code in FENCE.findall((ROOT / "CONTRIBUTING.md").read_text()) if language == "python"]
    names: dict[str, Any] = {"dataclass": dataclass, "Literal": Literal, "Annotated": Annotated, **vars(settings)}
    exec(compile(block, "CONTRIBUTING.md", "exec"), names)
    stopping = names["Stopping"]
    for given, said in (
        ({"rule": "gamma"}, "'fixed' or 'beta'"),
        ({"workers": 0}, "workers=0"),
        ({"alpha": 2.0}, "rule=fixed"),
    ):
        refusal(said, stopping, **given)
    assert stopping(rule="beta", alpha=2.0, workers=3).decisions() == {"rule": "beta", "alpha": 2.0}


def test_the_example_of_a_drafter_is_one() -> None:
    """docs/extend.md: it registers and drafts; a registered kind can decode (tests/inference/drafters)."""
    [block] = [code for language, code in FENCE.findall((ROOT / "docs/extend.md").read_text()) if language == "python"]
    names: dict[str, Any] = {}
    try:
        exec(compile(block, "docs/extend.md", "exec"), names)
        drafter = names["RepeatPlugin"]().make(None, MethodConfig("repeat"), None, drawn=False, tuning=None)
        tree = drafter.draft(torch.tensor([7]), 2)
        assert (tree.tokens.tolist(), tree.parents) == ([7, 7], (-1, 0))
    finally:
        KINDS.pop("repeat", None)


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_are_understood(monkeypatch: pytest.MonkeyPatch, page: str, line: str) -> None:
    """An entry's options compose, a script of benchmarks/ reads its own, make has the target; there is nothing else."""
    entry = written_commands([line])
    words = shlex.split(line, comments=True)
    if entry:
        ((command, overrides),) = entry
        as_typed(command, overrides)
    elif words[0] == "make" and line not in INSTALLING:
        options = [word for word in words[1:] if "=" in word]
        assert {*words[1:]} - {*options} <= MADE_BY_MAKE, page
        if options:  # of the pipeline
            as_typed("pipeline", [f"experiment={words[1]}", *options])
    elif words[0] == "python" and words[1].startswith("benchmarks/"):
        read_command_line(monkeypatch, ROOT / words[1], words[2:])
    elif words[:4] == [".venv/bin/python", "-m", "pytest", "-n0"]:
        assert all((ROOT / word).exists() for word in words[4:])
    else:
        assert line in INSTALLING | RUN_ELSEWHERE, (
            f"{page}: {line}: nothing checks this command; teach this test, or take it out"
        )


def of_vicuna() -> list[tuple[str, list[str]]]:
    """The commands of pages and experiments whose target is a Vicuna: their tokenizers have no chat template."""
    experiments = sorted((ROOT / "conf/experiment").glob("*/*vicuna*.yaml"))
    named = [(file.parent.name, [f"experiment={file.parent.name}/{file.stem}"]) for file in experiments]
    return [(command, given) for command, given in entries() if "vicuna" in " ".join(given)] + named


@pytest.mark.parametrize(("command", "given"), of_vicuna(), ids=str)
def test_commands_for_a_target_without_a_chat_template_render_conversations(command: str, given: list[str]) -> None:
    """As far as that goes without a network: a conversation is read as each source of the command says."""
    config = as_typed(command, given)
    data = getattr(config, "data", None) if command != "build_trigrams" else None  # which renders none
    talk = [{"role": role, "content": "so"} for role in ("user", "assistant")]
    for part in [part for _, _, part in data.parts()] or [data] if data else []:
        (document,) = encode([{"id": "1", "messages": talk}], byte_tokenizer(), part.template)
        assert document.supervised.any()
    if command == "evaluate_checkpoint" and config.checkpoint is None:  # else its record says how
        assert config.prompts == "python_stdlib" or config.template != "auto"


@pytest.mark.parametrize("name", [*NAMES, "CHANGELOG.md", "slurm/README.md"])
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if link.startswith("https://"):
            continue
        path, _, fragment = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        if fragment:
            assert fragment in map(anchor, re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)), link


def test_files_that_pages_name_are_there() -> None:
    named = re.compile(r"`((?:train|data_prep|inference|draft_models|conf|benchmarks|slurm|outrider)/[\w./]*\w)`")
    for page in PAGES:
        for name in named.findall(page.read_text()):
            assert Path(name).stem == READERS_OWN or (ROOT / name).exists(), f"{page.name}: {name}"
    for page in [ROOT / "docs/results.md", *TABLES]:
        for name in re.findall(r"`(\w+\.(?:json|png))`", page.read_text()):
            assert (BENCHMARKS / "results" / name).exists(), f"{page.name}: {name}"


@pytest.mark.parametrize("command", ["demo", "demo-real", "smollm2"])
def test_what_make_is_given_its_command_gets(command: str) -> None:
    """All of it: make itself takes any NAME=VALUE without a word. Python is the one that is make's own."""
    given = ["minutes=6", "debug=true", "target=x", "steps.report.dtype=float32"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"}
    done = subprocess.run(
        ["make", "-n", command, *given, "PYTHON=python3"],
        cwd=ROOT, env=outside, capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = shlex.split(done.stdout.splitlines()[-1])
    assert set(given) < set(words)
    assert not any(word.startswith("PYTHON") for word in words)


def test_make_says_what_each_of_its_commands_does() -> None:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"}
    for words in (["make"], ["make", "help"]):
        said = subprocess.run(words, cwd=ROOT, env=outside, capture_output=True, text=True, check=True).stdout
        assert {tuple(line.split()[:2]) for line in said.splitlines()} == {("make", name) for name in MADE_BY_MAKE}
        assert all(len(line.split()) > 3 for line in said.splitlines())


def test_pages_by_hand_stay_short() -> None:
    """Generated tables and the list of options are not counted."""
    generated = re.compile(r"<!-- [^>]* begin -->.*?end -->", re.DOTALL)
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name != "options.md"]
    words = {page.name: len(generated.sub("", page.read_text()).split()) for page in pages}
    assert sum(words.values()) <= 25_000
    assert words["results.md"] <= 2_500
    assert words["papers.md"] <= 2_500
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90
    assert len((ROOT / "CHANGELOG.md").read_text().split()) <= 600


def test_the_families_of_the_page_are_those_that_are_tested() -> None:
    page = (ROOT / "docs/getting-started.md").read_text()
    named = page.split("train an early exit:")[1].split("Llama, Mistral")[0]
    assert set(re.findall(r"`([a-z0-9_]+)`", named)) == set(FAMILIES)
