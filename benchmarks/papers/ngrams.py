"""`ngrams` on recorded answers, by corpus, and beside other programs. No paper has it, so its claims are ours.

Of two --table the first is counted without the answers of the models that are replayed, the second with them.
MT-Bench's questions 81 and 130 are instructions of AlpacaEval too. Other programs (see others.py), whose libraries are
in the folder --others, draft from the first --table; a corpus is a table of its own.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.inference.settings.method import NgramConfig
from papers.aded import drafting, without_suffixes
from papers.claims import Claim, Counts, Row, Table
from papers.measuring import Asked, Bench, continued, counts_of
from papers.others import programs

SOURCES = ("ngrams",)
SHARED = ("81", "130")
MIXED = NgramConfig(evidence="mixed", depth=30)  # the preset `ngrams`, with 64 nodes
FEW = ("llama", "vllm", "sglang-11")  # they draft chains, of 16 or 24 tokens at most, or 11 nodes


def tables(*, options: Any, **_: Any) -> dict[str, Table]:
    rows = [Row(f"`ngrams`, {Path(where).name}", drafting(MIXED), other=where, measure=apart)
            for where in options.table or ()]  # fmt: skip
    said = {"tau": "the models' own answers raise τ", "tau_new": "also without questions 81 and 130"}
    claims = [Claim(says, quantity, tuple(row.name for row in rows[:2]), ours=True) for quantity, says in said.items()]
    shown = (*said, "tau_asked", "per_round")
    found = {"corpora": Table("By corpus", shown, tuple(rows), tuple(claims) if len(rows) > 1 else ())}
    return found | ({f"others_{Path(options.table[0]).name}": others(options)} if options.others and rows else {})


def others(options: Any) -> Table:
    where, known = options.table[0], programs(options.others)
    ours = {nodes: f"`ngrams`, {nodes} nodes" for nodes in (11, 64)}
    rows = [Row(name, drafting(replace(MIXED, nodes=nodes)), other=where, measure=apart)
            for nodes, name in ours.items()]  # fmt: skip
    rows += [Row(name, other=where, measure=measure, never=without_suffixes(where)) for name, measure in known.items()]
    claims = [Claim(f"`ngrams` emits more a round than {name}, whose drafts may be as large or larger", "tau",
                    (name, ours[11 if name.startswith(FEW) else 64]), ours=True) for name in known]  # fmt: skip
    title = f"Beside other programs, from {Path(where).name}"
    return Table(title, ("tau", "per_round", "acceptance"), tuple(rows), tuple(claims))


def apart(bench: Bench, row: Row, asked: Asked) -> Counts:
    """The counts of a row, those of the questions in `SHARED` apart."""
    counts = counts_of(continued(bench, row, asked))
    which = "asked" if asked.id.partition("/")[0] in SHARED else "new"
    return counts | {f"{which}_{name}": counts[name] for name in ("tokens", "rounds")}
