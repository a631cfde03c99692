"""An EAGLE-3 head drafts as a loop without a cache, which computes everything again for every row."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.draft_models.eagle3.checkpoint import open_head
from outrider.draft_models.eagle3.model import Eagle3
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.core.target_session import Runtime
from outrider.inference.core.tree import ROOT, DraftTree
from outrider.inference.drafters.eagle3.drafter import Eagle3DraftModel
from outrider.inference.engines.graphs import cuda_graphs
from tests.eagle3_heads import DIALECTS, TARGET, VOCABULARY, Facts, Row, head_weights, reference, write_head
from tests.faults import plant
from tests.tiny import open_stack, save_target

LAST = TARGET.num_hidden_layers


@dataclass(frozen=True)
class Case:
    """A target in float64 and its head, with what a plain loop needs of both."""

    model: PreTrainedModel
    stack: LayerStack
    head: Eagle3
    facts: Facts
    weights: dict[str, Tensor]

    def taps(self, text: Sequence[int]) -> Tensor:
        """Aux hidden states [n, k, d] of transformers, whose last hidden state is the output of the norm."""
        before_norm: list[Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, given: before_norm.append(given[0]))
        states = self.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        hook.remove()
        boundaries = [*states[:LAST], before_norm[0]]
        return torch.stack([boundaries[tap][0] for tap in self.facts.taps], dim=1)

    def expected(self, text: Sequence[int], drafted: Sequence[int]) -> Tensor:
        """Logits [V_d] after the committed `text` and the path `drafted`, root first."""
        taps, known = self.taps(text), [*text, drafted[0]]
        rows = [Row(known[t + 1], t, range(t), taps[t]) for t in range(len(text))]
        for token in drafted[1:]:
            rows.append(Row(token, len(rows), range(len(rows)), len(rows) - 1))
        embedding = self.weights.get("embed_tokens.weight", self.model.get_input_embeddings().weight)
        return reference(self.facts, self.weights, embedding, rows)[-1]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    folder = tmp_path_factory.mktemp("eagle3")
    path = save_target(
        folder / "target", vocab_size=VOCABULARY, hidden_size=TARGET.hidden_size, num_hidden_layers=LAST,
        bos_token_id=0,
    )  # fmt: skip
    model, stack = open_stack(path, torch.float64)

    def make(dialect: str) -> Case:
        facts = DIALECTS[dialect]
        weights = {name: w.double() if w.is_floating_point() else w for name, w in head_weights(facts).items()}
        where = write_head(folder / dialect, facts, weights)
        head = open_head(where, TARGET).load(torch.float64)
        if not head.reading.own_embedding:
            head.use_embedding(stack.embed_tokens.weight)
        return Case(model, stack, head, facts, weights)

    return make


@dataclass(frozen=True)
class Scripted:
    """A scripted round: parents of its nodes, the number of nodes that are fed, and which are accepted."""

    parents: tuple[int, ...]
    fed: int
    accepted: tuple[int, ...]


# A mostly accepted chain, a tree whose path must be gathered, a round without a draft before one that gets two or more
# features, a rejected chain, and one after it.
SCRIPT = (
    Scripted((ROOT, 0, 1), 2, (0, 1)),
    Scripted((ROOT, ROOT, 0, 1, 1, 3), 4, (1, 3, 5)),
    Scripted((), 0, ()),
    Scripted((ROOT, 0), 1, ()),
    Scripted((ROOT, 0, 1), 2, (0, 1, 2)),
    Scripted((ROOT, 0), 1, (0,)),
)
Drafted = tuple[list[int], list[int], Tensor]  # the committed text, the path from the root on, logits [V] after it


@torch.inference_mode()
def drafts(stack: LayerStack, source: Eagle3DraftModel, runtime: Runtime, length: int) -> Iterator[Drafted]:
    """The drafts of `source` in the scripted rounds, in a text that begins with `length` tokens."""
    tokens = torch.randint(VOCABULARY, (99,), generator=torch.Generator().manual_seed(length)).tolist()
    text = tokens[:length]
    script = iter(tokens[length:])
    session = runtime.session(stack, 0, 60, 50)
    session.aux_layers = source.aux_layers
    session.prefill(text)
    source.begin(session)
    session.commit(range(length))
    for turn in SCRIPT:
        root, nodes = next(script), [next(script) for _ in turn.parents]
        paths = [[root]]
        for node, parent in zip(nodes, turn.parents, strict=True):
            paths.append([*paths[parent + 1], node])
        level, fed = [0] if nodes else [], 0  # rows: the root and the nodes that are fed, in order
        while level:
            parents = [ROOT if row == 0 else turn.parents[row - 1] + 1 for row in level]
            logits = source.extend(torch.tensor([paths[row][-1] for row in level]), parents)
            yield from ((list(text), paths[row], logits[place].clone()) for place, row in enumerate(level))
            fed = level[-1]
            level = [row for row in range(fed + 1, turn.fed + 1) if turn.parents[row - 1] + 1 in level]
        session.run_tree(
            torch.tensor([root]), DraftTree(torch.tensor(nodes, dtype=torch.long), turn.parents, (-1,) * len(nodes))
        )
        said = [root, *(nodes[node] for node in turn.accepted)]
        path = session.path(turn.accepted)
        source.commit(path, said)
        session.commit(path)
        text += said
    session.close()


def compare(case: Case, source: Eagle3DraftModel, runtime: Runtime, length: int) -> int:
    """Assert that the drafts are the expected ones; returns the number of rows."""
    rows = 0
    for text, path, logits in drafts(case.stack, source, runtime, length):
        known = list(case.facts.draft_tokens)
        expected = case.expected(text, path)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)  # rotary tables are those of float32
        assert known == (list(range(VOCABULARY)) if source.predicted is None else source.predicted.tolist())
        rows += 1
    return rows


def graphed() -> Runtime:
    """Small buckets, so that the text grows beyond one of them."""
    return cuda_graphs.Graphed(16)


@pytest.mark.parametrize(
    ("dialect", "runtime", "length"),
    [("eagle", Runtime, 3), ("specforge", graphed, 4), ("speculators", graphed, 2), ("modelopt", Runtime, 1)],
)
def test_drafts_are_those_of_a_loop_without_a_cache(
    cases: Callable[[str], Case], dialect: str, runtime: Callable[[], Runtime], length: int
) -> None:
    case = cases(dialect)
    assert compare(case, Eagle3DraftModel(case.head), runtime(), length) == 15


FAULTS = {  # of the source, and what stands there instead
    "hidden states of the next boundary": ("__init__", "head.reading.taps", "[tap + 1 for tap in head.reading.taps]"),
    "the feature of a token's own position": ("_run_pairs", "[None]), aux]", "[None]), aux.roll(-1, 1)]"),
    "entries of accepted tokens stay those of the draft": (
        "commit", "self.session.commit(range(self._pairs))\n        self._aux_hidden, new_tokens = aux, tokens[1:]",
        "kept = min(self.session.rows, self._pairs + len(rows) - 1)\n        self.session.commit(range(kept))\n"
        "        old = kept - self._pairs\n        self._aux_hidden, new_tokens = aux[:, old:], tokens[1 + old :]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    case = cases("specforge")
    plant(monkeypatch, Eagle3DraftModel, *FAULTS[fault])
    with pytest.raises(AssertionError, match="not close"):
        compare(case, Eagle3DraftModel(case.head), Runtime(), 3)
