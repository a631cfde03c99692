"""OPT-Tree (arXiv 2406.17276): its tables and figures.

The paper ranks nodes by q itself. Rows "at T = 0.5" rank them by a sharper q, under greedy decoding. Sequoia's tree is
fixed; its acceptance by rank is measured on other prompts than those compared. The strong drafter is the target without
the layers of --skip (`choose_skip.py` chooses them).
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from outrider.base.files import write_json
from outrider.inference.settings.kinds import KINDS
from outrider.inference.settings.method import MethodConfig, StructureConfig
from outrider.inference.settings.sampling import SamplingConfig
from outrider.inference.shapes.shapes import Shape, parse_shape
from papers.claims import Claim, Row, Table
from papers.measuring import Asked, Bench, continued

ARXIV = "2406.17276"
SOURCES = ("small_lm",)
DEPTH = 16  # of every tree, where the paper has no bound
SIZES = (10, 25, 50, 100, 150, 250, 500)
DELTAS = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
TEMPERATURES = (0.0, 0.25, 0.5, 0.75, 1.0)
WEAK = 130  # nodes up to which τ grows with the paper's small drafter, L-68M; with a strong one it does up to 500
SAMPLED_NODES = 50
RANKS = 32  # of a node's children that are looked at
BANDS = tuple(f"band_{n}" for n in range(1, 6))


def opt(nodes: int, source: str = "small_lm", **settings: Any) -> MethodConfig:
    shape = {"delta": 0.0, "max_depth": DEPTH, **settings}
    return MethodConfig(source=source, structure=StructureConfig(kind="opt_tree", nodes=nodes, **shape))


def fixed(shape: str, source: str = "small_lm", **settings: Any) -> MethodConfig:
    return MethodConfig(source=source, structure=StructureConfig(kind="static", shape=shape, **settings))


def prepare_rows(bench: Bench, others: Callable[[], list[Asked]], options: Any, tables: Mapping[str, Table]) -> None:
    """Sequoia's trees for Fig. 6, by acceptance on `others`."""
    if "figure_6" not in tables or (options.work / f"sequoia_{SIZES[-1]}.json").exists():
        return
    shares = acceptance_by_rank(bench, SOURCES[0], others())
    for nodes in SIZES:
        shape = best_shape(shares, nodes, DEPTH)
        write_json(options.work / f"sequoia_{nodes}.json", [list(path) for path in shape])


def tables(*, options: Any, **_: Any) -> dict[str, Table]:
    """Every table and figure of the paper, by key."""
    return {
        "table_1": main_table(),
        "abstract": strong_drafter(options.skip),
        "table_3": sampled_table(),
        "figure_3": Table("Fig. 3: time by input length", never="a property of the device; "
                          "benchmarks/results/floor_cpu.json has one"),
        "figure_5": correlation(),
        "figure_6": scaling(str(options.work / "sequoia_{}.json")),
        "figure_7": time_shares(),
        "figure_8": thresholds(),
        "figure_9": temperatures(),
        "figure_11": acceptance_by_q(),
    }  # fmt: skip


