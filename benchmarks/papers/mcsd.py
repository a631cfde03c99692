"""MCSD, Multi-Candidate Speculative Decoding (arXiv 2401.06706): its tables and figures.

A configuration 4x2x2 is a tree in which every node of the first level has two children, and so on. The paper's γ is
its depth, its budget the number of its leaves, its block efficiency our τ. Its acceptance rate α is that of a node: one
of the k candidates there is accepted. A pair of models is an entry of the results, so Table 5 has as many as were run.
"""

from collections.abc import Sequence
from typing import Any

from inference.settings.method import MethodConfig, StructureConfig
from inference.settings.sampling import SamplingConfig
from papers.claims import Claim, Row, Table

ARXIV = "2401.06706"
SOURCES = ("small_lm",)
GREEDY, SAMPLED = SamplingConfig(), SamplingConfig(temperature=1.0)
LAWS = {0: GREEDY, 1: SAMPLED}
CANDIDATES = (1, 2, 4, 8, 16, 32, 64)
# A chain and the tree of the same depth that the paper found best somewhere, within 32 leaves.
PAIRS = {
    "1x1x1x1x1": "4x2x2x1x1", "1x1x1x1": "8x2x1x1", "1x1x1": "16x1x1", "1x1": "16x2", "1": "32",
}  # fmt: skip
LONGER = ("1x1x1x1x1x1x1", "1x1x1x1x1x1x1x1x1")  # chains, of which the paper takes the best as well
SHOWN = ("tau", "per_round", "speedup")


def tree(config: str, draw: Any = "without_replacement", verify: Any = "exact") -> MethodConfig:
    shape = StructureConfig(kind="k_config", widths=widths(config), draw=draw)
    return MethodConfig(source="small_lm", structure=shape, verify=verify)


def widths(config: str) -> tuple[int, ...]:
    return tuple(int(width) for width in config.split("x"))


def tables(*, categories: Sequence[str], **_: Any) -> dict[str, Table]:
    """Every table and figure of the paper, by key."""
    return {
        "table_1": acceptance_rates(categories),
        "figure_3": more_candidates(),
        "tables_2_3": chains_and_trees(),
        "figure_4": budgets(),
        "table_4": verification(),
        "table_5": pairs(),
        "appendix_c": naive_bound(),
    }


def acceptance_rates(categories: Sequence[str]) -> Table:
    """By prompts and by temperature, with one candidate."""
    rows, claims = [], []
    for t, law in LAWS.items():
        rows.append(Row(f"all prompts, T = {t}", tree("1x1x1x1"), law, ("0.76, 0.55", "0.49, 0.36") if t == 0
                        else ("0.51, 0.39", "0.36, 0.25")))  # fmt: skip
        rows += [Row(f"{name}, T = {t}", tree("1x1x1x1"), law, category=name) for name in categories]
    said = "candidates are accepted more often under greedy decoding"
    claims = [Claim(said, "alpha_1", ("all prompts, T = 1", "all prompts, T = 0"))]
    return Table(
        "Table 1: α with one candidate (LLaMA-68M; Alpaca, WMT)",
        ("alpha_1", "tau"),
        tuple(rows),
        tuple(claims),
        ("for LLaMA-13B", "for Vicuna-13B"),
        note="How much α depends on the prompts shows by their categories.",
    )


def more_candidates() -> Table:
    shown = tuple(f"alpha_{k}" for k in CANDIDATES)
    rows = [Row(f"T = {t}", tree("64"), law) for t, law in LAWS.items()]
    claims = []
    for row in rows:
        claims.append(Claim(f"α grows with k ({row.name})", "", tuple(f"{row.name}@{name}" for name in shown)))
        ends = (f"{row.name}@alpha_32", f"{row.name}@alpha_64")
        claims.append(Claim(f"beyond k = 32 it hardly does ({row.name})", "", ends, "level", 0.05))
    return Table(
        "Fig. 3: α by the number of candidates k",
        shown,
        tuple(rows),
        tuple(claims),
        plot="alpha_*",
        xlabel="k",
        note="One draft of 64 candidates tells all k: they are tried one after the other. Sampled without replacement.",
    )


def chains_and_trees() -> Table:
    """Tables 2, 3, 6 and 7: SD with the γ of the tree, SD with other γ, and trees of 32 leaves."""
    rows, claims = [], []
    paper = (
        {"1x1x1x1x1": "2.71×, 3.19", "4x2x2x1x1": "3.06×, 3.93"},
        {"1x1x1x1": "1.69×, 1.98", "8x2x1x1": "2.17×, 2.71"},
    )
    for t, law in LAWS.items():
        for config in (*PAIRS, *LONGER, *PAIRS.values()):
            cells = (paper[t].get(config, "–"),)
            rows.append(Row(f"{config}, T = {t}", tree(config), law, cells))
        for chain, wide in PAIRS.items():
            said = f"{wide} emits more a round than the chain of its depth (T = {t})"
            claims.append(Claim(said, "tau", (f"{chain}, T = {t}", f"{wide}, T = {t}")))
        best = ("4x2x2x1x1", "8x2x1x1")[t]  # the paper's, at this temperature
        for chain in (*PAIRS, *LONGER):
            terms = (f"{chain}, T = {t}", f"{best}, T = {t}")
            claims.append(Claim(f"{best} is faster than {chain} (T = {t})", "speedup", terms))
        for chain in LONGER:
            terms = (f"{chain}, T = {t}", f"{best}, T = {t}")
            claims.append(Claim(f"{best} emits more a round than {chain} (T = {t})", "tau", terms))
    return Table(
        "Tables 2, 3, 6 and 7: chains and trees (LLaMA-33B with LLaMA-68M; Alpaca)",
        SHOWN,
        tuple(rows),
        tuple(claims),
        ("speed-up, block efficiency",),
    )


