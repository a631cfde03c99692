"""The bench of an evaluation: warmed-up arms with chosen sizes, and the measurement of a prompt by all arms.

An arm is a way of decoding: plain, by a method (a drafter and how it drafts), or transformers' `generate`. A group is
`config.batch` prompts that are decoded together. To judge an arm is to measure its rounding errors (see `lossless`).

prepare_methods   once for all processes: attention kernels, and "auto" sizes
make_bench        in each process: the arms, after a few tokens that warm them up
measure_talks     a group of prompts, turn by turn, by every arm
"""

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from outrider.base.progress import Stage, track_progress
from outrider.base.streams import Streams
from outrider.data_prep.text.chat import answer_text
from outrider.data_prep.text.prompt_records import Prompt
from outrider.draft_models.targets.vocabulary import UnusableTextError
from outrider.inference.core.batch import Batch
from outrider.inference.core.rounds import Clock, synchronized_clock
from outrider.inference.loading.drafters import context_length
from outrider.inference.loading.models import Models
from outrider.inference.loading.target_setup import TargetSetup
from outrider.inference.measure.arms import Turn, decode_all, make_arms, measure_deviations, run_arms, show_rounds
from outrider.inference.measure.lossless import HALF
from outrider.inference.measure.prepared import Prepared, render
from outrider.inference.measure.probe import tune
from outrider.inference.measure.results import Arm, Choosing, MakeArms, PromptResult, Skipped
from outrider.inference.measure.threads import CpuWatch
from outrider.inference.measure.time_limit import spread_order
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kinds import KINDS
from outrider.inference.settings.method import AUTOREGRESSIVE, TRANSFORMERS

WARM_UP_TOKENS = 8
# Prompts that are judged if texts alone do not decide, evenly spread; every mismatch is judged too. With `minutes` they
# are every second one in the order of measuring, as judging a prompt takes about as long as measuring it.
JUDGED_PROMPTS = 12


def prepare_methods(
    config: EvaluateConfig, setup: TargetSetup, models: Models, prompt: Sequence[int], max_positions: int
) -> Prepared:
    """The methods of `config`, with "auto" sizes measured on `prompt`. max_positions: of the longest text."""
    stack = models.stack
    drafter_models = [KINDS[name].load_plugin().causal_lms(model) for name, model in models.drafters.items()]
    kernels = models.runtime.choose_kernels([stack, *itertools.chain.from_iterable(drafter_models)], max_positions)
    models.runtime.prepare(max_positions, kernels)
    clock = synchronized_clock if stack.device.type == "cuda" else time.perf_counter
    settings = setup.text(config.max_new_tokens, config.sampling)
    methods, tunings = tune(
        config.methods, stack, models.drafters, prompt, settings, seed=config.seed, runtime=models.runtime, clock=clock
    )
    return Prepared(methods, tunings, kernels, products=models.products)


@dataclass(frozen=True)
class Bench:
    """The warmed-up arms of an evaluation.

    profilers: our arms with a clock that synchronises with the GPU, for the seconds of the parts of a round.
    judged: indices of the groups of prompts that are judged, besides those with a mismatch (see `lossless`).
    judge: makes the arms for judging; None if only equal texts count.
    display_positions: indices of the prompts whose first turn is decoded again by the arms of `show`, for display.
    watch: measures the CPU time of plain decoding.
    batch: decodes the prompts of a group together, for all arms but those in `alone`; None: a group is one prompt.
    order: the indices of the groups in the order of measuring.
    """

    arms: dict[str, Arm]
    profilers: dict[str, Arm]
    judged: frozenset[int]
    judge: MakeArms | None
    display_positions: frozenset[int]
    show: MakeArms
    watch: CpuWatch
    batch: Batch | None
    alone: frozenset[str]
    order: Sequence[int]


