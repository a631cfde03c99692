"""Seconds of the parts of a round of speculative decoding, by timers set from outside around the runtime's functions.

The seconds of a part exclude the parts inside it. Forward parts are the work of the modules, with cache writes. "rows"
is the preparation of their inputs: masks, rotary tables, bookkeeping. With CUDA graphs the forward parts are whole
passes with their masks, as they are replayed.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from subjects import Subject

from draft_models.early_exit.model import EarlyExit
from draft_models.targets.stack import LayerStack, WholeModel
from inference.core.decode import autoregressive, speculative
from inference.core.drafter import Drafter
from inference.core.rounds import Clock, Round
from inference.core.target_session import Runtime, TargetSession
from inference.core.token_selector import TokenSelector
from inference.drafters.early_exit import EarlyExitSource
from inference.drafters.shaped import ModelDrafter
from inference.engines.graphs.cuda_graphs import GraphedSession
from inference.loading.drafters import new_drafter
from inference.settings.method import MethodConfig
from outrider.streams import Streams


class PartTimers:
    """Seconds by part since the last `lap`, each part without the parts inside it; "other" is outside of all."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._running = ["other"]
        self._drafting = 0
        self._since = clock()
        self._seconds: dict[str, float] = {}

    def lap(self) -> dict[str, float]:
        """The seconds since the last lap; resets them."""
        self._turn()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def wrap(self, part: str, function: Callable[..., Any], *, drafting: bool = False) -> Callable[..., Any]:
        """`function`, timed as `part`; "forward" and "rows" are also split by whether a model is drafting."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._drafting += drafting
            side = "draft_" if self._drafting else "target_"
            self._turn()
            self._running.append(side + part if part in ("forward", "rows") else part)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn()
                self._running.pop()
                self._drafting -= drafting

        return timed

    def _turn(self) -> None:
        now = self._clock()
        part = self._running[-1]
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._since
        self._since = now


@contextmanager
def timers(watch: PartTimers, drafter: Drafter | None) -> Iterator[None]:
    """A context with timers around the functions of a round."""
    places: list[tuple[Any, str, str]] = [
        (LayerStack, "embed", "forward"),
        (LayerStack, "run", "forward"),
        (LayerStack, "logits", "forward"),
        (EarlyExit, "logits", "forward"),
        (WholeModel, "rows", "forward"),
        (GraphedSession, "_run", "forward"),
        (GraphedSession, "_step", "forward"),
        (TargetSession, "feed", "rows"),
        (TargetSession, "extend", "rows"),
        (TargetSession, "run_draft_layers", "rows"),
        (TargetSession, "finish", "rows"),
        (TargetSession, "commit", "cache"),
        (TokenSelector, "verify", "verify"),
        (TokenSelector, "next_token", "verify"),
    ]
    model = drafter.model if isinstance(drafter, ModelDrafter) else None
    if isinstance(model, EarlyExitSource):
        places += [(layer, "forward", "forward") for layer in model.drafter.layers]
    if drafter is not None:
        places += [(type(drafter), "draft", "structure"), (type(drafter), "commit", "cache")]
    with ExitStack() as patches:
        for owner, name, part in places:
            patches.enter_context(patch.object(owner, name, watch.wrap(part, getattr(owner, name))))
        if model is not None:
            extend = watch.wrap("rows", type(model).extend, drafting=True)
            patches.enter_context(patch.object(type(model), "extend", extend))
        yield


@dataclass
class Profile:
    """Rounds of one method, without prefill and without last rounds, which the end of a text shortens.

    parts: each round's seconds by part; untimed: the same rounds' seconds in a run without timers.
    """

    rounds: list[Round] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    untimed: list[float] = field(default_factory=list)


def profile(
    subject: Subject, methods: Mapping[str, MethodConfig | None], max_new_tokens: int, runtime: Runtime, clock: Clock
) -> dict[str, Profile]:
    """Every prompt decoded by every method (None: plainly) in turn, once without timers and once with."""
    profiles = {name: Profile() for name in methods}
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "runtime": runtime, "clock": clock}
    for prompt, (name, method), timed in itertools.product(subject.prompts, methods.items(), (False, True)):
        watch, laps = PartTimers(clock), []
        with ExitStack() as context:
            if method is None:
                drafter = None
                decoding = autoregressive(subject.stack, prompt, **options)
            else:
                drafter = new_drafter(method, subject.drafters, Streams(0))
                decoding = speculative(subject.stack, drafter, prompt, **options)
            if timed:
                context.enter_context(timers(watch, drafter))
            for r in decoding:
                laps.append((r, watch.lap()))
        if timed:
            profiles[name].rounds += [r for r, _ in laps[1:-1]]
            profiles[name].parts += [seconds for _, seconds in laps[1:-1]]
        else:
            profiles[name].untimed += [sum(seconds.values()) for _, seconds in laps[1:-1]]
    return profiles


def summarise(measured: Profile) -> dict[str, Any]:
    """Medians over rounds, of the whole and by part, and the share of all time that is not in forward passes.

    timers_cost: the fraction by which the timers slow a round.
    """
    parts, rounds = measured.parts, len(measured.rounds)
    totals = [sum(seconds.values()) for seconds in parts]
    names = sorted({name for seconds in parts for name in seconds})
    share = {name: sum(seconds.get(name, 0.0) for seconds in parts) / sum(totals) for name in names}
    return {
        "rounds": rounds,
        "tau": sum(len(r.tokens) for r in measured.rounds) / rounds,
        "drafted_per_round": sum(r.drafted for r in measured.rounds) / rounds,
        "median_seconds": statistics.median(totals),
        "median_seconds_by_part": {n: statistics.median(seconds.get(n, 0.0) for seconds in parts) for n in names},
        "share_by_part": share,
        "share_not_forward": 1 - sum(part for name, part in share.items() if name.endswith("_forward")),
        "timers_cost": statistics.median(totals) / statistics.median(measured.untimed) - 1,
    }
