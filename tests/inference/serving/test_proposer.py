"""For a table vLLM gets the chain that our drafter would draft from it, for every request of a batch."""

import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from outrider.draft_models.ngrams.table import TrigramTable
from outrider.inference.drafters.ngrams.drafter import MixedDrafter
from outrider.inference.serving.proposer import TABLE_VARIABLE, NgramProposer, ServedText, chain_rounds
from outrider.inference.settings.method import NgramConfig
from tests.faults import plant
from tests.inference.ngram_cases import FakeSession, make_table
from tests.inference.serving.vllm_stand_in import Request, Runner, vllm_config
from tests.refusals import refusal

VOCABULARY, MOST, LONGEST = 5, 4, 80
TABLES = {
    "grams": make_table(VOCABULARY),
    "suffixes": make_table(VOCABULARY, suffixes=True),
    "trigrams": make_table(VOCABULARY, orders=(3,)),
}
EVERYTHING = 2000  # nodes: more than all chains of MOST tokens
IDS = st.integers(0, VOCABULARY)  # one more than the table
REQUESTS = st.builds(
    Request, st.lists(IDS, min_size=1, max_size=20), st.lists(IDS, min_size=1, max_size=12), st.integers(0, 2)
)


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tables")
    for name, table in TABLES.items():
        table.save(folder / name)
    return {name: folder / name for name in TABLES}


def opened(place: Path, longest: int = LONGEST, most: int = MOST, vocabulary: int = VOCABULARY + 1) -> NgramProposer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TABLE_VARIABLE, str(place))
        proposer = NgramProposer(vllm_config(most, longest, vocabulary))
    proposer.load_model(object(), some="word")
    return proposer


def own_chains(table: TrigramTable, request: Request, longest: int = LONGEST) -> list[tuple[int, list[int]]]:
    """The drafts of this request by our drafter: from a tree with every chain, the likeliest child at each level."""
    drafter = MixedDrafter(table, NgramConfig(evidence="mixed", nodes=EVERYTHING, depth=MOST))
    drafter.begin(FakeSession(list(request.prompt)), None, None)  # type: ignore[arg-type]
    said, new, drafts = 0, list(request.answer[:1]), []
    while True:
        said += len(new)
        tree = drafter.draft(torch.tensor(new[-1:]), min(MOST, longest - len(request.prompt) - said))
        assert len(tree) < EVERYTHING
        chain, node = [], -1
        while node in tree.parents:
            node = tree.parents.index(node)
            chain.append(int(tree.tokens[node]))
        drafts.append((said, chain))
        left = list(request.answer[said:])
        if not left:
            return drafts
        accepted = next((i for i, pair in enumerate(zip(chain, left[:-1], strict=False)) if len({*pair}) > 1), None)
        kept = min(len(chain), len(left) - 1) if accepted is None else accepted
        drafter.commit(tree, [], [new[-1], *left[:kept]])
        new = left[: kept + 1]


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(sorted(TABLES)), st.lists(REQUESTS, min_size=1, max_size=5), st.integers(1, 3), st.booleans())
def test_it_proposes_the_chains_of_our_drafter(
    places: dict[str, Path], name: str, requests: list[Request], slots: int, pad: bool
) -> None:
    """For texts of different lengths that begin, end, wait and move between the slots of a batch.

    No text continues another that has ended: that would be the next turn of a conversation.
    """
    assume(not any(_may_go_on(one, other) for one in requests for other in requests if one is not other))
    Runner(opened(places[name]), requests, slots, LONGEST, pad=pad).run()
    for request in requests:
        assert request.drafts == own_chains(TABLES[name], request)


@settings(deadline=None, max_examples=10)
@given(st.sampled_from(sorted(TABLES)), REQUESTS)
def test_the_rounds_of_a_known_text(places: dict[str, Path], name: str, request: Request) -> None:
    """They are those of an engine that emits it."""
    rounds = chain_rounds(TABLES[name], request.prompt, request.answer, MOST)
    Runner(opened(places[name]), [request], 1, LONGEST).run()
    said = [count for count, _ in request.drafts if count < len(request.answer)]
    drafted = [len(draft) for count, draft in request.drafts if count < len(request.answer)]
    assert [many for many, _, _ in rounds] == drafted
    assert [len(tokens) for _, tokens, _ in rounds] == [b - a for a, b in pairwise([*said, len(request.answer)])]
    assert [token for _, tokens, _ in rounds for token in tokens] == [*request.answer[1:]]


def _may_go_on(later: Request, earlier: Request) -> bool:
    """Whether `later` begins with all of the prompt of `earlier` and some of its answer."""
    text = [*earlier.prompt, *earlier.answer]
    agree = next((i for i, pair in enumerate(zip(text, later.prompt, strict=False)) if len({*pair}) > 1), None)
    return (min(len(text), len(later.prompt)) if agree is None else agree) > len(earlier.prompt)


def test_the_next_turn_of_a_conversation_goes_on_with_what_was_learnt(places: dict[str, Path]) -> None:
    """Requests have no names, so the user's turn is then learnt like the answer; in a new text it is a prompt."""
    first, later = Request([0], [0]), Request([0, 0, 0, 0, 1], [0])
    Runner(opened(places["grams"]), [first, later], 1, LONGEST).run()
    text = np.array([*later.prompt, *later.answer])
    starts = [np.array(one.prompt) for one in (first, later)]
    gone_on, anew = (ServedText(TABLES["grams"], LONGEST, start).draft(text, MOST) for start in starts)
    assert later.drafts == [(1, gone_on)]
    assert gone_on != anew