def main_table() -> Table:
    """Tables 1 and 2, which differ by their prompts."""
    rows = []
    paper = {
        "small_lm": (("2.12, 2.20", "1.32×, 1.39×"), ("2.47, 2.63", "1.49×, 1.62×"), ("2.58, 2.78", "1.69×, 1.83×")),
        "eagle3": (("3.40, 3.52", "2.08×, 2.24×"), ("3.73, 3.83", "2.51×, 2.60×"), ("4.36, 4.68", "2.56×, 2.66×")),
        "early_exit": ((), (), ()),
    }
    names = {"small_lm": "small LM (the paper: L-68M)", "eagle3": "EAGLE-3 (the paper: EAGLE)",
             "early_exit": "early exit"}  # fmt: skip
    claims = []
    for source, name in names.items():
        binary, eagle, own = paper[source]
        rows += [
            Row(f"{name}, binary tree, 25 nodes", fixed("binary", source, nodes=25), paper=binary),
            Row(f"{name}, EAGLE's tree, 25 nodes", fixed("eagle", source), paper=eagle),
            Row(f"{name}, OPT-Tree, 25 nodes", opt(25, source), paper=own),
            Row(f"{name}, OPT-Tree, 25 nodes, at T = 0.5", opt(25, source, temperature=0.5)),
            Row(f"{name}, binary tree, 60 nodes", fixed("binary", source, nodes=60)),
            Row(f"{name}, OPT-Tree, 60 nodes", opt(60, source)),
            Row(f"{name}, OPT-Tree, 60 nodes, at T = 0.5", opt(60, source, temperature=0.5)),
        ]
        by_size = {25: ("binary tree", "EAGLE's tree", "OPT-Tree"), 60: ("binary tree", "OPT-Tree")}
        for nodes, trees in by_size.items():
            ranked = tuple(f"{name}, {tree}, {nodes} nodes" for tree in trees)
            said = f"{' < '.join(trees)} at {nodes} nodes"
            claims.append(Claim(f"{name}: {said}", "tau", ranked, of=said))
            ranked = (*ranked[:-1], f"{ranked[-1]}, at T = 0.5")
            said = f"{name}: the same at {nodes} nodes with OPT-Tree at T = 0.5"
            claims.append(Claim(said, "tau", ranked, ours=True))
        ranked, said = tuple(f"{name}, {tree}, 25 nodes" for tree in by_size[25]), "and in speed at 25 nodes"
        claims.append(Claim(f"{name}: {said}", "speedup", ranked, of=said))
    return Table(
        "Tables 1 and 2: trees at a node budget (LLaMA-2-7B; MT-Bench, GSM8K)",
        ("tau", "expected", "per_round", "speedup"),
        tuple(rows),
        tuple(claims),
        ("MAL", "speed-up"),
        note="MAL is our τ. The paper takes 25, 50 or 60 nodes for binary and OPT-Tree, whichever is fastest.",
    )


def strong_drafter(skip: Sequence[int] | None) -> Table:
    title = "Abstract: more than ten tokens a round, with a strong drafter and enough nodes"
    if not skip:
        return Table(title, never="needs --skip")
    sharper: dict[str, Any] = {"temperature": 0.5, "max_depth": 2 * DEPTH}
    trees = {"binary tree, 25 nodes": fixed("binary", nodes=25), "EAGLE's tree, 25 nodes": fixed("eagle"),
             "OPT-Tree, 25 nodes": opt(25), "binary tree, 60 nodes": fixed("binary", nodes=60),
             "OPT-Tree, 60 nodes": opt(60), "OPT-Tree, 60 nodes, at T = 0.5": opt(60, **sharper),
             "OPT-Tree, 100 nodes, at T = 0.5": opt(100, **sharper)}  # fmt: skip
    names = tuple(trees)
    ranked = {"binary tree < EAGLE's tree < OPT-Tree at 25 nodes": names[:3],
              "binary tree < OPT-Tree at 60 nodes": names[3:5]}  # fmt: skip
    return Table(
        title,
        ("tau", "expected", "per_round"),
        tuple(Row(name, replace(method, source="skip_layers", skip=tuple(skip))) for name, method in trees.items()),
        (
            *(Claim(f"self-speculation: {said}", "tau", own, of=said) for said, own in ranked.items()),
            Claim("OPT-Tree emits more than ten tokens a round", "tau", names[6:], "above", 10.0),
        ),
        note=f"The target without {len(skip)} of its layers drafts. OPT-Tree has {DEPTH} levels, twice as many at 0.5.",
    )


