"""Tables and other programs draft from a corpus on recorded answers."""

from types import SimpleNamespace

import torch

from outrider.draft_models.ngrams.table import TrigramTable
from tests.exact_distributions import paths

PROMPT, TEXT = [f"p{n}" for n in range(30)], [f"t{n}" for n in range(30)]


def test_every_table_is_a_row_and_shared_questions_are_counted_apart() -> None:
    """A corpus that has the answer drafts it, another does not; questions by their whole number."""
    from papers.measuring import Asked, Bench
    from papers.ngrams import tables

    text = [*range(20), *range(19, -1, -1)]
    found = [TrigramTable.from_documents([one], (2, 3, 4), 30, "d", suffixes=True) for one in (text, [25] * 9)]
    bench = Bench(None, {}, 30, 4, others={"runs/told": found[0], "runs/other": found[1]})
    table = tables(options=SimpleNamespace(table=list(bench.others)))["corpora"]
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
    from papers.rest import Told

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
