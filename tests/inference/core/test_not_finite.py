"""NaN and infinity: in memory that is used again and in drafted rows they change no token, in logits they are an error.

A mask does not hide them from attention: 0 · NaN is NaN.
"""

import copy
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from outrider.base.errors import UserError
from outrider.base.streams import Streams
from outrider.draft_models.targets.stack import LayerStack, WholeModel
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.core.rounds import Round
from outrider.inference.core.sampling import Sampler
from outrider.inference.core.target_session import Runtime, TargetSession
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.core.tree import DraftTree, depths
from outrider.inference.drafters.eagle3.drafter import Eagle3DraftModel
from outrider.inference.drafters.early_exit.drafter import EarlyExitDraftModel
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.drafters.small_lm.drafter import SmallLMDraftModel
from outrider.inference.engines.graphs.cuda_graphs import Graphed
from outrider.inference.settings.method import MethodConfig, StopConfig
from outrider.inference.settings.sampling import SamplingConfig
from outrider.inference.shapes.factory import make_structure
from tests.inference.graph_contract import keep_contracts
from tests.known_targets import PROMPT, Target, tokens_of
from tests.pairwise import all_pairs, each_value
from tests.refusals import refusal
from tests.tiers import typical_where
from tests.tiny import STRUCTURES, VOCABULARY, open_stack

SOURCES = ("early_exit", "small_lm", "plain_lm", "eagle3")
RUNTIMES = ("eager", "graphed", "graphs")
NAN, INFINITY = math.nan, math.inf
METHOD = MethodConfig(stop=StopConfig(rule="fixed", max_draft=4))


class Models:
    """A target and drafters of every kind; a fresh copy for every test that breaks them."""

    def __init__(self, target: Target):
        self.stack: LayerStack = open_stack(target.path)[1]
        self.small = target.small("small_lm")
        self.exit = target.exit("early_exit", 0.3)
        torch.manual_seed(0)
        config = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=128, vocab_size=VOCABULARY)
        self.plain = WholeModel(AutoModelForCausalLM.from_config(config))
        self.head = target.head

    def source(self, kind: str) -> Any:
        made: dict[str, Any] = {"early_exit": (EarlyExitDraftModel, self.exit), "eagle3": (Eagle3DraftModel, self.head)}
        small = SmallLMDraftModel, self.small if kind == "small_lm" else self.plain
        source, model = made.get(kind, small)
        return source(model)

    def embeddings(self) -> Iterator[Tensor]:
        """Of all models."""
        yield self.stack.embed_tokens.weight
        yield self.small.embed_tokens.weight
        yield self.plain.model.get_input_embeddings().weight
        yield self.head.embed_tokens.weight


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(tmp_path_factory.mktemp("target"), "mistral", torch.float32)


@pytest.fixture(scope="module")
def whole(target: Target) -> Models:
    return Models(target)


@pytest.fixture
def models(whole: Models) -> Models:
    return copy.deepcopy(whole)


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    if request.param == "graphs":
        keep_contracts(monkeypatch)
    return Runtime() if request.param == "eager" else Graphed(16)


def plain(
    models: Models, count: int, runtime: Runtime | None = None, selector: TokenSelector | None = None
) -> list[int]:
    rounds = autoregressive(models.stack, PROMPT, max_new_tokens=count, runtime=runtime, selector=selector)
    return tokens_of(rounds)


def draft(
    models: Models, source: Any, structure: str, count: int, runtime: Runtime, sampler: Sampler | None = None
) -> Iterator[Round]:
    drawn, rule = sampler is not None and not sampler.greedy, "block" if structure == "block" else "exact"
    structure = "chain" if structure == "block" else structure
    shape = make_structure(replace(METHOD, structure=STRUCTURES[structure]), Streams(4), drawn)
    generator = random.Random(4) if drawn else None
    options: dict[str, Any] = {
        "max_new_tokens": count,
        "runtime": runtime,
        "selector": TokenSelector(sampler, generator, rule),
    }
    return speculative(models.stack, ModelDrafter(source, shape), PROMPT, **options)


# --- what is left behind, and what is drafted ------------------------------------------------------------------------


LEAVING = all_pairs(
    [("early_exit", "chain"), ("small_lm", "opt_tree"), ("eagle3", "opt_tree")],
    [NAN, INFINITY],
    ["graphed", "recorded"],
)


@pytest.mark.parametrize(
    ("drafted", "poison", "runtime"),
    typical_where(each_value(LEAVING).__contains__, LEAVING),
    indirect=["runtime"],
)
@pytest.mark.slow
def test_what_a_generation_leaves_behind_changes_no_other(
    models: Models, runtime: Graphed, drafted: tuple[str, str], poison: float
) -> None:
    source, structure = drafted
    expected = plain(models, 16)
    for _ in range(2):
        assert plain(models, 16, runtime) == expected
        assert tokens_of(draft(models, models.source(source), structure, 16, runtime)) == expected
        for arena in runtime._arenas.values():
            caches = (arena.first_cache, arena.second_cache, *(cache for _, cache in arena.draft_caches.values()))
            left = [cache._buffer for cache in caches if cache._buffer is not None] + list(arena.buffers.values())
            for memory in left:
                with torch.inference_mode():
                    memory.fill_(poison if memory.is_floating_point() else 0)


