"""Every source × structure × stop rule emits the target's text, token for token (sampling: test_distributions.py)."""

import copy
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from outrider import preset
from outrider.base.streams import Streams
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.core.decode import autoregressive, cut, speculative
from outrider.inference.core.rounds import Round
from outrider.inference.core.sampling import Sampler
from outrider.inference.core.target_session import Runtime
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.core.tree import DraftTree
from outrider.inference.core.verify import Chance, Matching, NodeRule, Rejection, verify_block, verify_sampled
from outrider.inference.drafters.copies import PromptLookup
from outrider.inference.drafters.early_exit.drafter import EarlyExitDraftModel
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.drafters.model_plugin import make_prompt_lookup
from outrider.inference.drafters.ngrams.drafter import make_ngram_drafter
from outrider.inference.drafters.small_lm.drafter import SmallLMDraftModel
from outrider.inference.loading.generation_config import TextSettings
from outrider.inference.measure.arms import make_arms
from outrider.inference.settings.method import DRAWS, MethodConfig, NgramConfig, StopConfig, StructureConfig
from outrider.inference.settings.sampling import SamplingConfig
from outrider.inference.shapes.factory import make_structure, make_tree
from outrider.inference.sizing.policy import Tuning
from tests import tiny
from tests.faults import plant
from tests.inference.drafters.test_ngrams import slow_lookup
from tests.inference.ngram_cases import CONFIGS
from tests.inference.priced import costs
from tests.known_targets import COUNT, PROMPT, SELDOM_RIGHT, SOURCES, Target, targets, tokens_of
from tests.pairwise import all_pairs, each_value
from tests.refusals import refusal
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

STRUCTURES = {
    **tiny.STRUCTURES,
    "opt_tree, deep": StructureConfig(kind="opt_tree", nodes=20, delta=0.3),
    "opt_tree, sharp": StructureConfig(kind="opt_tree", nodes=12, delta=0.1, width=3, temperature=0.5),
    "token_graph, pruned": StructureConfig(kind="token_graph", nodes=30, tau=2),
    "binary": StructureConfig(kind="static", shape="binary", nodes=14),
}
RULES = {
    "fixed": StopConfig(rule="fixed", max_draft=4),
    "fixed, one": StopConfig(rule="fixed", max_draft=1),
    "fixed, eight": StopConfig(rule="fixed", max_draft=8),
    "confidence": StopConfig(rule="confidence", max_draft=6, threshold=0.5),
    "beta": StopConfig(rule="beta", max_draft=6, alpha=2.0, beta=1.0),
    "beta, printed": StopConfig(rule="beta", max_draft=6, alpha=2.0, beta=1.0, update="printed"),
}
WEIGHTS: dict[str, dict[str, Any]] = {"grouped": {}, "tied": {"tied": True, "peak": 1.0}, "all heads": {"kv_heads": 4}}
CHAIN = method_of(STRUCTURES["chain"])
make = pytest.fixture(scope="module")(targets)


@pytest.fixture
def target(make: Callable[..., Target]) -> Target:
    return make()


def decode(
    target: Target, drafter: Any, prompt: Sequence[int] = PROMPT, count: int = COUNT, **options: Any
) -> list[Round]:
    return list(speculative(target.stack, drafter, prompt, max_new_tokens=count, **options))


# --- greedy -----------------------------------------------------------------------------------------------------------

DTYPES = (torch.float64, torch.float32)
MATRIX = all_pairs(ARCHITECTURES, WEIGHTS, SOURCES, STRUCTURES, RULES, ["eager", "graphed"], DTYPES, [None, 1, 2])
TYPICAL = {*each_value(MATRIX)}


