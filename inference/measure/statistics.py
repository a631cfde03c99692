"""Statistics of generations: τ and its parts, acceptance by depth, texts that loop, medians with intervals, a verdict.

A text loops if it repeats a cycle of tokens three times or more in a row, in a stretch of at least `LEAST` tokens that
covers half of the text or reaches its end. A greedy target that has fallen into a cycle seldom leaves it: a base model
under a chat template does this. Drafts in a loop are almost always accepted, so its speed-up says nothing about other
texts.

Only exact repetitions without a gap count. Lines of code, entries of a list and quotations of the prompt repeat words
too, but they differ in something, or occur only twice. A share of repeated n-grams would count them.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from outrider.inference.core.drafter import CANDIDATE, CHOSEN, TRIED
from outrider.inference.core.rounds import Generation


def decode_statistics(generations: Iterable[Generation]) -> dict[str, float]:
    """τ and its parts over generations of one method (paper's symbols: v_d, r_d, HM), and what other papers report.

    tau: tokens per target pass, bonus included, prefill excluded.
    acceptance_rate v_d: accepted / drafted.
    draft_share r_d: accepted / all output tokens.
    harmonic_mean: of the two.
    tau_of_requests: the mean over requests of each one's τ; `tau` pools all rounds instead, so that long answers count
    for more. accepted_per_round: accepted draft tokens per round, that is τ without the bonus, pooled.
    accepted_per_round_of_requests: its mean over requests. Requests that the prefill ended have no rounds.
    """
    generations = list(generations)
    rounds, texts = [r for g in generations for r in g.rounds], [g.rounds for g in generations if g.rounds]
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    emitted, output = sum(len(r.tokens) for r in rounds), sum(len(g.tokens) for g in generations)
    v, r = (accepted / drafted if drafted else 0.0), (accepted / output if output else 0.0)
    return {
        "tau": emitted / len(rounds) if rounds else 0.0,
        "acceptance_rate": v,
        "draft_share": r,
        "harmonic_mean": 2 * v * r / (v + r) if v + r else 0.0,
        "drafted_tokens_per_round": drafted / len(rounds) if rounds else 0.0,
        "tau_of_requests": _mean([sum(len(r.tokens) for r in text) / len(text) for text in texts]),
        "accepted_per_round": accepted / len(rounds) if rounds else 0.0,
        "accepted_per_round_of_requests": _mean([sum(r.accepted for r in text) / len(text) for text in texts]),
    }


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def structure_statistics(generations: Iterable[Generation]) -> dict[str, float]:
    """Per-round means of the structure's sums (see `Structure.totals`); empty if it has none.

    Candidates and chosen sizes are not among them, see `acceptance_by_candidates` and `chosen_sizes`.
    """
    generations = list(generations)
    rounds = sum(len(g.rounds) for g in generations)
    names = sorted({name for g in generations for name in g.totals if not name.startswith((TRIED, CANDIDATE, CHOSEN))})
    return {name: sum(g.totals.get(name, 0.0) for g in generations) / rounds for name in names}


def chosen_sizes(generations: Iterable[Generation]) -> dict[str, dict[str, Any]]:
    """Per "auto" size: the value chosen most often, its share of the rounds, and the mean."""
    counts: dict[str, Counter[str]] = {}
    for generation in generations:
        for name, count in generation.totals.items():
            if name.startswith(CHOSEN):
                size, _, value = name.removeprefix(CHOSEN).partition("=")
                counts.setdefault(size, Counter())[value] += int(count)
    by_size: dict[str, dict[str, Any]] = {}
    for size, values in sorted(counts.items()):
        [(mode, times)] = values.most_common(1)
        mean = sum(int(value) * count for value, count in values.items()) / values.total()
        by_size[size] = {"mode": mode, "share": times / values.total(), "mean": mean}
    return by_size


def acceptance_by_candidates(generations: Iterable[Generation]) -> list[float]:
    """MCSD's acceptance by k: the share of nodes at which one of the first k = 1, 2, … candidates was accepted.

    Candidates are tried in order, so this is the acceptance of a tree with k of them.
    Empty for structures without candidates.
    """
    totals: Counter[str] = Counter()
    for generation in generations:
        totals.update(generation.totals)
    widest = max((int(name.removeprefix(CANDIDATE)) for name in totals if CANDIDATE in name), default=0)
    accepted = itertools.accumulate(totals[f"{CANDIDATE}{k}"] for k in range(1, widest + 1))
    return [count / totals[TRIED] for count in accepted]


def acceptance_by_position(
    generations: Iterable[Generation], *, given_previous: bool = False
) -> list[dict[str, float]]:
    """For depth i = 1, 2, …: the number of rounds that drafted that deep, and the share accepted to that depth.

    In a chain depth i is the i-th token. given_previous: the conditional acceptance, over only those rounds whose path
    reached i − 1. Depths without such rounds are left out.
    """
    rounds = [r for g in generations for r in g.rounds]
    table = []
    for position in range(1, max((r.depth for r in rounds), default=0) + 1):
        least = position - 1 if given_previous else 0
        reached = [r for r in rounds if r.depth >= position and r.accepted >= least]
        if reached:
            share = sum(r.accepted >= position for r in reached) / len(reached)
            table.append({"position": position, "rounds": len(reached), "accepted": share})
    return table


def bootstrap_median(
    values: Sequence[float], generator: np.random.Generator, draws: int = 2000, *, units: Sequence[str] | None = None
) -> tuple[float, list[float]]:
    """The median of `values` and its 95 % bootstrap interval, resampling with replacement.

    units: per value, the cluster that it belongs to. All values of a cluster are drawn together (a cluster bootstrap:
    Davison and Hinkley 1997, §3.8), which scipy.stats.bootstrap does not support. None: every value is a cluster.
    """
    names = {name: number for number, name in enumerate(dict.fromkeys(units or range(len(values))))}
    owners = torch.tensor([names[name] for name in units or range(len(values))])
    picks = torch.from_numpy(generator.integers(len(names), size=(draws, len(names))))
    data, order = torch.tensor(values, dtype=torch.float64).sort()
    times = torch.zeros(draws, len(names), dtype=torch.long).scatter_add_(1, picks, torch.ones_like(picks))
    counts = times[:, owners[order]].cumsum(1)  # [draws, values]: the number of a draw's values up to this one
    half = counts[:, -1:] / 2
    lower, upper = (counts < half).sum(1), (counts <= half).sum(1)  # the two middle values, or one twice
    medians = (data[lower] + data[upper]) / 2
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return statistics.median(values), [low, high]


def coverage(vocabulary: Iterable[int], texts: Iterable[tuple[str, Sequence[int]]]) -> dict[str, float]:
    """The share of `vocabulary` tokens among those of `texts` (a category, and a text's tokens), overall ("all") and by
    category."""
    vocabulary, counts, inside = set(vocabulary), Counter[str](), Counter[str]()
    for category, tokens in texts:
        for name in ("all", category):
            counts[name] += len(tokens)
            inside[name] += sum(token in vocabulary for token in tokens)
    return {name: inside[name] / count for name, count in counts.items() if count}


TIMES = 3  # repetitions of a cycle: twice is an ordinary quotation
LEAST = 12  # tokens of the stretch: a row of dots, or of digits at the end of a text, is shorter


@lru_cache(maxsize=4096)  # all arms of a greedy evaluation have the same texts
def looped(tokens: tuple[int, ...]) -> int:
    """The number of tokens in the longest stretch of a text that makes it loop; 0 for a text that does not."""
    text, size, longest = np.array(tokens), len(tokens), 0
    for period in range(1, size // TIMES + 1):
        edges = np.concatenate(([-1], np.flatnonzero(text[period:] != text[:-period]), [size - period]))
        lengths, ends = np.diff(edges) - 1 + period, edges[1:] + period  # of stretches of this period
        # A stretch may end one token before the text does: the last token may be the end token.
        counts = (lengths >= max(TIMES * period, LEAST)) & ((2 * lengths >= size) | (ends >= size - 1))
        longest = max(longest, int(lengths[counts].max(initial=0)))
    return longest


def share_of_loops(texts: Sequence[tuple[int, ...]]) -> dict[str, float]:
    """The number of `texts`, how many of them loop, and the share of all their tokens that is in loops."""
    lengths, total = [looped(text) for text in texts], sum(map(len, texts))
    return {"texts": len(texts), "looping": sum(map(bool, lengths)), "share": sum(lengths) / total if total else 0.0}


def loops_text(loops: Mapping[str, float]) -> str:
    """The result of `share_of_loops` in words."""
    return f"{loops['looping']} of {loops['texts']} texts repeat themselves ({loops['share']:.0%} of all tokens)"


MIN_PROMPTS = 5  # conversations of any number of turns; fewer give no meaningful interval, so no verdict
# Conditions common to all prompts of a run shift all its speed-ups together: memory placement, the kernels chosen at
# load, the machine's temperature. An interval over prompts does not include them.
MARGIN = 0.02


def verdict(speedup: Mapping[str, Any], busy: str | None = None) -> str:
    """ "faster" or "slower" if the whole interval is beyond 1 by more than `MARGIN`, else "undecided".

    speedup: its ci95 and number of prompts. busy: why speeds of that run are unreliable (see `machine_load`).
    """
    if busy or speedup["ci95"] is None or speedup["prompts"] < MIN_PROMPTS:
        return "undecided"
    low, high = speedup["ci95"]
    return "faster" if low > 1 + MARGIN else "slower" if high < 1 - MARGIN else "undecided"
