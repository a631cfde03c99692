"""ADED, adaptive draft-verification (arXiv 2407.12021): its tables and figures.

The n-grams read only the tokens of a target. So recorded answers (--transcripts) replace the target, except for times
and sampling. The paper's accept length is our τ. It calls its t a threshold of tri-gram probability "at 12". Here this
means the twelve likeliest successors; Table t of papers.md has other readings (commit 5616baab). The paper's tree has
up to n · l = 96 nodes. The tree here has 64, as many as REST's; another row has 96. Commit 93d34beb counted REST's rows
by code of its own, and with 96 nodes too.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.draft_models.ngrams.table import map_table
from outrider.inference.settings.method import MethodConfig, NgramConfig
from outrider.inference.settings.sampling import SamplingConfig
from papers.claims import Claim, Row, Table
from papers.rest import NO_REST, Retrieved, measured_by

ARXIV = "2407.12021"
SOURCES = ("ngrams",)
PAPER = NgramConfig(search="puct")
EARLY = replace(PAPER, c1=2.414)  # of Figs. 4a and 5
GREEDY = replace(PAPER, c1=0.0, c2=1e30)  # E = 0; at C1 = 0 alone it is log((ΣN + 9) / 8)
BEST_FIRST = NgramConfig(depth=10)
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
STRETCHES = tuple(f"late_{at}" for at in (0, 64, 128, 256, 384))
MORE = "ADED accepts more than REST"
SHOWN = ("tau", "per_round", "milliseconds", "speedup")


def drafting(config: NgramConfig) -> MethodConfig:
    return MethodConfig(source="ngrams", ngrams=config)


def tables(*, options: Any, categories: Sequence[str]) -> dict[str, Table]:
    """Every table and figure of the paper, by key."""
    groups = MT_BENCH if options.transcripts else categories
    given = options.table or []
    return {
        "table_1": main_table(options, groups),
        "figure_3": Table("Fig. 3: throughput", never="of its hardware; the speed-ups stand in Table 1"),
        "figure_4a": adaptation(),
        "figure_4b": categories_table(groups),
        "figure_5": sampling(),
        "figure_6": searches(),
        "table_2": corpus_sizes(given),
        "orders": orders(),
        "figure_7": exploration(),
    }


def without_suffixes(where: str | None) -> str:
    """The reason why REST cannot draft from the table in `where`; empty if it can, or if there is no table."""
    there = where is not None and Path(where).is_dir()
    kept = there and "suffixes.order" in map_table(Path(str(where)))[1]
    return "" if not there or kept else "needs tables built with suffixes=true"


def peers(options: Any, groups: Sequence[str]) -> list[Row]:
    """The rows of REST and of Lookahead, whose figures are of an earlier commit."""
    first, rest = options.table[0] if options.table else None, measured_by(Retrieved)
    cells = ("1.97, 1.98, 1.95", "16.31, 25.43, 28.63")
    told = Row("REST, all prompts", measure=rest, paper=cells, never=without_suffixes(first) or NO_REST)
    rows = [told]
    if "instructions" in groups:
        cells = ("2.22, 2.21, 2.11", "14.24, 22.94, 26.03")
        rows.append(replace(told, name="REST, instructions", category="instructions", paper=cells))
    if "code" in groups:
        never = without_suffixes(options.code_table) or NO_REST if options.code_table else "needs --code-table"
        cells = ("2.21, 2.50, 2.29", "14.90, 20.17, 24.91")
        own = Row("REST, code, with a table of code", measure=rest, category="code", paper=cells, never=never)
        rows.append(replace(own, other=options.code_table or ""))
    cells, never = ("1.89, 1.85, 1.83", "18.93, 32.73, 40.53"), "last decoded by commit 93d34beb's papers/peers.py"
    return [*rows, Row("Lookahead, all prompts", paper=cells, never=never)]


def main_table(options: Any, groups: Sequence[str]) -> Table:
    """--code-table: of source code, for the categories "code" (HumanEval) and "instructions" (Alpaca)."""
    paper = {"all prompts": ("2.42, 2.39, 2.29", "12.95, 22.94, 24.96"),
             "instructions": ("2.33, 2.26, 2.21", "12.81, 24.06, 24.62")}  # fmt: skip
    of_code = ("2.67, 2.81, 2.62", "11.24, 19.96, 21.19")
    aded = "ADED, all prompts"
    rows = [
        Row(aded, drafting(PAPER), paper=paper["all prompts"]),
        Row("ADED, 96 nodes", drafting(replace(PAPER, nodes=96))),
    ]
    rows += [Row(f"ADED, {name}", drafting(PAPER), paper=paper.get(name, ()), category=name) for name in groups
             if name not in MT_BENCH]  # fmt: skip
    code_table = options.code_table
    for name, cells in (("code", of_code), ("instructions", ())):
        told = Row(f"ADED, {name}, with a table of code", drafting(PAPER), paper=cells, category=name)
        rows.append(replace(told, other=code_table or "", never="" if code_table else "needs --code-table"))
    rows += [Row("best-first, ten deep, all prompts (ours)", drafting(BEST_FIRST)), *peers(options, groups)]
    claims = [
        Claim("ADED is faster than plain decoding", "speedup", (aded,), "above", 1.0),
        Claim(MORE, "tau", ("REST, all prompts", aded)),
        Claim("and a fifth more", "tau", ("REST, all prompts", aded), scale=(1.2, 1.0)),
        Claim("and more than Lookahead", "tau", ("Lookahead, all prompts", aded)),
        Claim("its accept length is above 2.2, as in all of the paper's cells", "tau", (aded,), "above", 2.2),
    ]
    if "code" in groups:
        terms = ("REST, code, with a table of code", "ADED, code, with a table of code")
        claims.append(Claim("also on code, with a table of code", "tau", terms, of=MORE))
    if "instructions" in groups:
        terms = ("REST, instructions", "ADED, instructions")
        claims.append(Claim("also on instructions", "tau", terms, of=MORE))
    return Table(
        "Table 1: accept length and latency (Vicuna-7B, 13B, 33B; MT-Bench, Alpaca, HumanEval)",
        SHOWN,
        tuple(rows),
        tuple(claims),
        ("accept length", "ms/token"),
        note="The first rows' figures of the paper are of MT-Bench. ADED and REST draft from the same corpus, 64 nodes "
        "at most where no number is said.",
    )


def adaptation() -> Table:
    adapted, built = "adapted", "as built"
    rows = (Row(adapted, drafting(EARLY)), Row(built, drafting(replace(EARLY, adapt=False))))
    claims = [Claim("adaptation lifts τ", "tau", (built, adapted))]
    claims += [Claim(f"also from token {name[5:]} on", name, (built, adapted), of=claims[0].says) for name in STRETCHES]
    return Table(
        "Fig. 4a: adaptation, by the length of the output",
        ("tau", *STRETCHES),
        rows,
        tuple(claims),
        note="Stretches of 64 tokens. C1 = 2.414, as in the paper.",
    )


def categories_table(groups: Sequence[str]) -> Table:
    rows = tuple(Row(name, drafting(PAPER), category=name) for name in groups)
    names = tuple(row.name for row in rows)
    claims = (Claim("τ differs little between categories", "tau", names, "level"),)
    note = (
        "The paper says: without significant variations. Here: by less than a tenth, as in all claims of no difference."
    )
    return Table("Fig. 4b: by category", ("tau",), rows, claims if len(rows) > 1 else (), note=note)


def sampling() -> Table:
    """The paper does not say the temperature of (a): it is 1 here."""
    by_p = [Row(f"top-p {p}", drafting(EARLY), SamplingConfig(temperature=1.0, top_p=p), x=p, line="top-p")
            for p in (0.5, 0.7, 0.85, 0.95, 1.0)]  # fmt: skip
    by_t = [Row(f"temperature {t}", drafting(EARLY), SamplingConfig(temperature=t), x=t, line="temperature")
            for t in (0.0, 0.25, 0.5, 0.75, 1.0)]  # fmt: skip
    return Table(
        "Fig. 5: top-p and temperature",
        ("tau", "speedup"),
        (*by_p, *by_t),
        (
            Claim("(a) top-p changes τ by less than a tenth", "tau", tuple(row.name for row in by_p), "level"),
            Claim("(b) neither does temperature", "tau", tuple(row.name for row in by_t), "level"),
        ),
        plot="tau",
        xlabel="top-p, or temperature",
        note="Top-p at temperature 1. The bounds are ours. The paper says: not significantly, and negligible.",
    )


def searches() -> Table:
    counts = (10, 25, 50, 100, 150, 300)
    rows = [Row(f"{s} searches", drafting(replace(PAPER, iterations=s)), x=s) for s in counts]
    greedy = Row("150 searches, greedy (E = 0)", drafting(GREEDY), paper=("1.493",))
    return Table(
        "Fig. 6: the number of searches, and greedy search",
        ("tau", "per_round"),
        (*rows, greedy, Row("best-first, ten deep, 64 nodes (ours)", drafting(BEST_FIRST))),
        (
            Claim("150 searches beat 10", "tau", ("10 searches", "150 searches")),
            Claim("the tree search beats greedy search", "tau", (greedy.name, "150 searches")),
        ),
        ("accept length",),
        plot="tau",
        xlabel="searches",
        note="Greedy takes the likeliest successor at every node that it has. It completes sentences by sampling too.",
    )


def corpus_sizes(given: Sequence[str]) -> Table:
    rows = tuple(Row(f"table {Path(where).name}", drafting(PAPER), other=where) for where in given)
    names = tuple(row.name for row in rows)
    return Table(
        "Table 2: the size of the corpus (121k and 774k conversations: 2.30 and 2.42)",
        ("tau", "milliseconds", "speedup"),
        rows,
        (Claim("a larger corpus lifts τ", "tau", names[::-1]),) if len(rows) > 1 else (),
        note="" if len(rows) > 1 else "Give several --table, from the largest to the smallest.",
    )


def orders() -> Table:
    names = {2: "bi-grams", 3: "tri-grams", 4: "4-grams"}
    paper = {2: "1.80", 3: "2.30", 4: "1.82"}
    rows = tuple(Row(name, drafting(replace(PAPER, order=n)), paper=(paper[n],)) for n, name in names.items())  # type: ignore[arg-type]
    return Table(
        "Effect of the n-gram order (in the text of the paper)",
        ("tau", "per_round"),
        rows,
        (
            Claim("tri-grams beat bi-grams", "tau", (names[2], names[3]), of="tri-grams are best"),
            Claim("tri-grams beat 4-grams", "tau", (names[4], names[3]), of="tri-grams are best"),
        ),
        ("accept length",),
    )


def exploration() -> Table:
    c1 = [Row(f"C1 = {c}", drafting(replace(PAPER, c1=c)), x=c, line="C1") for c in (0.0, 0.5, 2.414, 8.0, 32.0, 128.0)]
    c2 = [Row(f"1/C2 = {c:g}", drafting(replace(EARLY, c2=1 / c)), x=c, line="1/C2")
          for c in (0.01, 0.125, 1.0, 10.0, 100.0, 1e4, 1e8)]  # fmt: skip
    return Table(
        "Fig. 7: exploration",
        ("tau", "per_round"),
        (*c1, *c2),
        tuple(
            Claim(f"τ rises with moderate exploration and falls at the extremes ({line})", "tau",
                  tuple(row.name for row in rows), "peaks", of="τ rises with moderate exploration")
            for line, rows in (("C1", c1), ("1/C2", c2))
        ),
        plot="tau",
        xlabel="C1, or 1/C2",
        note="C2 at C1 = 2.414, as with a large C1 it hardly counts.",
    )  # fmt: skip
