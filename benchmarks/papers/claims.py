"""What a paper says, as plain data, and the quantities that it speaks of (`papers.judging` judges it).

A row of a table is a way of decoding. For every prompt, the counts of its rounds are summed and kept. Every quantity is
computed from such sums, over any set of prompts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from outrider.inference.settings.method import MethodConfig
from outrider.inference.settings.sampling import SamplingConfig

Counts = Mapping[str, float]  # of one prompt
EQUAL = 0.1  # two terms are alike if they differ by less than this share: one bound for all claims of it
Sums = Mapping[str, Any]  # of all prompts: a number, or an array whose item i leaves prompt i out


@dataclass(frozen=True)
class Row:
    """A way of decoding.

    paper: the cells of the paper's own table, by column there.
    method: None with `measure`, which then gives the counts (bench, row, prompt).
    category: only prompts of this category count; empty: all.
    other: the path of its draft model; empty: the model given for its source, or the first of several tables.
    x: its place on the axis of a plot. line: its line in the plot.
    facts: counts that are known beforehand, the same for every prompt.
    never: why it is not run.
    """

    name: str
    method: MethodConfig | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    paper: tuple[str, ...] = ()
    category: str = ""
    other: str = ""
    x: float | None = None
    line: str = ""
    measure: Callable[..., Counts] | None = None
    facts: tuple[tuple[str, float], ...] = ()
    never: str = ""


@dataclass(frozen=True)
class Claim:
    """The paper says it. terms: rows in the order of the claim, "row", or "row@quantity" for another than `quantity`.

    rises: every term is above the one before it; a trend is a claim about the ends of its curve. level: no two terms
    differ by more than the share EQUAL of the mean of all. peaks: some term in the middle is above both ends. above,
    below: the one term is above, below `bound`. scale: what each term is multiplied by first; factors are the paper's.
    of: the paper's statement that it is a part of; empty: it is one itself. All parts of a statement count as one.
    ours: the paper does not say it, so it is judged and not counted.
    """

    says: str
    quantity: str
    terms: tuple[str, ...]
    kind: Literal["rises", "level", "peaks", "above", "below"] = "rises"
    bound: float = 0.0
    scale: tuple[float, ...] = ()
    of: str = ""
    ours: bool = False


@dataclass(frozen=True)
class Table:
    """A table or figure of the paper. columns: of its own cells; quantities: what is shown of ours. Names of
    rows, and claims, are unique in a table: they match the tables of several targets.

    plot: the quantity that its picture shows, over the rows' x. never: the reason why none of it is run. note: one
    sentence.
    """

    title: str
    quantities: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    claims: tuple[Claim, ...] = ()
    columns: tuple[str, ...] = ()
    plot: str = ""
    xlabel: str = ""
    never: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        for named in ([row.name for row in self.rows], [claim.says for claim in self.claims]):
            if len(set(named)) < len(named):
                raise ValueError(f"{self.title}: twice in {named}")


# ----------------------------------------------------------------------------------------------------------- quantities


def _share(above: str, below: str, factor: float = 1.0) -> Callable[[Sums], Any]:
    return lambda c: factor * c.get(above, 0.0) / np.maximum(c.get(below, 0.0), 1e-12)


def _correlation(c: Sums) -> Any:
    """Pearson's correlation of E(A) and the tokens of a round."""
    n, e, a = c["rounds"], c["expected_tau"], c["reached"]
    spread = (n * c["expected_squared"] - e * e) * (n * c["reached_squared"] - a * a)
    return (n * c["expected_reached"] - e * a) / np.sqrt(np.maximum(spread, 1e-12))


@dataclass(frozen=True)
class Quantity:
    """label: its header. needs: the counts without which it was not measured. digits: shown."""

    label: str
    of: Callable[[Sums], Any]
    needs: tuple[str, ...] = ()
    digits: int = 2


