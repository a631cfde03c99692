"""The shape of the house in numbers that may only fall; shape.json has them, names.json the vague names by folder.

A commit that raises one has to add an entry to docs/decisions.md, which says what was removed for it. Imports are those
at the top of a module, without `TYPE_CHECKING`: what runs when it is imported; late ones are counted by themselves.
"""

import ast
import json
import re
import subprocess
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from outrider.base.run_dirs import FOLDERS

ROOT = Path(__file__).parent.parent
BARS = ROOT / "tests" / "shape.json"  # at most; lower one whenever it is beaten
MOST: dict[str, int] = json.loads(BARS.read_text("utf-8"))
NAMES = ROOT / "tests" / "names.json"  # of each folder, how many bound names say nothing; a folder without a number: 0
MOST_VAGUE: dict[str, int] = json.loads(NAMES.read_text("utf-8"))
VAGUE = re.compile(
    "_*(found|given|known|made|kept|said|own|places?|taken|told|asked|others?|wanted|one|each|rest|left|done|whole|some"
    "|now|named|placed|shown|few|both|every|theirs|mine|its|ours)_*"
)
DECISIONS = "docs/decisions.md"
Graph = dict[str, set[str]]


@cache
def sources() -> dict[str, Path]:
    """The files of the source, by module."""
    files = [file for folder in ("outrider", *FOLDERS) for file in (ROOT / folder).rglob("*.py")]
    parts = {file: file.relative_to(ROOT).with_suffix("").parts for file in files}
    return {".".join(["outrider"] * (own[0] != "outrider") + [*own]).removesuffix(".__init__"): f
            for f, own in parts.items()}  # fmt: skip


@cache
def imports() -> Graph:
    """The modules of ours that each module imports at its top."""
    return {module: {*_imported(file)} - {module} for module, file in sources().items()}


def _imported(file: Path) -> list[str]:
    found = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name if name in sources() else node.module for name in names]
    return [module for module in found if module in sources()]


def below(module: str) -> set[str]:
    """It and all that importing it imports."""
    seen, todo = {module}, [module]
    while todo:
        new = imports()[todo.pop()] - seen
        seen |= new
        todo += new
    return seen


def lines(modules: set[str]) -> int:
    return sum(len(sources()[module].read_text().splitlines()) for module in modules)


def longest_chain() -> int:
    longest: dict[str, int] = {}
    for module in TopologicalSorter(imports()).static_order():
        longest[module] = 1 + max((longest[other] for other in imports()[module]), default=0)
    return max(longest.values())


def lines_of(folder: str) -> int:
    return sum(len(file.read_text().splitlines()) for file in (ROOT / folder).rglob("*.py"))


def late_imports() -> int:
    """Imports of our modules that run later than their module: in functions."""
    functions = (
        node
        for file in sources().values()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    late = {(one.lineno, id(node)) for node in functions for one in ast.walk(node) if _is_ours(one)}
    return len(late)


def _is_ours(node: ast.AST) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return any(name.partition(".")[0] == "outrider" for name in names)


def lines_with(pattern: str) -> int:
    every = (line for file in sources().values() for line in file.read_text().splitlines())
    return sum(re.search(pattern, line) is not None for line in every)


@cache
def measured() -> dict[str, int]:
    loop, interface = below("outrider.inference.core.decode"), below("outrider.inference.core.drafter")
    return {
        "source lines": lines({*sources()}),
        "test lines": lines_of("tests"),
        "benchmark lines": lines_of("benchmarks"),
        "late imports": late_imports(),
        "modules on the longest chain of imports": longest_chain(),
        "modules below the decode loop": len(loop),
        "lines below the decode loop": lines(loop),
        "modules below the drafter's interface": len(interface),
        "lines below the drafter's interface": lines(interface),
        "lines with Any": lines_with(r"\bAny\b"),
        "lines with type: ignore": lines_with("type: ignore"),
        "presets of methods": len([*(ROOT / "conf" / "method").glob("*.yaml")]),
    }


@pytest.mark.parametrize("what", MOST)
def test_nothing_grows(what: str) -> None:
    assert measured()[what] <= MOST[what]


def bound_names(source: str) -> list[str]:
    """Every name that the source binds: assignments, loop variables, arguments, functions."""
    nodes = [*ast.walk(ast.parse(source))]
    names = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    names += [node.arg for node in nodes if isinstance(node, ast.arg)]
    return names + [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@cache
def vague_names() -> Counter[str]:
    """How many names of each folder are a participle, a pronoun or an adverb alone, which says nothing of a value."""
    counts: Counter[str] = Counter()
    for file in sources().values():
        names = bound_names(file.read_text("utf-8"))
        counts[file.parent.relative_to(ROOT).as_posix()] += sum(VAGUE.fullmatch(name) is not None for name in names)
    return counts


@pytest.mark.parametrize("folder", sorted({*MOST_VAGUE, *vague_names()}))
def test_no_name_more_says_nothing(folder: str) -> None:
    assert vague_names()[folder] <= MOST_VAGUE.get(folder, 0), f"{folder}: name the thing; see CONTRIBUTING, Rules"


def test_a_vague_name_is_seen_wherever_it_is_bound() -> None:
    source = "found = 1\nfor place in x: own: int = 2\ndef said(given, *kept, rows): (a, _left) = 1, 2"
    vague = [name for name in bound_names(source) if VAGUE.fullmatch(name)]
    assert {*vague} == {"found", "place", "own", "said", "given", "kept", "_left"}
    assert not [name for name in bound_names("rows = found.place\nx.own = said(given=3)") if VAGUE.fullmatch(name)]


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def raised(before: str, now: str, decisions: str) -> list[str]:
    """The numbers that a change raised without a new entry among the `decisions` that it changed (a diff)."""
    old, new = json.loads(before or "{}"), json.loads(now)
    grown = [name for name in old if name not in new or new[name] > old[name]]
    return [] if re.search(r"^\+(## |- .*\d)", decisions, re.MULTILINE) else grown


@pytest.mark.parametrize("file", [BARS, NAMES])
def test_no_commit_raises_a_number_without_a_decision(file: Path) -> None:
    """Of the commits that are here; a shallow clone has few."""
    name = file.relative_to(ROOT).as_posix()
    for commit in git("log", "--format=%H", "--", name).split():
        if before := git("show", f"{commit}~:{name}"):
            changed = git("diff", f"{commit}~", commit, "--", DECISIONS)
            assert not raised(before, git("show", f"{commit}:{name}"), changed), commit
    assert not raised(git("show", f"HEAD:{name}"), file.read_text("utf-8"), git("diff", "HEAD", "--", DECISIONS))


def test_a_raised_number_is_seen() -> None:
    assert raised('{"lines": 5}', '{"lines": 6}', "+Some words\n") == ["lines"]
    assert raised('{"lines": 5}', "{}", "") == ["lines"]
    for entry in ("+## What went for it\n", "+- What went for it: 1\n"):
        assert not raised('{"lines": 5}', '{"lines": 6}', entry)
    assert not raised('{"lines": 5}', '{"lines": 4, "more": 7}', "")
