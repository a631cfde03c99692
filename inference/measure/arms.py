"""The arms of a measurement: ways of decoding that run in turn on the same prompts, so that they can be compared.

An `Arm` is a function from a prompt's ids and random streams to a generation. `make_arms` makes them, `run_arms` runs
them on prompts, `measure_deviations` and `show_rounds` run them again with selectors that record. A selector chooses
tokens from the target's logits. A round drafts, verifies and emits tokens once.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from outrider.base.progress import Stage
from outrider.base.streams import Streams
from outrider.draft_models.targets.attention import stock_attention
from outrider.draft_models.targets.target import Target
from outrider.inference.core.batch import Batch, BatchText
from outrider.inference.core.decode import autoregressive, cut, speculative
from outrider.inference.core.drafter import Drafter
from outrider.inference.core.rounds import Clock, Generation, Round, collect
from outrider.inference.core.stop_strings import StopStrings, cut_at_stop
from outrider.inference.core.target_session import Runtime
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.loading.drafters import Drafters, new_drafter
from outrider.inference.loading.generation_config import TextSettings
from outrider.inference.measure.lossless import Deviation, Forced, make_reference
from outrider.inference.measure.results import Arm, Choosing, MakeArms, PromptResult, ShownRound, TreeLog, shown_rounds
from outrider.inference.settings.method import AUTOREGRESSIVE, TRANSFORMERS, MethodConfig
from outrider.inference.settings.sampling import Verification
from outrider.inference.sizing.policy import Tuning


def make_arms(
    stack: Target,
    drafters: Drafters,
    methods: Mapping[str, MethodConfig],
    stock: PreTrainedModel | None,
    text: TextSettings,
    *,
    runtime: Runtime | None = None,
    tunings: Mapping[str, Tuning] | None = None,
    clock: Clock = time.perf_counter,
    choosing: Choosing = lambda selector: selector,
) -> dict[str, Arm]:
    """The arms to compare, by name: plain decoding, every method and, given `stock`, its `generate`.

    stack, stock: the target as this runtime and as transformers runs it. drafters: their models by kind.
    runtime: how the passes of all arms but `generate` run; None: eagerly.
    tunings: the measured costs of the methods with "auto" sizes (see `inference.measure.probe`).
    choosing: replaces an arm's selector. An arm uses the random streams within its name, one per purpose.
    """
    maker = _ArmMaker(stack, text, runtime, clock, choosing)
    decode = partial(autoregressive, stack)
    arms: dict[str, Arm] = {AUTOREGRESSIVE: lambda ids, streams: maker.run(decode, ids, streams.within(AUTOREGRESSIVE))}
    for name, method in methods.items():
        tuning = tunings.get(name) if tunings else None
        if tuning is not None and isinstance(runtime, Batch):
            tuning = tuning.of_all(partial(runtime.sharing, stack))  # a pass costs by the number of its texts
        make = partial(new_drafter, method, drafters, drawn=text.sampling.temperature > 0, tuning=tuning)
        arms[name] = partial(maker.draft, name, make, method.verification)
    if runtime is not None:
        arms = {name: rerun_on_capture(arm, runtime) for name, arm in arms.items()}
    if stock is not None:
        arms[TRANSFORMERS] = lambda prompt, streams: transformers_generate(
            stock, prompt, text, streams.number(TRANSFORMERS, "sample", bits=64)
        )
    return arms


@dataclass(frozen=True)
class _ArmMaker:
    """What the arms of this runtime share (see `make_arms`)."""

    stack: Target
    text: TextSettings
    runtime: Runtime | None
    clock: Clock
    choosing: Choosing

    def draft(
        self, name: str, make: Callable[..., Drafter], rule: Verification, prompt: Sequence[int], streams: Streams
    ) -> Generation:
        """Decoding with the drafters of `make` (see `new_drafter`); with all arguments up to `rule` bound, an `Arm`."""
        arm_streams = streams.within(name)
        drafter = make(arm_streams)
        generation = self.run(partial(speculative, self.stack, drafter), prompt, arm_streams, rule)
        return replace(generation, totals=dict(drafter.totals))

    def run(
        self,
        decode: Callable[..., Iterator[Round]],
        prompt: Sequence[int],
        streams: Streams,
        rule: Verification = "exact",
    ) -> Generation:
        """The text after `prompt` by the rounds of `decode`. rule: which drafted tokens are accepted."""
        settings, max_new_tokens = self.text, self.text.max_new_tokens
        verify_stream = streams.of("verify") if settings.sampling.temperature > 0 else None
        selector = self.choosing(TokenSelector(settings.sampler(prompt, self.stack.device), verify_stream, rule))
        options = {"max_new_tokens": max_new_tokens, "eos": settings.eos, "runtime": self.runtime, "clock": self.clock}
        rounds = decode(prompt, selector=selector, **options)
        if settings.stops and settings.tokenizer is not None:
            rounds = cut_at_stop(rounds, prompt, StopStrings(settings.stops, settings.tokenizer).first_end)
        with Stage("", max_new_tokens, "tokens") as stage:
            return collect(_advance_stage(rounds, stage), self.clock)


def _advance_stage(rounds: Iterator[Round], stage: Stage) -> Iterator[Round]:
    for r in rounds:
        stage.advance(len(r.tokens))
        yield r


def rerun_on_capture(arm: Arm, runtime: Runtime) -> Arm:
    """`arm`, run again if it captured graphs, since capture time is not decode time."""

    def decode_without_captures(prompt: Sequence[int], streams: Streams) -> Generation:
        while True:
            captures_before = runtime.captures
            generation = arm(prompt, streams)
            if runtime.captures == captures_before:
                return generation

    return decode_without_captures


class _FirstToken(BaseStreamer):
    """Records the time of the first new token, the end of the prefill; counts the tokens in `stage`."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.calls = 0
        self.at = 0.0

    def put(self, value: object) -> None:
        self.calls += 1
        if self.calls == 2:  # the first call passes the prompt
            self.at = time.perf_counter()
        self.stage.done = self.calls - 1

    def end(self) -> None:
        pass


