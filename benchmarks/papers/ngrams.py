"""`ngrams` on recorded answers, by corpus. No paper has it, so its claims are ours.

Of two --table the first is counted without the answers of the models that are replayed, the second with them.
MT-Bench's questions 81 and 130 are instructions of AlpacaEval too.
"""

from pathlib import Path
from typing import Any

from outrider.inference.settings.method import NgramConfig
from papers.aded import drafting
from papers.claims import Claim, Counts, Row, Table
from papers.measuring import Asked, Bench, continued, counts_of

SOURCES = ("ngrams",)
SHARED = ("81", "130")
MIXED = NgramConfig(evidence="mixed", depth=30)  # the preset `ngrams`, with 64 nodes


def tables(*, options: Any, **_: Any) -> dict[str, Table]:
    rows = [Row(f"`ngrams`, {Path(where).name}", drafting(MIXED), other=where, measure=apart)
            for where in options.table or ()]  # fmt: skip
    said = {"tau": "the models' own answers raise τ", "tau_new": "also without questions 81 and 130"}
    claims = [Claim(says, quantity, tuple(row.name for row in rows[:2]), ours=True) for quantity, says in said.items()]
    shown = (*said, "tau_asked", "per_round")
    return {"corpora": Table("By corpus", shown, tuple(rows), tuple(claims) if len(rows) > 1 else ())}


def apart(bench: Bench, row: Row, asked: Asked) -> Counts:
    """The counts of a row, those of the questions in `SHARED` apart."""
    counts = counts_of(continued(bench, row, asked))
    which = "asked" if asked.id.partition("/")[0] in SHARED else "new"
    return counts | {f"{which}_{name}": counts[name] for name in ("tokens", "rounds")}
