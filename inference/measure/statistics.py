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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from outrider.inference.core.drafter import CANDIDATE, CHOSEN, OBSERVED, TRIED
from outrider.inference.core.rounds import Generation, Round

OPTIONAL = {"optional": True}  # of a field that report.json leaves out while the field is None
MIN_PROMPTS = 5  # conversations of any number of turns; fewer give no meaningful interval, so no verdict


@dataclass(frozen=True, kw_only=True)
class DecodeStatistics:
    """τ and its parts over generations of one method (paper's symbols: v_d, r_d, HM), and what other papers report.

    tau: tokens per round, which is a pass of the target, its own token (the bonus) included, the prefill excluded.
    acceptance_rate v_d: accepted / drafted, without what a chain drafted after an accepted end token.
    draft_share r_d: accepted / all output tokens. harmonic_mean: of the two.
    tau_of_requests: the mean over requests of each one's τ; `tau` pools all rounds instead, so that long answers count
    for more. accepted_per_round: accepted draft tokens per round, that is τ without the bonus, pooled.
    accepted_per_round_of_requests: its mean over requests. Requests that the prefill ended have no rounds.
    """

    tau: float
    acceptance_rate: float
    draft_share: float
    harmonic_mean: float
    drafted_tokens_per_round: float
    tau_of_requests: float
    accepted_per_round: float
    accepted_per_round_of_requests: float


def decode_statistics(generations: Iterable[Generation]) -> DecodeStatistics:
    """The statistics of all rounds and requests; 0 where nothing was decoded."""
    generations = list(generations)
    rounds, request_rounds = [r for g in generations for r in g.rounds], [g.rounds for g in generations if g.rounds]
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    emitted, output = sum(len(r.tokens) for r in rounds), sum(len(g.tokens) for g in generations)
    tested = count_tested(rounds)
    v, r = (accepted / tested if tested else 0.0), (accepted / output if output else 0.0)
    return DecodeStatistics(
        tau=emitted / len(rounds) if rounds else 0.0,
        acceptance_rate=v,
        draft_share=r,
        harmonic_mean=2 * v * r / (v + r) if v + r else 0.0,
        drafted_tokens_per_round=drafted / len(rounds) if rounds else 0.0,
        tau_of_requests=_mean([sum(len(r.tokens) for r in text) / len(text) for text in request_rounds]),
        accepted_per_round=accepted / len(rounds) if rounds else 0.0,
        accepted_per_round_of_requests=_mean([sum(r.accepted for r in text) / len(text) for text in request_rounds]),
    )


def count_tested(rounds: Iterable[Round]) -> int:
    """The drafted tokens that the target tested: of a chain none after an accepted end token, of a tree all."""
    return sum(_tested_depth(r) if r.drafted == r.depth else r.drafted for r in rounds)


def _tested_depth(round_: Round) -> int:
    """The depth to which a draft was tested: that of its last emitted token if the answer ends within the draft.

    Otherwise the last token is the target's own, so there are more tokens than accepted ones.
    """
    return round_.accepted if 0 < len(round_.tokens) <= round_.accepted else round_.depth


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def structure_statistics(generations: Iterable[Generation]) -> dict[str, float]:
    """Means over rounds of what the draft's structure (chain or tree) summed in `totals`; empty if it summed nothing.

    Candidates and chosen sizes are not among them, see `acceptance_by_candidates` and `chosen_sizes`.
    """
    generations = list(generations)
    # Some stored results do not tell `OBSERVED`, the rounds with a draft. The rounds of a text without a sum had none.
    round_count = sum(g.totals.get(OBSERVED, len(g.rounds)) for g in generations if g.totals) or 1
    excluded_prefixes = (TRIED, CANDIDATE, CHOSEN, OBSERVED)
    names = sorted({name for g in generations for name in g.totals if not name.startswith(excluded_prefixes)})
    return {name: sum(g.totals.get(name, 0.0) for g in generations) / round_count for name in names}


@dataclass(frozen=True)
class SourceRounds:
    """The number of rounds whose drafts are from one source (model, text so far or n-gram table), and their τ."""

    rounds: int
    tau: float


def count_rounds_by_source(generations: Iterable[Generation]) -> dict[str, SourceRounds]:
    """The rounds of each source; those without a draft, or whose source is not recorded, under "none"."""
    counts_by_source: dict[str, list[int]] = {}
    for r in (r for generation in generations for r in generation.rounds):
        counts_by_source.setdefault(r.source or "none", []).append(len(r.tokens))
    return {source: SourceRounds(len(counts), _mean(counts)) for source, counts in sorted(counts_by_source.items())}


@dataclass(frozen=True)
class ChosenSize:
    """An "auto" size: the value chosen most often, its share of the rounds that chose one, and the mean."""

    mode: str
    share: float
    mean: float


