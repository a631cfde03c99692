"""How measured counts judge a paper's claims: from plain data alone, so that anybody can judge again (`--judge`).

A claim is a set of contrasts (differences, or distances from a bound) that must be positive. The interval of each is a
jackknife's over conversations: every conversation is left out once, for all rows alike. The quantile is Student's, with
one degree of freedom less than conversations. If several contrasts could decide, the level is divided by their number
(Bonferroni). Holm's correction over all claims of an entry says which decisions hold together.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import NormalDist
from typing import Any

import numpy as np

from papers.claims import EQUAL, Claim, Counts, Table, quantity

MIN_PROMPTS, LEVEL = 5, 0.05  # fewer conversations decide nothing; two-sided
HOLDS, FAILS, UNDECIDED, NOT_RUN = "holds", "does not hold", "undecided", "not run"
DECIDED = (HOLDS, FAILS)
QUIET = "a time: needs --timed, on a machine that does nothing else"
UNFIT = "not decidable on this machine: the paper's times are of a GPU"
NOT_FIT = {"verdict": NOT_RUN, "reason": UNFIT}
GPUS = ("NVIDIA", "AMD Instinct", "AMD Radeon")  # how devices are named that decide times

Measured = Mapping[str, Mapping[str, Counts]]  # by row and prompt
Kept = Mapping[tuple[str, str], Counts]  # by key of a row and prompt


# ----------------------------------------------------------------------------------------------------------- plain data


def described(table: Table, keys: Mapping[str, str]) -> dict[str, Any]:
    """A table as plain data, without figures. keys: by row, what its counts are kept under."""
    rows = {
        row.name: {"key": keys.get(row.name), "category": row.category, "facts": dict(row.facts), "never": row.never,
                   "paper": list(row.paper), "x": row.x, "line": row.line}
        for row in table.rows
    }  # fmt: skip
    own = {name: getattr(table, name) for name in ("title", "note", "never", "plot", "xlabel")}
    shown = {name: {"label": quantity(name).label, "digits": quantity(name).digits} for name in table.quantities}
    claims = [asdict(claim) for claim in table.claims]
    return {**own, "columns": list(table.columns), "quantities": shown, "rows": rows, "claims": claims}


def claim_of(plain: Mapping[str, Any]) -> Claim:
    """The claim that a JSON file has, with or without its verdict."""
    known = {one.name: plain[one.name] for one in fields(Claim) if one.name in plain}
    return Claim(**{**known, "terms": tuple(known["terms"]), "scale": tuple(known["scale"])})


def by_row(table: Mapping[str, Any], asked: Mapping[str, str], counts: Kept) -> dict[str, dict[str, Counts]]:
    """The counts of a table's rows by prompt, of prompts on which all of its rows were measured.

    asked: the category of every prompt.
    """
    rows = {name: row for name, row in table["rows"].items() if row["key"] is not None}
    mine = {name: [id for id, category in asked.items() if row["category"] in ("", category)]
            for name, row in rows.items()}  # fmt: skip
    lacking = {id for name, ids in mine.items() for id in ids if (rows[name]["key"], id) not in counts}
    return {
        name: {id: {**counts[row["key"], id], **row["facts"]} for id in mine[name] if id not in lacking}
        for name, row in rows.items()
    }


def judge_entry(entry: Mapping[str, Any], counts: Kept) -> dict[str, Any]:
    """An entry of a paper's results with all its figures and verdicts made of `counts`."""
    tables, fit = {}, entry["machine"]["device"].startswith(GPUS)
    for key, table in entry["tables"].items():
        measured = by_row(table, entry["asked"], counts)
        alike = timed_alike(measured)
        rows = {name: {**row, "here": {shown: value(row["never"], name, alike.get(name, {}), shown)
                                       for shown in table["quantities"]}}
                for name, row in table["rows"].items()}  # fmt: skip
        never = {name: row["never"] for name, row in rows.items()}
        claims = [{**asdict(claim), **(judge(claim, never, measured) if fit or not is_time(claim) else NOT_FIT)}
                  for claim in map(claim_of, table["claims"])]  # fmt: skip
        tables[key] = {**table, "rows": rows, "claims": claims, "measured": said(alike, entry["length"])}
    correct([claim for table in tables.values() for claim in table["claims"]])
    clocked = {id for (_, id), own in counts.items() if "seconds" in own}
    prompts = {id for _, id in counts} & set(entry["asked"])
    return {**entry, "prompts": len(prompts), "timed": len(clocked & prompts), "tables": tables}


def is_time(claim: Claim) -> bool:
    """Whether a claim is about times."""
    named = [term.partition("@")[2] or claim.quantity for term in claim.terms]
    return any("seconds" in need for name in named for need in quantity(name).needs)


