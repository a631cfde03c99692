"""What a paper says, as plain data, and how measured counts judge it.

A row of a table is a way of decoding. What was measured of it are counts by prompt, sums over rounds. Every quantity is
made of such sums, so that the bootstrap draws prompts anew and nothing else: rows stay paired by prompt.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from inference.settings.method import MethodConfig
from inference.settings.sampling import SamplingConfig

DRAWS, MIN_PROMPTS = 2000, 5  # of the bootstrap; fewer prompts decide nothing
HOLDS, FAILS, UNDECIDED, NOT_RUN = "holds", "does not hold", "undecided", "not run"
QUIET = "a time: needs --timed, on a machine that does nothing else"

Counts = Mapping[str, float]  # of one prompt
Sums = Mapping[str, Any]  # of all prompts: a number, or one for every draw of the bootstrap


@dataclass(frozen=True)
class Row:
    """A way of decoding.

    paper: the cells of the paper's own table, by column there.
    method: None with `measure`, which then gives the counts (bench, row, prompt).
    category: only prompts of this category count; empty: all.
    other: where the model lies that it drafts from; empty: the one given for its source, of tables the first.
    x: where a plot has it. line: which line of the plot it belongs to.
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

    rises: every term is above the one before it. level: the terms differ by no more than the share `bound` of their
    mean. peaks: some term in the middle is above both ends. above, below: the one term is at least, at most `bound`.
    scale: what each term is multiplied by first.
    """

    says: str
    quantity: str
    terms: tuple[str, ...]
    kind: Literal["rises", "level", "peaks", "above", "below"] = "rises"
    bound: float = 0.0
    scale: tuple[float, ...] = ()


@dataclass(frozen=True)
class Table:
    """A table or figure of the paper. columns: of its own cells; quantities: what is shown of ours. Rows have names of
    their own, and claims say different things, by which those of several targets find each other.

    plot: the quantity that its picture shows, over the rows' x; or several, as alpha_*, over their numbers. never: why
    nothing of it is run. note: one sentence.
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
    """Pearson's, of E(A) and the tokens a round brought."""
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
    "tau": Quantity("τ", _share("tokens", "rounds")),
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
    # by weights: a draft's step reads `step_weights` of the `pass_weights` of a pass, for every token of a chain
    "step_share": Quantity("draft step, share of a pass", _share("step_weights", "pass_weights"), ("step_weights",)),
    "gain_by_weights": Quantity(
        "tokens per pass, by weights",
        lambda c: c["tokens"] / np.maximum(c["rounds"] + c["drafted"] * c.get("step_weights", 0)
                                           / np.maximum(c.get("pass_weights", 0), 1e-12), 1e-12), ("step_weights",)),
    "trained_steps": Quantity("steps", _share("trained_steps", "trained_runs"), ("trained_runs",), 0),
    "speedup": Quantity("speed-up", _share("plain_seconds", "seconds"), ("seconds",)),
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


# -------------------------------------------------------------------------------------------------------------- judging


def sums(counts: Mapping[str, Counts], prompts: Sequence[str], weights: Any) -> dict[str, Any]:
    """The counts of `prompts`, added up with `weights` [draws, prompts] (or [prompts])."""
    keys = sorted({key for prompt in prompts for key in counts.get(prompt, {})})
    table = np.array([[counts.get(prompt, {}).get(key, 0.0) for key in keys] for prompt in prompts])
    return dict(zip(keys, (weights @ table).T, strict=True))


def by_conversation(counts: Mapping[str, Counts]) -> dict[str, Counter[str]]:
    """The counts of prompts, those of a conversation's turns together: turns are alike, and drawn together."""
    found: dict[str, Counter[str]] = {}
    for prompt, own in counts.items():
        found.setdefault(prompt.partition("/turn")[0], Counter()).update(own)  # type: ignore[arg-type]
    return found


def why_not(row: Row, counts: Mapping[str, Counts], name: str) -> str:
    """Why a quantity of a row is not known; empty where it is."""
    if row.never:
        return row.never
    if not counts:
        return f"{row.name}: not measured yet"
    known = {key for each in counts.values() for key in each}
    lacking = [key for key in quantity(name).needs if key not in known]
    if "seconds" in lacking:
        return QUIET
    return f"{row.name}: never came up here" if lacking else ""