def chosen_sizes(generations: Iterable[Generation]) -> dict[str, ChosenSize]:
    """The "auto" sizes that the rounds chose, by their name."""
    counts_by_size: dict[str, Counter[str]] = {}
    for generation in generations:
        for name, count in generation.totals.items():
            if name.startswith(CHOSEN):
                size_name, _, value = name.removeprefix(CHOSEN).partition("=")
                counts_by_size.setdefault(size_name, Counter())[value] += int(count)
    size_by_name: dict[str, ChosenSize] = {}
    for size_name, value_counts in sorted(counts_by_size.items()):
        [(mode, mode_count)] = value_counts.most_common(1)
        mean = sum(int(value) * count for value, count in value_counts.items()) / value_counts.total()
        size_by_name[size_name] = ChosenSize(mode, mode_count / value_counts.total(), mean)
    return size_by_name


def acceptance_by_candidates(generations: Iterable[Generation]) -> list[float]:
    """MCSD's acceptance by k: the share of nodes at which one of the first k = 1, 2, … candidates was accepted.

    Candidates are tried in order, so this is the acceptance of a tree with k of them. Empty for other structures.
    """
    totals: Counter[str] = Counter()
    for generation in generations:
        totals.update(generation.totals)
    max_candidates = max((int(name.removeprefix(CANDIDATE)) for name in totals if CANDIDATE in name), default=0)
    cum_accepted = itertools.accumulate(totals[f"{CANDIDATE}{k}"] for k in range(1, max_candidates + 1))
    return [count / totals[TRIED] for count in cum_accepted]


@dataclass(frozen=True)
class DepthAcceptance:
    """A depth of drafts: the number of rounds that drafted that deep, and the share accepted to that depth."""

    position: int
    rounds: int
    accepted: float


def acceptance_by_position(
    generations: Iterable[Generation], *, given_previous: bool = False
) -> tuple[DepthAcceptance, ...]:
    """The acceptance at depth i = 1, 2, … In a chain depth i is the i-th token. given_previous: the conditional
    acceptance, over only those rounds that accepted to depth i − 1. Depths without such rounds are left out. A draft is
    tested up to an accepted end token only."""
    round_depths = [(r.accepted, _tested_depth(r)) for g in generations for r in g.rounds]
    depth_rows = []
    for position in range(1, max((tested for _, tested in round_depths), default=0) + 1):
        min_accepted = position - 1 if given_previous else 0
        reached = [accepted for accepted, tested in round_depths if tested >= position and accepted >= min_accepted]
        if reached:
            share = sum(accepted >= position for accepted in reached) / len(reached)
            depth_rows.append(DepthAcceptance(position, len(reached), share))
    return tuple(depth_rows)


@dataclass(frozen=True)
class MedianInterval:
    """The median over prompts of a ratio or a time, its 95 % interval and the number of prompts; None without values.

    An interval over fewer than `MIN_PROMPTS` prompts says nothing, and is not shown.
    vs_transformers_generate: the same over transformers' `generate`, of a speed-up over plain decoding.
    """

    median: float | None = None
    ci95: tuple[float, float] | None = None
    prompts: int = 0
    vs_transformers_generate: "MedianInterval | None" = field(default=None, metadata=OPTIONAL)

    @property
    def shown_interval(self) -> tuple[float, float] | None:
        return self.ci95 if self.prompts >= MIN_PROMPTS else None

    def __format__(self, format_spec: str) -> str:
        """As text. format_spec: "interval"; "times", the median alone; "ms", in thousandths."""
        if self.median is None:
            return "–"
        factor, digits, unit = (1000, 1, "") if format_spec == "ms" else (1, 2, "×")
        median_text = f"{factor * self.median:.{digits}f}{unit}"
        if format_spec == "times" or self.shown_interval is None:
            return median_text
        low, high = self.shown_interval
        return f"{median_text} [{factor * low:.{digits}f}, {factor * high:.{digits}f}]"


