"""Costs measured with a clock that knows what everything takes; the same tokens whatever is chosen from them."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.base.errors import UserError
from outrider.base.streams import Streams
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.draft_models.small_lm.model import load_small_lm
from outrider.draft_models.targets.open_target import load_tokenizer
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.core.rounds import Round
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.core.tree import DraftTree
from outrider.inference.drafters.early_exit.drafter import EarlyExitDraftModel
from outrider.inference.drafters.model_plugin import Calibrated
from outrider.inference.drafters.small_lm.drafter import SmallLMDraftModel
from outrider.inference.engines.graphs.cuda_graphs import Graphed, GraphedSession
from outrider.inference.loading.drafters import Drafters, new_drafter
from outrider.inference.loading.generation_config import TextSettings
from outrider.inference.measure.arms import make_arms
from outrider.inference.measure.probe import SIZES, _cycle, _SizesInTurn, probes_of, tune
from outrider.inference.measure.results import PromptResult
from outrider.inference.measure.statistics import chosen_sizes
from outrider.inference.report.writing import write_markdown
from outrider.inference.settings.method import (
    AUTO,
    AUTOREGRESSIVE,
    MethodConfig,
    NgramConfig,
    StopConfig,
    StructureConfig,
)
from outrider.inference.sizing.costs import curve
from outrider.inference.sizing.policy import LONGEST_CHAIN
from tests.inference.evaluate.reports import report_of
from tests.known_targets import COUNT, PROMPT, Target, tokens_of
from tests.tiers import typical_where
from tests.tiny import LAYERS, VOCABULARY, make_drafter, open_stack, random_prompt, save_target

CHAIN = MethodConfig(stop=StopConfig(max_draft=AUTO))
TREE = MethodConfig(structure=StructureConfig(kind="opt_tree", nodes=AUTO, max_depth=AUTO))
METHODS = {
    "chain": CHAIN,
    "opt_tree": TREE,
    "opt_tree, nodes": replace(TREE, structure=replace(TREE.structure, max_depth=3)),
    "opt_tree, depth": replace(TREE, structure=replace(TREE.structure, nodes=9)),
}

PAIRS = typical_where(
    lambda row: row[1] == "early_exit" or row[0] == "chain",
    list(itertools.product(METHODS, ("early_exit", "small_lm"))),
)


class WorkClock:
    """Seconds pass only in draft steps, target passes and choices of a next token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: float = 0.1, node: float = 0.01, free: int = 0):
        """The first `free` rounds take no time, but for one that compiles what it runs."""
        self.now, self.widest, rounds = 0.0, 0, 0

        def spend(owner: type, name: str, seconds: Any) -> None:
            original = getattr(owner, name)

            def timed(*args: Any) -> Any:
                self.now += seconds(*args)
                return original(*args)

            monkeypatch.setattr(owner, name, timed)

        def of_step(_: Any, tokens: Tensor, parents: Sequence[int]) -> float:
            return step + 0.001 * len(parents) if rounds >= free else 0.0

        def of_pass(_: Any, tree: DraftTree, logits: Tensor) -> float:
            nonlocal rounds
            rounds += 1
            self.widest = max(self.widest, len(tree))
            return 1.0 + node * (len(tree) + 1) if rounds > free else 100.0 * (rounds == 3)

        spend(EarlyExitDraftModel, "extend", of_step)
        spend(SmallLMDraftModel, "extend", of_step)
        spend(TokenSelector, "verify", of_pass)
        spend(TokenSelector, "next_token", lambda *_: 0.5)
        spend(GraphedSession, "_step", lambda *_: 0.5)

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[LayerStack, Drafters, list[int]]:
    """A target, drafters that are right now and then, and what the target says after `PROMPT`."""
    target = Target(tmp_path_factory.mktemp("tuning"), "llama", torch.float32)
    drafters = {"early_exit": Calibrated(target.exit("early_exit")), "small_lm": target.small("small_lm")}
    return target.stack, drafters, target.text_after(PROMPT, COUNT)