def budgets() -> Table:
    """Fig. 4, with γ = 2."""
    by_budget = {8: ("4x2", "8x1", "2x4"), 16: ("4x4", "8x2", "16x1", "2x8"), 32: ("8x4", "16x2", "32x1", "4x8")}
    rows = [
        Row(f"{config}, T = {t}", tree(config), law, x=budget, line=f"T = {t}")
        for t, law in LAWS.items()
        for budget, configs in by_budget.items()
        for config in configs
    ]
    claims = []
    for t in LAWS:
        for falling, rising in (("4x2", "2x4"), ("8x2", "2x8"), ("8x4", "4x8")):
            claims.append(
                Claim(f"{falling} beats {rising} (T = {t})", "tau", (f"{rising}, T = {t}", f"{falling}, T = {t}"))
            )
        for budget, same in ((16, ("4x4", "8x2", "16x1")), (32, ("8x4", "16x2", "32x1"))):
            names = tuple(f"{config}, T = {t}" for config in same)
            claims.append(
                Claim(f"falling configurations of {budget} leaves do alike (T = {t})", "tau", names, "level", 0.1)
            )
        more = (f"8x2, T = {t}", f"16x2, T = {t}")
        claims.append(Claim(f"32 leaves emit more a round than 16 (T = {t})", "tau", more))
        claims.append(Claim(f"but are slower (T = {t})", "speedup", more[::-1]))
    return Table(
        "Fig. 4: configurations of a budget, γ = 2",
        SHOWN,
        tuple(rows),
        tuple(claims),
        plot="tau",
        xlabel="leaves",
    )


def verification() -> Table:
    rows = (
        Row("MCSS without replacement", tree("8x2x1x1"), SAMPLED, ("2.71", "2.17×")),
        Row("MCSS with replacement", tree("8x2x1x1", "with_replacement"), SAMPLED, ("2.55", "2.04×")),
        Row("MCNS", tree("8x2x1x1", verify="naive"), SAMPLED, ("1.65", "1.33×")),
        Row("MCSS without replacement, no tree attention", paper=("2.68", "1.84×"),
            never="this runtime has no other way to verify a tree; what it would verify stands in the first row"),
    )  # fmt: skip
    without, replaced, naive = (row.name for row in rows[:3])
    return Table(
        "Table 4: verification rules and tree attention (LLaMA-33B; Alpaca, T = 1)",
        ("tau", "verified", "verified_apart", "speedup"),
        rows,
        (
            Claim("without replacement beats with", "tau", (replaced, without)),
            Claim("with replacement it beats naive sampling by a fifth", "tau", (naive, replaced), scale=(1.2, 1.0)),
            Claim("and so it does without", "tau", (naive, without), scale=(1.2, 1.0)),
        ),
        ("block efficiency", "speed-up"),
        note="Verified tokens a round, as a tree and as a batch of its paths. A batch also needs a copy of the keys "
        "and values of the text for every path.",
    )


def pairs() -> Table:
    paper = {0: ("0.76 → 0.88", "0.49 → 0.67", "0.86 → 0.95"), 1: ("0.51 → 0.72", "0.35 → 0.57", "0.63 → 0.81")}
    rows = [Row(f"T = {t}", tree("4x1x1x1"), law, paper[t]) for t, law in LAWS.items()]
    return Table(
        "Tables 5 and 8: α with one candidate and with four, by pair",
        ("alpha_1", "alpha_4"),
        tuple(rows),
        tuple(Claim(f"four candidates raise α ({row.name})", "", (f"{row.name}@alpha_1", f"{row.name}@alpha_4"))
              for row in rows),
        ("LLaMA-68M, 13B", "LLaMA-68M, Vicuna-13B", "OPT-125M, 13B"),
        note="Other pairs, of OPT or Llama models of any size or with a fine-tuned drafter, are further entries: give "
        "--pair NAME=TARGET,DRAFTER. The paper does not say its k in the text; it is read as four.",
    )  # fmt: skip


def naive_bound() -> Table:
    exact, naive = "MCSS, with replacement", "MCNS, with replacement"
    return Table(
        "App. C: naive sampling accepts no more often, whatever k",
        tuple(f"alpha_{k}" for k in (1, 2, 4, 8)),
        (
            Row(exact, tree("8", "with_replacement"), SAMPLED),
            Row(naive, tree("8", "with_replacement", "naive"), SAMPLED),
        ),
        tuple(
            Claim(f"α of {naive} is at most that of {exact} at k = {k}", f"alpha_{k}", (naive, exact))
            for k in (1, 2, 4, 8)
        ),
        note="A theorem; the tests prove it by enumeration (`inference/core/verify.py`).",
    )