def bootstrap_median(
    values: Sequence[float], generator: np.random.Generator, draws: int = 0, *, units: Sequence[str] | None = None
) -> tuple[float, tuple[float, float]]:
    """The median of `values` and its 95 % bootstrap interval, resampling with replacement.

    draws: 0 means many for few clusters, whose bounds hang on them. units: per value, its cluster, which is drawn whole
    (a cluster bootstrap: Davison and Hinkley 1997, §3.8; scipy.stats.bootstrap has none). None: every value is one.
    """
    cluster_ids = {name: number for number, name in enumerate(dict.fromkeys(units or range(len(values))))}
    draws = draws or (2000 if len(cluster_ids) > 12 else min(100_000, 2000 + 4_000_000 // len(values)))
    picks = generator.integers(len(cluster_ids), size=(draws, len(cluster_ids)))  # [draws, clusters]
    slots = (picks + len(cluster_ids) * np.arange(draws)[:, None]).ravel()
    times = np.bincount(slots, minlength=picks.size).reshape(picks.shape)
    order = np.argsort(values)
    cluster_of = np.array([cluster_ids[name] for name in units or range(len(values))])[order]  # [values]
    # [draws, values]: how many of a draw's values are up to this one, if each cluster counts as `times` it was picked.
    cum_counts = times[:, cluster_of].cumsum(1)
    half = cum_counts[:, -1:] / 2
    lower, upper = (cum_counts < half).sum(1), (cum_counts <= half).sum(1)  # the two middle values, or one twice
    low, high = np.quantile(np.array(values)[order][np.stack([lower, upper])].mean(0), (0.025, 0.975)).tolist()
    return statistics.median(values), (low, high)


def bootstrap_tau_gain(counts: np.ndarray, generator: np.random.Generator) -> tuple[float, float]:
    """The 95 % bootstrap interval of a gain of τ, resampling texts with replacement.

    counts [3, n]: of each text, its tokens after the prefill's, and the rounds of two drafters for them. The gain is
    tokens / rounds of the second drafter, less that of the first, each summed over the texts.
    """
    size = counts.shape[1]
    tokens, first_rounds, second_rounds = counts[:, generator.integers(size, size=(2000, size))].sum(-1)  # [draws] each
    low, high = np.quantile(tokens / second_rounds - tokens / first_rounds, (0.025, 0.975))
    return float(low), float(high)


def coverage_by_category(vocabulary: Iterable[int], texts: Iterable[tuple[str, Sequence[int]]]) -> dict[str, float]:
    """The share of tokens of `texts`, as (category, tokens), that `vocabulary` has: overall ("all") and by category."""
    vocabulary, token_counts, covered_counts = set(vocabulary), Counter[str](), Counter[str]()
    for category, tokens in texts:
        for name in ("all", category):
            token_counts[name] += len(tokens)
            covered_counts[name] += sum(token in vocabulary for token in tokens)
    return {name: covered_counts[name] / count for name, count in token_counts.items() if count}


TIMES = 3  # repetitions of a cycle: twice is an ordinary quotation
LEAST = 12  # tokens of the stretch: a row of dots, or of digits at the end of a text, is shorter


@lru_cache(maxsize=4096)  # all arms of a greedy evaluation have the same texts
def loop_length(tokens: tuple[int, ...]) -> int:
    """The number of tokens in the longest stretch of a text that makes it loop; 0 for a text that does not."""
    text, token_count, longest = np.array(tokens), len(tokens), 0
    # Example: a b c b c b c with period 2. text[i] != text[i + 2] at i = 0 only, so edges are −1, 0 and 5; between them
    # are stretches of 2 and 6 tokens that end at 2 and 7. The second is b c b c b c.
    for period in range(1, token_count // TIMES + 1):
        edges = np.concatenate(([-1], np.flatnonzero(text[period:] != text[:-period]), [token_count - period]))
        lengths, ends = np.diff(edges) - 1 + period, edges[1:] + period  # of stretches of this period
        # A stretch may end one token before the text does: the last token may be the end token.
        loop_mask = (lengths >= max(TIMES * period, LEAST)) & ((2 * lengths >= token_count) | (ends >= token_count - 1))
        longest = max(longest, int(lengths[loop_mask].max(initial=0)))
    return longest


@dataclass(frozen=True)
class Loops:
    """The number of texts, how many of them loop, and the share of all their tokens that is in loops."""

    texts: int
    looping: int
    share: float

    def __str__(self) -> str:
        return f"{self.looping} of {self.texts} texts repeat themselves ({self.share:.0%} of all tokens)"


def count_loops(texts: Sequence[tuple[int, ...]]) -> Loops:
    lengths, token_count = [loop_length(text) for text in texts], sum(map(len, texts))
    return Loops(len(texts), sum(map(bool, lengths)), sum(lengths) / token_count if token_count else 0.0)


@dataclass(frozen=True)
class PlainToken:
    """The mean time of a token of plain decoding, in microseconds, and its parts; None if no token was decoded.

    host: what is outside the model's pass: choosing the token and transferring it, cache bookkeeping, stop strings and
    the loop; host_share: of 1. On CUDA the token is timed with synchronisation, which makes pass and host longer.
    """

    token_us: float | None = None
    pass_us: float | None = None
    host_us: float | None = None
    host_share: float | None = None


@dataclass(frozen=True)
class MachineLoad:
    """Medians over prompts of the share of its threads' CPU time that the process got, and of the load average; None if
    not recorded. busy: why the speeds are unreliable; None if the machine was not busy."""

    cpu_share: float | None = None
    load_average: float | None = None
    busy: str | None = None

    def warnings(self, device: str = "") -> list[str]:
        """A warning for the top of a report if the machine was busy. device: the one that was measured on."""
        advice = " threads=1 is the least disturbed by other work." if device == "cpu" else ""
        return [f"{self.busy} Do not quote these speeds; no speed is judged.{advice}"] if self.busy else []


# Conditions common to all prompts of a run shift all its speed-ups together: memory placement, the kernels chosen at
# load, the machine's temperature. An interval over prompts does not include them.
MARGIN = 0.02


def judge_speed(speedup: MedianInterval, busy_reason: str | None = None) -> str:
    """ "faster" or "slower" if the whole interval is beyond 1 by more than `MARGIN`, else "undecided".

    busy_reason: why speeds of that run are unreliable; None if they are reliable.
    """
    if busy_reason or speedup.ci95 is None or speedup.prompts < MIN_PROMPTS:
        return "undecided"
    low, high = speedup.ci95
    return "faster" if low > 1 + MARGIN else "slower" if high < 1 - MARGIN else "undecided"
