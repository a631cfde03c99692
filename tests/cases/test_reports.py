"""What an outside reader of reports, plans and cards found wrong, again: loops, memory, warnings, words."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import default_rng

import outrider.draft_models.losses as losses_module
from outrider.base.streams import Streams
from outrider.base.words import figure
from outrider.draft_models.acceptance import BLOCKS, FLOAT32_BYTES, acceptance_by_target, judge
from outrider.draft_models.card import LEAST_TAU
from outrider.draft_models.losses import (
    DIVERGENCES,
    linear_cross_entropy,
    linear_divergence,
    linear_topk_divergence,
    loss_bytes,
)
from outrider.inference.core.rounds import Generation, Round
from outrider.inference.measure.lossless import Deviation
from outrider.inference.measure.replay import RecordedTurn, replay_markdown, replay_report
from outrider.inference.measure.results import PromptResult
from outrider.inference.measure.speed import speedup
from outrider.inference.measure.statistics import LEAST, looped
from outrider.inference.report.page import make_page
from outrider.inference.report.plots import plot_speedups
from outrider.inference.report.report import build_report, markdown, write_reports
from outrider.inference.report.side_by_side import compare_reports
from outrider.inference.report.wording import recommendation
from outrider.inference.settings.method import AUTOREGRESSIVE, TRANSFORMERS, MethodConfig
from outrider.inference.settings.sampling import SamplingConfig
from outrider.inference.settings.tools import CompareConfig
from outrider.train.core.fit import fit
from outrider.train.core.training import Training
from outrider.train.recipes.early_exit import train_early_exit
from tests.memory import Alive
from tests.tiny import save_target
from tests.train.fit_job import TinyModel, tiny_config, tiny_rows
from tests.train.jobs import FIT, distilling, log, write_corpus

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
    assert period * times <= looped(text) <= period * times + period // 2 + (before > 0)
    assert not looped((*drawn[:before], *cycle * 2, *cycle[: period - 1])) or period == 1


@pytest.mark.parametrize("read", [tokens, lambda text: tuple(text.encode())], ids=["words", "bytes"])
@pytest.mark.parametrize("text", [CODE, LIST, TABLE, SAID + QUOTED, QUOTED + SAID, SAID + CODE + SAID])
def test_code_lists_tables_and_quotations_do_not(text: str, read: Callable[[str], tuple[int, ...]]) -> None:
    assert not looped(read(text))


def test_a_short_repetition_inside_a_text_does_not() -> None:
    assert not looped((*range(60), *[99] * 20, *range(100, 160)))
    assert looped((*range(20), *[99] * 60, *range(100, 130)))  # it is most of the text


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


FACTS = {
    "target": "models/my-target", "model": "my-target", "drafter": "runs/auto/table", "dtype": "float32",
    "computes_in": "float32", "device": "cpu", "max_new_tokens": 24, "processes": 1, "temperature": 0.0,
    "sampling": asdict(SamplingConfig()),
    "settings": asdict(MethodConfig()), "kernels": {"1024×640 in bfloat16": "plain"},
}  # fmt: skip


def reported(made: Sequence[PromptResult], folder: Path, **facts: Any) -> tuple[dict[str, Any], str, str]:
    """The report of "m" as JSON, Markdown and page, as they are written."""
    report = build_report("m", made, FACTS | facts, seed=0)
    texts = {(r.prompt_id, arm): "" for r in made for arm in r.generations}
    write_reports(folder, [report], made, texts, partial(make_page, [report], made, str))
    written = [(folder / f"report.{kind}").read_text() for kind in ("json", "md", "html")]
    return json.loads(written[0]), written[1], written[2]


def test_loops_are_counted_alike_everywhere_and_decide_nothing(tmp_path: Path) -> None:
    """Five texts at the speed of plain decoding, and three loops at ten times that."""
    report, table, page = reported(results([1.0] * 5 + [10.0] * 3, loops=(5, 6, 7)), tmp_path)
    assert report["loops"] == {"texts": 8, "looping": 3, "share": 0.375}
    assert {name: part["loops"]["looping"] for name, part in report["by_category"].items()} == {"chat": 2, "code": 1}
    assert "3 of 8 texts repeat themselves" in table
    assert "3 of 8 texts repeat themselves" in page
    assert "2 of 4 texts repeat themselves" in page  # of the category
    assert report["speedup"]["prompts"] == 8
    assert report["speedup_without_loops"] == {"median": 1.0, "ci95": [1.0, 1.0], "prompts": 5}
    assert "1.00× [1.00, 1.00]" in table
    assert "1.00× [1.00, 1.00]" in page
    assert report["verdict"] == "undecided"
    assert "fastest" not in recommendation([report])


def test_nothing_is_recommended_from_loops_alone(tmp_path: Path) -> None:
    """As a base model's under a chat template, of which a look-up was 5.8 times as fast."""
    report, table, page = reported(results([5.0, 5.8, 4.0, 31.2, 6.0], loops=range(5)), tmp_path)
    assert report["verdict"] == "undecided"
    assert report["speedup"]["median"] == pytest.approx(5.8)
    assert report["speedup_without_loops"]["median"] is None
    for said in (table, page, recommendation([report])):
        assert "undecided: 5 of 5 texts repeat themselves" in said
        assert "base model" in said
        assert "template=none" in said
    left, *_ = reported(results([5.0] * 7, loops=(0, 1, 2)), tmp_path / "more")
    assert recommendation([left]).startswith("undecided: 3 of 7 texts")


