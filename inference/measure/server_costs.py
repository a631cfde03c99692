"""What a pass costs in an engine behind a server, by requests alone, and the speed-up that replayed rounds would have.

A server that keeps the cache of a prompt computes only the tokens after it. So a request for one token after a known
prompt and w new tokens takes the server's overhead and one pass over w tokens, t(w). Between the tokens of a longer
answer lies a pass over one. Hence

    pass(w) = seconds between tokens + t(w) − t(1)

A pass that verifies a draft computes logits of all its rows, and here only of the last. So beside a large vocabulary
the passes of a small model come out too cheap. A server that runs the drafter alone tells what a drafted token takes in
its engine at most: the time of its token has the server's own work for a request in it.
W is the widest measured pass, in tokens. Replayed rounds are those in which a drafter would have decoded recordings.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from outrider.base.errors import UserError
from outrider.base.progress import track_progress
from outrider.base.streams import Streams
from outrider.inference.core.rounds import Generation, Round
from outrider.inference.measure.statistics import MedianInterval

WIDTHS = (1, 2, 4, 8, 16)  # tokens of the passes that are measured
BLOCK = 16  # tokens: vLLM keeps the cache of whole blocks alone
PROMPT_TOKENS = 16 * BLOCK  # of the prompt that is known to the server
ANSWER_TOKENS = 17  # of an answer whose tokens are timed
TURNS = 15  # of the measurement: each times a request of every width, and an answer
CACHED_SHARE = 0.5  # a request after a known prompt takes less than this share of one after an unknown prompt
DRAWS = 1000  # of texts and turns, for an interval


class TimedServer(Protocol):
    """The part of `TargetServer` that is timed."""

    setting: str  # the option that gives its URL, and the URL: for errors

    def stream(
        self, prompt: list[int], count: int, seed: int, **more: object
    ) -> tuple[object, list[tuple[int, ...]], list[float], object]:
        """At most `count` tokens: the answer, its steps, the times of the request and of each step, and the reply."""


@dataclass(frozen=True)
class ServerCosts:
    """Seconds in each turn of the measurement. token: between two tokens of an answer. first: by w, of a request for
    one token after a known prompt and w new tokens."""

    token: tuple[float, ...]
    first: Mapping[int, tuple[float, ...]]

    def passes(self, random: np.random.Generator | None = None) -> np.ndarray:
        """Seconds [W + 1] of a pass over 0 … W tokens, linear between `WIDTHS`; random: of resampled turns."""
        token, single = _median(self.token, random), _median(self.first[1], random)
        seconds = [token, *(max(token, token + _median(self.first[width], random) - single) for width in WIDTHS[1:])]
        # A wider pass takes no less time; a pass over 0 tokens, which does not occur, has the seconds of 1.
        return np.interp(range(WIDTHS[-1] + 1), WIDTHS, np.maximum.accumulate(seconds))


def _median(seconds: Sequence[float], random: np.random.Generator | None) -> float:
    """The median of all turns, or if `random` is given, of turns drawn with replacement."""
    return float(np.median(seconds if random is None else random.choice(seconds, len(seconds))))


def measure_server(server: TimedServer, prompt: Sequence[int], seed: int = 0) -> ServerCosts:
    """The costs of passes in the engine behind `server`, after the tokens of `prompt`, repeated as needed.

    Raises `UserError` if the server computes a known prompt again.
    """
    random = Streams(seed).arrays("server costs")
    repeated_prompt = _repeat(prompt)

    def seconds_to_first(tokens: list[int]) -> float:
        _, _, step_times, _ = server.stream(tokens, 1, seed, cache_prompt=True)  # llama.cpp's option
        return step_times[1] - step_times[0]

    def new_tokens(count: int) -> list[int]:
        return random.choice(prompt, count).tolist()

    seconds_to_first(repeated_prompt)  # the server keeps it from now on
    token_seconds: list[float] = []
    first_seconds: dict[int, list[float]] = {width: [] for width in WIDTHS}
    uncached_seconds: list[float] = []
    for turn in track_progress(range(TURNS), "measuring passes of the server", "turns"):
        for width in WIDTHS if turn % 2 else reversed(WIDTHS):  # so that a drift of speed favours no width
            first_seconds[width].append(seconds_to_first([*repeated_prompt, *new_tokens(width)]))
        token_seconds.append(_time_token(server, repeated_prompt, seed))
        if turn < TURNS // 3:
            uncached_seconds.append(seconds_to_first(new_tokens(PROMPT_TOKENS)))
    if np.median(first_seconds[1]) > CACHED_SHARE * np.median(uncached_seconds):
        raise UserError(
            f"{server.setting}: it computes a known prompt again, so its passes cannot be timed by requests; let it "
            "keep the cache of prompts (vLLM: --enable-prefix-caching), or start the engine by measure-engine"
        )
    return ServerCosts(tuple(token_seconds), {width: tuple(seconds) for width, seconds in first_seconds.items()})


def measure_drafter(server: TimedServer, prompt: Sequence[int], seed: int = 0) -> tuple[float, ...]:
    """Seconds of a token in each turn, of the drafter that `server` runs in the target's place."""
    repeated_prompt = _repeat(prompt)
    turns = track_progress(range(TURNS), "measuring tokens of the drafter's server", "turns")
    return tuple(_time_token(server, repeated_prompt, seed) for _ in turns)


