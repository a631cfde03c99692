"""Every source × structure emits the target's text, token for token (sampling: test_distributions.py)."""

import copy
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor

from draft_models.draft_vocabulary import narrow
from draft_models.eagle3.model import Eagle3
from draft_models.small_lm.model import load_small_lm
from draft_models.targets.narrowed import DraftVocabulary
from draft_models.targets.open_target import load_tokenizer
from draft_models.targets.stack import LayerStack
from inference.core.decode import autoregressive, speculative
from inference.core.drafter import Drafter, DraftModel
from inference.core.rounds import Round
from inference.core.sampling import Sampler
from inference.core.token_selector import TokenSelector
from inference.core.tree import DraftTree
from inference.core.verify import Chance, Matching, NodeRule, Rejection, verify_sampled
from inference.drafters.eagle3 import Eagle3Source
from inference.drafters.early_exit import EarlyExitSource
from inference.drafters.shaped import ModelDrafter, allowance_of
from inference.drafters.skip_layers import SkipLayersSource
from inference.drafters.small_lm import SmallLMSource
from inference.measure.arms import make_arms
from inference.settings.method import DRAWS, MethodConfig, StopConfig, StructureConfig
from inference.settings.sampling import SamplingConfig
from inference.shapes.factory import Structure, make_structure, make_tree
from inference.sizing.costs import WIDEST, Costs
from inference.sizing.policy import Tuning
from outrider.streams import Streams
from tests.fitted_heads import fitted_head
from tests.pairwise import all_pairs, each_value
from tests.tiers import quick_where, typical_where
from tests.tiny import (
    ARCHITECTURES,
    LAYERS,
    make_drafter,
    method_of,
    open_stack,
    random_prompt,
    reference_generate,
    save_target,
)
from train.parts.drafter import export

STRUCTURES = {
    "chain": StructureConfig(),
    "k_config": StructureConfig(kind="k_config", widths=(3, 2, 1, 1)),
    "opt_tree": StructureConfig(kind="opt_tree", nodes=12, delta=0.0, max_depth=6),
    "opt_tree, deep": StructureConfig(kind="opt_tree", nodes=20, delta=0.3),
    "token_graph": StructureConfig(kind="token_graph", nodes=20, tau=1, theta_prob=0.0, theta_sibling=0.0),
    "token_graph, pruned": StructureConfig(kind="token_graph", nodes=30, tau=2),
    "opt_tree, sharp": StructureConfig(kind="opt_tree", nodes=12, delta=0.1, width=3, temperature=0.5),
    "binary": StructureConfig(kind="static", shape="binary", nodes=14),
    "eagle": StructureConfig(kind="static", shape="eagle"),
}


def structure_of(name: str) -> Structure:
    return make_structure(method_of(STRUCTURES[name]), Streams(0))


def drafter_of(model: DraftModel, name: str) -> Drafter:
    """`model` with the structure of that name."""
    return ModelDrafter(model, structure_of(name))


def tokens_of(rounds: list[Round]) -> list[int]:
    return [token for r in rounds for token in r.tokens]


@cache
def head_for(path: Path, dtype: torch.dtype) -> Eagle3:
    """An EAGLE-3 head that often predicts the target's token after the prompt of these tests."""
    model, stack = open_stack(path, dtype)
    prompt = random_prompt(20)
    return fitted_head(stack, [(prompt, reference_generate(model, prompt, 40))])


def make_source(kind: str, path: Path, small: Path, dtype: torch.dtype = torch.float32) -> DraftModel:
    if kind == "small_lm, some tokens":
        small = small.with_name("small_of_some")
    if kind.startswith("small_lm"):
        return SmallLMSource(load_small_lm(str(small), load_tokenizer(str(path)), dtype=dtype))
    if kind == "skip_layers":
        return SkipLayersSource([LAYERS - 1])
    if kind == "eagle3":
        return Eagle3Source(head_for(path, dtype))
    return EarlyExitSource(make_drafter(path, LAYERS - 1 if kind == "early_exit" else 1, noise=0.15, dtype=dtype))


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple]:
    """By architecture: a target (windows shorter than the text), a similar small LM, a prompt and its continuation."""

    @cache
    def make(architecture: str) -> tuple:
        folder = tmp_path_factory.mktemp("lossless")
        path = save_target(folder / "target", architecture, kv_heads=2, peak=6.0)
        model, stack = open_stack(path)
        small = AutoModelForCausalLM.from_pretrained(path)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in small.parameters():
                parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)
        small.save_pretrained(folder / "small")
        load_tokenizer(str(path)).save_pretrained(folder / "small")
        prompt = random_prompt(20)
        said = reference_generate(model, prompt, 40)
        own = DraftVocabulary(torch.tensor(sorted({*prompt, *said[::2]})), model.config.vocab_size)
        narrow(small, own)
        export(small, load_tokenizer(str(path)), folder / "small_of_some")
        return path, folder / "small", stack, prompt, said

    return make