def timed_alike(measured: Measured) -> Measured:
    """`measured`, with times only of prompts on which all timed rows have them, so that rows can be compared."""
    clocked = [own for own in measured.values() if any("seconds" in each for each in own.values())]
    lacking = {prompt for own in clocked for prompt, each in own.items() if "seconds" not in each}

    def untimed(each: Counts) -> Counts:
        return {name: amount for name, amount in each.items() if name != "seconds"}

    return {row: {prompt: untimed(each) if prompt in lacking else each for prompt, each in own.items()}
            for row, own in measured.items()}  # fmt: skip


def said(measured: Measured, length: str) -> str:
    """The number of prompts of a table, in words."""
    prompts = {prompt for own in measured.values() for prompt in own}
    timed = {prompt: each["timed"] for own in measured.values() for prompt, each in own.items() if "seconds" in each}
    clock = f", {len(timed)} timed over {np.mean(list(timed.values())):.0f} tokens each on average" if timed else ""
    return f"{len(prompts)} prompts × {length}{clock}" if prompts else ""


# -------------------------------------------------------------------------------------------------------------- figures


def sums(counts: Mapping[str, Counts], prompts: Sequence[str], weights: Any) -> dict[str, Any]:
    """The counts of `prompts`, added up with `weights` [sets, prompts] (or [prompts])."""
    keys = sorted({key for prompt in prompts for key in counts.get(prompt, {})})
    table = np.array([[counts.get(prompt, {}).get(key, 0.0) for key in keys] for prompt in prompts])
    return dict(zip(keys, (weights @ table).T, strict=True))


def by_conversation(counts: Mapping[str, Counts]) -> dict[str, Counter[str]]:
    """The counts of prompts, those of a conversation's turns together: turns are alike, and left out together."""
    found: dict[str, Counter[str]] = {}
    for prompt, own in counts.items():
        found.setdefault(prompt.partition("/turn")[0], Counter()).update(own)  # type: ignore[arg-type]
    return found


def why_not(never: str, row: str, counts: Mapping[str, Counts], name: str) -> str:
    """Why a quantity of a row is not known; empty where it is."""
    if never:
        return never
    if not counts:
        return f"{row}: not measured yet"
    known = {key for each in counts.values() for key in each}
    lacking = [key for key in quantity(name).needs if key not in known]
    if "seconds" in lacking:
        return QUIET
    return f"{row}: never came up here" if lacking else ""


def value(never: str, row: str, counts: Mapping[str, Counts], name: str) -> float | None:
    """A quantity of a row over all its prompts, of times over those that were timed."""
    if why_not(never, row, counts, name):
        return None
    if "seconds" in quantity(name).needs:
        counts = {prompt: own for prompt, own in counts.items() if "seconds" in own}
    prompts = sorted(counts)
    return float(quantity(name).of(sums(counts, prompts, np.ones(len(prompts)))))


# -------------------------------------------------------------------------------------------------------------- judging


@dataclass(frozen=True)
class Contrasts:
    """What must be positive: all of some group.

    whole [contrasts]: over all conversations. errors: their standard errors. groups: places of contrasts.
    conversations: with the quantity, of the row that has fewest.
    """

    whole: Any
    errors: Any
    groups: Sequence[Sequence[int]]
    conversations: int

    @property
    def degrees(self) -> int:
        """Of freedom."""
        return max(1, self.conversations - 1)

    @property
    def scores(self) -> Any:
        """Every contrast over its standard error, as a normal variable of the same probability."""
        zero = np.where(self.whole == 0, 0.0, np.copysign(np.inf, self.whole))
        t = np.divide(self.whole, self.errors, out=zero, where=self.errors > 0)
        return np.copysign(normal_of(np.abs(t), self.degrees), t)

    @property
    def chance(self) -> tuple[float, float]:
        """One-sided probabilities of contrasts as far from 0, were they 0: for the claim and against it."""
        tail = NormalDist().cdf
        for_it = min(tail(-min(self.scores[group])) for group in self.groups) * len(self.groups)
        against = max(tail(min(self.scores[group])) * len(group) for group in self.groups)
        return for_it, against

    def interval(self) -> tuple[float, list[float]]:
        """The contrast on which the claim hangs, with its 95 % interval."""
        group = max(self.groups, key=lambda places: float(min(self.scores[places])))
        worst = min(group, key=lambda place: float(self.scores[place]))
        reach = float(self.errors[worst]) * student_of(NormalDist().inv_cdf(1 - LEVEL / 2), self.degrees)
        middle = float(self.whole[worst])
        return middle, [middle - reach, middle + reach]

    def needed(self) -> int | None:
        """How many conversations would decide it, were the contrasts and their spread those of a larger sample."""
        scores = max((self.scores[group] for group in self.groups), key=lambda own: float(min(own)))
        ways = len(self.groups) if min(scores) > 0 else len(scores)
        weak = min(scores) if min(scores) > 0 else max((abs(score) for score in scores if score < 0), default=0.0)
        z = NormalDist().inv_cdf(1 - LEVEL / 2 / ways)
        return math.ceil(self.conversations * (z / weak) ** 2) if weak > 0.05 else None