def sampled_table() -> Table:
    rows = [
        Row("OPT-Tree, T = 0", opt(SAMPLED_NODES), paper=("2.58",)),
        Row("OPT-Tree, T = 1", opt(SAMPLED_NODES), SamplingConfig(temperature=1.0), ("2.72",)),
        Row("EAGLE's tree, T = 1", fixed("eagle"), SamplingConfig(temperature=1.0)),
    ]
    return Table(
        "Table 3: sampling at temperature 1 (LLaMA-2-7B with L-68M; MT-Bench)",
        ("tau", "speedup"),
        tuple(rows),
        (
            Claim("τ is lower at temperature 1", "tau", ("OPT-Tree, T = 1", "OPT-Tree, T = 0")),
            Claim("τ is higher there, as for the paper's own LLaMA-2-7B with L-68M", "tau",
                  ("OPT-Tree, T = 0", "OPT-Tree, T = 1"), ours=True),
            Claim("OPT-Tree beats EAGLE's tree there too", "tau", ("EAGLE's tree, T = 1", "OPT-Tree, T = 1")),
        ),
        ("MAL",),
        note="The paper says that τ is slightly lower. Its Tables 1 and 3 have nine pairs in common: six fall; "
        "LLaMA-2-7B with L-68M (2.58, 2.72) and L-1B (4.88, 5.25) and 70B with EAGLE (4.06, 4.09) rise.",
    )  # fmt: skip


def correlation() -> Table:
    trees = {"50 nodes": opt(50), "50 nodes, at T = 0.5": opt(50, temperature=0.5)}
    trees["early exit, 50 nodes"], said = opt(50, "early_exit"), "a larger E(A) goes with a larger A"
    return Table(
        "Fig. 5: E(A) and A of every round",
        ("correlation", "expected", "tau"),
        tuple(Row(name, tree) for name, tree in trees.items()),
        tuple(Claim(f"{said} ({name})", "correlation", (name,), "above", of=said) for name in trees),
        note="The paper shows counts; here it is Pearson's correlation over rounds.",
    )


def scaling(shapes: str) -> Table:
    """shapes: where Sequoia's trees lie, by their size."""
    lines = {"OPT-Tree": lambda n: opt(n), "Sequoia": lambda n: fixed(shapes.format(n))}
    rows = [Row(f"{line}, {n} nodes", make(n), x=n, line=line) for line, make in lines.items() for n in SIZES]
    own = {line: tuple(f"{line}, {n} nodes" for n in SIZES) for line in lines}
    few = max(nodes for nodes in SIZES if nodes <= WEAK)
    ends = own["OPT-Tree"][0], own["OPT-Tree"][-1]
    claims = [Claim("τ of OPT-Tree grows up to 500 nodes", "tau", ends, ours=True)]
    claims += [Claim(f"τ of {line} grows up to {few} nodes", "tau", (own[line][0], f"{line}, {few} nodes"))
               for line in lines]  # fmt: skip
    claims += [Claim(f"OPT-Tree beats Sequoia at {n} nodes", "tau", (f"Sequoia, {n} nodes", f"OPT-Tree, {n} nodes"),
                     of="OPT-Tree beats Sequoia") for n in SIZES]  # fmt: skip
    claims += [Claim(f"{line} hardly grows from 150 to 500 nodes", "tau",
                     (f"{line}, 150 nodes", f"{line}, 500 nodes"), "level") for line in lines]  # fmt: skip
    return Table(
        "Fig. 6: τ by the size of the tree, beside Sequoia's",
        ("tau",),
        tuple(rows),
        tuple(claims),
        plot="tau",
        xlabel="nodes",
        note="All trees are at most 16 deep.",
    )


def time_shares() -> Table:
    return Table(
        "Fig. 7: where a round's time goes (50 nodes)",
        ("drafting_ms", "verifying_ms", "others_ms", "tree_share"),
        (Row("OPT-Tree, 50 nodes", opt(50), paper=("6.3 % at most",)),),
        (Claim("tree operations take at most 6.3 %", "tree_share", ("OPT-Tree, 50 nodes",), "below", 0.063),),
        ("share of tree operations",),
    )