def make_bench(
    config: EvaluateConfig, setup: TargetSetup, models: Models, prepared: Prepared, prompt: Sequence[int], prompts: int
) -> Bench:
    """The arms of `config`, warmed up on a few tokens after `prompt`; `prompts`: the total number of prompts."""
    arm_inputs = models.stack, models.drafters, prepared.methods
    batch = Batch(models.runtime, yielding=False) if config.batch > 1 else None
    make = partial(make_arms, *arm_inputs, runtime=batch or models.runtime, tunings=prepared.tunings)
    reference = models.reference if config.compare_transformers else None

    def arms_for(max_new_tokens: int, clock: Clock = time.perf_counter) -> dict[str, Arm]:
        return make(reference, setup.text(max_new_tokens, config.sampling), clock=clock)

    def arms_with(choosing: Choosing) -> dict[str, Arm]:
        return make(None, setup.text(config.max_new_tokens, config.sampling), choosing=choosing)

    warm_up_tokens = min(WARM_UP_TOKENS, config.max_new_tokens)
    alone_arms = frozenset({TRANSFORMERS})
    for name, arm in track_progress(arms_for(warm_up_tokens).items(), "warming up, compiling what is new", "methods"):
        streams, arm_batch = Streams(config.seed).within("warm-up"), None if name in alone_arms else batch
        decode_all(arm, [prompt] * config.batch, [streams] * config.batch, arm_batch)
    profilers: dict[str, Arm] = {}
    if setup.device.type == "cuda":
        synchronized_arms = arms_for(config.max_new_tokens, synchronized_clock)
        profilers = {name: synchronized_arms[name] for name in (AUTOREGRESSIVE, *prepared.methods)}

    def spread(total: int, count: int) -> frozenset[int]:
        """`count` of `total`, evenly spread; the first that are measured where minutes= may leave others out."""
        even_indices = (i * total // count for i in range(count))
        return frozenset(even_indices if config.minutes is None else spread_order(total)[:count])

    n_groups, n_judged = prompts // config.batch, -(-JUDGED_PROMPTS // config.batch)
    group_order = range(n_groups) if config.minutes is None else spread_order(n_groups)
    judged = spread(n_groups, n_judged) if config.minutes is None else frozenset([*group_order][: 2 * n_judged : 2])
    display_positions = spread(prompts, config.show_prompts)
    # If an int8 model's arm ran the float weights by mistake, its text might still be equal by chance.
    judge = arms_with if config.sampling.temperature > 0 or setup.dtype in HALF or setup.int8 else None
    arms, watch = arms_for(config.max_new_tokens), CpuWatch()
    if setup.device.type == "cpu":
        arms[AUTOREGRESSIVE] = watch.around(arms[AUTOREGRESSIVE])
    return Bench(arms, profilers, judged, judge, display_positions, arms_with, watch, batch, alone_arms, group_order)


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this process, for all arms together: on the GPU if `device` is one, else of main memory; 0 if the
    system does not report it (Windows)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024  # bytes per unit of ru_maxrss
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@dataclass
class Talk:
    """A prompt whose turns are measured. first_ids: the ids of its first turn. position: its index in the run.

    texts: the turns and answers so far, alternating.
    """

    prompt: Prompt
    first_ids: Sequence[int]
    position: int
    results: list[PromptResult] = field(default_factory=list)
    skipped: tuple[Skipped, ...] = ()
    texts: list[str] = field(default_factory=list)

    def ask(self, number: int, config: EvaluateConfig, setup: TargetSetup, context: int) -> Turn | None:
        """Turn `number`, after the target's own answers to the earlier turns. None if there is no such turn, or if it
        is skipped; later turns are then skipped too. context: the models' context length in tokens."""
        if self.skipped or number >= len(self.prompt.turns):
            return None
        turn_ids, ids, skip_reason = self.prompt.turn_ids, self.first_ids, ""
        answers = [result.answer for result in self.results]
        self.texts += [*(answer_text(answer, setup.tokenizer) for answer in answers[-1:]), self.prompt.turns[number]]
        try:
            ids = render(setup, self.prompt, self.texts, answers) if answers else ids
        except UnusableTextError as error:  # caused by an answer of the target
            ids, skip_reason = [], str(error)
        if len(ids) + config.max_new_tokens > context:
            skip_reason = f"{len(ids)} tokens and {config.max_new_tokens} new ones in a context of {context}"
        if skip_reason:
            print(f"skipped prompt={self.prompt.id} turn={number + 1}: {skip_reason}", flush=True)
            reasons = itertools.chain([skip_reason], itertools.repeat("a turn before it was left out"))
            self.skipped = tuple(map(Skipped, turn_ids[number:], reasons))
            return None
        return Turn(turn_ids[number], self.prompt.category, ids, self.prompt.id)


def measure_talks(
    config: EvaluateConfig, talks: Sequence[Talk], setup: TargetSetup, models: Models, bench: Bench
) -> None:
    """Run every turn of the talks through every arm; several talks are decoded together. The place of the group in the
    order of measuring and the turn determine which arm runs first, in any process."""
    group_index = talks[0].position // config.batch
    group_name = None if bench.batch is None else f"{group_index} {talks[0].prompt.id}"
    context = context_length(setup.config, models.drafters)
    for number in range(max(len(talk.prompt.turns) for talk in talks)):
        talk_turns = [(talk, turn) for talk in talks if (turn := talk.ask(number, config, setup, context)) is not None]
        if not talk_turns:
            return
        queries = [replace(turn, group=group_name) for _, turn in talk_turns]
        results = run_arms(
            bench.arms, queries, repeats=config.repeats, turn=bench.order.index(group_index) + number, seed=config.seed,
            profilers=bench.profilers, batch=bench.batch, alone=bench.alone,
        )  # fmt: skip
        results = with_deviations(config, models, bench, group_index, results)
        display_flags = [number == 0 and talk.position in bench.display_positions for talk, _ in talk_turns]
        results = with_rounds(config, bench, display_flags, results)
        for (talk, _), result in zip(talk_turns, results, strict=True):
            talk.results.append(result)


def with_deviations(
    config: EvaluateConfig, models: Models, bench: Bench, group_index: int, results: list[PromptResult]
) -> list[PromptResult]:
    """`results` with the deviations of all arms, if a text differs or the group with this index is to be judged."""
    arm_names, is_sampled = (AUTOREGRESSIVE, *config.methods), config.sampling.temperature > 0
    differs = not is_sampled and not all(result.identical(name) for result in results for name in arm_names)
    if bench.judge is None or not (differs or group_index in bench.judged):
        return results
    streams = [Streams(config.seed, result.prompt_id) for result in results]
    with Stage(f"judging prompt {results[0].prompt_id}"):
        deviations = measure_deviations(models.reference, results, bench.judge, streams, bench.batch)
    return [replace(result, deviations=by_arm) for result, by_arm in zip(results, deviations, strict=True)]


def with_rounds(
    config: EvaluateConfig, bench: Bench, displayed: Sequence[bool], results: list[PromptResult]
) -> list[PromptResult]:
    """`results` with recorded rounds where they are `displayed`; the whole group is decoded again, as measured."""
    if not any(displayed):
        return results
    streams = [Streams(config.seed, result.prompt_id, repeat=0) for result in results]
    rounds = show_rounds(bench.show, config.methods, [result.prompt for result in results], streams, bench.batch)
    return [
        replace(result, shown=by_method) if is_displayed else result
        for result, by_method, is_displayed in zip(results, rounds, displayed, strict=True)
    ]