def value(row: Row, counts: Mapping[str, Counts], name: str) -> float | None:
    """A quantity of a row over all its prompts."""
    if why_not(row, counts, name):
        return None
    prompts = sorted(counts)
    return float(quantity(name).of(sums(counts, prompts, np.ones(len(prompts)))))


def statistic(kind: str, bound: float, terms: Sequence[Any]) -> Any:
    """What must be above 0 for the claim to hold (see `Claim`)."""
    stacked = np.stack(terms)
    if kind == "level":
        return bound - (stacked.max(0) - stacked.min(0)) / np.maximum(np.abs(stacked.mean(0)), 1e-12)
    if kind == "peaks":
        return stacked[1:-1].max(0) - np.maximum(stacked[0], stacked[-1])
    if kind in ("above", "below"):
        return stacked[0] - bound if kind == "above" else bound - stacked[0]
    return np.diff(stacked, axis=0)  # by step


def judge(claim: Claim, rows: Mapping[str, Row], measured: Mapping[str, Mapping[str, Counts]]) -> dict[str, Any]:
    """The claim with its verdict. measured: the counts by row and prompt.

    It holds if the interval of its statistic is above 0, and does not hold if that is below. A rising claim holds if
    that of every step is above, and does not hold if that of one is below. All else is undecided.
    """
    found: dict[str, Any] = {"says": claim.says}
    named = [(*term.partition("@")[::2], claim.quantity) for term in claim.terms]
    parts = [(rows[row], other or default) for row, other, default in named]
    reasons = [why_not(row, measured.get(row.name, {}), name) for row, name in parts]
    if any(reasons):
        return {**found, "verdict": NOT_RUN, "reason": next(filter(None, reasons))}
    measured = {row.name: by_conversation(measured[row.name]) for row, _ in parts}
    prompts = sorted({prompt for row, _ in parts for prompt in measured[row.name]})
    if any("seconds" in quantity(name).needs for _, name in parts):  # times may be of some prompts only
        own = [measured[row.name] for row, _ in parts]
        prompts = [prompt for prompt in prompts if all("seconds" in each[prompt] for each in own if prompt in each)]
        if not prompts:
            return {**found, "verdict": NOT_RUN, "reason": QUIET}
    scale = claim.scale or (1.0,) * len(parts)
    draws = np.random.default_rng(0).multinomial(len(prompts), np.full(len(prompts), 1 / len(prompts)), DRAWS)

    def terms(weights: Any) -> list[Any]:
        return [
            factor * quantity(name).of(sums(measured[row.name], prompts, weights))
            for factor, (row, name) in zip(scale, parts, strict=True)
        ]

    drawn, whole = terms(draws), terms(np.ones(len(prompts)))
    ends = np.quantile(statistic(claim.kind, claim.bound, drawn), [0.025, 0.975], axis=-1)
    low, high = (float(end.min()) for end in ends)  # of the step that stands worst, where there are several
    verdict = FAILS if high < 0 else HOLDS if low > 0 else UNDECIDED
    return {
        **found,
        "verdict": verdict if len(prompts) >= MIN_PROMPTS else UNDECIDED,
        "values": [float(term) for term in whole],
        "statistic": float(np.min(statistic(claim.kind, claim.bound, [np.asarray(term) for term in whole]))),
        "ci95": [low, high],
        "prompts": len(prompts),
    }


def judged(table: Table, measured: Mapping[str, Mapping[str, Counts]]) -> dict[str, Any]:
    """A table with our figures and verdicts, JSON-able. measured: the counts of its rows by prompt."""
    rows = {row.name: row for row in table.rows}
    return {
        "title": table.title,
        "note": table.note,
        "never": table.never,
        "columns": list(table.columns),
        "quantities": {name: {"label": quantity(name).label, "digits": quantity(name).digits}
                       for name in table.quantities},
        "rows": {
            row.name: {
                "paper": list(row.paper), "never": row.never, "x": row.x, "line": row.line,
                "here": {name: value(row, measured.get(row.name, {}), name) for name in table.quantities},
            }
            for row in table.rows
        },
        "claims": [judge(claim, rows, measured) for claim in table.claims],
        "plot": table.plot,
        "xlabel": table.xlabel,
    }  # fmt: skip


def safe(name: str) -> str:
    """`name` as part of a file's name."""
    return re.sub(r"\W+", "_", name).strip("_").lower()