SHAPES = ("chain", "k_config", "opt_tree")
DRAFTED = [  # a plain LM runs eagerly
    *all_pairs(["early_exit", "small_lm", "eagle3"], SHAPES, [NAN, INFINITY], RUNTIMES),
    *all_pairs(["plain_lm"], SHAPES, [NAN, INFINITY], ["eager"]),
]
WITHOUT = all_pairs(SOURCES, STRUCTURES, [None, Sampler(SamplingConfig(temperature=0.7, top_p=0.9))])


@pytest.mark.parametrize(
    ("source", "structure", "poison", "runtime"),
    typical_where(each_value(DRAFTED).__contains__, DRAFTED),
    indirect=["runtime"],
)
@pytest.mark.slow
def test_a_drafted_token_that_is_no_number_changes_no_other(
    models: Models, runtime: Runtime, source: str, structure: str, poison: float
) -> None:
    """Every model computes NaN of a token that some drafts have and the text has not: it must be as if they had not."""
    expected = plain(models, 20)
    bad = next(token for token in range(VOCABULARY) if token not in expected and token not in PROMPT)
    for embedding in models.embeddings():
        embedding.data[bad] = poison
    drafter, calls = models.source(source), []
    extend = drafter.extend

    def extended(tokens: Tensor, parents: Any) -> Tensor:
        calls.append(len(parents))
        logits = extend(tokens, parents).clone()
        if len(calls) % 9 == 2:
            logits[..., bad] = 1e4
        return logits

    drafter.extend = extended
    rounds = list(draft(models, drafter, structure, 20, runtime))
    assert tokens_of(rounds) == expected
    assert plain(models, 20, runtime) == expected
    accepted = [r.accepted for r in rounds[1:]]
    assert 0 in accepted
    if structure == "chain" and source != "plain_lm":  # which is hardly ever right
        assert any(accepted[accepted.index(0) :])  # drafting recovers


@pytest.mark.parametrize(
    ("source", "structure", "sampler"),
    typical_where(each_value(WITHOUT).__contains__, WITHOUT),
)
def test_a_drafter_without_numbers_costs_acceptance_only(
    models: Models, source: str, structure: str, sampler: Sampler | None
) -> None:
    expected = plain(models, 12)
    heads = (models.exit.output_head, models.small.head, models.plain.model.lm_head, models.head.lm_head)
    for head in heads:
        head.weight.data = torch.full_like(head.weight, NAN)
    found = tokens_of(draft(models, models.source(source), structure, 12, Runtime(), sampler))
    assert len(found) == 12
    assert found == expected or sampler is not None


# --- logits ----------------------------------------------------------------------------------------------------------


SAMPLERS = {
    "greedy": None,
    "greedy, with a processor": Sampler(SamplingConfig(repetition_penalty=1.2)),
    "sampled": Sampler(SamplingConfig(temperature=0.8)),
    "sampled, cut": Sampler(SamplingConfig(temperature=0.8, top_p=0.9, top_k=20, repetition_penalty=1.2)),
}
FAULTY = all_pairs(["plain", "chain", "block", "k_config", "eagle3"], SAMPLERS, RUNTIMES)


@pytest.mark.parametrize(
    ("arm", "chosen", "runtime"),
    typical_where(each_value(FAULTY).__contains__, FAULTY),
    indirect=["runtime"],
)
@pytest.mark.slow
def test_logits_that_are_no_numbers_are_an_error(models: Models, runtime: Runtime, arm: str, chosen: str) -> None:
    """At the first position of the text that has such, however far drafts go beyond it; all before it is emitted."""
    sampler = SAMPLERS[chosen]
    sampled = sampler is not None and not sampler.greedy

    def run() -> Iterator[Round]:
        if arm == "eagle3":
            return draft(models, models.source(arm), "opt_tree", 12, runtime, sampler)
        if arm != "plain":
            return draft(models, EarlyExitDraftModel(models.exit), arm, 12, runtime, sampler)
        selector = TokenSelector(sampler, random.Random(4) if sampled else None)
        return autoregressive(models.stack, PROMPT, max_new_tokens=12, runtime=runtime, selector=selector)

    models.stack.reserve(500)
    ((cos, _),) = models.stack.tables
    rotary = cos.clone()
    text = tokens_of(run())
    for position in (len(PROMPT) + 7, len(PROMPT) - 1):
        cos.copy_(rotary)[position:] = NAN
        said: list[int] = []
        with pytest.raises(UserError, match=rf"logits at position {position} are NaN or infinite in dtype=float32"):
            said.extend(token for r in run() for token in r.tokens)
        assert len(said) == max(0, position + 1 - len(PROMPT))
        assert said == text[: len(said)] or sampled


@pytest.mark.parametrize("nodes", [1, 3, 4])
def test_the_position_is_that_of_the_row_without_numbers(
    target: Target, models: Models, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    """Where only one row of a pass overflows, after `nodes` accepted tokens."""
    run_tree, position = TargetSession.run_tree, len(PROMPT) + 5 + nodes  # the second round begins after 5 tokens

    def overflowing(session: TargetSession, root: Tensor, tree: DraftTree) -> Tensor:
        logits = run_tree(session, root, tree).clone()
        for row, depth in enumerate(depths(tree.parents)):
            if session.base + depth == position:
                logits[row] = INFINITY
        return logits

    monkeypatch.setattr(TargetSession, "run_tree", overflowing)
    sure = target.source("early_exit", 0.0)  # the target itself: all that it drafts is right
    refusal(rf"logits at position {position} are NaN or infinite", list, draft(models, sure, "chain", 12, Runtime()))
