"""report.html and Weights & Biases show what was measured; the page is self-contained, and escapes every text."""

import html
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from outrider.base.wandb_config import WandbConfig
from outrider.data_prep.text.prompts import Prompt
from outrider.draft_models.targets.settings import EARLY_EXIT
from outrider.inference.core.tree import ROOT
from outrider.inference.measure.results import PromptResult, ShownRound, TreeLog, read_results
from outrider.inference.measure.statistics import MedianInterval
from outrider.inference.measure.threads import judge_load
from outrider.inference.report.comparison import compare_reports
from outrider.inference.report.conditions import RUN, find_overlap, origin_of
from outrider.inference.report.page import make_page, rejected_tokens
from outrider.inference.report.plots import save_plots
from outrider.inference.report.sentences import overlap_sentence
from outrider.inference.report.types import MethodReport, read_reports
from outrider.inference.report.writing import COLUMNS, log_reports
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import preset
from outrider.inference.settings.tools import CompareConfig
from tests.inference.evaluate.evaluating import METHODS, evaluate, tokens
from tests.tiers import as_many
from tests.tiny import byte_tokenizer

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>&lt;"


class Page(HTMLParser):
    """The page as a browser parses it: elements, and the text of every article with rejected tokens apart."""

    def __init__(self, page: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: dict[str, str] = {}
        self.rejected: dict[str, str] = {}
        self.scripts: dict[str | None, str] = {}
        self._article = self._script = None
        self.feed(page)

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.elements.append((name, found))
        if name not in ("meta", "input", "link"):
            self.open.append(name)
        if name == "article":
            self._article = found["data-text"]
        if name == "script":
            self._script = found.get("id")

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name
        if name == "article":
            self._article = None

    def handle_data(self, text: str) -> None:
        if self._article is not None:
            into = self.rejected if self.open[-1] == "del" else self.texts
            into[self._article] = into.get(self._article, "") + text
        elif self.open and self.open[-1] == "script":
            self.scripts[self._script] = self.scripts.get(self._script, "") + text


def kept(config: EvaluateConfig) -> tuple[list[MethodReport], list[PromptResult]]:
    reports = read_reports(Path(config.out_dir) / "report.json", "")
    return reports, [turn for _, one in sorted(read_results(Path(config.out_dir)).items()) for turn in one.turns]


def decode(ids: Sequence[int]) -> str:
    return str(byte_tokenizer().decode(list(ids)))


def test_the_page_shows_the_texts_that_were_measured(alone: EvaluateConfig) -> None:
    """The texts are those of the arms, the trees contain the accepted tokens, and only some first turns are kept."""
    page = Page((Path(alone.out_dir) / "report.html").read_text())
    measured = tokens(alone)
    _, results = kept(alone)
    shown = [result for result in results if result.shown]
    assert [result.prompt_id for result in shown] == ["a", "b/turn1", "c", "d/turn1"]  # 4 of 5, evenly spread
    assert set(page.texts) == {f"{n}/{method}" for n in range(4) for method in alone.methods}
    for number, result in enumerate(shown):
        for method, rounds in result.shown.items():
            assert page.texts[f"{number}/{method}"] == decode(measured[result.prompt_id, method])
            assert tuple(t for r in rounds for t in r.tokens) == result.generations[method].tokens
            for r in rounds[1:]:
                assert [r.drafted[node] for node in r.path][: r.accepted] == list(r.tokens[: r.accepted])
                assert [r.parents[node] for node in r.path] == [ROOT, *r.path][: len(r.path)]
        chain = result.generations["chain"].rounds  # of fixed length, so that the shown run has the same drafts
        assert [len(r.drafted) for r in result.shown["chain"][1:]] == [r.drafted for r in chain]
        assert [r.accepted for r in result.shown["chain"][1:]] == [r.accepted for r in chain]
    trees = json.loads(page.scripts["rounds"])["trees"]
    assert set(trees) == set(page.texts)
    assert any(page.rejected.values())


def test_an_evaluation_beside_itself_is_no_faster(alone: EvaluateConfig, tmp_path: Path) -> None:
    folders = [alone.out_dir, alone.out_dir]
    found = compare_reports(CompareConfig(compare=folders, out_dir=str(tmp_path)))
    assert [row.pair for row in found.methods] == [(name, name) for name in alone.methods]
    for row in found.methods:
        assert row.gain == MedianInterval(1.0, (1.0, 1.0), 5)
        assert (row.same_text, row.verdict) == (7, "undecided")


def test_the_page_needs_nothing_but_itself(alone: EvaluateConfig) -> None:
    raw = (Path(alone.out_dir) / "report.html").read_text()
    page = Page(raw)
    assert page.open == []  # every element was closed
    assert len(raw) < 400_000
    assert not {"src", "href", "srcset", "action"} & {key for _, found in page.elements for key in found}
    assert not {"link", "iframe", "img", "object"} & {name for name, _ in page.elements}
    assert not re.search(r"url\((?!#)|@import|https?:|fetch\(|innerHTML", raw)
    said = html.unescape(" ".join(raw.split()))
    for wanted in ("Is it the target's own text?", "digest: target", "What the columns say"):
        assert wanted in said
    reports, _ = kept(alone)
    for digest in reports[0].conditions.digests.values():
        assert digest in said
    for category in reports[0].by_category:
        assert f"<summary>{category}, " in said


@settings(max_examples=as_many(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text())
@example(EVIL)
def test_no_text_of_a_model_becomes_markup(alone: EvaluateConfig, text: str) -> None:
    """What is escaped comes back: in an element, in an attribute, and in the data of the script."""
    reports, (result, *_) = kept(alone)
    reports = [replace(r, conditions=replace(r.conditions, target=text, model=text)) for r in reports]
    rounds = (ShownRound((1, 2), 1, drafted=(1,), parents=(ROOT,), path=(0,)),)
    page = Page(make_page(reports, [replace(result, shown={text: rounds})], lambda ids: text * len(ids)))
    assert [name for name, _ in page.elements if name in ("script", "img")] == ["script"] * 2
    assert page.texts.get(f"0/{text}", "") == 2 * text
    assert json.loads(page.scripts["rounds"])["pieces"] == {"1": text, "2": text}


def test_timed_runs_record_no_trees(config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a page no tree is recorded; the timed runs record none."""

    def refuse(*_: object) -> Any:
        raise AssertionError("noted")

    monkeypatch.setattr(TreeLog, "verify", refuse)
    prompts = [Prompt("a", "code", ("def add(first, second):",), False)]
    evaluate(config("none", show_prompts=0), prompts)
    assert "No rounds were kept" in (Path(config("none").out_dir) / "report.html").read_text()
    with pytest.raises(AssertionError, match="noted"):
        evaluate(config("some", show_prompts=1), prompts)


def test_the_rejected_rest_of_a_draft_by_hand() -> None:
    # Root 0, 1; under 0: 2, 3; under 3: 4. Accepted are 0 and 2, or 0 alone, or none.
    tree = {"drafted": (10, 11, 12, 13, 14), "parents": (ROOT, ROOT, 0, 0, 3)}
    assert rejected_tokens(ShownRound((10, 12, 5), 2, path=(0, 2), **tree)) == []
    assert rejected_tokens(ShownRound((10, 5), 1, path=(0,), **tree)) == [12]
    assert rejected_tokens(ShownRound((5,), 0, path=(), **tree)) == [10, 12]
    assert rejected_tokens(ShownRound((5,))) == []


def test_overlap_of_training_text_and_prompts_by_hand(tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(20)]
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": " ".join(words)}) + "\n")
    data = {"source": "local", "path": [str(tmp_path / "train.jsonl")], "heldout_fraction": 0.0}
    prompts = [
        Prompt("seen", "x", (" ".join(words[3 : 3 + RUN + 1]),), False),
        Prompt("half", "x", ("other " + " ".join(words[: RUN - 1]),), False),
        Prompt("short", "x", ("w0 w1",), False),
    ]
    found = find_overlap(data, prompts)
    assert (found.prompts_seen, found.prompts, found.runs_seen, found.runs, found.complete) == (1, 3, 2, 3, True)
    for training, why in (({**data, "source": "hub"}, "Hub"), (None, "no record"),
                          ({**data, "path": [str(tmp_path / "gone")]}, "cannot be read")):  # fmt: skip
        assert why in find_overlap(training, prompts).why
    assert "or take newer prompts" in overlap_sentence("small_lm", find_overlap(None, prompts))


def test_what_the_prompts_are_to_the_drafters_is_said_where_it_is_known(alone: EvaluateConfig, tmp_path: Path) -> None:
    """And not of drafters that learned from no text."""
    untrained = replace(alone, checkpoint=None, target="t", methods={"prompt_lookup": preset("prompt_lookup")})
    held = replace(alone, prompts=str(tmp_path / "heldout.jsonl"))
    cases = ((alone, "own"), (alone, "maths"), (held, "maths"), (alone, "python_stdlib"), (untrained, "own"))

    def sentence(config: EvaluateConfig, category: str) -> str:
        texts = {kind: record.data for kind, record in config.training_records().items()}
        return origin_of(config, texts, [Prompt("a", category, ("x",), True)])

    sentences = [sentence(config, category) for config, category in cases]
    assert [*map(bool, sentences)] == [True, False, False, False, False]
    (tmp_path / "prompts.json").write_text("{}")
    assert "held out from those" in sentence(held, "maths")


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium (apt-get install chromium)")
CLICK = """<script>
document.getElementById("choose-method").value = "tree";
document.getElementById("choose-method").dispatchEvent(new Event("change"));
document.querySelector('[data-text="0/tree"] [data-round="1"]').click();
</script>"""
WIDE = MedianInterval(10.25, (10.11, 12.75), 5, MedianInterval(20.5, (19.25, 21.75), 5))
MEASURE = """<script>
const below = (name) => document.querySelector(name).getBoundingClientRect().bottom;
const seen = {width: innerWidth, busy: below(".busy"), verdict: below("#verdict")};
document.querySelectorAll("details").forEach((one) => (one.open = true));
const letters = [...document.querySelectorAll("figure text")].map((one) => one.getBoundingClientRect().height);
const boxes = [document.documentElement, ...document.querySelectorAll(".scroll")];
seen.sideways = Math.max(...boxes.map((one) => one.scrollWidth - one.clientWidth));
seen.letters = Math.min(...letters);
parent.postMessage(JSON.stringify(seen), "*");
</script>"""


# A window of Chromium is 500 pixels wide or more, a frame in it is not.
FRAME = """<script>addEventListener("message", (event) => (document.title = event.data));</script>
<iframe src="report.html" style="border: 0; width: {}px; height: 800px"></iframe>"""


def browsed(file: Path) -> str:
    """The page's DOM in Chromium, after its scripts."""
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={file.parent}/profile",
               "--window-size=1300,900", "--virtual-time-budget=2000", "--dump-dom", file.as_uri()]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def title(dom: str) -> str:
    return dom.partition("<title>")[2].partition("</title>")[0]


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [1200, 800, 390])
def test_a_window_shows_the_verdict_first_and_never_scrolls_sideways(
    alone: EvaluateConfig, tmp_path: Path, width: int
) -> None:
    """Twelve methods, a long name, a busy machine, and every table unfolded."""
    reports, results = kept(alone)
    busy = judge_load([0.34], [4.0], cores=2)
    names = {"target": "/a/long/name/" * 9, "model": "a-long-name" * 9, "load": busy}
    many = [
        replace(report, conditions=replace(report.conditions, **names), figures=replace(report.figures, speedup=WIDE))
        for report in reports
    ] * 6
    page = make_page(many, results, decode, save_plots(tmp_path, many)).replace("</body>", MEASURE + "</body>")
    (tmp_path / "report.html").write_text(page)
    (tmp_path / "frame.html").write_text(FRAME.format(width))
    dom = browsed(tmp_path / "frame.html")
    seen = json.loads(html.unescape(title(dom)))
    assert seen["width"] == width
    assert seen["sideways"] <= 0
    assert seen["busy"] < seen["verdict"] < 800
    assert seen["letters"] >= 10  # pixels from a line of a plot to the next


@pytest.mark.slow
@needs_browser
def test_a_browser_draws_the_tree_of_a_round_that_is_clicked(alone: EvaluateConfig, tmp_path: Path) -> None:
    reports, results = kept(alone)
    page = make_page(reports, results, lambda ids: EVIL * len(ids)).replace("</body>", CLICK + "</body>")
    (tmp_path / "report.html").write_text(page)
    dom = browsed(tmp_path / "report.html")
    seen = Page(dom)
    assert "owned" not in title(dom)
    assert "img" not in {name for name, _ in seen.elements}
    panel = dom[dom.index('id="tree"') : dom.index("</aside>")]
    r = results[0].shown["tree"][1]
    assert f"Round 1: {len(r.drafted)} drafted, {len(r.path)} accepted" in panel
    assert panel.count("<li>") == len(r.drafted) + len(r.tokens) - r.accepted
    hidden = {f["data-text"] for name, f in seen.elements if name == "article" and "hidden" in f}
    assert hidden == {f"{n}/{m}" for n in range(4) for m in alone.methods} - {"0/tree"}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Notes what it is told."""
    wandb = MagicMock(__spec__=object(), Table=lambda columns, data: (columns, data))
    wandb.init.return_value = MagicMock(id="r1", summary={})
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return wandb


def test_a_report_is_not_lost_where_wandb_cannot_begin(
    tmp_path: Path, fake: MagicMock, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.Error = OSError
    fake.init.side_effect = OSError("No API key configured")
    log_reports(WandbConfig(mode="online"), tmp_path, [], {})
    assert "No API key configured; wandb login" in capsys.readouterr().err


def test_an_evaluation_is_one_run_with_its_table_and_page(tmp_path: Path, tiny_models: Path, fake: MagicMock) -> None:
    config = EvaluateConfig(
        target=str(tiny_models / "target"), checkpoint=str(tiny_models / EARLY_EXIT), methods=METHODS, max_new_tokens=6,
        out_dir=str(tmp_path / "out"), wandb=WandbConfig(mode="offline", project="p", name="n"), show_prompts=1,
    )  # fmt: skip
    evaluate(config)
    started, run = fake.init.call_args.kwargs, fake.init.return_value
    (logged,) = run.log.call_args.args
    assert {key: started[key] for key in ("project", "name", "mode", "id", "resume", "job_type")} == {
        "project": "p", "name": "n", "mode": "offline", "id": None, "resume": None, "job_type": "evaluate",
    }  # fmt: skip
    assert started["config"]["max_new_tokens"] == 6
    columns, rows = logged["methods"]
    assert columns == list(COLUMNS)
    assert [row[0] for row in rows] == list(METHODS)
    assert all(dict(zip(columns, row, strict=True))["identical"] == "7/7" for row in rows)
    fake.Html.assert_called_once_with((tmp_path / "out/report.html").read_text(), inject=False)
    assert run.summary["tree/tau"] == rows[1][columns.index("tau")]
    assert (fake.init.call_count, run.log.call_count, run.finish.call_count) == (1, 1, 1)
    log_reports(config.wandb, tmp_path / "out", [], {})  # a resumed evaluation
    assert (fake.init.call_args.kwargs["id"], fake.init.call_args.kwargs["resume"]) == ("r1", "allow")