@pytest.fixture
def target(targets: Callable[[str], tuple]) -> tuple:
    """A target with grouped heads and a window."""
    return targets("mistral")


OF_SOME = ("early_exit, some tokens", "small_lm, some tokens", "eagle3")


BY_PLACES = list(itertools.product(OF_SOME, STRUCTURES))


@pytest.mark.parametrize(("kind", "structure"), typical_where(each_value(BY_PLACES).__contains__, BY_PLACES))
def test_drafts_by_places_are_those_by_tokens(
    target: tuple, monkeypatch: pytest.MonkeyPatch, kind: str, structure: str
) -> None:
    """A drafter over some tokens works with their indices, and drafts the same as over all tokens."""
    path, small, stack, prompt, said = target
    drafts: list[tuple] = []

    def noted(self: ModelDrafter, root: torch.Tensor, limit: int) -> DraftTree:
        tree = draft(self, root, limit)
        drafts.append((tree.tokens.tolist(), tree.parents, tree.rows))
        return tree

    draft = ModelDrafter.draft
    monkeypatch.setattr(ModelDrafter, "draft", noted)
    found = []
    for reads_root in (structure.startswith("token_graph"), True):
        if kind == "early_exit, some tokens":
            some = torch.tensor(sorted({*prompt, *said[::2]}))
            model: DraftModel = EarlyExitSource(make_drafter(path, LAYERS - 1, noise=0.15, tokens=some))
        else:
            model = make_source(kind, path, small)
        if isinstance(model, Eagle3Source):  # equally likely tokens may come in any order
            model.head = copy.deepcopy(model.head)
            generator = torch.Generator().manual_seed(0)
            model.head.lm_head.weight += 1e-3 * torch.randn(model.head.lm_head.weight.shape, generator=generator)
        shaped = drafter_of(model, structure)
        assert isinstance(shaped, ModelDrafter)
        shaped.structure.reads_root = reads_root
        assert tokens_of(list(speculative(stack, shaped, prompt, max_new_tokens=40))) == said
        assert model.predicted is not None
        assert {token for tokens, _, _ in drafts for token in tokens} <= set(model.predicted.tolist())
        found.append(drafts[:])
        drafts.clear()
    assert found[0] == found[1]
    assert any(tokens for tokens, _, _ in found[0])


SOURCES = ("early_exit", "early_exit, first layer", "small_lm", "small_lm, some tokens", "skip_layers", "eagle3")


MATRIX = all_pairs(ARCHITECTURES, SOURCES, STRUCTURES)


@pytest.mark.parametrize(
    ("architecture", "source", "structure"),
    typical_where(each_value(MATRIX).__contains__, quick_where(lambda row: row[0] == "mistral", MATRIX)),
)
def test_greedy_equals_generate(
    targets: Callable[[str], tuple], architecture: str, source: str, structure: str
) -> None:
    path, small, stack, prompt, expected = targets(architecture)
    drafter = drafter_of(make_source(source, path, small), structure)
    rounds = list(speculative(stack, drafter, prompt, max_new_tokens=40))
    assert tokens_of(rounds) == expected
    assert sum(r.drafted for r in rounds) > 20
    if source != "early_exit, first layer":  # which is almost never right
        assert sum(r.accepted for r in rounds) > 10
        assert max(r.accepted for r in rounds) >= 2


def test_totals_that_the_papers_report(target: tuple) -> None:
    """The totals equal those of the trees, which the test records."""
    path, small, stack, prompt, _ = target
    for name in ("opt_tree", "token_graph"):
        drafting, seen = structure_of(name), []
        observe = drafting.observe

        def record(tree: DraftTree, accepted: list[int], observe: Callable = observe, seen: list = seen) -> None:
            seen.append((tree, accepted))
            observe(tree, accepted)

        drafting.observe = record  # type: ignore[method-assign]
        list(
            speculative(stack, ModelDrafter(make_source("small_lm", path, small), drafting), prompt, max_new_tokens=40)
        )
        if name == "opt_tree":
            expected = sum(1 + float(tree.path_probs.sum()) for tree, _ in seen)
            assert drafting.totals == pytest.approx({"expected_tau": expected}, rel=1e-5)
        else:
            fed = sum(tree.drafted for tree, _ in seen)
            copies = sum(any(node >= tree.drafted for node in accepted) for tree, accepted in seen)
            assert drafting.totals == {"drafted_by_source": fed, "graph_success": copies}