@torch.inference_mode()
def transformers_generate(
    model: PreTrainedModel, prompt: Sequence[int], text_settings: TextSettings, seed: int = 0
) -> Generation:
    """The target through transformers' own `generate`, with its own attention and cache."""
    ids = torch.tensor([prompt], device=model.device)
    model.generation_config = settings = text_settings.for_generate()
    streamer = _FirstToken(Stage("", text_settings.max_new_tokens, "tokens"))
    with streamer.stage, stock_attention(model), torch.random.fork_rng():
        torch.manual_seed(seed)
        started = time.perf_counter()
        output_ids = model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=streamer,
            tokenizer=text_settings.tokenizer if text_settings.stops else None,
        )  # fmt: skip
        ended = time.perf_counter()
    tokens = cut(output_ids[0, len(prompt) :].tolist(), text_settings.eos, text_settings.max_new_tokens)
    return Generation(tokens, streamer.at - started, ended - streamer.at)


@dataclass(frozen=True)
class Turn:
    """A prompt that the arms continue; the other fields are those of its `PromptResult`."""

    prompt_id: str
    category: str
    prompt: Sequence[int]
    conversation: str | None = None
    group: str | None = None


def run_arms(
    arms: Mapping[str, Arm],
    queries: Sequence[Turn],
    *,
    repeats: int,
    turn: int,
    seed: int = 0,
    profilers: Mapping[str, Arm] | None = None,
    batch: Batch | None = None,
    alone: Collection[str] = (),
) -> list[PromptResult]:
    """Continue prompts with every arm, `repeats` times, the arms' order rotating with `turn` and repeat.

    An arm's result is the repeat with the median decoding time. `profilers`, arms whose clock synchronises with the
    device, run the first repeat again for the seconds of the parts of a round.
    batch: all arms but those in `alone` decode the prompts together (see `decode_all`).
    """
    prompts = [query.prompt for query in queries]
    streams = [[Streams(seed, query.prompt_id, repeat) for query in queries] for repeat in range(repeats)]
    arm_names = list(arms)
    runs: dict[str, list[list[Generation]]] = {name: [] for name in arm_names}
    for repeat in range(repeats):
        shift = (turn + repeat) % len(arm_names)
        for number, name in enumerate(arm_names[shift:] + arm_names[:shift], 1):
            with Stage(f"arm {number}/{len(arm_names)} {name}"):
                runs[name].append(decode_all(arms[name], prompts, streams[repeat], None if name in alone else batch))
    medians = {
        name: sorted(generations, key=lambda texts: sum(text.decode_seconds for text in texts))[(repeats - 1) // 2]
        for name, generations in runs.items()
    }
    reference = TRANSFORMERS if TRANSFORMERS in arms else AUTOREGRESSIVE
    profiles_by_arm = {
        name: decode_all(profiler, prompts, streams[0], None if name in alone else batch)
        for name, profiler in (profilers or {}).items()
    }
    return [
        PromptResult(
            query.prompt_id, query.category, tuple(query.prompt), {name: texts[i] for name, texts in medians.items()},
            reference, {name: texts[i] for name, texts in profiles_by_arm.items()},
            answer=runs[AUTOREGRESSIVE][0][i].tokens, conversation=query.conversation, group=query.group,  # [0]: repeat
        )
        for i, query in enumerate(queries)
    ]  # fmt: skip


def decode_all(
    arm: Arm, prompts: Sequence[Sequence[int]], streams: Sequence[Streams], batch: Batch | None = None
) -> list[Generation]:
    """`arm` on all prompts: one after another, or together in the `batch` that is its runtime. Decoded together, a text
    gets its prompt's seconds, and of the common decoding time its share by tokens. So all texts have the same rate."""
    if batch is None:
        return [arm(*arguments) for arguments in zip(prompts, streams, strict=True)]
    generations: dict[int, Generation] = {}
    errors: list[Exception | None] = []

    def text(index: int) -> Iterator[Round]:
        generations[index] = arm(prompts[index], streams[index])  # its passes run together with the others'
        yield from ()

    for index in range(len(prompts)):
        batch.add(BatchText(text(index), take=lambda _: None, end=errors.append))
    started = time.perf_counter()
    try:
        while batch.texts:
            batch.step()
    finally:
        batch.close()
    seconds = time.perf_counter() - started
    for error in filter(None, errors):
        raise error
    return _share_time([generations[index] for index in range(len(prompts))], seconds)


def _share_time(texts: Sequence[Generation], seconds: float) -> list[Generation]:
    """`texts`, which were decoded together in `seconds`, each with its share of that time; parts of rounds keep their
    proportions."""
    shared_seconds = seconds - sum(text.prefill_seconds for text in texts)
    token_seconds = shared_seconds / max(1, sum(len(text.tokens) - 1 for text in texts))
    timed_texts = []
    for text in texts:
        decode_seconds, round_seconds = token_seconds * (len(text.tokens) - 1), sum(r.seconds for r in text.rounds)
        scale = decode_seconds / round_seconds if round_seconds else 0.0
        timed_rounds = [
            replace(r, seconds=scale * r.seconds, draft_seconds=scale * r.draft_seconds,
                    structure_seconds=scale * r.structure_seconds, verify_seconds=scale * r.verify_seconds)
            for r in text.rounds
        ]  # fmt: skip
        timed_texts.append(replace(text, decode_seconds=decode_seconds, rounds=tuple(timed_rounds)))
    return timed_texts


def measure_deviations(
    hf_model: PreTrainedModel,
    results: Sequence[PromptResult],
    build_arms: MakeArms,
    streams: Sequence[Streams],
    batch: Batch | None = None,
) -> list[dict[str, Deviation]]:
    """By name, the deviations (rounding errors, see `lossless`) of this runtime's arms on each result's reference text.

    hf_model: the target as transformers runs it; streams, batch: those of the results' generations.
    """
    references = [make_reference(hf_model, r.prompt, r.generations[r.reference].tokens) for r in results]
    selectors: list[Forced] = []

    def force(selector: TokenSelector) -> TokenSelector:
        selectors.append(Forced(selector, references[len(selectors) % len(references)]))  # the next text begins
        return selectors[-1]

    deviations: list[dict[str, Deviation]] = [{} for _ in results]
    for name, arm in build_arms(force).items():
        decode_all(arm, [r.prompt for r in results], streams, batch)
        for deviation_by_arm, result, forced in zip(deviations, results, selectors[-len(results) :], strict=True):
            deviation_by_arm[name] = forced.deviation(result.generations[name].tokens)
    return deviations


def show_rounds(
    build_arms: MakeArms,
    methods: Collection[str],
    prompts: Sequence[Sequence[int]],
    streams: Sequence[Streams],
    batch: Batch | None = None,
) -> list[dict[str, tuple[ShownRound, ...]]]:
    """The rounds of every method on each prompt, by name: an extra, untimed run that records the trees."""
    tree_logs: list[TreeLog] = []

    def note(selector: TokenSelector) -> TokenSelector:
        tree_logs.append(TreeLog(selector))
        return tree_logs[-1]

    rounds: list[dict[str, tuple[ShownRound, ...]]] = [{} for _ in prompts]
    for name, arm in build_arms(note).items():
        if name in methods:
            texts = decode_all(arm, prompts, streams, batch)
            for rounds_by_method, text, tree_log in zip(rounds, texts, tree_logs[-len(prompts) :], strict=True):
                rounds_by_method[name] = shown_rounds(text.tokens[0], text.rounds, tree_log.verified)
    return rounds
