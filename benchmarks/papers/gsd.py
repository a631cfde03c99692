"""GSD, Graph-Structured Speculative Decoding (arXiv 2407.16207): its tables and figures.

SSD is a chain of up to ten tokens that ends where q falls below θ_prob. TSD is the tree that GSD's graph is without
merging (tau=0). The paper's drafts have no bound on their nodes. Here the bound is NODES, as some trees would not end.
The small LM drafts; without --small-lm the early exit does. With --skip the target without those layers drafts, and its
drafts are deep (`choose_skip.py` chooses the layers). Each drafter has an entry of its own (--label).

The paper's acceptance rate is our draft share, the share of the output that was drafted. For 8,575 drafted and 512
emitted tokens it is 0.89, which a share of the drafted tokens cannot be. Fig. 5(c) is judged by both readings.

Table 5 (App. C, how far q after a merged node is from its own) was measured by this file in commit 5616baab.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.base.errors import require
from outrider.inference.settings.method import MethodConfig, StopConfig, StructureConfig
from outrider.inference.settings.sampling import SamplingConfig
from papers.claims import Claim, Row, Table

ARXIV = "2407.16207"
NODES = {"small_lm": 1000, "early_exit": 256, "skip_layers": 256}
SAMPLED_NODES = 64
SOURCES = ("small_lm",)
TREE, GRAPH = "a tree has a larger share than a chain", "a graph has a larger share than the tree"
SHOWN = ("draft_share", "per_512", "depth", "graph_success", "shared", "tau", "speedup")
LARGE = {"theta_prob": 0.2, "theta_sibling": 0.3}  # of the 70B models
SMALL = {"theta_prob": 0.4, "theta_sibling": 0.1}  # of the others
TOP_P = SamplingConfig(temperature=0.7, top_p=0.7)


@dataclass(frozen=True)
class Drafts:
    """The drafter. skip: the layers that self-speculation leaves out."""

    source: str = "small_lm"
    skip: tuple[int, ...] | None = None

    def graph(self, tau: int, **settings: Any) -> MethodConfig:
        """The token graph; tau=0: TSD. Only drafting has a depth, as in the paper: copies may be deeper."""
        shape = {"nodes": NODES[self.source], "deep_copies": tau > 0, **LARGE, **settings}
        structure = StructureConfig(kind="token_graph", tau=tau, **shape)
        return MethodConfig(source=self.source, structure=structure, skip=self.skip)

    def ssd(self, theta_prob: float = 0.2) -> MethodConfig:
        stop = StopConfig(rule="confidence", threshold=theta_prob, max_draft=10)
        return MethodConfig(source=self.source, stop=stop, skip=self.skip)


def drafts_of(options: Any) -> Drafts:
    """Raises `UserError` for two drafters at once."""
    models = [name for name in ("small_lm", "checkpoint") if getattr(options, name)]
    require(not (options.skip and models), "skip", options.skip, f"without {' and '.join(models)}, which drafts too")
    if options.skip:
        return Drafts("skip_layers", tuple(options.skip))
    return Drafts("early_exit" if models == ["checkpoint"] else "small_lm")


def tables(*, options: Any, **_: Any) -> dict[str, Table]:
    """Every table and figure of the paper, by key."""
    by = drafts_of(options)
    return {
        "table_1": main_table(by),
        "table_2": sampled_table(by),
        "table_3": breakdown(by),
        "table_4": Table("Table 4: Medusa", never="Medusa's heads are no drafter of this project"),
        "tables_6_8": smaller_models(by),
        "table_10": Table("Table 10: Rouge of sampled texts", never="sampled texts have exactly the target's law here"),
        "figure_3": recurring(by),
        "figure_5": ablations(by),
        "figure_7": children(by),
        "figure_8": sibling_pruning(by),
    }


def main_table(by: Drafts) -> Table:
    return Table(
        "Table 1: SSD, TSD and GSD (LLaMA-2-70B; GSM8k, XSum)",
        SHOWN,
        (
            Row("SSD", by.ssd(), paper=("0.795, 0.652", "630, 773", "–", "1.85×, 1.56×")),
            Row("TSD", by.graph(0), paper=("0.894, 0.784", "8575, 22512", "0 %", "1.81×, 1.42×")),
            Row("GSD", by.graph(2), paper=("0.917, 0.831", "793, 1545", "27.7 %, 32.8 %", "1.96×, 1.73×")),
            Row("GSD, copies within ten tokens too", by.graph(2, deep_copies=False)),
            Row("Self SSD", never="self-speculation stands in EESD's tables", paper=("–", "–", "–", "1.37×, 1.28×")),
        ),
        (
            Claim("a tree has a share of its drafts in the output that is a tenth larger than a chain's", "draft_share",
                  ("SSD", "TSD"), scale=(1.1, 1), of=TREE),
            Claim("a graph has an even larger share than the tree", "draft_share", ("TSD", "GSD"), of=GRAPH),
            Claim("the tree drafts at least 4.65 times as much as the chain", "per_512", ("SSD", "TSD"),
                  scale=(4.65, 1)),
            Claim("the graph drafts at most twice as much as the chain", "per_512", ("GSD", "SSD"), scale=(1, 2)),
            Claim("in a quarter of the rounds a merged node's successor is accepted", "graph_success", ("GSD",),
                  "above", 0.25, ours=True),
            Claim("or one on either side of a merge, as the paper may count", "shared", ("GSD",), "above", 0.25),
            Claim("the graph is fastest, the tree slower than the chain", "speedup", ("TSD", "SSD", "GSD")),
        ),
        ("acceptance rate", "drafted", "graph success", "speed-up"),
        note="Both thresholds as in the paper (0.2 and 0.3), τ = 2. Its acceptance rate is our draft share. For "
        "LLaMA-2-70b-chat on XSum it has 0.496, 0.634 and 0.642, and 1.19, 1.30 and 1.32 times, and drafts 4.65 times "
        "as much in the tree, the least of its rows. The drafter runs ten tokens deep at most. Copies go on from "
        "there, as in the paper, but for the row that says otherwise.",
    )  # fmt: skip


def smaller_models(by: Drafts) -> Table:
    return Table(
        "Tables 6 to 8: smaller models (Alpaca, WMT-14, GSM8K)",
        SHOWN,
        (
            Row("SSD", by.ssd(0.4), paper=("0.628, 0.705, 0.653", "1.12×, 1.30×, 1.18×", "0.563, 0.621, 0.602",
                "1.12×, 1.16×, 1.08×", "0.729, 0.783, 0.601", "1.22×, 1.29×, 1.04×")),
            Row("TSD", by.graph(0, **SMALL), paper=("0.783, 0.798, 0.741", "0.44×, 0.59×, 0.32×", "0.672, 0.705, 0.770",
                "0.37×, 0.38×, 0.62×", "0.846, 0.851, 0.775", "0.65×, 0.56×, 0.60×")),
            Row("GSD", by.graph(1, **SMALL), paper=("0.819, 0.812, 0.755", "1.48×, 1.52×, 1.26×", "0.691, 0.733, 0.793",
                "1.15×, 1.28×, 1.22×", "0.860, 0.863, 0.793", "1.31×, 1.36×, 1.16×")),
        ),
        (
            Claim("a tree has a larger share than a chain", "draft_share", ("SSD", "TSD"), of=TREE),
            Claim("a graph has an even larger one", "draft_share", ("TSD", "GSD"), of=GRAPH),
            Claim("the graph is fastest, the tree slowest", "speedup", ("TSD", "SSD", "GSD")),
        ),
        ("BLOOM-7b1", "its speed-up", "OPT-13b", "its speed-up", "LLaMA-2-7b", "its speed-up"),
        note="Thresholds 0.4 and 0.1, τ = 1.",
    )  # fmt: skip


def sampled_table(by: Drafts) -> Table:
    small = {"nodes": SAMPLED_NODES, **SMALL}
    return Table(
        "Tables 2 and 9: sampling, top-p 0.7 at temperature 0.7 (LLaMA-2-70b on GSM8k, XSum; LLaMA-2-7b on Alpaca)",
        SHOWN,
        (
            Row("SSD", by.ssd(), TOP_P, ("1.80×, 1.58×",)),
            Row("TSD", by.graph(0, nodes=SAMPLED_NODES), TOP_P, ("1.81×, 1.46×",)),
            Row("GSD", by.graph(2, nodes=SAMPLED_NODES), TOP_P, ("2.14×, 1.89×",)),
            Row("SSD, the 7b's thresholds", by.ssd(0.4), TOP_P, ("–", "0.695 (1.16×)")),
            Row("GSD, the 7b's thresholds", by.graph(1, **small), TOP_P, ("–", "0.793 (1.34×)")),
        ),
        (
            Claim("a graph has a larger share than a chain (7b)", "draft_share",
                  ("SSD, the 7b's thresholds", "GSD, the 7b's thresholds")),
            Claim("and is faster (7b)", "speedup", ("SSD, the 7b's thresholds", "GSD, the 7b's thresholds")),
            Claim("a graph is faster than a chain (70b)", "speedup", ("SSD", "GSD")),
        ),
        ("70b speed-up", "7b acceptance rate"),
        note=f"Thresholds of the 70b 0.2 and 0.3 with τ = 2, of the 7b 0.4 and 0.1 with τ = 1. The paper reuses q from "
        f"another prefix, which changes the law a little; here the law is exact. At most {SAMPLED_NODES} nodes.",
    )  # fmt: skip


def breakdown(by: Drafts) -> Table:
    shown = ("drafting_ms", "verifying_ms", "others_ms")
    return Table(
        "Table 3: where a round's time goes",
        shown,
        (
            Row("SSD", by.ssd(), paper=("224.9 ms", "133.5 ms", "45.8 ms")),
            Row("TSD", by.graph(0), paper=("323.9 ms", "184.4 ms", "49.8 ms")),
            Row("GSD", by.graph(2), paper=("209.0 ms", "178.3 ms", "50.2 ms")),
        ),
        (Claim("a graph drafts in less time than a tree", "drafting_ms", ("GSD", "TSD")),),
        ("draft", "verification", "others"),
        note="With k = 4; with k = 2 the paper's tree drafts in 257.0 ms and its graph in 225.9 ms.",
    )


def recurring(by: Drafts) -> Table:
    grams = tuple(f"repeated_{n}" for n in range(1, 5))
    return Table(
        "Fig. 3: tokens in recurring n-grams of a tree",
        grams,
        (Row("TSD", by.graph(0)),),
        (
            Claim("70 % of the tree's tokens recur", "repeated_1", ("TSD",), "above", 0.7),
            Claim("whole segments recur too, the longer the rarer", "", tuple(f"TSD@{name}" for name in grams[::-1])),
        ),
    )


def ablations(by: Drafts) -> Table:
    """Fig. 5: one setting at a time around the default of Table 1."""
    swept: dict[str, Sequence[float]] = {
        "k": (1, 2, 3, 4, 5), "τ": (1, 2, 3, 4), "θ_prob": (0.1, 0.2, 0.4, 0.6), "θ_sib": (0.1, 0.3, 0.5, 0.8),
    }  # fmt: skip
    named = {"k": "out_degree", "θ_prob": "theta_prob", "θ_sib": "theta_sibling"}
    rows = [
        Row(f"{name} = {at}", by.graph(int(at)) if name == "τ" else by.graph(2, **{named[name]: at}), x=at, line=name)
        for name, values in swept.items()
        for at in values
    ]
    ends = {name: (f"{name} = {values[0]}", f"{name} = {values[-1]}") for name, values in swept.items()}
    raises = "(c) θ_prob raises the acceptance rate, read as"
    return Table(
        "Fig. 5: out-degree, redundancy and pruning",
        ("draft_share", "acceptance", "per_512", "graph_success", "tau"),
        tuple(rows),
        (
            Claim("(a) the share grows with the out-degree", "draft_share", ends["k"]),
            Claim("(b) a larger τ drafts more tokens", "per_512", ends["τ"]),
            Claim("(b) a larger τ lowers the share: merging adds hypotheses", "draft_share", ends["τ"][::-1]),
            Claim("(c) θ_prob drafts fewer tokens", "per_512", ends["θ_prob"][::-1]),
            Claim(f"{raises} the draft share", "draft_share", ends["θ_prob"], ours=True),  # which no pruning can
            Claim(f"{raises} v_d", "acceptance", ends["θ_prob"]),
            Claim("(d) θ_sib drafts fewer tokens", "per_512", ends["θ_sib"][::-1]),
            Claim("(d) θ_sib lowers the share", "draft_share", ends["θ_sib"][::-1]),
        ),
        plot="draft_share",
        xlabel="k, τ or threshold",
        note="Claims compare the ends of a curve. A larger θ_prob only takes candidates from a tree, so that the draft "
        "share cannot rise but by merges and by the bound on nodes. What can rise is v_d, accepted of submitted.",
    )


def children(by: Drafts) -> Table:
    shown = ("child_1", "child_2", "child_3", "child_4", "later_children")
    return Table(
        "Fig. 7: how often the i-th child is the accepted one",
        shown,
        (Row("SSD", by.ssd(0.4)), Row("TSD", by.graph(0, **SMALL)), Row("GSD", by.graph(1, **SMALL))),
        (
            Claim("about half of the accepted tokens are later children", "later_children", ("GSD",), "above", 0.4),
            Claim("a graph's first children are accepted a little more often", "child_1", ("TSD", "GSD")),
        ),
        note="Shares of the nodes that the target went through. The paper does not say of which nodes its shares are.",
    )


def sibling_pruning(by: Drafts) -> Table:
    values = (0.05, 0.1, 0.3, 0.5, 0.8)
    rows = [Row(f"θ_sib = {at}", by.graph(1, **{**SMALL, "theta_sibling": at}), x=at) for at in values]
    ends = (rows[-1].name, rows[0].name)
    return Table(
        "Fig. 8: sibling pruning and later children (k = 4, τ = 1, θ_prob = 0.4)",
        ("child_1", "child_2", "child_3", "child_4", "later_children"),
        tuple(rows),
        (Claim("stricter pruning accepts fewer later children", "later_children", ends),),
        plot="later_children",
        xlabel="θ_sib",
        note="Of two siblings with q ≥ 0.4 the smaller is at least 2/3 of the larger. So a θ_sib below 2/3 leaves the "
        "draft as it is: only the last row can differ.",
    )
