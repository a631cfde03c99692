"""Start-up measurement of the costs of a round on this device, and of the drafts' acceptance.

A round drafts, verifies and emits tokens once. `tune` measures each method with "auto" sizes by decoding after a prompt
(`measure_costs`). First plain decoding runs. Then the method decodes, and each round drafts in another size: by a
`_ProbeStructure` of several (`probes_of`) if a structure (a rule for chains or trees) shapes the drafts, else by
`_SizesInTurn`. `_cycle` measures the laps, the seconds of draft steps and of the target's passes with their width in
tokens. `curve` makes costs of them:

    draft steps (1, 2.1 ms), (3, 2.2 ms), (7, 2.6 ms) …   →   seconds of a step of 1, 2, 3, … nodes
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, cast

import numpy as np
from torch import Tensor

from outrider.base.errors import UserError
from outrider.base.progress import Stage
from outrider.base.streams import Streams
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.target import Target
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.core.drafter import Drafter
from outrider.inference.core.rounds import Clock, Round
from outrider.inference.core.session import Pass, Session, View
from outrider.inference.core.target_session import Runtime, eager_session
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.core.tree import DraftTree
from outrider.inference.drafters.draft_model import OnePass
from outrider.inference.drafters.model_drafter import ModelDrafter, TimedModel
from outrider.inference.loading.drafters import Drafters, new_drafter, position_limits
from outrider.inference.loading.generation_config import TextSettings
from outrider.inference.settings.kinds import KINDS
from outrider.inference.settings.method import AUTO, MethodConfig, StopConfig, StructureConfig
from outrider.inference.shapes.factory import Structure
from outrider.inference.sizing.costs import Costs, curve, typical
from outrider.inference.sizing.node_sizes import SEARCH_SIZES, trials_of
from outrider.inference.sizing.policy import INDICES, TUNED_TOKENS, Tuning
from outrider.inference.stopping.interface import Source

SECONDS = 2.0  # time limit for starting another cycle through the probes, after the first CYCLES[0]
CYCLES = (4, 10)  # fewest and most cycles; the first one warms up and is not timed
LONGEST = 8.0  # seconds after which two cycles are enough
# A first cycle whose rounds, at their typical seconds, together exceed SLOW ends after FEWEST sizes, is timed and is
# the only one: warming up is little beside such passes, and a curve goes on beyond its last size as it rose before. But
# a first draft may compile or load for seconds, so it is not timed. Plain decoding ends likewise.
SLOW, FEWEST = 3.0, 5
PLAIN_TOKENS = 12  # maximum length of a measured generation without a drafter
CHAINS = (1, 3, 7, 15)  # tokens of the drafted chains
NODES, LEVELS = (1, 3, 7, 15, 31, 63), 4  # tokens of the drafted trees, and their most levels
SIZES = (0, *NODES)  # of a drafter that shapes its own drafts; a round without a draft has a cost too


def probes_of(method: MethodConfig) -> list[MethodConfig]:
    """`method` with various numbers in place of "auto", so that passes of many widths occur. copy=None: the model alone
    drafts, without n-grams of the text."""
    tree_config, method = method.structure, replace(method, copy=None)
    if tree_config.kind == "chain":
        return [replace(method, stop=StopConfig(max_draft=length)) for length in CHAINS]
    node_counts = NODES if AUTO in (tree_config.nodes, tree_config.max_depth) else (tree_config.nodes,)
    max_levels = LEVELS if isinstance(tree_config.max_depth, str) else min(LEVELS, tree_config.max_depth)
    trees = [replace(tree_config, nodes=n, max_depth=max_levels, delta=0.0) for n in node_counts]  # any gain counts
    without_rule = replace(method, structure=StructureConfig(), stop=StopConfig())
    return [replace(without_rule, structure=sized_tree) for sized_tree in trees]  # no stop rule: all levels are drafted


def tune(
    methods: Mapping[str, MethodConfig],
    stack: Target,
    drafters: Drafters,
    prompt: Sequence[int],
    settings: TextSettings | None = None,
    *,
    seed: int = 0,
    runtime: Runtime | None = None,
    clock: Clock = time.perf_counter,
) -> tuple[dict[str, MethodConfig], dict[str, Tuning]]:
    """`methods` ready to run, and the `Tuning` of those with "auto" sizes, measured by decoding after `prompt`. An
    OPT-Tree with a null δ and a given depth gets δ = μ = seconds of a draft step / seconds of a decoding step.
    settings: of the arms; None: greedy. No text ends early here. clock: one that synchronises with the device."""
    ready_methods, tunings = dict(methods), {}
    for name, method in methods.items():
        structure = method.structure
        if not (method.adapts or method.lacks_delta):
            continue
        streams = Streams(seed).within(name, "tune")
        text = settings or TextSettings(TUNED_TOKENS)
        with Stage(f"measuring the sizes of {name}"):
            tuning = measure_costs(method, stack, drafters, prompt, text, streams, runtime, clock)
        if method.adapts:
            tunings[name] = tuning
        if method.lacks_delta:
            mu = tuning.costs.step[1] / tuning.costs.autoregressive
            ready_methods[name] = replace(method, structure=replace(structure, delta=min(1.0, mu)))
    return ready_methods, tunings


def measure_costs(
    method: MethodConfig,
    stack: Target,
    drafters: Drafters,
    prompt: Sequence[int],
    settings: TextSettings,
    streams: Streams,
    runtime: Runtime | None,
    clock: Clock,
) -> Tuning:
    """The costs of rounds of `method` on this device, and the acceptance of its drafts.

    The rounds of a generation cycle through `probes_of`, so that drift of the machine affects all sizes alike. Takes
    `SECONDS` seconds, or `CYCLES[0]` cycles if these take longer, two above `LONGEST`, or one that is `SLOW`. A prompt
    too long to continue is cut at the front. streams: random ones, by purpose.
    """
    model = {name: model for name, model in drafters.items() if name == method.source}
    limits = [context_limit(stack.config), *position_limits(model)]
    new_tokens = max(2, min(TUNED_TOKENS, min(limits) // 2))
    prompt = prompt[max(0, len(prompt) + new_tokens - min(limits)) :]
    sampler = replace(settings, max_new_tokens=new_tokens).sampler(prompt, stack.device)
    is_sampled = settings.sampling.temperature > 0
    generation_ids, timed_runtime = itertools.count(), _Passes(clock)
    runtime = timed_runtime if runtime is None or runtime.name == Runtime.name else runtime

    def make(config: MethodConfig, draft_streams: Streams) -> Drafter:
        return new_drafter(config, drafters, draft_streams, drawn=is_sampled)

    def decode(arm: Callable[..., Iterator[Round]], *drafter: Drafter, tokens: int) -> Iterator[Round]:
        verify_stream = streams.of("verify", next(generation_ids)) if is_sampled else None
        selector = TokenSelector(sampler, verify_stream, method.verification)
        options = {"max_new_tokens": tokens, "selector": selector, "runtime": runtime, "clock": clock}
        return arm(stack, *drafter, prompt, **options)

    plain_seconds = _plain_seconds(decode(autoregressive, tokens=min(PLAIN_TOKENS, new_tokens)))
    outside_seconds = plain_seconds - typical(timed_runtime.laps or [0.0])  # of a plain round, outside its pass
    has_structure = KINDS[method.source].shaped
    sized_methods = probes_of(method) if has_structure else [method]
    drafters_of_probes = (make(config, streams.within("probe", i)) for i, config in enumerate(sized_methods))
    structures = (cast(ModelDrafter, drafter).structure for drafter in drafters_of_probes)
    probe = _ProbeStructure([*structures]) if has_structure else _SizesInTurn()

    def generate() -> Iterator[Round]:
        return decode(speculative, probe.into(make(sized_methods[-1], streams)), tokens=new_tokens)

    rounds = _rounds_of(generate, probe, f"{method.source} drafter", new_tokens)
    target_laps, other_seconds = _cycle(rounds, probe, clock)
    is_padded = runtime.name == "graphed"  # CUDA graphs run passes of 1, 2, 4, … rows
    step_laps = probe.laps or [(1, 0.0)]  # none if one pass drafts all levels: these seconds are in `probe.once`
    step, verify_seconds = curve(step_laps, padded=is_padded and has_structure), curve(target_laps, padded=is_padded)
    unshared = (0.0, 0.0, 0.0)  # of a draft step, a verification, a step of plain decoding (see `Costs`)
    if runtime is timed_runtime:  # several texts could share the passes, but not what is outside
        unshared = (min(step[1], outside_seconds) if has_structure else step[1], outside_seconds, outside_seconds)
    first_step_extra = typical(probe.once) - step[1] if probe.once else 0.0
    costs = Costs(step, verify_seconds, typical(other_seconds) + max(0.0, first_step_extra), plain_seconds, unshared)
    return Tuning(costs, tuple(probe.tried), tuple(probe.right))


def _plain_seconds(rounds: Iterator[Round]) -> float:
    """The `typical` seconds (lower quartile) of a round of plain decoding, without the prefill."""
    seconds: list[float] = []
    for number, r in enumerate(rounds):
        seconds += [r.seconds] if number else []
        if len(seconds) >= FEWEST and len(seconds) * typical(seconds) > SLOW:
            break
    return typical(seconds)


def _rounds_of(
    generate: Callable[[], Iterator[Round]], probe: "_ProbeStructure | _SizesInTurn", drafter: str, n_tokens: int
) -> Iterator[Round]:
    """The rounds of one generation of `n_tokens` tokens after another, without end. Raises `UserError` if `drafter`, a
    name, drafts nothing."""
    while True:
        has_drafted = probe.counts_empty
        for number, r in enumerate(generate()):
            if r.drafted or (number and probe.counts_empty):  # without a draft only if 0 is a measured size
                has_drafted = True
                yield r
        if not has_drafted:
            raise UserError(
                f"the {drafter} proposed nothing in a text of {n_tokens} tokens, so it cannot be "
                "measured: expected logits that are numbers; look at its training, or evaluate a fixed size"
            )


def _cycle(
    rounds: Iterator[Round], probe: "_ProbeStructure | _SizesInTurn", clock: Clock
) -> tuple[list[tuple[int, float]], list[float]]:
    """The (rows, seconds) of the target's passes, and each round's seconds outside its parts, in `CYCLES` cycles."""
    target_laps: list[tuple[int, float]] = []
    other_seconds: list[float] = []
    started, first_lap_count, round_seconds = clock(), 0, list[float]()
    for round_number, r in enumerate(rounds, start=1):
        if probe.counts_empty:  # it runs no model
            probe.laps.append((max(1, r.drafted), r.structure_seconds))
        target_laps.append((r.drafted + 1, r.verify_seconds))
        other_seconds.append(r.seconds - r.draft_seconds - r.structure_seconds - r.verify_seconds)
        cycle_count, cycle_turn = divmod(round_number, probe.turns)
        elapsed_seconds = clock() - started
        round_seconds.append(r.seconds)
        first_lap_count = len(probe.laps) if round_number == 1 else first_lap_count
        if FEWEST <= round_number <= probe.turns and round_number * typical(round_seconds) > SLOW:
            del probe.laps[:first_lap_count]
            break
        cycle_limit = CYCLES[1] if elapsed_seconds <= SECONDS else CYCLES[0] if elapsed_seconds <= LONGEST else 2
        if not cycle_turn and cycle_count >= cycle_limit:
            break
        if round_number == probe.turns:
            for measurements in (target_laps, other_seconds, probe.laps, probe.once):  # the first cycle warmed up
                cast(list[object], measurements).clear()
    return target_laps, other_seconds


class _Passes(Runtime):
    """An eager runtime that times each pass that several texts could share. laps: the seconds of each."""

    def __init__(self, clock: Clock):
        self._clock, self.laps = clock, list[float]()

    def session(self, target: Target, split: int | None, capacity: int, context: int | None = None) -> Session:
        return eager_session(target, split, capacity, context, self._run)

    def _run(self, _: object, pass_: Pass, x: Tensor, view: View) -> tuple[Tensor, ...]:
        started = self._clock()
        outputs = pass_(x, view)
        self.laps.append(self._clock() - started)
        return outputs


class _ProbeStructure(Structure):
    """Cycles through several structures by round. laps: (width, seconds) of every draft step, from one forward pass to
    the next or to the end of the draft. once: seconds of the first step of a `OnePass` drafter, whose pass drafts all
    tokens; it is in no lap. tried, right: drafted tokens, and those that the target accepted, by index: the position in
    a chain, or the band of q.
    """

    counts_empty = False  # whether a round without a draft is measured

    def __init__(self, structures: Sequence[Structure]):
        super().__init__(max(s.max_rows for s in structures), max(s.max_depth for s in structures))
        self._structures, self._turn, self.turns = structures, 0, len(structures)
        self.reads_root = any(structure.reads_root for structure in structures)
        self.laps: list[tuple[int, float]] = []
        self.once: list[float] = []
        self.tried, self.right = [0.0] * INDICES, [0.0] * INDICES

    def into(self, drafter: Drafter) -> Drafter:
        """`drafter` with these structures in turn."""
        model = cast(ModelDrafter, drafter).model
        self._one_pass = isinstance(model, OnePass)
        return ModelDrafter(model, self)

    def draft(self, source: Source, root: Tensor, limit: int) -> DraftTree:
        tree = self._active.draft(source, root, limit)
        laps = cast(TimedModel, source).laps()
        self.once += [seconds for _, seconds in laps[: self._one_pass]]  # the first lap, or none
        self.laps += laps[self._one_pass :]
        return tree

    def observe(self, tree: DraftTree, accepted_nodes: Sequence[int]) -> None:
        """Count the outcomes. Unlike in the base class no stop rule learns."""
        if not len(tree):
            return  # the same size is tried again
        for index, tried_count, right_count in self._active.trials(tree, accepted_nodes):
            self.tried[index] += tried_count
            self.right[index] += right_count
        self._turn += 1

    @property
    def _active(self) -> Structure:
        return self._structures[self._turn % self.turns]


class _SizesInTurn:
    """The `Sizes` of a drafter that shapes its own drafts: cycles through `SIZES`, and records outcomes of trials.

    laps: (nodes, seconds) of every round's drafting.
    """

    turns, max_nodes = len(SIZES), max(SIZES)
    counts_empty = True
    once: ClassVar[list[float]] = []

    def __init__(self) -> None:
        self._turn = 0
        self.totals: Counter[str] = Counter()
        self.laps: list[tuple[int, float]] = []
        self.tried, self.right = [0.0] * INDICES, [0.0] * INDICES

    def into(self, drafter: Drafter) -> Drafter:
        """`drafter` with these sizes, also wider than its own: passes of several texts have so many rows."""
        drafter.sizes, drafter.max_rows = self, self.max_nodes
        return drafter

    def search_size(self) -> int:
        """The number of nodes to search for in this round; some may not be submitted (see `count`)."""
        self._turn += 1
        return next(size for size in SEARCH_SIZES if size >= self._size)

    @property
    def _size(self) -> int:
        return SIZES[self._turn % self.turns]

    def count(self, parents: np.ndarray, probs: np.ndarray) -> int:
        return min(self._size, len(parents))

    def observe(self, parents: np.ndarray, probs: np.ndarray, accepted: Sequence[int]) -> None:
        for index, tried_count, right_count in trials_of(parents, probs, accepted):
            self.tried[index] += tried_count
            self.right[index] += right_count
