"""MCSD, Multi-Candidate Speculative Decoding (arXiv 2401.06706): its tables and figures.

A configuration 4x2x2 is a tree in which every node of the first level has two children, and so on. The paper's γ is
its depth, its budget the number of its leaves, its block efficiency our τ. Its acceptance rate α is that of a node: one
of the k candidates there is accepted. A pair of models is an entry of the results, so Table 5 has as many as were run.

All counts are expected ones, of texts that plain decoding said (`papers.expected`). α at k = 4 is that of 4x4x4, in
which every node has four candidates.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from outrider.inference.settings.method import MethodConfig, StructureConfig
from outrider.inference.settings.sampling import SamplingConfig
from papers.claims import Claim, Row, Table
from papers.expected import Expected
from papers.judging import UNFIT

ARXIV = "2401.06706"
SOURCES = ("small_lm",)
GREEDY, SAMPLED = SamplingConfig(), SamplingConfig(temperature=1.0)
LAWS = {0: GREEDY, 1: SAMPLED}
NewRow = Callable[..., Row]
CANDIDATES = (1, 2, 4, 8, 16, 32, 64)
# A chain and the tree of the same depth that the paper found best somewhere, within 32 leaves.
PAIRS = {
    "1x1x1x1x1": "4x2x2x1x1", "1x1x1x1": "8x2x1x1", "1x1x1": "16x1x1", "1x1": "16x2", "1": "32",
}  # fmt: skip
LONGER = ("1x1x1x1x1x1x1", "1x1x1x1x1x1x1x1x1")  # chains, of which the paper takes the best as well
SHOWN = ("tau", "per_round", "speedup")
PAPERS: tuple[dict[tuple[str, str], tuple[str]], ...] = ({  # Table 2, by temperature
    ("alpaca", "1x1x1x1x1"): ("2.71×, 3.19",), ("alpaca", LONGER[1]): ("2.89×, 3.70",),
    ("alpaca", "4x2x2x1x1"): ("3.06×, 3.93",), ("wmt", "1x1x1x1x1"): ("2.02×, 2.38",),
    ("wmt", LONGER[0]): ("2.06×, 2.52",), ("wmt", "4x2x2x1x1"): ("2.24×, 2.87",),
}, {
    ("alpaca", "1x1x1x1"): ("1.69×, 1.98",), ("alpaca", "1x1x1x1x1"): ("1.73×, 2.02",),
    ("alpaca", "8x2x1x1"): ("2.17×, 2.71",), ("wmt", "1x1x1x1x1"): ("1.43×, 1.69",),
})  # fmt: skip


def tree(config: str, draw: Any = "without_replacement", verify: Any = "auto") -> MethodConfig:
    shape = StructureConfig(kind="k_config", widths=tuple(map(int, config.split("x"))), draw=draw)
    return MethodConfig(source="small_lm", structure=shape, verify=verify)


def tables(*, options: Any, categories: Sequence[str]) -> dict[str, Table]:
    """Every table and figure of the paper, by key."""
    expected = Expected()

    def row(name: str, method: MethodConfig, law: SamplingConfig, paper: tuple[str, ...] = (), **others: Any) -> Row:
        return Row(name, method, law, paper, measure=expected, **others)

    return {
        "table_1": acceptance_rates(row, categories),
        "figure_3": more_candidates(row),
        "tables_2_3": chains_and_trees(row, categories),
        "figure_4": budgets(row),
        "table_4": verification(row),
        "table_5": pairs(row, categories),
    }


def acceptance_rates(row: NewRow, categories: Sequence[str]) -> Table:
    """By prompts and by temperature, with one candidate."""
    rows, claims = [], []
    paper = {(0, "alpaca"): ("0.76", "0.49"), (0, "wmt"): ("0.55", "0.36"),
             (1, "alpaca"): ("0.51", "0.36"), (1, "wmt"): ("0.39", "0.25")}  # fmt: skip
    for t, law in LAWS.items():
        for name in ("all prompts", *categories):
            category, cells = name if name in categories else "", paper.get((t, name), ())
            rows.append(row(f"{name}, T = {t}", tree("1x1x1x1"), law, cells, category=category))
        if {"alpaca", "wmt"} <= set(categories):
            said = f"translations are accepted less often than answers to Alpaca (T = {t})"
            terms = (f"wmt, T = {t}", f"alpaca, T = {t}")
            claims.append(Claim(said, "alpha_1", terms, of="translations are accepted less often"))
    for name in ("all prompts", *categories):
        said = f"candidates are accepted more often under greedy decoding ({name})"
        terms = (f"{name}, T = 1", f"{name}, T = 0")
        claims.append(Claim(said, "alpha_1", terms, of="candidates are accepted more often under greedy decoding"))
    return Table(
        "Table 1: α with one candidate (LLaMA-68M; Alpaca, WMT)",
        ("alpha_1", "tau"),
        tuple(rows),
        tuple(claims),
        ("for LLaMA-13B", "for Vicuna-13B"),
    )


def more_candidates(row: NewRow) -> Table:
    """One token ahead, each k by itself: at which nodes a round stands depends on k, so α need not grow."""
    rows, claims = [], []
    for t, law in LAWS.items():
        names = {k: f"k = {k}, T = {t}" for k in CANDIDATES}
        rows += [row(names[k], tree(str(k)), law, x=float(k), line=f"T = {t}") for k in CANDIDATES]
        claims.append(Claim(f"α grows with k, up to 32 (T = {t})", "alpha", (names[1], names[32]), of="α grows with k"))
        claims.append(Claim(f"beyond k = 32 it hardly does (T = {t})", "alpha", (names[32], names[64]), "level",
                            of="beyond k = 32 it hardly does"))  # fmt: skip
    return Table(
        "Fig. 3: α by the number of candidates k",
        ("alpha",),
        tuple(rows),
        tuple(claims),
        plot="alpha",
        xlabel="k",
        note="Trees of one level, each decoded by itself. Sampled without replacement.",
    )


def chains_and_trees(row: NewRow, categories: Sequence[str]) -> Table:
    """Tables 2, 3, 6 and 7: SD with the γ of the tree, SD with other γ, and trees of 32 leaves."""
    rows, claims = [], []
    for t, law in LAWS.items():
        rows += [row(f"{one}, T = {t}", tree(one), law) for one in (*PAIRS, *LONGER, *PAIRS.values())]
        for chain, wide in PAIRS.items():
            said = f"{wide} emits more a round than the chain of its depth (T = {t})"
            terms = (f"{chain}, T = {t}", f"{wide}, T = {t}")
            claims.append(Claim(said, "tau", terms, of="trees emit more a round than chains"))
        best = ("4x2x2x1x1", "8x2x1x1")[t]  # the paper's, at this temperature
        for chain in (*PAIRS, *LONGER):
            terms = (f"{chain}, T = {t}", f"{best}, T = {t}")
            claims.append(Claim(f"{best} is faster than {chain} (T = {t})", "speedup", terms, of="trees are faster"))
        for chain in LONGER:
            terms = (f"{chain}, T = {t}", f"{best}, T = {t}")
            claims.append(Claim(f"{best} emits more a round than {chain} (T = {t})", "tau", terms,
                                of="trees emit more a round than chains"))  # fmt: skip
        chains = (("1x1x1x1x1", *LONGER), ("1x1x1x1", "1x1x1x1x1"))[t]
        for name, config in itertools.product(categories, (*chains, best)):
            own, cells = f"{config}, {name}, T = {t}", PAPERS[t].get((name, config), ())
            rows.append(row(own, tree(config), law, cells, category=name))
    return Table(
        "Tables 2, 3, 6 and 7: chains and trees (LLaMA-33B with LLaMA-68M; Alpaca, WMT)",
        SHOWN,
        tuple(rows),
        tuple(claims),
        ("speed-up, block efficiency",),
        note="Table 3 is of a slower drafter, for which shorter drafts pay. Each pair of models is an entry.",
    )


def budgets(row: NewRow) -> Table:
    """Fig. 4, with γ = 2."""
    by_budget = {8: ("4x2", "8x1", "2x4"), 16: ("4x4", "8x2", "16x1", "2x8"), 32: ("8x4", "16x2", "32x1", "4x8")}
    rows = [
        row(f"{config}, T = {t}", tree(config), law, x=budget, line=f"T = {t}")
        for t, law in LAWS.items()
        for budget, configs in by_budget.items()
        for config in configs
    ]
    claims = []
    for t in LAWS:
        for falling, rising in (("4x2", "2x4"), ("8x2", "2x8"), ("8x4", "4x8")):
            said, terms = f"{falling} beats {rising} (T = {t})", (f"{rising}, T = {t}", f"{falling}, T = {t}")
            claims.append(Claim(said, "tau", terms, of="falling configurations beat rising ones"))
        for budget, same in ((16, ("4x4", "8x2", "16x1")), (32, ("8x4", "16x2", "32x1"))):
            terms = tuple(f"{config}, T = {t}" for config in same)
            said = f"falling configurations of {budget} leaves do alike (T = {t})"
            claims.append(Claim(said, "tau", terms, "level", of="falling configurations of a budget do alike"))
        more = (f"8x2, T = {t}", f"16x2, T = {t}")
        claims.append(Claim(f"32 leaves emit more a round than 16 (T = {t})", "tau", more, of="more leaves emit more"))
        claims.append(Claim(f"but are slower (T = {t})", "speedup", more[::-1], of="but are slower"))
    title = "Fig. 4: configurations of a budget, γ = 2"
    return Table(title, SHOWN, tuple(rows), tuple(claims), plot="tau", xlabel="leaves")


def verification(row: NewRow) -> Table:
    rows = (
        row("MCSS without replacement", tree("8x2x1x1"), SAMPLED, ("2.71", "2.17×")),
        row("MCSS with replacement", tree("8x2x1x1", "with_replacement"), SAMPLED, ("2.55", "2.04×")),
        row("MCNS", tree("8x2x1x1", verify="naive"), SAMPLED, ("1.65", "1.33×")),
        Row("MCSS without replacement, no tree attention", paper=("2.68", "1.84×"), never=UNFIT),
    )
    without, replaced, naive, _ = (each.name for each in rows)
    return Table(
        "Table 4: verification rules and tree attention (LLaMA-33B; Alpaca, T = 1)",
        ("tau", "verified", "verified_apart", "speedup"),
        rows,
        (
            Claim("without replacement beats with", "tau", (replaced, without)),
            Claim("but by little: 7 % at most", "tau", (without, replaced), scale=(1.0, 1.07)),
            Claim("with replacement it beats naive sampling by 9 %", "tau", (naive, replaced), scale=(1.09, 1.0)),
            Claim("and so it does without", "tau", (naive, without), scale=(1.09, 1.0)),
        ),
        ("block efficiency", "speed-up"),
        note="Here Alpaca and WMT. The paper's four pairs are 6.3 % to 9.6 %. Verified tokens a round, as a tree and "
        "as a batch of its paths, which copies the keys and values of the text for every path. Draws that repeat are "
        "one node, so that trees drawn with replacement are smaller; they are not counted.",
    )


def pairs(row: NewRow, categories: Sequence[str]) -> Table:
    rows, claims = [], []
    paper = {(0, 1): ("0.76", "0.49", "0.86"), (0, 4): ("0.88", "0.67", "0.95"),
             (1, 1): ("0.51", "0.35", "0.63"), (1, 4): ("0.72", "0.57", "0.81")}  # fmt: skip
    for t, law in LAWS.items():
        for name in ("all prompts", *categories):
            own = {k: f"k = {k}, T = {t}, {name}" for k in (1, 4)}
            category = name if name in categories else ""
            cells = {k: paper[t, k] if name == "alpaca" else () for k in own}
            rows += [row(own[k], tree("x".join(3 * [str(k)])), law, cells[k], category=category) for k in own]
            times, said = ((1.1, "a tenth"), (1.25, "a quarter"))[t]
            claims.append(Claim(f"four candidates raise α by {said} (T = {t}, {name})", "alpha", (own[1], own[4]),
                                scale=(times, 1.0), of=f"four candidates raise α by {said} (T = {t})"))  # fmt: skip
    return Table(
        "Tables 5 and 8: α with one candidate and with four, by pair",
        ("alpha", "tau"),
        tuple(rows),
        tuple(claims),
        ("LLaMA-68M, 13B", "LLaMA-68M, Vicuna-13B", "OPT-125M, 13B"),
        note="1x1x1 and 4x4x4. On Alpaca every pair of the paper gains so much. Other pairs, of OPT or Llama models of "
        "any size or with a fine-tuned drafter, are further entries. The copy of the paper that we read lacks its "
        "formulas, also this k, which is read as four.",
    )