def normal_of(t: Any, degrees: int) -> Any:
    """The normal variable with the probability of Student's `t` (Wallace 1959; to 0.02 from 4 degrees on)."""
    return (8 * degrees + 1) / (8 * degrees + 3) * np.sqrt(degrees * np.log1p(t * t / degrees))


def student_of(z: float, degrees: int) -> float:
    """The inverse of `normal_of`."""
    return math.sqrt(degrees * math.expm1((z * (8 * degrees + 3) / (8 * degrees + 1)) ** 2 / degrees))


def differences(claim: Claim, terms: Any) -> tuple[Any, list[list[int]]]:
    """The contrasts [contrasts, …] of terms [terms, …] and their groups (see `Contrasts`)."""
    count = len(terms)
    if claim.kind == "rises":
        return np.diff(terms, axis=0), [list(range(count - 1))]
    if claim.kind == "level":
        room = EQUAL * np.abs(terms.mean(0))
        found = [room - (a - b) for a, b in itertools.permutations(terms, 2)]
        return np.stack(found), [list(range(len(found)))]
    if claim.kind == "peaks":
        found = [middle - end for middle in terms[1:-1] for end in (terms[0], terms[-1])]
        return np.stack(found), [[place, place + 1] for place in range(0, len(found), 2)]
    return (terms - claim.bound) * (1 if claim.kind == "above" else -1), [[0]]


def contrasts(
    claim: Claim, parts: Sequence[tuple[Mapping[str, Counts], str]], prompts: Sequence[str]
) -> tuple[Any, Contrasts]:
    """The terms over all `prompts`, and their `Contrasts`. parts: of every term its row's counts and its quantity."""
    n, scale = len(prompts), claim.scale or (1.0,) * len(parts)

    def terms(weights: Any) -> Any:
        return np.stack([factor * quantity(name).of(sums(own, prompts, weights))
                         for factor, (own, name) in zip(scale, parts, strict=True)])  # fmt: skip

    values = terms(np.ones(n))
    whole, groups = differences(claim, values)
    left, _ = differences(claim, terms(1 - np.eye(n)))
    errors = np.sqrt((n - 1) / n * ((left - left.mean(-1, keepdims=True)) ** 2).sum(-1))
    fewest = min(sum(any(own.get(prompt, {}).get(key) for key in quantity(name).needs or own.get(prompt, ()))
                     for prompt in prompts) for own, name in parts)  # fmt: skip
    return values, Contrasts(whole, errors, groups, fewest)


def judge(claim: Claim, never: Mapping[str, str], measured: Measured) -> dict[str, Any]:
    """The verdict. never: by row, why it is not run.

    The claim holds if all contrasts of a group are above 0, and does not hold if one of every group is below.
    """
    named = [(*term.partition("@")[::2], claim.quantity) for term in claim.terms]
    parts = [(row, other or default) for row, other, default in named]
    reasons = [why_not(never[row], row, measured.get(row, {}), name) for row, name in parts]
    if any(reasons):
        return {"verdict": NOT_RUN, "reason": next(filter(None, reasons))}
    own = [(by_conversation(measured[row]), name) for row, name in parts]
    prompts = sorted({prompt for counts, _ in own for prompt in counts})
    if any("seconds" in quantity(name).needs for _, name in own):  # times may be of some prompts only
        prompts = [one for one in prompts if all("seconds" in counts[one] for counts, _ in own if one in counts)]
        if not prompts:
            return {"verdict": NOT_RUN, "reason": QUIET}
    values, found = contrasts(claim, own, prompts)
    for_it, against = found.chance
    verdict = HOLDS if for_it < LEVEL / 2 else FAILS if against < LEVEL / 2 else UNDECIDED
    verdict = verdict if found.conversations >= MIN_PROMPTS else UNDECIDED
    middle, interval = found.interval()
    return {
        "verdict": verdict, "values": [float(term) for term in values], "statistic": middle, "ci95": interval,
        "p": min(1.0, 2 * min(for_it, against)), "prompts": found.conversations,
        "needed": found.needed() if verdict == UNDECIDED else None,
    }  # fmt: skip


def statements(claims: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """How many of the paper's statements have each verdict: one does not hold if a part does not, is undecided if a
    part is, and holds if the parts that were run do."""
    parts: dict[str, set[str]] = {}
    for claim in claims:
        if not claim["ours"]:
            parts.setdefault(claim["of"] or claim["says"], set()).add(claim["verdict"])
    order = (FAILS, UNDECIDED, HOLDS, NOT_RUN)
    return Counter(next(verdict for verdict in order if verdict in found) for found in parts.values())


def correct(claims: Sequence[dict[str, Any]]) -> None:
    """Say of every decision whether it stands by Holm's correction over all `claims` that were run."""
    run = sorted((claim for claim in claims if claim["verdict"] != NOT_RUN), key=lambda claim: claim["p"])
    standing = True
    for place, claim in enumerate(run):
        standing = standing and claim["p"] <= LEVEL / (len(run) - place)
        claim["stands"] = standing and claim["verdict"] in DECIDED