@pytest.mark.slow
def test_a_sharper_q_drafts_deeper(target: tuple) -> None:
    path, small, stack, prompt, _ = target

    def mean_depth(temperature: float) -> float:
        drafting, depths = make_tree(StructureConfig("opt_tree", nodes=12, delta=0.0, temperature=temperature)), []
        observe = drafting.observe

        def record(tree: DraftTree, accepted: list[int]) -> None:
            depth = []
            for parent in tree.parents:
                depth.append(1 + (depth[parent] if parent >= 0 else 0))
            depths.append(max(depth, default=0))
            observe(tree, accepted)

        drafting.observe = record  # type: ignore[method-assign]
        list(
            speculative(stack, ModelDrafter(make_source("small_lm", path, small), drafting), prompt, max_new_tokens=40)
        )
        return sum(depths) / len(depths)

    assert mean_depth(0.3) > mean_depth(1.0) > mean_depth(4.0)


@pytest.mark.parametrize("structure", ["k_config", "opt_tree", "token_graph"])
@pytest.mark.parametrize("source", ["early_exit", "small_lm"])
def test_caches_equal_a_fresh_prefill(tmp_path: Path, source: str, structure: str) -> None:
    """After a generation with trees, all caches equal those of a prefill of the same text."""
    path = save_target(tmp_path / "target", "qwen3", kv_heads=2)
    _, stack = open_stack(path, torch.float64)
    drafter = make_source(source, path, path, torch.float64)
    prompt = random_prompt(9)
    text = prompt + tokens_of(
        list(speculative(stack, ModelDrafter(drafter, structure_of(structure)), prompt, max_new_tokens=30))
    )
    fresh = make_source(source, path, path, torch.float64)

    def caches(of: DraftModel) -> list:
        return [of.cache, of.session.first, of.session.rest] if source == "early_exit" else [of.session.first]

    known = caches(drafter)[0].length
    next(speculative(stack, ModelDrafter(fresh, structure_of(structure)), text[:known], max_new_tokens=2))
    for ours, expected in zip(caches(drafter), caches(fresh), strict=True):
        for pair, fresh_pair in zip(ours.content(), expected.content(), strict=True):
            for tensor, fresh_tensor in zip(pair, fresh_pair, strict=True):
                torch.testing.assert_close(tensor[:, :, :known], fresh_tensor[:, :, :known], rtol=1e-9, atol=1e-9)


DEAR = list(
    itertools.product(["early_exit", "small_lm", "skip_layers", "eagle3"], [(40.0, 1, 2), (2.0, 2, 12), (0.0, 6, 99)])
)


@pytest.mark.parametrize(("source", "cost"), typical_where(each_value(DEAR).__contains__, DEAR))
def test_rounds_without_a_draft_change_no_token(target: tuple, source: str, cost: tuple[float, int, int]) -> None:
    """Where a draft costs much, few rounds have one, and all before it waits for the drafter; where none, all have."""
    step_seconds, fewest, most = cost
    path, small, stack, prompt, expected = target
    tuning = Tuning(Costs((step_seconds,) * (WIDEST + 1), (1.0,) * (WIDEST + 1), 0.0, 1.0))
    structure = make_structure(MethodConfig(stop=StopConfig(rule="survival")), Streams(0), tuning=tuning)
    drafter = ModelDrafter(make_source(source, path, small), structure, allowance_of(tuning))
    rounds = list(speculative(stack, drafter, prompt, max_new_tokens=len(expected)))
    assert tokens_of(rounds) == expected
    drafted = [r.drafted > 0 for r in rounds[1:-1]]
    assert fewest <= sum(drafted) <= most
    assert all(drafted) == (step_seconds == 0.0)


ENDING = list(itertools.product(["early_exit", "small_lm", "skip_layers", "eagle3"], ["eagle", "token_graph"]))


@pytest.mark.parametrize(("source", "structure"), typical_where(each_value(ENDING).__contains__, ENDING))
def test_trees_up_to_the_last_position_of_the_context(tmp_path: Path, source: str, structure: str) -> None:
    path = save_target(tmp_path, "llama", kv_heads=2)
    model, stack = open_stack(path)
    prompt = random_prompt(236)
    rounds = speculative(stack, drafter_of(make_source(source, path, path), structure), prompt, max_new_tokens=20)
    assert tokens_of(list(rounds)) == reference_generate(model, prompt, 20)