def test_texts_without_loops_are_judged_as_ever(tmp_path: Path) -> None:
    report, *_ = reported(results([2.0, 2.1, 2.2, 2.3, 2.4, 9.0], loops=(5,)), tmp_path)
    assert report["verdict"] == "faster"
    assert recommendation([report]).startswith("`m` is the fastest: 2.20×")
    none, *_ = reported(results([2.0, 2.1, 2.2, 2.3, 2.4]), tmp_path / "none")
    assert none["loops"]["looping"] == 0
    assert {**none["speedup"], "vs_transformers_generate": None} == {
        **none["speedup_without_loops"], "vs_transformers_generate": None
    }  # fmt: skip
    assert "0 of 5 texts repeat themselves" in markdown([none])


def test_replays_say_how_much_repeats_itself() -> None:
    texts = [tuple(range(24)), (1, 2, 3) * 8]
    turns = [RecordedTurn(str(place), "qa", (0,), text) for place, text in enumerate(texts)]
    report = {"method": "m", **replay_report(turns, [generation(text, 1.0) for text in texts])}
    assert report["loops"] == {"texts": 2, "looping": 1, "share": 0.5}
    assert report["by_category"]["qa"]["loops"]["looping"] == 1
    table = replay_markdown([report | {"tau": 3.0, "tau_without_loops": 2.0}], "answers.jsonl")
    assert "1 of 2 texts repeat themselves" in table
    assert "| m | 3.000 | 2.000 |" in table