def _repeat(prompt: Sequence[int]) -> list[int]:
    """`PROMPT_TOKENS` ids: those of `prompt` again and again."""
    return np.resize(prompt, PROMPT_TOKENS).tolist()


def _time_token(server: TimedServer, prompt: list[int], seed: int) -> float:
    """Seconds between two tokens of an answer to `prompt`."""
    _, step_tokens, step_times, _ = server.stream(prompt, ANSWER_TOKENS, seed, ignore_eos=True, cache_prompt=True)
    if len(step_tokens) < 2:
        raise UserError(f"{server.setting}: an answer came in one piece: it ended at once, or a proxy collects it")
    return (step_times[-1] - step_times[1]) / max(1, sum(map(len, step_tokens[1:])))


def expect_speedup(
    generations: Sequence[Generation],
    costs: ServerCosts,
    streams: Streams,
    drafter_seconds: Sequence[float] = (),
    *,
    units: Sequence[str] | None = None,
    in_one_pass: bool = False,
) -> MedianInterval:
    """The speed-up over plain decoding that replayed rounds would have in the engine: median over texts, 95 % interval.

    The interval has the choice of texts and of turns. Drafting takes the seconds that it took in the replay.
    drafter_seconds: seconds of a token of an engine that runs the drafter alone, of each turn. The engine's work for a
    request is in them too, so drafting takes at most them, down to the seconds of the replay if these are fewer: a
    share of the difference, drawn anew each time, is taken off. units: of each text, its conversation; the texts of a
    conversation are drawn together. in_one_pass: a whole draft takes the seconds of a token.
    """
    indices = [index for index, generation in enumerate(generations) if generation.rounds]
    if not indices:
        return MedianInterval()
    texts, unit_names = [generations[index].rounds for index in indices], units or range(len(generations))
    rows_by_unit: dict[str | int, list[int]] = {}
    for row, index in enumerate(indices):
        rows_by_unit.setdefault(unit_names[index], []).append(row)
    clusters = [np.array(rows) for rows in rows_by_unit.values()]
    width_counts = np.array([_count_widths(text) for text in texts])  # [texts, W + 1]
    replayed_seconds = np.array([sum(r.draft_seconds + r.structure_seconds for r in text) for text in texts])  # [texts]
    drafted_counts = np.array([sum(bool(r.drafted) if in_one_pass else r.drafted for r in text) for text in texts])
    token_counts = np.array([sum(len(r.tokens) for r in text) for text in texts])  # [texts]

    def sample_speedups(random: np.random.Generator | None = None) -> np.ndarray:
        """[texts]: with the medians of all turns, or with those of turns drawn by `random`."""
        pass_seconds, draft_seconds = costs.passes(random), replayed_seconds
        if drafter_seconds:
            max_draft_seconds = drafted_counts * _median(drafter_seconds, random)
            share = 0.5 if random is None else random.random()
            draft_seconds = max_draft_seconds - share * np.maximum(0.0, max_draft_seconds - replayed_seconds)
        return token_counts * pass_seconds[1] / (width_counts @ pass_seconds + draft_seconds)

    random = streams.arrays("expected speed-up")
    picks = random.integers(len(clusters), size=(DRAWS, len(clusters)))
    medians = [np.median(sample_speedups(random)[np.concatenate([clusters[pick] for pick in row])]) for row in picks]
    low, high = np.quantile(medians, (0.025, 0.975)).tolist()
    return MedianInterval(float(np.median(sample_speedups())), (low, high), len(clusters))


def _count_widths(rounds: Sequence[Round]) -> list[int]:
    """The numbers of rounds [W + 1] of a text by the tokens of the target's pass; W stands for all wider passes."""
    width_counts = Counter(min(1 + round_.drafted, WIDTHS[-1]) for round_ in rounds)
    return [width_counts[width] for width in range(WIDTHS[-1] + 1)]