@pytest.mark.parametrize(
    ("architecture", "weights", "source", "structure", "rule", "runtime", "dtype", "copied"),
    typical_where(TYPICAL.__contains__, quick_where(lambda row: row[0] == "mistral", MATRIX)),
    indirect=["runtime"],
)
def test_greedy_equals_generate(
    make: Callable[..., Target], runtime: Runtime, architecture: str, weights: str, source: str, structure: str,
    rule: str, dtype: torch.dtype, copied: int | None,
) -> None:  # fmt: skip
    """A prompt longer than the windows, and one of a single token whose text ends at an EOS."""
    target, method = make(architecture, dtype, **WEIGHTS[weights]), MethodConfig(structure=STRUCTURES[structure])
    for prompt, ends in ((PROMPT, False), (PROMPT[:1], True)):
        expected = target.text_after(prompt, COUNT)
        assert ends or len({*expected}) > 2  # or the comparison were worth little
        eos = expected[11:12] if ends else []
        said = expected[: expected.index(eos[0]) + 1] if ends else expected
        options: Any = {"eos": eos, "runtime": runtime}
        assert tokens_of(list(autoregressive(target.stack, prompt, max_new_tokens=COUNT, **options))) == said
        drafter = target.drafter(source, replace(method, stop=RULES[rule], copy=copied))
        rounds = decode(target, drafter, prompt, **options)
        assert tokens_of(rounds) == said
        assert any(r.drafted for r in rounds)
        if source not in SELDOM_RIGHT and weights == "grouped" and not ends and copied is None:
            assert sum(r.accepted for r in rounds) > 5


