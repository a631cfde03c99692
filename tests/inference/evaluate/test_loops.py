"""Texts that end in a cycle: they are counted, named in every form of a report, and decide nothing."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from numpy.random import default_rng

from outrider.base.streams import Streams
from outrider.inference.core.rounds import Generation, Round
from outrider.inference.measure.results import PromptResult
from outrider.inference.measure.speed import speedup, without_loops
from outrider.inference.measure.statistics import LEAST, Loops, MedianInterval, loop_length
from outrider.inference.report.page import make_page
from outrider.inference.report.sentences import write_recommendation
from outrider.inference.report.types import MethodReport, read_reports, to_json
from outrider.inference.report.writing import write_reports
from outrider.inference.settings.method import AUTOREGRESSIVE, TRANSFORMERS
from tests.inference.evaluate.reports import report_of

CODE = '''
def add(one: int, other: int) -> int:
    """The sum."""
    if one is None:
        return other
    if other is None:
        return one
    return one + other


def test_add() -> None:
    assert add(1, 2) == 3
    assert add(2, 2) == 4
    assert add(2, 3) == 5
    assert add(3, 3) == 6
'''
LIST = "".join(f"{number}. The {name} is checked, and its log is kept.\n" for number, name in enumerate(
    ("disk", "fan", "board", "cable", "switch", "clock", "pump", "door"), 1))  # fmt: skip
TABLE = "| name | state | load |\n|---|---|---|\n" + "".join(f"| node{n} | up | {n * 7 % 10} |\n" for n in range(9))
QUOTED = 2 * "SELECT name, state FROM nodes WHERE load > 3 ORDER BY name;\n"
SAID = "The query asks for the nodes that are under load, by name. It reads one table, and needs no index on it.\n"


def tokens(text: str) -> tuple[int, ...]:
    """Its words and spaces as tokens."""
    known: dict[str, int] = {}
    return tuple(known.setdefault(word, len(known)) for word in re.findall(r"\w+|\s+|[^\w\s]", text))


@pytest.mark.parametrize("period", [1, 2, 3, 5, 8, 13, 31, 64, 90])
@pytest.mark.parametrize("before", [0, 7, 150])
@pytest.mark.parametrize("ended", [True, False])
def test_a_text_that_ends_in_a_cycle_loops(period: int, before: int, ended: bool) -> None:
    times = max(3, math.ceil(LEAST / period))
    drawn = default_rng(period).permutation(10_000).tolist()
    cycle = drawn[before : before + period]
    text = (*drawn[:before], *cycle * times, *cycle[: period // 2], *([10_001] if ended else []))
    assert period * times <= loop_length(text) <= period * times + period // 2 + (before > 0)
    assert not loop_length((*drawn[:before], *cycle * 2, *cycle[: period - 1])) or period == 1


@pytest.mark.parametrize("read", [tokens, lambda text: tuple(text.encode())], ids=["words", "bytes"])
@pytest.mark.parametrize("text", [CODE, LIST, TABLE, SAID + QUOTED, QUOTED + SAID, SAID + CODE + SAID])
def test_code_lists_tables_and_quotations_do_not(text: str, read: Callable[[str], tuple[int, ...]]) -> None:
    assert not loop_length(read(text))


def test_a_short_repetition_inside_a_text_does_not() -> None:
    assert not loop_length((*range(60), *[99] * 20, *range(100, 160)))
    assert loop_length((*range(20), *[99] * 60, *range(100, 130)))  # it is most of the text


def generation(text: Sequence[int], seconds: float, drafted: int = 4) -> Generation:
    rounds = tuple(Round((token,), drafted, 0, drafted, *(seconds / 100,) * 4) for token in text[1:])
    return Generation(tuple(text), 0.5, seconds, rounds)


def results(speeds: Sequence[float], loops: Sequence[int] = (), stock: float = 1.0) -> list[PromptResult]:
    """A prompt for each speed-up of the method "m"; those in `loops` have texts that loop. stock: of generate."""
    made = []
    for place, speed in enumerate(speeds):
        text = (1, 2, 3) * 8 if place in loops else tuple(range(place, place + 24))
        arms = {AUTOREGRESSIVE: generation(text, 1.0, 0), TRANSFORMERS: generation(text, 1 / stock, 0)}
        category = ("code", "chat")[place % 2]
        made.append(
            PromptResult(f"p{place}", category, (place,), {**arms, "m": generation(text, 1 / speed)}, TRANSFORMERS)
        )
    return made


def reported(made: Sequence[PromptResult], folder: Path, **facts: Any) -> tuple[MethodReport, str, str]:
    """The report of "m", and its Markdown and page as they are written."""
    report = report_of(made, **facts)
    texts = {(r.prompt_id, arm): "" for r in made for arm in r.generations}
    write_reports(folder, [report], made, texts, partial(make_page, [report], made, str))
    assert to_json(read_reports(folder / "report.json", "")) == to_json([report])
    return report, *((folder / f"report.{kind}").read_text() for kind in ("md", "html"))


def test_loops_are_counted_alike_everywhere_and_decide_nothing(tmp_path: Path) -> None:
    """Five texts at the speed of plain decoding, and three loops at ten times that."""
    report, table, page = reported(results([1.0] * 5 + [10.0] * 3, loops=(5, 6, 7)), tmp_path)
    assert report.figures.loops == Loops(8, 3, 0.375)
    assert {name: part.loops.looping for name, part in report.by_category.items()} == {"chat": 2, "code": 1}
    assert "3 of 8 texts repeat themselves" in table
    assert "3 of 8 texts repeat themselves" in page
    assert "2 of 4 texts repeat themselves" in page  # of the category
    assert report.figures.speedup.prompts == 8
    assert report.figures.speedup_without_loops == MedianInterval(1.0, (1.0, 1.0), 5)
    assert "1.00× [1.00, 1.00]" in table
    assert "1.00× [1.00, 1.00]" in page
    assert report.verdict == "undecided"
    assert "fastest" not in write_recommendation([report])


def test_a_loop_takes_the_texts_with_it_that_were_decoded_together() -> None:
    """They have the pace of all."""
    made = [replace(r, group=str(i // 2)) for i, r in enumerate(results([1.0] * 6, loops=(3,)))]
    assert [r.prompt_id for r in without_loops(made, "m")] == [made[i].prompt_id for i in (0, 1, 4, 5)]


def test_nothing_is_recommended_from_loops_alone(tmp_path: Path) -> None:
    """As a base model's under a chat template, of which a look-up was 5.8 times as fast."""
    report, table, page = reported(results([5.0, 5.8, 4.0, 31.2, 6.0], loops=range(5)), tmp_path)
    assert report.verdict == "undecided"
    assert report.figures.speedup.median == pytest.approx(5.8)
    assert report.figures.speedup_without_loops.median is None
    for said in (table, page, write_recommendation([report])):
        assert "undecided: 5 of 5 texts repeat themselves" in said
        assert "base model" in said
        assert "template=none" in said
    left, *_ = reported(results([5.0] * 7, loops=(0, 1, 2)), tmp_path / "more")
    assert write_recommendation([left]).startswith("undecided: 3 of 7 texts")


def test_prompts_of_one_id_are_two_prompts() -> None:
    """As where several processes numbered their own prompts, whose results were joined; turns stay one unit."""
    made = results([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    alike = [replace(r, prompt_id="p") for r in made]
    assert speedup(alike, "m", AUTOREGRESSIVE, Streams(0)) == speedup(made, "m", AUTOREGRESSIVE, Streams(0))
    assert report_of(alike).figures.prompts == 6
    assert len({r.unit for r in (replace(r, category=r.prompt_id, conversation="1") for r in made)}) == 6
    turns = [replace(r, category="chat", conversation="1") for r in made]
    assert speedup(turns, "m", AUTOREGRESSIVE, Streams(0)).prompts == 1