@pytest.mark.parametrize("structure", ["chain", "opt_tree", "k_config"])
def test_greedy_with_a_repetition_penalty_equals_generate(tmp_path: Path, structure: str) -> None:
    path = save_target(tmp_path)
    model, stack = open_stack(path)
    prompt = random_prompt(15)
    ids = torch.tensor([prompt])
    model.generation_config.pad_token_id = 0
    model.generation_config.repetition_penalty = 1.3
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
    expected = out[0, len(prompt) :].tolist()
    model.generation_config.repetition_penalty = 1.0
    assert expected != reference_generate(model, prompt, 40)
    sampler = Sampler(SamplingConfig(repetition_penalty=1.3))
    source = make_source("early_exit", path, path)
    rounds = speculative(
        stack, drafter_of(source, structure), prompt, max_new_tokens=40, selector=TokenSelector(sampler)
    )
    assert tokens_of(list(rounds)) == expected
    assert (
        tokens_of(list(autoregressive(stack, prompt, max_new_tokens=40, selector=TokenSelector(sampler)))) == expected
    )


# --- sampling, over a vocabulary of 6; its distribution is tested in test_distributions.py
# ----------------------------------------------

VOCABULARY = 6


@pytest.fixture(scope="module")
def tiny_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> tuple[LayerStack, LayerStack, list[int]]:
    """A target, another model as drafter, and a prompt."""
    folder = tmp_path_factory.mktemp("sampled")
    stacks = []
    for seed in (0, 1):
        path = save_target(folder / str(seed), vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, seed=seed,
                           num_hidden_layers=1, bos_token_id=None)  # fmt: skip
        _, stack = open_stack(path)
        with torch.no_grad():
            stack.head.weight *= 2.0
        stacks.append(stack)
    return stacks[0], stacks[1], [1, 4, 2]


class ByLength(LogitsProcessor):
    """A processor that favours a different token at every length of the text."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, input_ids.shape[1] % VOCABULARY] += 4.0
        return scores


@pytest.mark.parametrize("widths", [(1, 1, 1, 1), (2, 2, 1)])
def test_draft_and_target_distributions_are_processed_alike(tiny_vocabulary: tuple, widths: tuple[int, ...]) -> None:
    """With processors that read the text: if the target drafts for itself, every first candidate is accepted."""
    stack, _, prompt = tiny_vocabulary
    generator = random.Random(0)
    selector = TokenSelector(Sampler(SamplingConfig(temperature=0.9, repetition_penalty=1.8), [ByLength()]), generator)
    drafting = make_tree(StructureConfig(kind="k_config", widths=widths), random.Random(1))
    count = 1 + 6 * (len(widths) + 1)
    rounds = list(
        speculative(
            stack, ModelDrafter(SmallLMSource(stack), drafting), prompt, max_new_tokens=count, selector=selector
        )
    )
    assert [r.accepted for r in rounds[1:]] == [len(widths)] * 6
    assert drafting.totals == {"nodes_tried": 6 * len(widths), "accepted_candidate_1": 6 * len(widths)}


def test_each_draft_is_verified_by_its_rule(tiny_vocabulary: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled candidates are verified by rejection, with repeated draws; chosen ones, and naive, by matching."""
    stack, drafter, prompt = tiny_vocabulary
    trees = {draw: StructureConfig(kind="k_config", widths=(6, 2), draw=draw) for draw in DRAWS}
    shapes = trees | {"chain": STRUCTURES["chain"]}
    methods = {name: replace(method_of(shape), source="small_lm") for name, shape in shapes.items()}
    methods["opt_tree"] = MethodConfig("small_lm", STRUCTURES["opt_tree"])
    methods["naive"] = MethodConfig("small_lm", trees["with_replacement"], verify="naive")
    options = {"max_new_tokens": 8, "eos": (), "sampling": SamplingConfig(temperature=1.0)}
    arms = make_arms(stack, {"small_lm": drafter}, methods, None, **options)
    seen: list[tuple] = []

    def noted(tokens: list, parents: list, q: dict, p: torch.Tensor, rule: NodeRule, chance: Chance, **given: Any):
        if tokens:
            seen.append((rule, bool(q), bool(given["draws"])))
        return verify_sampled(tokens, parents, q, p, rule, chance, **given)

    monkeypatch.setattr("inference.core.token_selector.verify_sampled", noted)
    used = {}
    for name in methods:
        seen.clear()
        arms[name](prompt, Streams(0))
        used[name] = set(seen)
    assert used == {
        "with_replacement": {(Rejection(replace=True), True, True)},
        "without_replacement": {(Rejection(replace=False), True, False)},
        "top_k": {(Matching(), False, False)},
        "chain": {(Rejection(replace=False), True, False)},
        "opt_tree": {(Matching(), False, False)},
        "naive": {(Matching(), True, False)},
    }
