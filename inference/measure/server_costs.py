"""What a pass costs in an engine behind a server, by requests alone, and the speed-up that replayed rounds would have.

A server that keeps the cache of a prompt computes only the tokens after it. So a request for one token after a known
prompt and w new tokens takes the server's overhead and one pass over w tokens, t(w). Between the tokens of a longer
answer lies a pass over one. Hence

    pass(w) = seconds between tokens + t(w) − t(1)

A pass that verifies a draft computes logits of all its rows, and here only of the last. So beside a large vocabulary
the passes of a small model come out too cheap.
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
TURNS = 15
CACHED_SHARE = 0.5  # a request after a known prompt takes less than this share of one after an unknown prompt
DRAWS = 1000


class TimedServer(Protocol):
    """The part of `TargetServer` that is timed."""

    setting: str

    def stream(
        self, prompt: list[int], count: int, seed: int, **more: object
    ) -> tuple[object, list[tuple[int, ...]], list[float], object]:
        """At most `count` tokens: the answer, its steps, the times of the request and of each step, and the reply."""


@dataclass(frozen=True)
class ServerCosts:
    """Seconds of each turn. token: between two tokens of an answer. first: of a request for one token after a known
    prompt and w new tokens, by w."""

    token: tuple[float, ...]
    first: Mapping[int, tuple[float, ...]]

    def passes(self, random: np.random.Generator | None = None) -> np.ndarray:
        """Seconds [W + 1] of a pass over 0 … W tokens, linear between `WIDTHS`; random: of resampled turns."""

        def median(seconds: Sequence[float]) -> float:
            drawn = seconds if random is None else random.choice(seconds, len(seconds))
            return float(np.median(drawn))

        token, single = median(self.token), median(self.first[1])
        measured = [token, *(max(token, token + median(self.first[width]) - single) for width in WIDTHS[1:])]
        return np.interp(range(WIDTHS[-1] + 1), WIDTHS, np.maximum.accumulate(measured))


def measure_server(server: TimedServer, prompt: Sequence[int], seed: int = 0) -> ServerCosts:
    """The costs of passes in the engine behind `server`, after the tokens of `prompt`, repeated as needed.

    Raises `UserError` if the server computes a known prompt again.
    """
    random = Streams(seed).arrays("server costs")
    repeated = [*np.resize(prompt, PROMPT_TOKENS).tolist()]

    def seconds_to_first(tokens: list[int]) -> float:
        _, _, times, _ = server.stream(tokens, 1, seed, cache_prompt=True)  # llama.cpp's option
        return times[1] - times[0]

    def new_tokens(count: int) -> list[int]:
        tokens: list[int] = random.choice(prompt, count).tolist()
        return tokens

    seconds_to_first(repeated)  # the server keeps it from now on
    token_seconds: list[float] = []
    first_seconds: dict[int, list[float]] = {width: [] for width in WIDTHS}
    unknown_seconds: list[float] = []
    for turn in track_progress(range(TURNS), "measuring passes of the server", "turns"):
        for width in WIDTHS if turn % 2 else reversed(WIDTHS):
            first_seconds[width].append(seconds_to_first([*repeated, *new_tokens(width)]))
        _, steps, times, _ = server.stream(repeated, ANSWER_TOKENS, seed, ignore_eos=True, cache_prompt=True)
        token_seconds.append((times[-1] - times[1]) / max(1, sum(map(len, steps[1:]))))
        if turn < TURNS // 3:
            unknown_seconds.append(seconds_to_first(new_tokens(PROMPT_TOKENS)))
    if np.median(first_seconds[1]) > CACHED_SHARE * np.median(unknown_seconds):
        raise UserError(
            f"{server.setting}: it computes a known prompt again, so its passes cannot be timed by requests; let it "
            "keep the cache of prompts (vLLM: --enable-prefix-caching), or start the engine by measure-engine"
        )
    return ServerCosts(tuple(token_seconds), {width: tuple(seconds) for width, seconds in first_seconds.items()})


def expect_speedup(generations: Sequence[Generation], costs: ServerCosts, streams: Streams) -> MedianInterval:
    """The speed-up over plain decoding that replayed rounds would have in the engine: median over texts, 95 % interval.

    The interval has the choice of texts and of turns. Drafting takes the seconds that it took in the replay.
    """
    texts = [_count_rounds(generation.rounds) for generation in generations if generation.rounds]
    rounds = np.array([widths for widths, _, _ in texts])  # [texts, W + 1]
    drafting = np.array([seconds for _, seconds, _ in texts])  # [texts]
    tokens = np.array([count for _, _, count in texts])  # [texts]

    def ratios(seconds: np.ndarray) -> np.ndarray:
        faster: np.ndarray = tokens * seconds[1] / (rounds @ seconds + drafting)
        return faster

    random = streams.arrays("expected speed-up")
    medians = [np.median(random.choice(ratios(costs.passes(random)), len(texts))) for _ in range(DRAWS)]
    low, high = np.quantile(medians, (0.025, 0.975)).tolist()
    return MedianInterval(float(np.median(ratios(costs.passes()))), (low, high), len(texts))


def _count_rounds(rounds: Sequence[Round]) -> tuple[list[int], float, int]:
    """Of a text: its rounds by the tokens of the target's pass, the seconds of drafting, and the tokens."""
    widths = Counter(min(1 + round_.drafted, WIDTHS[-1]) for round_ in rounds)
    drafting = sum(round_.draft_seconds + round_.structure_seconds for round_ in rounds)
    return [widths[width] for width in range(WIDTHS[-1] + 1)], drafting, sum(len(round_.tokens) for round_ in rounds)