@pytest.mark.parametrize(("name", "source"), PAIRS)
@pytest.mark.slow
def test_costs_are_what_the_clock_says(models: tuple, monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> None:
    stack, drafters, _ = models
    clock = WorkClock(monkeypatch, free=len(probes_of(METHODS[name])))  # the first cycle warms up and does not count
    methods = {"m": replace(METHODS[name], source=source)}
    _, tunings = tune(methods, stack, drafters, PROMPT, clock=clock)
    costs, tuning = tunings["m"].costs, tunings["m"]
    assert (costs.autoregressive, costs.overhead) == (0.5, pytest.approx(0.0))
    for width in (2, 4, 8, 16):
        assert costs.verify[width] == pytest.approx(1 + 0.01 * width)
    assert costs.step[1] == pytest.approx(0.101)
    if name != "chain":
        assert costs.step[4] == pytest.approx(0.104, rel=0.1)
    assert sum(tuning.trials) > 10
    assert sum(tuning.hits) > 1
    if name == "chain":
        assert all(right <= tried for right, tried in zip(tuning.hits, tuning.trials, strict=True))


@pytest.mark.parametrize("token", [0.04, 4.0])
def test_a_first_draft_that_compiles_is_no_cost_of_drafting(token: float) -> None:
    """Beside the passes of a target of a billion weights, whose cycle takes over a second, and of one far slower."""
    sizes, now, turns = _SizesInTurn(), 0.0, itertools.count()

    def rounds() -> Iterator[Round]:
        nonlocal now
        for turn in turns:
            drafted, drafting = SIZES[(turn + 1) % len(SIZES)], 0.0002 if turn else 4.4
            passed = token * (1 + 0.2 * drafted)
            now += drafting + passed
            yield Round((1,), drafted, 0, drafted, drafting + passed, 0.0, drafting, passed)

    passes, _ = _cycle(rounds(), sizes, lambda: now)
    step, verify = curve(sizes.laps), curve(passes)
    assert max(step) == pytest.approx(0.0002)
    assert verify[16] == pytest.approx(token * 4.0)
    assert now < 4.4 + 250 * token  # some cycles of the fast one, a part of one of the slow one
    if token < 1:
        assert {width for width, _ in passes} == {size + 1 for size in SIZES}


@pytest.mark.parametrize(
    ("name", "levels", "parallel"),
    [("chain", None, 5), ("opt_tree", None, 5), ("opt_tree", 1, 5), ("chain", None, 1)],
)
def test_a_pass_for_all_tokens_costs_once(
    models: tuple, monkeypatch: pytest.MonkeyPatch, name: str, levels: int | None, parallel: int
) -> None:
    """Further steps cost nothing, also where there are none: of one level, and by a pass for one token."""
    stack, drafters, text = models
    monkeypatch.setattr(drafters["small_lm"].config, "pard_token", VOCABULARY - 1, raising=False)
    monkeypatch.setattr(drafters["small_lm"].config, "parallel_tokens", parallel, raising=False)
    method = replace(METHODS[name], source="small_lm")
    if levels is not None:  # a null δ is measured too
        method = replace(method, structure=replace(method.structure, max_depth=levels, delta=None))
    clock = WorkClock(monkeypatch, free=len(probes_of(method)))
    methods = {"m": method}
    ready, tunings = tune(methods, stack, drafters, PROMPT, clock=clock)
    assert tunings["m"].costs.step[:5] == pytest.approx((0.0,) * 5)
    assert tunings["m"].costs.overhead == pytest.approx(0.1 + 0.001 * parallel)
    drafter = new_drafter(ready["m"], drafters, Streams(0), False, tunings["m"])
    rounds = list(speculative(stack, drafter, PROMPT, max_new_tokens=COUNT))
    assert tokens_of(rounds) == text
    assert max(r.depth for r in rounds) <= 5


@pytest.mark.slow
def test_a_prompt_as_long_as_the_context_is_measured_with(models: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    stack, drafters, _ = models
    prompts = []

    def noted(stack: LayerStack, prompt: Sequence[int], **options: Any) -> Iterator[Round]:
        prompts.append(list(prompt))
        return autoregressive(stack, prompt, **options)

    monkeypatch.setattr("outrider.inference.measure.probe.autoregressive", noted)
    _, tunings = tune(METHODS, stack, drafters, random_prompt(256), clock=WorkClock(monkeypatch))
    assert set(tunings) == set(METHODS)
    assert all(0 < len(prompt) < 256 and prompt == random_prompt(256)[-len(prompt) :] for prompt in prompts)


def test_a_drafter_of_fewer_positions_is_measured_within_them(
    models: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_target(tmp_path, "opt", max_position_embeddings=64)
    small = load_small_lm(str(path), load_tokenizer(str(path)), dtype=torch.float32)
    methods = {"m": replace(CHAIN, source="small_lm")}
    clock = WorkClock(monkeypatch)
    _, tunings = tune(methods, models[0], {"small_lm": small}, random_prompt(100), clock=clock)
    assert sum(tunings["m"].trials) > 5


def test_what_needs_no_measuring_is_left_alone(models: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """δ = μ where it is null: a draft step's seconds over a decoding step's, at most 1."""
    stack, drafters, _ = models
    tree = MethodConfig(structure=StructureConfig(kind="opt_tree"))
    given = replace(tree, structure=replace(tree.structure, delta=0.3))
    clock = WorkClock(monkeypatch)
    ready, tunings = tune({"given": given, "chain": MethodConfig()}, stack, drafters, random_prompt(9), clock=clock)
    assert ready == {"given": given, "chain": MethodConfig()}
    assert tunings == {}
    assert clock.now == 0
    ready, tunings = tune({"tree": tree}, stack, drafters, random_prompt(9), clock=clock)
    assert ready["tree"].structure.delta == pytest.approx(0.101 / 0.5)
    assert tunings == {}
    slow = WorkClock(monkeypatch, step=7.0)
    assert tune({"tree": tree}, stack, drafters, random_prompt(9), clock=slow)[0]["tree"].structure.delta == 1.0


def test_a_drafter_without_numbers_is_refused(tmp_path: Path) -> None:
    """It drafts nothing, in any text, and a tree's δ is measured on drafts."""
    path = save_target(tmp_path)
    drafter = make_drafter(path, LAYERS - 1)
    drafter.output_head.weight.data.fill_(torch.nan)
    tree = MethodConfig(structure=StructureConfig(kind="opt_tree", nodes=6))
    with pytest.raises(UserError, match="early_exit drafter proposed nothing in a text of"):
        tune({"tree": tree}, open_stack(path)[1], {"early_exit": Calibrated(drafter)}, random_prompt(9))


def test_a_padding_runtime_has_steps_in_its_costs(models: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    stack, drafters, _ = models
    clock = WorkClock(monkeypatch)
    _, tunings = tune({"m": CHAIN}, stack, drafters, PROMPT, clock=clock, runtime=Graphed())
    widths, seconds = (3, 5, 8, 9, 16), [1.04, 1.08, 1.08, 1.16, 1.16]
    assert [tunings["m"].costs.verify[width] for width in widths] == pytest.approx(seconds)


@pytest.mark.parametrize(("name", "source"), PAIRS)
@pytest.mark.slow
def test_greedy_tokens_do_not_depend_on_the_choice(
    models: tuple, monkeypatch: pytest.MonkeyPatch, name: str, source: str
) -> None:
    """Under several costs: other sizes, the same tokens, whatever the generation before accepted."""
    stack, drafters, expected = models
    method, chosen = replace(METHODS[name], source=source), []
    for step, node in ((0.0, 0.0001), (2.0, 1.0)):
        with monkeypatch.context() as patches:
            clock = WorkClock(patches, step, node)
            methods, tunings = tune({"m": method}, stack, drafters, PROMPT, clock=clock)
            arms = make_arms(stack, drafters, methods, None, TextSettings(24), tunings=tunings, clock=clock)
            generation = arms["m"](PROMPT, Streams(0))
            arms["m"](random_prompt(11, seed=4), Streams(0))
            again = arms["m"](PROMPT, Streams(0))
        assert list(generation.tokens) == expected[:24]
        assert [r.drafted for r in again.rounds] == [r.drafted for r in generation.rounds]  # from the prior again
        sizes = chosen_sizes([generation])
        drafting = {"chain": ["max_draft"], "opt_tree": ["max_depth", "nodes"]}
        names = {"opt_tree, nodes": ["nodes"], "opt_tree, depth": ["max_depth"], **drafting}[name]
        assert sorted(sizes) == (names if sizes or not step else [])  # where steps are dear, nothing need be drafted
        chosen.append(sum(r.drafted for r in generation.rounds) / len(generation.rounds))
    if name != "opt_tree, depth":
        assert chosen[0] > chosen[1]


NGRAMS = MethodConfig("ngrams", ngrams=NgramConfig(evidence="mixed", depth=8, nodes=AUTO))
LOOKUP = MethodConfig("prompt_lookup", stop=StopConfig(max_draft=AUTO))


@pytest.mark.parametrize(("method", "repeated"), [(NGRAMS, 1), (LOOKUP, 1), (LOOKUP, 3)])
def test_drafters_of_tokens_draft_as_much_as_pays(
    models: tuple, monkeypatch: pytest.MonkeyPatch, method: MethodConfig, repeated: int
) -> None:
    """Costs are what the clock says, of every length, also where nothing occurs twice; the tokens are the target's."""
    stack, drafters, expected = models
    prompt, drafted = PROMPT * repeated, []
    table = TrigramTable.from_documents([prompt + expected[:20], random_prompt(80)], [2, 3, 4], 256, "t")
    for node in (0.0001, 0.4):
        with monkeypatch.context() as patches:
            clock = WorkClock(patches, node=node, free=len(SIZES))
            methods, tunings = tune({"m": method}, stack, {**drafters, "ngrams": table}, prompt, clock=clock)
            arms = make_arms(stack, {"ngrams": table}, methods, None, TextSettings(40), tunings=tunings, clock=clock)
            generation, plain = (arms[name](prompt, Streams(0)) for name in ("m", AUTOREGRESSIVE))
        costs, widths = tunings["m"].costs, (1, 2, 4, 8)
        assert [costs.verify[width] for width in widths] == pytest.approx([1 + node * width for width in widths])
        assert (costs.autoregressive, costs.step) == (0.5, pytest.approx((0.0,) * 65))  # drafting takes no time
        assert (generation.tokens, clock.widest) == (plain.tokens, SIZES[-1])  # several texts share such passes
        assert method == NGRAMS or max(r.drafted for r in generation.rounds) <= LONGEST_CHAIN
        sizes = chosen_sizes([generation])
        drafted.append(sizes["nodes"].mean if sizes else 0.0)
    if method == NGRAMS:
        assert min(sum(tunings["m"].trials), sum(tunings["m"].hits)) > 10
        assert drafted[0] > 2 * drafted[1]


@pytest.mark.slow
def test_the_report_says_what_was_chosen(models: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    stack, drafters, _ = models
    methods, tunings = tune(METHODS, stack, drafters, PROMPT, clock=WorkClock(monkeypatch))
    arms = make_arms(stack, drafters, methods, None, TextSettings(30), tunings=tunings)
    generations = {name: arm(PROMPT, Streams(0)) for name, arm in arms.items()}
    results = [PromptResult("p", "text", tuple(PROMPT), generations, AUTOREGRESSIVE)]
    reports = {name: report_of(results, name, tunings[name]) for name in METHODS}
    for report in reports.values():
        assert report.auto.costs["autoregressive_step"] == 0.5
        assert report.auto.costs["target_pass"]["4"] == pytest.approx(1.04)
        assert report.break_even_acceptance is not None
        assert set(report.structure) <= {"expected_tau", "drafter_passes"}
    chain, tree = (reports[name].auto.chosen for name in ("chain", "opt_tree"))
    assert 1 <= chain["max_draft"].mean <= LONGEST_CHAIN
    assert 0 < tree["nodes"].share <= 1
    assert tree["nodes"].mode in write_markdown([*reports.values()])
    assert report_of(results, "chain").auto is None
