"""A block drafter drafts as a loop without a cache, which computes the whole block again in every round."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.draft_models.dflash.checkpoint import open_drafter
from outrider.draft_models.dflash.model import BlockAttention, DFlash
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.core.decode import speculative
from outrider.inference.core.target_session import Runtime
from outrider.inference.drafters.dflash import drafter as dflash
from outrider.inference.drafters.dflash.drafter import BlockPasses, DFlashPlugin, OneBlock
from outrider.inference.settings.method import MethodConfig, StopConfig
from tests.block_drafters import (
    DIALECTS,
    LAYERS,
    VOCABULARY,
    WIDTH,
    Facts,
    Weights,
    drafter_weights,
    reference,
    slot_confidence,
    slot_logits,
    write_drafter,
)
from tests.faults import plant
from tests.inference.drafters.test_eagle3 import drafts, graphed
from tests.known_targets import COUNT, PROMPT, Target, targets, tokens_of
from tests.tiny import open_stack, save_target

make = pytest.fixture(scope="module")(targets)


@dataclass(frozen=True)
class Case:
    """A target in float64 and its block drafter, with what a plain loop needs of both."""

    model: PreTrainedModel
    stack: LayerStack
    drafter: DFlash
    facts: Facts
    weights: Weights

    def aux_hidden(self, text: Sequence[int]) -> Tensor:
        """Aux hidden states [n, k, d] of transformers, whose last hidden state is the output of the norm."""
        before_norm: list[Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, given: before_norm.append(given[0]))
        states = self.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        hook.remove()
        boundaries = [*states[:LAYERS], before_norm[0]]
        return torch.stack([boundaries[tap][0] for tap in self.facts.taps], dim=1)

    def block(self, text: Sequence[int], root: int) -> Tensor:
        """The block's hidden states after the committed `text`."""
        embedding = self.weights.get("embed_tokens.weight", self.model.get_input_embeddings().weight)
        return reference(self.facts, self.weights, embedding, self.aux_hidden(text), root)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    folder = tmp_path_factory.mktemp("dflash")
    path = save_target(
        folder / "target", vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, bos_token_id=0
    )
    model, stack = open_stack(path, torch.float64)

    def make(dialect: str) -> Case:
        facts = DIALECTS[dialect]
        weights = drafter_weights(facts)
        where = write_drafter(folder / dialect.replace(", ", "_"), facts, weights)
        drafter = open_drafter(where, stack.config).load(torch.float64)
        DFlashPlugin().prepare(drafter, stack)
        return Case(model, stack, drafter, facts, weights)

    return make


def largest_error(case: Case, runtime: Runtime, length: int) -> float:
    """Of logits, and of the confidence head, over all rows of the scripted rounds of `tests…test_eagle3`."""
    source, errors = OneBlock(case.drafter), list[float]()
    head = case.model.get_output_embeddings().weight
    for text, path, logits in drafts(case.stack, source, runtime, length):  # type: ignore[arg-type]
        block = case.block(text, path[0])
        depth = min(len(path), source.drafter.reading.drafted) - 1  # deeper rows have the logits of the last
        expected = slot_logits(case.facts, case.weights, head, block, depth, path[-1])
        errors.append(float((logits - expected).abs().max()))
        if case.drafter.confidence_head is not None and len(source.hidden) == 1:
            found = case.drafter.confidence_head(None, source.hidden)[0]
            errors.append(float((found - slot_confidence(case.facts, case.weights, block, depth, path[-1])).abs()))
    assert len(errors) >= 15
    return max(errors)


RUNTIMES: dict[str, Callable[[], Runtime]] = {"eager": Runtime, "graphed": graphed}


@pytest.mark.parametrize(("dialect", "runtime", "length"), [
    ("z-lab", "eager", 3), ("z-lab", "graphed", 1), ("z-lab, mixed", "graphed", 4), ("z-lab, windows", "eager", 5),
    ("specforge, dspark", "eager", 1), ("deepspec", "graphed", 2), ("speculators", "graphed", 4),
    ("speculators, dspark", "eager", 2),
])  # fmt: skip
@torch.inference_mode()
def test_drafts_are_those_of_a_loop_without_a_cache(
    cases: Callable[[str], Case], dialect: str, runtime: str, length: int
) -> None:
    assert largest_error(cases(dialect), RUNTIMES[runtime](), length) < 1e-5  # rotary tables are those of float32


FAULTS = {  # of a class or module: its function, and what stands there instead
    "hidden states of the next boundary": (
        BlockPasses, "__init__", "drafter.reading.taps", "[tap + 1 for tap in drafter.reading.taps]",
    ),
    "the context is one position off": (BlockPasses, "_store_context", "features(aux)", "features(aux.roll(1, 1))"),
    "rows of masks stay in the cache": (
        BlockPasses, "run_pass", "first_cache.keep(self.session.base, ())\n    self.session.start_round()",
        "commit(range(2))",
    ),
    "accepted positions have no feature": (BlockPasses, "commit", "aux_hidden(rows)", "aux_hidden(rows[:1])"),
    "rows see no later row": (dflash, "block_mask", " if causal else row_positions.max()", ""),
    "a window of the chain": (dflash, "block_mask", ".abs() < window", ".abs() < window + 1"),
    "a slot too early": (BlockPasses, "run_pass", "0 if reading.sample_from_anchor else 1", "0"),
    "a bias by another token": (OneBlock, "extend", "bias(logits, tokens)", "bias(logits, tokens - tokens)"),
    "the bias forgotten": (OneBlock, "extend", "self.drafter.bias(logits, tokens)", "logits"),
    "keys are not rotated": (BlockAttention, "store", "self.rotate(self.k_norm(key), rotary)", "self.k_norm(key)"),
}  # fmt: skip
OF = {"a window of the chain": "z-lab, windows", "a bias by another token": "specforge, dspark",
      "the bias forgotten": "specforge, dspark"}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@torch.inference_mode()
def test_a_planted_fault_is_seen(cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    case = cases(OF.get(fault, "z-lab"))
    plant(monkeypatch, *FAULTS[fault])
    with pytest.raises((AssertionError, IndexError)):
        assert largest_error(case, Runtime(), 5) < 1e-3


def test_a_context_one_position_off_costs_acceptance_but_no_token(
    make: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, accepted = make("llama"), list[int]()
    for fault in ((), ("the context is one position off",)):
        for name in fault:
            plant(monkeypatch, *FAULTS[name])
        drafter = target.drafter("dflash, markov", MethodConfig("dflash", stop=StopConfig(max_draft=3)))
        rounds = list(speculative(target.stack, drafter, PROMPT, max_new_tokens=COUNT))
        assert tokens_of(rounds) == target.text_after(PROMPT, COUNT)
        accepted.append(sum(r.accepted for r in rounds))
    assert accepted[0] > accepted[1] + 2