def some_requests() -> list[Request]:
    generator = np.random.default_rng(4)
    sizes = [(9, 11), (3, 12), (17, 2), (6, 9), (1, 5)]
    return [Request(*(generator.integers(0, VOCABULARY, size).tolist() for size in pair)) for pair in sizes]


FAULTS = {
    "none": None,
    "a context lacks its latest token": ("draft", "draft_end, 1", "draft_end - 1, 1"),
    "the longest context lacks its oldest token": (
        "__init__", "table, _CONFIG", "table, type(_CONFIG)(evidence='mixed', longest=_CONFIG.longest - 1)",
    ),
    "the first new token is not learnt": ("draft", "self._ids, old_length, self", "self._ids, old_length + 1, self"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_what_it_reads_is_seen(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The oldest token is missed only if it decides: 1 follows 3, and 2 follows 0."""
    between = np.random.default_rng(5).integers(4, VOCABULARY, NgramConfig.longest - 1).tolist()
    told, room = [3, *between, 1, 0, *between, 2, 0, *between, 2], 400
    requests = [*some_requests(), Request(told, [*told, *told, *told])]
    if planted := FAULTS[fault]:
        plant(monkeypatch, ServedText, *planted)
    proposer = opened(places["suffixes"], room)
    Runner(proposer, requests, 2, room).run()
    same = all(request.drafts == own_chains(TABLES["suffixes"], request, room) for request in requests)
    assert same == (fault == "none")


def test_a_text_is_learnt_once_in_any_slot(places: dict[str, Path]) -> None:
    """Also two texts with a common prefix. For a batch of two, at most two texts are kept."""
    begun: list[int] = []

    class Counted(ServedText):
        def __init__(self, table: TrigramTable, room: int, prompt: np.ndarray):
            begun.append(len(prompt))
            super().__init__(table, room, prompt)

    proposer = opened(places["grams"])
    proposer.text = Counted
    requests = [*some_requests(), *some_requests()[:2], *some_requests()[:2]]
    runner = Runner(proposer, requests, 2, LONGEST)
    runner.run(lambda: _at_most(proposer, 2))
    assert sorted(begun) == sorted(len(request.prompt) for request in requests)


def _at_most(proposer: NgramProposer, texts: int) -> None:
    assert len(proposer._texts) <= texts


def test_no_draft_goes_beyond_the_models_length(places: dict[str, Path]) -> None:
    request = Request([0, 1, 2, 0, 1, 2, 0, 1], [2, 0, 3, 1, 4, 2])
    longest = len(request.prompt) + len(request.answer)
    Runner(opened(places["grams"], longest), [request], 1, longest).run()
    assert request.drafts == own_chains(TABLES["grams"], request, longest)
    left = [longest - len(request.prompt) - said for said, _ in request.drafts]
    assert left[-1] == 0
    assert [len(draft) for _, draft in request.drafts] == [min(MOST, room) for room in left]


def test_a_request_without_evidence_drafts_nothing(places: dict[str, Path]) -> None:
    """An empty batch, an empty text, only padding, or a text with placeholders; other requests draft as usual."""
    proposer = opened(places["grams"])

    def proposed(sampled: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> list[list[int]]:
        ids = np.full((max(1, len(texts)), LONGEST), 3, np.int32)
        for row, text in zip(ids, texts, strict=False):
            row[: len(text)] = text
        return proposer.propose(sampled, np.array([*map(len, texts)], np.int32), ids)

    assert proposed([], []) == []
    known, waits, padding, unknown = [0, 1, 2, 0, 1], [0, 1], [1, 2, 0, 1], [0, 1, -1, 1]
    drafts = proposed([[1], [], [-1, -1], [1]], [known, waits, padding, unknown])
    assert [len(draft) for draft in drafts] == [MOST, 0, 0, 0]
    assert proposed([[1, -1]], [known]) == [drafts[0]]  # the same text again, without new tokens
    beyond = [VOCABULARY, VOCABULARY]
    assert proposed([[VOCABULARY]], [beyond])[0][:1] == [VOCABULARY]  # by the repeat within the text


def test_what_cannot_serve_is_refused_when_the_server_starts(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(TABLE_VARIABLE, raising=False)
    config: Any = vllm_config(MOST, LONGEST, VOCABULARY)
    refusal("OUTRIDER_TABLE='': expected the directory of an n-gram table", NgramProposer, config)
    refusal(r"ids beyond the target's 4", opened, places["grams"], vocabulary=VOCABULARY - 1)
    refusal("outrider build-trigrams", opened, tmp_path)
    del config.model_config.get_vocab_size
    refusal(r"vLLM's config: .*get_vocab_size.*; expected what vLLM 0.32 has", NgramProposer, config)


@pytest.mark.slow
def test_importing_it_needs_neither_vllm_nor_torch() -> None:
    said = "import sys, inference.serving.proposer; print(*(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    loaded = {*done.stdout.split()} - {*sys.stdlib_module_names}
    assert loaded >= {"inference", "numpy", "numba"}
    assert not loaded & {"vllm", "torch", "transformers", "datasets", "hydra", "omegaconf"}