def thresholds() -> Table:
    rows = [Row(f"δ = {delta}", opt(50, delta=delta), x=delta) for delta in DELTAS]
    names = tuple(row.name for row in rows)
    return Table(
        "Fig. 8: the threshold δ (50 nodes)",
        ("tau", "depth", "milliseconds", "speedup"),
        tuple(rows),
        (
            Claim("τ drops as the threshold grows", "tau", (names[-1], names[0])),
            Claim("speed is best somewhere between", "speedup", names, "peaks"),
        ),
        plot="tau",
        xlabel="δ",
    )


def temperatures() -> Table:
    """The paper changes the verification alone: its trees are ranked by the drafter's own q. The same at 0 and at 1."""
    lines = {"": "drafter", ", ranked at it": "sampler"}
    rows = [
        Row(f"T = {t}{name}", opt(SAMPLED_NODES, **({"rank": rank} if 0 < t < 1 else {})),
            SamplingConfig(temperature=t), x=t, line=f"by the {rank}'s q")
        for name, rank in lines.items() for t in TEMPERATURES
    ]  # fmt: skip
    own = [tuple(f"T = {t}{name}" for t in TEMPERATURES) for name in lines]
    return Table(
        "Fig. 9: temperature (50 nodes)",
        ("tau", "speedup"),
        tuple(rows),
        (
            Claim("τ drops as the temperature rises", "tau", (own[0][-1], own[0][0])),
            Claim("there is a high speed-up even at temperature 1", "speedup", ("T = 1.0",), "above", 1.0),
        ),
        plot="tau",
        xlabel="temperature",
    )


def acceptance_by_q() -> Table:
    claims = []
    for n, bands in enumerate(itertools.pairwise(BANDS), start=1):
        terms, said = tuple(f"OPT-Tree@{band}" for band in bands), f"acceptance rises from band {n} to band {n + 1}"
        claims.append(Claim(said, "", terms, of="acceptance rises with q"))
    return Table("Fig. 11: acceptance by q (50 nodes)", BANDS, (Row("OPT-Tree", opt(50)),), tuple(claims))


# ------------------------------------------------------------------------------------------------------------- sequoia


def acceptance_by_rank(bench: Bench, drafter: str, prompts: Sequence[Asked]) -> list[float]:
    """How often the target's greedy token is the draft's likeliest, second likeliest, and so on, over `prompts`."""
    assert KINDS[drafter].shaped
    widest = StructureConfig(kind="k_config", widths=(RANKS,), draw="top_k")
    row = Row("ranks", MethodConfig(source=drafter, structure=widest))
    totals: Counter[str] = Counter()
    for asked in prompts:
        totals.update(continued(bench, row, asked).totals)
    return [totals[f"rank_{rank}"] / max(1, totals["tried"]) for rank in range(1, RANKS + 1)]


def best_shape(acceptance: Sequence[float], nodes: int, depth: int) -> Shape:
    """The tree of `nodes` nodes, at most `depth` deep, whose expected accepted length is largest.

    acceptance: by rank, the same at every node. The probability to reach a node is the product along its path. No
    descendant's product is larger. So the nodes with the `nodes` largest products form a tree, and no other tree has a
    larger sum. Sequoia's dynamic programme finds the same tree.
    """
    descending = sorted(acceptance, reverse=True)
    waiting = [(-descending[0], (0,))]
    found: list[tuple[int, ...]] = []
    while waiting and len(found) < nodes:
        reached, path = heapq.heappop(waiting)
        found.append(path)
        rank = path[-1]
        if rank + 1 < len(descending):
            heapq.heappush(
                waiting, (reached / max(descending[rank], 1e-12) * descending[rank + 1], (*path[:-1], rank + 1))
            )
        if len(path) < depth:
            heapq.heappush(waiting, (reached * descending[0], (*path, 0)))
    return parse_shape(found, "Sequoia's tree")