def test_so_do_two_evaluations_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five texts that got no faster, and three loops that got ten times as fast."""
    runs = {"a": results([1.0] * 8, loops=(5, 6, 7)), "b": results([1.0] * 5 + [10.0] * 3, loops=(5, 6, 7))}
    monkeypatch.setattr(
        "outrider.inference.report.side_by_side.read_evaluation", lambda name: _evaluation(name, runs[name])
    )
    found = compare_reports(CompareConfig(compare=["a", "b"], out_dir=str(tmp_path / "out")))
    (row,) = found["methods"]
    assert row["verdict"] == "undecided"
    assert (row["gain"]["prompts"], row["gain_without_loops"]["prompts"]) == (8, 5)
    assert row["loops"]["looping"] == 6
    table = (tmp_path / "out/compare.md").read_text()
    assert "6 of 16 texts repeat themselves" in table
    with_loops, without = (figure(row[key]) for key in ("gain", "gain_without_loops"))
    assert with_loops != without
    assert f"| m | m | {with_loops} | {without} |" in table


def _evaluation(name: str, made: Sequence[PromptResult]) -> Any:
    from outrider.inference.report.side_by_side import Evaluation

    return Evaluation(name, {"m": {"method": "m", **FACTS}}, {r.prompt_id: r for r in made})


def test_plain_decoding_that_is_slower_than_generate_is_said(tmp_path: Path) -> None:
    for place, (stock, slower) in enumerate(((1.5, True), (1.0, False), (0.5, False))):
        report, *pages = reported(results([2.0] * 6, stock=stock), tmp_path / str(place))
        for said in (*pages, recommendation([report])):
            assert ("slower here than transformers" in said.replace("&#x27;", "'")) == slower
            assert ("threads=1" in said) == slower


def test_ties_of_plain_decoding_are_noted_as_those_of_a_method(tmp_path: Path) -> None:
    made = results([2.0] * 6)
    odd, rounded = made[0], Deviation(8, (0.0, 0.0, 0.0), 2.0, 1, 5, own_gaps=2)
    arms = {AUTOREGRESSIVE: replace(odd.generations[AUTOREGRESSIVE], tokens=(9,) * 5 + tuple(range(19)))}
    made[0] = replace(odd, generations={**odd.generations, **arms})
    made = [replace(r, deviations={"m": rounded, AUTOREGRESSIVE: rounded}) for r in made]
    report, table, page = reported(made, tmp_path, dtype="bfloat16", computes_in="bfloat16")
    assert report["lossless"]["autoregressive_excused_ties"] == 1
    for said in (table, page):
        assert "5/6 (+1 ties)" in said
        assert "0 of 48 (transformers: 12)" in said


def test_the_page_names_the_tool_and_folds_what_few_want(tmp_path: Path) -> None:
    _, _, page = reported(results([2.0] * 6), tmp_path)
    (heading,) = re.findall(r"<h1>(.*?)</h1>", page)
    assert "Outrider" in heading
    assert "my-target" in heading
    assert "/" not in heading
    folded = re.sub(r"<details.*?</details>", "", page, flags=re.DOTALL)
    assert "1024×640 in bfloat16" in page
    assert "1024×640 in bfloat16" not in folded
    assert "runs/auto/table" in page


def test_a_wide_interval_is_cut_and_names_stay_free() -> None:
    for speeds, cut in (([5.0, 5.8, 4.0, 31.2, 6.0], 1), ([2.0, 2.1, 2.2, 2.3, 2.4], 0)):
        (axes,) = plot_speedups([build_report("m", results(speeds), FACTS, seed=0)]).axes
        assert axes.get_xlim()[1] < 16
        assert [line.get_marker() for line in axes.lines].count(">") == cut  # the arrow
        (name,) = axes.texts
        (even,) = [line for line in axes.lines if line.get_linestyle() == "--"]
        assert name.get_text().startswith("m: ")
        assert name.get_position()[1] < np.min(even.get_ydata())  # the axis points down: the line is below the name


def test_a_run_without_rounds_has_no_tau(tmp_path: Path) -> None:
    ended = {arm: Generation((7,), 0.5, 0.0) for arm in (AUTOREGRESSIVE, TRANSFORMERS, "m")}
    _, table, _ = reported([PromptResult("p", "code", (1,), ended, TRANSFORMERS)], tmp_path)
    (row,) = [line for line in table.splitlines() if line.startswith("| m | undecided")]
    assert row.split(" | ")[6] == "–"


def test_prompts_of_one_id_are_two_prompts() -> None:
    """As where several processes numbered their own prompts, whose results were joined; turns stay one unit."""
    made = results([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    alike = [replace(r, prompt_id="p") for r in made]
    assert speedup(alike, "m", AUTOREGRESSIVE, Streams(0)) == speedup(made, "m", AUTOREGRESSIVE, Streams(0))
    assert build_report("m", alike, FACTS, seed=0)["prompts"] == 6
    assert len({r.unit for r in (replace(r, category=r.prompt_id, conversation="1") for r in made)}) == 6
    turns = [replace(r, category="chat", conversation="1") for r in made]
    assert speedup(turns, "m", AUTOREGRESSIVE, Streams(0))["prompts"] == 1


ROWS, WIDTH, TOKENS = 1100, 4, 512


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 rows of logits."""
    monkeypatch.setitem(BLOCKS, "cpu", 16 * FLOAT32_BYTES * TOKENS + 1)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("kind", ["cross_entropy", "cached", *DIVERGENCES])