QUANTITIES = {
    "tau": Quantity("τ", _share("tokens", "rounds"), ("rounds",)),
    "tau_exact": Quantity("τ token by token", _share("exact", "rounds"), ("exact",), 3),
    "tau_block": Quantity("τ as a block", _share("block", "rounds"), ("block",), 3),
    "tau_new": Quantity("τ without questions 81 and 130", _share("new_tokens", "new_rounds"), ("new_rounds",)),
    "tau_asked": Quantity("τ of these two", _share("asked_tokens", "asked_rounds"), ("asked_rounds",)),
    "alpha": Quantity("α", _share("accepted", "tried"), ("tried",), 3),
    "acceptance": Quantity("v_d", _share("accepted", "drafted")),
    "draft_share": Quantity("draft share", _share("accepted", "output"), digits=3),
    "hm": Quantity("HM", lambda c: 200 * c["accepted"] / np.maximum(c["drafted"] + c["output"], 1e-12), digits=1),
    "per_round": Quantity("drafted/round", _share("by_source", "rounds"), digits=1),
    "depth": Quantity("depth", _share("depth", "rounds"), digits=1),
    "per_512": Quantity("drafted per 512", _share("by_source", "output", 512.0), digits=0),
    "graph_success": Quantity("graph success", _share("graph_success", "rounds"), ("by_source",), 3),
    "shared": Quantity("rounds through a shared subtree", _share("shared_rounds", "rounds"), ("nodes",), 3),
    "later_children": Quantity(
        "from later children", lambda c: 1 - c.get("rank_1", 0) / np.maximum(c["reached"] - c["rounds"], 1e-12),
        ("reached",)
    ),
    "expected": Quantity("E(A)", _share("expected_tau", "rounds"), ("expected_tau",)),
    "correlation": Quantity("correlation", _correlation, ("expected_squared",)),
    "verified": Quantity("verified/round", _share("verified", "rounds"), ("verified",), 1),
    "verified_apart": Quantity("verified/round, paths apart", _share("verified_apart", "rounds"), ("verified",), 1),
    "apart": Quantity("a pass over the paths apart, over one over the tree",
                      _share("apart_pass_seconds", "tree_pass_seconds"), ("apart_pass_seconds",)),
    # by weights: a draft's step reads `step_weights` of the `pass_weights` of a pass, for every token of a chain
    "step_share": Quantity("draft step, share of a pass", _share("step_weights", "pass_weights"), ("step_weights",)),
    "gain_by_weights": Quantity(
        "tokens per pass, by weights",
        lambda c: c["tokens"] / np.maximum(c["rounds"] + c["drafted"] * c.get("step_weights", 0)
                                           / np.maximum(c.get("pass_weights", 0), 1e-12), 1e-12), ("step_weights",)),
    # assumed: a draft step takes 0.1, and a verifying pass 1.1, of the time of plain decoding's pass
    "modelled": Quantity("speed-up, modelled",
                         lambda c: c["tokens"] / np.maximum(1.1 * c["rounds"] + 0.1 * c["drafted"], 1e-12),
                         ("rounds",)),
    "trained_steps": Quantity("steps", _share("trained_steps", "trained_runs"), ("trained_runs",), 0),
    "speedup": Quantity("speed-up", _share("plain_seconds", "seconds"), ("seconds",)),
    # EESD's Eqs. 13 and 14: the time of all drafts, and as many passes over one token as there are rounds
    "predicted": Quantity(
        "speed-up by Eq. 14", lambda c: c["plain_seconds"] / np.maximum(
            c["plain_seconds"] * c["timed_rounds"] / np.maximum(c["timed"], 1e-12) + c["draft_seconds"], 1e-12),
        ("seconds",)),
    "milliseconds": Quantity("ms/token", _share("seconds", "timed", 1e3), ("seconds",)),
    "drafting_ms": Quantity("draft ms/round", _share("draft_seconds", "timed_rounds", 1e3), ("seconds",)),
    "verifying_ms": Quantity("verify ms/round", _share("verify_seconds", "timed_rounds", 1e3), ("seconds",)),
    "others_ms": Quantity("other ms/round", _share("other_seconds", "timed_rounds", 1e3), ("seconds",)),
    "drafting_per_token": Quantity("draft ms/token", _share("draft_seconds", "timed", 1e3), ("seconds",)),
    "verifying_per_token": Quantity("verify ms/token", _share("verify_seconds", "timed", 1e3), ("seconds",)),
    "deciding_per_token": Quantity("stop rule ms/token", _share("structure_seconds", "timed", 1e3), ("seconds",)),
    "tree_share": Quantity("share of tree operations", _share("structure_seconds", "seconds"), ("seconds",), 3),
}  # fmt: skip


def quantity(name: str) -> Quantity:
    """A quantity by name. Besides those of `QUANTITIES`, with a number in their names:

    child_3: how often the third likeliest child of a node was the accepted one. alpha_3: how often one of the first
    three was. repeated_2: the share of a tree's tokens that are in 2-grams it has twice. kl_2: the mean divergence, in
    nats, of what is drafted after a 2-gram from what is after its first occurrence. band_1: how often a child with q in
    the first fifth was accepted. late_64: τ of rounds that begin from the 64th token on, by stretches of 64.
    """
    if name in QUANTITIES:
        return QUANTITIES[name]
    kind, _, number = name.rpartition("_")
    n = int(number)
    made = {
        "child": lambda: Quantity(f"child {n}", _share(f"rank_{n}", "tried"), ("tried",), 3),
        "alpha": lambda: Quantity(f"α, k = {n}", lambda c: sum(c.get(f"rank_{k}", 0.0) for k in range(1, n + 1))
                                  / np.maximum(c["tried"], 1e-12), ("tried",), 3),
        "repeated": lambda: Quantity(f"in repeated {n}-grams", _share(f"repeated_{n}", "nodes"), ("nodes",)),
        "kl": lambda: Quantity(f"KL, τ = {n}", _share(f"kl_{n}", f"kl_count_{n}"), (f"kl_{n}",), 4),
        "band": lambda: Quantity(f"q in [{(n - 1) / 5:.1f}, {n / 5:.1f})", _share(f"right_{n}", f"in_band_{n}"),
                                 (f"in_band_{n}",)),
        "late": lambda: Quantity(f"τ from token {n}", _share(f"late_tokens_{n}", f"late_rounds_{n}"),
                                 (f"late_rounds_{n}",)),
    }  # fmt: skip
    return made[kind]()
