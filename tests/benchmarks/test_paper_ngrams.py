"""Tables and other programs draft from a corpus on recorded answers."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from outrider.draft_models.ngrams.suffixes import separated
from outrider.draft_models.ngrams.table import TrigramTable
from tests.exact_distributions import paths

ROOT = Path(__file__).parents[2]
PROMPT, TEXT = [f"p{n}" for n in range(30)], [f"t{n}" for n in range(30)]


def test_every_table_is_a_row_and_shared_questions_are_counted_apart() -> None:
    """A corpus that has the answer drafts it, another does not; questions by their whole number."""
    from papers.measuring import Asked, Bench
    from papers.ngrams import tables

    text = [*range(20), *range(19, -1, -1)]
    found = [TrigramTable.from_documents([one], (2, 3, 4), 30, "d", suffixes=True) for one in (text, [25] * 9)]
    bench = Bench(None, {}, 30, 4, others={"runs/told": found[0], "runs/other": found[1]})
    table = tables(options=SimpleNamespace(table=list(bench.others), others=None))["corpora"]
    told, other = table.rows
    assert all(claim.terms == (told.name, other.name) and claim.ours for claim in table.claims)
    for id, which in (("81/turn1", "asked"), ("130/turn2", "asked"), ("810/turn1", "new"), ("13/turn1", "new")):
        asked = Asked(id, "c", tuple(text[:3]), tuple(text[3:]))
        counts = [row.measure(bench, row, asked) for row in (told, other) if row.measure]
        assert counts[0]["rounds"] < counts[1]["rounds"]
        assert all(own[f"{which}_{name}"] == own[name] for own in counts for name in ("tokens", "rounds"))
        assert {"asked_rounds", "new_rounds"} & counts[0].keys() == {f"{which}_rounds"}


def test_a_program_is_asked_of_every_text_and_drafts_what_it_says() -> None:
    """It is asked of the text before every round. Half of its paths are wrong; what they share is drafted once."""
    from papers.measuring import Asked, Bench, counts_of, replayed
    from papers.others import Told

    prompt, answer = [*range(5)], [*range(40, 10, -1)]

    class Program(Told):
        def after(self, text: list[int]) -> list[list[int]]:
            assert text == [*prompt, *answer][: len(text)]
            at = len(text) - len(prompt)
            return [[*answer[at : at + 2], 99], answer[at : at + 3], [98], []]

    program, asked = Program(), Asked("a", "c", tuple(prompt), tuple(answer))
    for _ in "again":
        counts = counts_of(replayed(Bench(None, {}, 100, 4), program, asked))
        assert (counts["tokens"], counts["rounds"], counts["accepted"]) == (29, 8, 21)
    program.text = [*prompt, *answer[:9]]
    first, second, third = answer[10:13]
    whole = [(first,), (first, second), (first, second, 99), (first, second, third), (98,)]
    for limit in range(5):
        tree = program.draft(torch.tensor(answer[9:10]), limit)
        assert set(paths(tree.tokens.tolist(), tree.parents)) == {(), *(one for one in whole if len(one) <= limit)}
        assert len(tree) == sum(len(one) <= limit for one in whole)


# How many tokens each drafts where a text repeats four tokens of a document that the corpus has twice: as many as
# matched, as many as it keeps nodes for the corpus, ten, or all 14 that are left.
AHEAD = {"llama-static": 14, "llama-dynamic": 14, "vllm-suffix": 4, "sglang-11": 8, "sglang-64": 14, "REST": 10}


@pytest.mark.parametrize("name", AHEAD)
def test_a_program_drafts_by_its_own_rule_and_forgets_a_text(name: str) -> None:
    from papers.measuring import Asked, Bench, replayed
    from papers.others import NO_REST, Compiled, Retrieved, Told

    library = ROOT / ".engines" / "others" / f"{name}.so"
    if NO_REST if name == "REST" else not library.exists():
        pytest.skip(f"{name} is not there: make other-ngrams")
    tokens = separated([[*range(1, 21)]] * 2, 100)
    program: Told = Retrieved(tokens, 100) if name == "REST" else Compiled(library, tokens, 100)

    def said(*text: int) -> list[tuple[int, ...]]:
        program.begin(SimpleNamespace(tokens=torch.tensor(text[:-1])), None, None)  # type: ignore[arg-type]
        tree = program.draft(torch.tensor(text[-1:]), 99)
        return paths(tree.tokens.tolist(), tree.parents)

    expected = tuple(range(7, 7 + AHEAD[name]))
    assert max(said(90, 3, 4, 5, 6), key=len) == expected
    replayed(Bench(None, {}, 100, 4), program, Asked("a", "c", (80, 81), (82, 83, 84, 82, 83, 84)))
    assert said(80, 81, 82, 83) == [()]
    assert max(said(90, 3, 4, 5, 6), key=len) == expected