def test_a_loss_takes_no_more_than_the_plan_says(kind: str) -> None:
    """Of a chunk one block of logits, and the copies of few rows at a time."""
    hidden, weight = torch.randn(ROWS, WIDTH).requires_grad_(), torch.randn(TOKENS, WIDTH).requires_grad_()
    known, labels = (torch.randn(ROWS, WIDTH), torch.randn(TOKENS, WIDTH)), torch.zeros(ROWS, dtype=torch.long)
    with Alive() as alive:
        if kind == "cross_entropy":
            loss = linear_cross_entropy(hidden, weight, labels)
        elif kind == "cached":
            top = torch.arange(8).expand(ROWS, 8), torch.full((ROWS, 8), -3.0), torch.full((ROWS,), 0.6)
            loss = linear_topk_divergence(hidden, weight, *top, labels, "forward_kl")
        else:
            loss = linear_divergence(hidden, weight, *known, labels, kind)
        loss.backward()
    given = 10 * (hidden.nbytes + weight.nbytes)
    assert alive.peak <= loss_bytes(TOKENS, TOKENS, hidden.device) + given
    assert alive.peak < 2 * 512 * TOKENS * FLOAT32_BYTES  # that is, no second tensor of a whole chunk


@pytest.mark.usefixtures("few")
def test_so_does_judging_a_drafter() -> None:
    hidden, head = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, TOKENS)
    with Alive() as alive, torch.no_grad():
        judge(lambda states: states @ head, hidden, acceptance_by_target(lambda states: states @ head, hidden))
    assert alive.peak <= losses_module.COPIES * BLOCKS["cpu"] + 4 * hidden.nbytes


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("kind", ["cross_entropy", *DIVERGENCES])
def test_the_loss_of_few_rows_at_a_time_is_that_of_all(kind: str) -> None:
    """Values and gradients, in float64, against the whole computation."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, known, head = (
        torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in (ROWS, TOKENS, ROWS, TOKENS)
    )
    labels = torch.randint(TOKENS, (ROWS,), generator=generator)
    found = []
    for whole in (True, False):
        states, matrix = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if whole:
            log_q, log_p = (states @ matrix.T).log_softmax(-1), (known @ head.T).log_softmax(-1)
            value = _formula(kind, log_p, log_q, labels)
        elif kind == "cross_entropy":
            value = linear_cross_entropy(states, matrix, labels)
        else:
            value = linear_divergence(states, matrix, known, head, labels, kind)
        found.append((value.detach(), *torch.autograd.grad(value, [states, matrix])))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def _formula(kind: str, log_p: torch.Tensor, log_q: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    p, q = log_p.exp(), log_q.exp()
    alpha, forward = torch.minimum(p, q).sum(-1), (p * (log_p - log_q)).sum(-1)
    middle = ((p + q) / 2).log()
    share = (-losses_module.KL_FADES * alpha.detach()).exp()
    each = {
        "cross_entropy": lambda: -log_q.gather(-1, labels[:, None])[:, 0],
        "forward_kl": lambda: forward,
        "reverse_kl": lambda: (q * (log_q - log_p)).sum(-1),
        "jensen_shannon": lambda: ((p * (log_p - middle)).sum(-1) + (q * (log_q - middle)).sum(-1)) / 2,
        "total_variation": lambda: 1 - alpha,
        "acceptance": lambda: -alpha.log(),
        "kl_tv": lambda: share * forward + (1 - share) * (1 - alpha),
    }
    return each[kind]().sum()


@pytest.mark.parametrize(("objective", "name"), [("forward_kl", "tau_analytic"), ("cross_entropy", "tau_text")])
def test_the_card_of_a_useless_early_exit_says_so_without_decoding(
    objective: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Steps far too large, after which nothing was decoded: the analytic τ decides, or the one of its guesses."""
    path = save_target(tmp_path / "target", peak=4.0)
    run = distilling(path, write_corpus(tmp_path), tmp_path / "out", objective=objective, exit_layer=1)
    train_early_exit(replace(run, fit=replace(FIT, steps=2, lr=3.0)))
    tau = log(tmp_path / "out")[-1][f"eval_{name}"]
    card, said = (tmp_path / "out/README.md").read_text(), capsys.readouterr()
    assert tau < LEAST_TAU
    assert "**Of no use**" in card
    assert f"- {name}: {round(tau, 3)}" in card
    assert f" {name}={tau:.4f}" in said.out.splitlines()[-1]
    assert "of no use" in said.err


def test_wandb_learns_where_a_training_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: dict[str, object] = {}
    monkeypatch.setattr("outrider.train.core.fit.start_wandb", lambda *given: logged.update(given[-1]))
    fit(Training(TinyModel(), tiny_rows(), tiny_config(steps=2)), tmp_path)
    assert (logged["out_dir"], logged["processes"]) == (str(tmp_path), 1)