OF_TOKENS = {
    **{f"lookup, {size}": size for size in (1, 3)},
    **CONFIGS,
    "recycled": NgramConfig(evidence="mixed", depth=8, nodes=30, recycle=4),
    "recycled, auto": NgramConfig(evidence="mixed", depth=8, nodes="auto", recycle=4),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_drafters_of_tokens_equal_generate(make: Callable[..., Target], architecture: str) -> None:
    target, prompt = make(architecture), random_prompt(10) * 2
    expected = target.text_after(prompt, 50)
    table = TrigramTable.from_documents([expected[:30], random_prompt(60)], [2, 3, 4], 256, "t")
    # a pass over so many rows, by which few nodes pay, and more of them where drafts come true
    dear = Tuning(costs(0.01, node=0.05, rest=0.1))
    for name, config in OF_TOKENS.items():
        found = PromptLookup(config) if isinstance(config, int) else make_ngram_drafter(table, config, 0, dear)
        rounds = decode(target, found, prompt, 50)
        assert tokens_of(rounds) == expected, name
        assert sum(r.drafted for r in rounds) > 0, name
        assert name.startswith("lookup") or sum(r.accepted for r in rounds) > 5, name
        assert max(r.drafted for r in rounds) <= found.max_rows, name
        assert not name.endswith("auto") or len({r.drafted for r in rounds}) > 2, name


def noted(drafter: ModelDrafter) -> list[tuple[int, int, DraftTree, bool]]:
    """Of every draft from now on: the tokens of the text, the limit, the draft, and whether the model was asked."""
    drafts, draft = list[tuple[int, int, DraftTree, bool]](), drafter.draft

    def note(root: torch.Tensor, limit: int) -> DraftTree:
        drafts.append((drafter._session.base + 1, limit, draft(root, limit), bool(drafter._source.fed)))
        return drafts[-1][2]

    drafter.draft = note  # type: ignore[method-assign]
    return drafts


OF_SOME = [name for name in SOURCES if "some" in name or name.startswith(("eagle3", "dflash"))]
BY_PLACES = list(itertools.product(OF_SOME, STRUCTURES))


@pytest.mark.parametrize(("kind", "structure"), typical_where(each_value(BY_PLACES).__contains__, BY_PLACES))
def test_drafts_by_places_are_those_by_tokens(target: Target, kind: str, structure: str) -> None:
    """A drafter over some tokens works with their indices, and drafts the same as over all tokens."""
    found = []
    for reads_root in (structure.startswith("token_graph"), True):
        model = target.source(kind)
        if hasattr(model, "head"):  # of EAGLE-3: equally likely tokens may come in any order
            model.head = copy.deepcopy(model.head)
            generator = torch.Generator().manual_seed(0)
            noise = torch.randn(model.head.lm_head.weight.shape, generator=generator, dtype=target.dtype)
            model.head.lm_head.weight += 1e-3 * noise
        shape = make_structure(method_of(STRUCTURES[structure]), Streams(0))
        shape.reads_root = reads_root
        drafter = ModelDrafter(model, shape)
        trees = noted(drafter)
        assert tokens_of(decode(target, drafter)) == target.text_after(PROMPT, COUNT)
        drafts = [(tree.tokens.tolist(), tree.parents, tree.rows) for _, _, tree, _ in trees]
        assert {token for tokens, _, _ in drafts for token in tokens} <= {*model.predicted.tolist()}
        found.append(drafts)
    assert found[0] == found[1]
    assert any(tokens for tokens, _, _ in found[0])


def require_copies(target: Target, kind: str, structure: str = "the default") -> None:
    """A draft is the text's where its last tokens occurred before, else the model's as if it drafted in every round;
    structure and allowance learn from the model's alone."""
    method, told = preset(f"{kind.partition(',')[0]}/survival"), list[int]()
    method = replace(method_of(STRUCTURES[structure]), copy=1) if structure in STRUCTURES else method
    tuning, known = Tuning(costs(0.0, node=0.0, rest=0.0)), [*PROMPT, *target.text_after(PROMPT, 2 * COUNT)]
    shape, allowance = make_structure(method, Streams(0), tuning=tuning), tuning.allowance()
    shape.observe = lambda tree, nodes: told.append(len(tree))  # type: ignore[method-assign]
    allowance.observe = lambda fed, submitted, emitted: told.append(submitted)  # type: ignore[method-assign]
    drafter = ModelDrafter(target.source(kind), shape, allowance, make_prompt_lookup(method, shape, tuning))
    drafts = noted(drafter)
    assert tokens_of(decode(target, drafter, count=2 * COUNT)) == known[len(PROMPT) :]
    for length, limit, tree, modelled in drafts:
        text, size = known[:length], method.copy or 0
        said = slow_lookup(text, size, shape.steps(limit), size)
        assert modelled == (not said and limit > 0)
        if modelled:
            alone = ModelDrafter(target.source(kind), make_structure(method, Streams(0), tuning=tuning))
            expected = noted(alone)
            list(itertools.islice(speculative(target.stack, alone, text[:-1], max_new_tokens=limit + 2), 2))
            assert (tree.tokens.tolist(), tree.parents) == (expected[0][2].tokens.tolist(), expected[0][2].parents)
        else:
            assert tree.tokens.tolist() in (said, said[:8])  # as many as a first search finds
    made = [len(tree) for *_, tree, modelled in drafts if modelled]
    assert [count for count in told if count] == [count for count in made for _ in (shape, allowance)]
    assert 1 < len(made) < len(drafts) - 1


COPYING = list(itertools.product(SOURCES, ["chain", "opt_tree", "the default"]))
COPIES = {("early_exit, one pass", "chain"), ("small_lm", "opt_tree"), ("small_lm, some tokens", "the default"),
          ("skip_layers", "opt_tree"), ("eagle3", "chain")}  # fmt: skip


@pytest.mark.parametrize(("kind", "structure"), typical_where(COPIES.__contains__, COPYING))
def test_drafts_are_copied_where_the_text_says_them(target: Target, kind: str, structure: str) -> None:
    require_copies(target, kind, structure)


FAULTS = {  # in a function of a class, and what stands there instead
    "the model misses what was copied": (
        SmallLMDraftModel,
        "commit",
        "torch.cat([self._pending, uncached_tokens])",
        "uncached_tokens",
    ),
    "copies are learned from": (ModelDrafter, "commit", "len(tree) and not pass_sizes", "False"),
    "of another text": (PromptLookup, "commit", "(tokens)", "(tokens[:1])"),
    "deeper than the structure": (ModelDrafter, "draft", "self.structure.steps(limit)", "limit"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_copies_are_seen(target: Target, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    plant(monkeypatch, *FAULTS[fault])
    for structure in ("opt_tree", "the default")[: 1 if "deeper" in fault else 2]:  # which is as deep as any limit
        with pytest.raises(AssertionError):
            require_copies(target, "small_lm", structure)


PRICES = [(40.0, 0, 0), (1.2, 1, 2), (1.05, 2, 12), (0.0, 5, 99)]  # of a step; the fewest and most rounds with a draft
DEAR = list(itertools.product(["early_exit", "small_lm", "skip_layers", "eagle3", "dflash"], PRICES))


@pytest.mark.parametrize(("source", "cost"), typical_where(each_value(DEAR).__contains__, DEAR))
def test_rounds_without_a_draft_change_no_token(target: Target, source: str, cost: tuple[float, int, int]) -> None:
    """Where a trial loses more than all are allowed, no round has a draft; where drafts cost much, few; nothing, all.

    What a structure learns from is what it drafted, however many rounds the allowance leaves out.
    """
    step_seconds, fewest, most = cost
    tuning = Tuning(costs(step_seconds, node=0.0, rest=0.0))
    structure, observed = make_structure(MethodConfig(stop=StopConfig(rule="survival")), Streams(0), tuning=tuning), []
    observe = structure.observe
    structure.observe = lambda tree, nodes: (observed.append(len(tree)), observe(tree, nodes))[1]  # type: ignore[method-assign]
    rounds = decode(target, ModelDrafter(target.source(source), structure, tuning.allowance()))
    assert tokens_of(rounds) == target.text_after(PROMPT, COUNT)
    drafted = [r.drafted > 0 for r in rounds[1:-1]]
    assert fewest <= sum(drafted) <= most
    assert all(drafted) == (step_seconds == 0.0)
    assert observed == [r.drafted for r in rounds if r.drafted]


ENDING = [
    *itertools.product(
        ["early_exit", "small_lm", "skip_layers", "eagle3", "dflash", "dflash, markov"],
        ["chain", "static", "token_graph"],
    )
]


@pytest.mark.parametrize(("source", "structure"), typical_where(each_value(ENDING).__contains__, ENDING))
def test_drafts_up_to_the_last_position(make: Callable[..., Target], source: str, structure: str) -> None:
    target, prompt = make("llama"), random_prompt(236)
    drafter = target.drafter(source, method_of(STRUCTURES[structure], 8))
    assert tokens_of(decode(target, drafter, prompt, 20)) == target.text_after(prompt, 20)


@pytest.mark.parametrize("structure", ["chain", "opt_tree", "k_config"])
def test_greedy_with_a_repetition_penalty_equals_generate(target: Target, structure: str) -> None:
    target.model.generation_config.repetition_penalty = 1.3
    expected = reference_generate(target.model, PROMPT, COUNT)
    target.model.generation_config.repetition_penalty = 1.0
    assert expected != target.text_after(PROMPT, COUNT)
    selector = TokenSelector(Sampler(SamplingConfig(repetition_penalty=1.3)))
    drafter = target.drafter("early_exit", method_of(STRUCTURES[structure]))
    assert tokens_of(decode(target, drafter, selector=selector)) == expected
    assert tokens_of(list(autoregressive(target.stack, PROMPT, max_new_tokens=COUNT, selector=selector))) == expected


@pytest.mark.parametrize(("own_head", "depth"), [(True, 1), (False, 1), (True, 2)])
def test_the_target_as_its_own_drafter_is_always_right(target: Target, own_head: bool, depth: int) -> None:
    exit_ = make_drafter(target.path, LAYERS - depth, own_head=own_head, depth=depth, dtype=target.dtype)
    exit_.use_head(target.stack.head)
    shape = make_structure(CHAIN, Streams(0))
    rounds = decode(target, ModelDrafter(EarlyExitDraftModel(exit_), shape), count=41)[1:]
    assert [r.accepted for r in rounds] == [4] * 8
    assert [len(r.tokens) for r in rounds] == [5] * 8


# --- where a text ends, and what a round counts -----------------------------------------------------------------------


def test_cut() -> None:
    assert cut([1, 2, 3], {2}, 9) == (1, 2)
    assert cut([1, 2, 3], {3}, 2) == (1, 2)
    assert cut([1, 2, 3], (), 5) == (1, 2, 3)
    assert cut([2], {2}, 1) == (2,)


@pytest.mark.slow
def test_eos_at_every_position(make: Callable[..., Target]) -> None:
    """Text ends with the first EOS wherever in a round it falls: first token, inside a draft, the bonus."""
    target, prompt = make("llama", peak=1.0, kv_heads=4), random_prompt(12, seed=3)
    full, places = target.text_after(prompt, COUNT), set()
    firsts = {token: full.index(token) for token in full}
    for eos, place in [*(([token], place) for token, place in firsts.items()), ([full[5], full[9]], firsts[full[5]])]:
        expected = full[: min(place, *(firsts[token] for token in eos)) + 1]
        assert tokens_of(list(autoregressive(target.stack, prompt, max_new_tokens=COUNT, eos=eos))) == expected
        drafter = ModelDrafter(target.source("early_exit", 0.05), make_structure(CHAIN, Streams(0)))
        rounds = decode(target, drafter, prompt, eos=eos)
        assert tokens_of(rounds) == expected
        assert sum(r.accepted for r in rounds) <= len(expected)
        places.add((len(rounds[-1].tokens), rounds[-1].accepted))
    assert len(places) >= 5  # EOS fell on several positions of a draft


@pytest.mark.parametrize("rule", typical_where(("fixed", "beta").__contains__, RULES))
def test_max_new_tokens_at_every_offset(target: Target, rule: str) -> None:
    full = target.text_after(PROMPT, COUNT)
    for count in range(1, 15):
        rounds = decode(target, target.drafter("early_exit", MethodConfig(stop=RULES[rule])), count=count)
        assert tokens_of(rounds) == full[:count]
        assert all(r.drafted <= count for r in rounds)
        assert tokens_of(list(autoregressive(target.stack, PROMPT, max_new_tokens=count))) == full[:count]


def test_accounting(target: Target) -> None:
    """A round's tokens are its accepted ones and the bonus; parts of its time add up to less than the whole."""
    prefill, *rounds = decode(target, target.drafter("early_exit", CHAIN), random_prompt(5), 50)
    assert (len(prefill.tokens), prefill.drafted) == (1, 0)
    assert 1 + sum(len(r.tokens) for r in rounds) == 50
    assert len({r.accepted for r in rounds}) > 2
    budget = 49
    for r in rounds:
        assert r.accepted <= r.drafted == min(4, budget - 1)
        assert len(r.tokens) == r.accepted + 1
        budget -= len(r.tokens)
        assert (r.draft_seconds > 0) == (r.drafted > 0)
        assert min(r.structure_seconds, r.verify_seconds) > 0
        assert r.draft_seconds + r.structure_seconds + r.verify_seconds <= r.seconds


def test_totals_that_the_papers_report(target: Target) -> None:
    """They equal those of the trees, which are kept on the side; a rule is told the depth and the accepted path."""
    for name in ("opt_tree", "token_graph"):
        shape, seen, told = make_structure(method_of(STRUCTURES[name]), Streams(0)), [], []
        observe, observed = shape.observe, shape.rule.observe
        shape.observe = lambda tree, nodes, seen=seen, of=observe: (seen.append((tree, nodes)), of(tree, nodes))[1]
        shape.rule.observe = lambda *given, told=told, of=observed: (told.append(given), of(*given))[1]
        rounds = decode(target, ModelDrafter(target.source("small_lm"), shape))
        assert told == [(r.depth, r.accepted) for r in rounds[1:]] == [(t.depth, len(nodes)) for t, nodes in seen]
        if name == "opt_tree":
            expected = sum(1 + float(tree.path_probs.sum()) for tree, _ in seen)
            assert shape.totals == pytest.approx({"expected_tau": expected, "observed": len(seen)}, rel=1e-5)
        else:
            fed = sum(tree.drafted for tree, _ in seen)
            copies = sum(any(node >= tree.drafted for node in accepted) for tree, accepted in seen)
            assert shape.totals == {"drafted_by_source": fed, "graph_success": copies, "observed": len(seen)}


def test_impossible_lengths_are_refused(target: Target) -> None:
    for prompt, count, message in (
        ([], 5, "empty prompt"),
        ([1], 0, "max_new_tokens=0"),
        ([1] * 250, 7, "context of 256"),
    ):
        refusal(message, list, autoregressive(target.stack, prompt, max_new_tokens=count))
    assert len(tokens_of(list(autoregressive(target.stack, [1] * 250, max_new_tokens=6)))) == 6


# --- sampling, over a vocabulary of 6 ---------------------------------------------------------------------------------

VOCABULARY = 6


@pytest.fixture(scope="module")
def tiny_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> tuple[LayerStack, LayerStack]:
    """A target, and another model as drafter."""
    stacks = []
    for seed in (0, 1):
        path = save_target(tmp_path_factory.mktemp("sampled"), vocab_size=VOCABULARY, hidden_size=16, seed=seed,
                           intermediate_size=24, num_hidden_layers=1, bos_token_id=None)  # fmt: skip
        stacks.append(open_stack(path)[1])
        with torch.no_grad():
            stacks[-1].head.weight *= 2.0
    return stacks[0], stacks[1]


class ByLength(LogitsProcessor):
    """A processor that favours a different token at every length of the text."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, input_ids.shape[1] % VOCABULARY] += 4.0
        return scores


@pytest.mark.parametrize("widths", [(1, 1, 1, 1), (2, 2, 1)])
def test_draft_and_target_distributions_are_processed_alike(tiny_vocabulary: tuple, widths: tuple[int, ...]) -> None:
    """With processors that read the text: if the target drafts for itself, every first candidate is accepted."""
    sampler = Sampler(SamplingConfig(temperature=0.9, repetition_penalty=1.8), [ByLength()])
    drafting = make_tree(StructureConfig(kind="k_config", widths=widths), random.Random(1))
    options: Any = {"max_new_tokens": 1 + 6 * (len(widths) + 1), "selector": TokenSelector(sampler, random.Random(0))}
    drafter = ModelDrafter(SmallLMDraftModel(tiny_vocabulary[0]), drafting)
    rounds = list(speculative(tiny_vocabulary[0], drafter, [1, 4, 2], **options))
    assert [r.accepted for r in rounds[1:]] == [len(widths)] * 6
    nodes = 6 * len(widths)
    assert drafting.totals == {"nodes_tried": nodes, "accepted_candidate_1": nodes, "observed": 6}


def test_each_draft_is_verified_by_its_rule(tiny_vocabulary: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled candidates are verified by rejection, with repeated draws; chosen ones, and naive, by matching."""
    stack, drafter = tiny_vocabulary
    trees = {draw: StructureConfig(kind="k_config", widths=(6, 2), draw=draw) for draw in DRAWS}
    shapes = trees | {"chain": STRUCTURES["chain"]}
    methods = {name: replace(method_of(shape), source="small_lm") for name, shape in shapes.items()}
    methods["exact"] = replace(methods["chain"], verify="exact")
    methods["opt_tree"] = MethodConfig("small_lm", STRUCTURES["opt_tree"])
    methods["naive"] = MethodConfig("small_lm", trees["with_replacement"], verify="naive")
    methods["block"] = replace(methods["chain"], verify="block")
    text, seen = TextSettings(8, sampling=SamplingConfig(temperature=1.0)), list[tuple]()
    arms = make_arms(stack, {"small_lm": drafter}, methods, None, text)

    def noted(tokens: list, parents: list, q: dict, p: torch.Tensor, rule: NodeRule, chance: Chance, **given: Any):
        if tokens:
            seen.append((rule, bool(q), bool(given["draws"])))
        return verify_sampled(tokens, parents, q, p, rule, chance, **given)

    def block(tokens: list, q: dict, p: torch.Tensor, chance: Chance) -> tuple[list[int], int]:
        seen.append(("block", bool(q)))
        return verify_block(tokens, q, p, chance)

    monkeypatch.setattr("outrider.inference.core.token_selector.verify_sampled", noted)
    monkeypatch.setattr("outrider.inference.core.token_selector.verify_block", block)
    used = {}
    for name in methods:
        seen.clear()
        arms[name]([1, 4, 2], Streams(0))
        used[name] = set(seen)
    assert used == {
        "with_replacement": {(Rejection(replace=True), True, True)},
        "without_replacement": {(Rejection(replace=False), True, False)},
        "top_k": {(Matching(), False, False)},
        "exact": {(Rejection(replace=False), True, False)},
        "chain": {("block", True)},
        "opt_tree": {(Matching(), False, False)},
        "naive": {(Matching(), True, False)},
        "block": {("block", True)},
    }
