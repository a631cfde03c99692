"""Measuring: several ways of decoding, run in turn on the same prompts, and whether they emit the same tokens."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from draft_models.calibration import CalibrationHead
from draft_models.early_exit import EarlyExit
from draft_models.errors import require
from draft_models.small_lm import SmallLM
from draft_models.target import LayerStack
from draft_models.trigram import TrigramTable
from inference.auto import Tuning
from inference.choosing import Chooser
from inference.decode import Clock, Round, autoregressive, cut, speculative, until
from inference.drafting import Structure, make_structure
from inference.generation_config import generate_settings, make_sampler
from inference.lookup import PromptLookup
from inference.ngrams import make_ngram_drafter
from inference.packing import can_pack, fuse_layers, pack_linears
from inference.runtime import Runtime
from inference.sampling import Sampler
from inference.settings import EvaluateConfig, MethodConfig, SamplingConfig, number
from inference.sources import Drafter, EarlyExitSource, SmallLMSource
from inference.stop_strings import StopStrings

GREEDY = SamplingConfig()
AUTOREGRESSIVE, TRANSFORMERS = "autoregressive", "transformers_generate"  # the two baselines' names


class PromptLike(Protocol):
    """What evaluation needs to know of a prompt (see `data_prep.prompts.Prompt`)."""

    @property
    def id(self) -> str: ...
    @property
    def category(self) -> str: ...
    @property
    def turns(self) -> tuple[str, ...]: ...
    @property
    def chat(self) -> bool: ...


@dataclass(frozen=True)
class Generation:
    """One prompt continued by one arm. `rounds` leaves the prefill out; seconds are wall clock."""

    tokens: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float
    rounds: tuple[Round, ...] = ()
    totals: Mapping[str, float] = field(default_factory=dict)  # of the structure (see `Structure.totals`)


@dataclass(frozen=True)
class PromptResult:
    """One prompt continued by every arm.

    profiles: runs of our arms with a clock that waits for the device, where the timed ones' does not (CUDA);
    they say how a round's time divides. excused: the arms whose first mismatch is a rounding tie. conversation: the id
    of the prompt that this is one of several turns of.
    """

    prompt_id: str
    category: str
    prompt: tuple[int, ...]
    generations: Mapping[str, Generation]
    reference: str
    profiles: Mapping[str, Generation] = field(default_factory=dict)
    excused: frozenset[str] = frozenset()
    conversation: str | None = None

    @property
    def unit(self) -> str:
        """What an interval takes for one observation: the conversation, as its turns are alike."""
        return self.prompt_id if self.conversation is None else self.conversation

    def identical(self, arm: str) -> bool:
        """Whether `arm` emitted exactly the reference arm's tokens."""
        return self.generations[arm].tokens == self.generations[self.reference].tokens


@dataclass(frozen=True)
class Skipped:
    """A turn that was not measured, and why."""

    prompt_id: str
    reason: str


Arm = Callable[[Sequence[int]], Generation]


@dataclass(frozen=True)
class Drafters:
    """The trained drafters at hand."""

    early_exit: EarlyExit | None = None
    small_lm: SmallLM | None = None
    calibration: CalibrationHead | None = None  # of the early-exit drafter
    ngrams: TrigramTable | None = None


def make_drafting(
    method: MethodConfig,
    drafters: Drafters,
    seed: int,
    generator: torch.Generator | None = None,
    tuning: Tuning | None = None,
) -> tuple[Drafter, Structure]:
    """The source and structure of `method`, fresh for one generation.

    generator: draw drafts from q (sampling). tuning: for sizes that are "auto" (see `inference.tuning`).
    """
    if method.source == "prompt_lookup":
        lookup = PromptLookup(method.max_ngram, number(method.stop.max_draft))
        return lookup, lookup
    if method.source == "ngrams":
        assert drafters.ngrams is not None
        ngrams = make_ngram_drafter(drafters.ngrams, method.ngrams, seed)
        return ngrams, ngrams
    structure = make_structure(method, seed, generator, drafters.calibration, tuning)
    if method.source == "small_lm":
        assert drafters.small_lm is not None
        return SmallLMSource(drafters.small_lm), structure
    assert drafters.early_exit is not None
    return EarlyExitSource(drafters.early_exit), structure


def open_table(config: EvaluateConfig, digest: str, vocabulary: int | None = None) -> TrigramTable | None:
    """The n-gram table of `config`, None where no method needs one.

    digest: `vocabulary_digest` of the target's tokenizer; vocabulary: the target's, which every id must be in. Raises
    `UserError` for a table of another tokenizer, or a damaged one.
    """
    if all(method.source != "ngrams" for method in config.methods.values()):
        return None
    assert config.table is not None
    table = TrigramTable.open(config.table)
    table.require_tokenizer(digest, f"table={config.table}")
    limit = table.vocabulary if vocabulary is None else vocabulary
    require(table.vocabulary <= limit, "table", config.table, f"ids below the target's {limit}, not {table.vocabulary}")
    return table


def make_arms(
    stack: LayerStack,
    drafters: Drafters,
    methods: Mapping[str, MethodConfig],
    plain: PreTrainedModel | None,
    *,
    max_new_tokens: int,
    eos: Collection[int],
    seed: int,
    sampling: SamplingConfig = GREEDY,
    generation: GenerationConfig | None = None,
    stops: Sequence[str] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
    runtime: Runtime | None = None,
    tunings: Mapping[str, Tuning] | None = None,
    clock: Clock = time.perf_counter,
) -> dict[str, Arm]:
    """The arms to compare, by name: plain decoding, every method and, given a `plain` model, its `generate`.

    sampling: how all of them choose tokens; when it samples, every generation starts from `seed` again. generation:
    the target's own config, for what else acts on the choice. stops: strings that end a text, which need the
    `tokenizer`. runtime: how the passes of all but `generate` run; None: eagerly. tunings: of the methods with sizes of
    "auto" (see `inference.tuning`).
    """
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos": eos}
    ours: dict[str, Any] = {**options, "runtime": runtime, "clock": clock}
    settings = generate_settings(generation, sampling, **options)
    ends = None
    if stops:
        assert tokenizer is not None
        ends = StopStrings(stops, tokenizer).first_end

    def run(rounds: Iterator[Round], prompt: Sequence[int]) -> Generation:
        return collect(rounds if ends is None else until(rounds, prompt, ends), clock)

    def choose(prompt: Sequence[int]) -> Sampler | None:
        return make_sampler(settings, sampling, prompt, stack.device)

    def fresh_generator() -> torch.Generator | None:
        return torch.Generator(stack.device).manual_seed(seed) if sampling.temperature else None

    def autoregress(prompt: Sequence[int]) -> Generation:
        chooser = Chooser(choose(prompt), fresh_generator())
        return run(autoregressive(stack, prompt, chooser=chooser, **ours), prompt)

    def drafting(name: str, method: MethodConfig) -> Arm:
        tuning = tunings.get(name) if tunings else None

        def draft(prompt: Sequence[int]) -> Generation:
            generator = fresh_generator()
            source, structure = make_drafting(method, drafters, seed, generator, tuning)
            chooser = Chooser(choose(prompt), generator, naive=method.verify == "naive")
            decoded = run(speculative(stack, source, structure, prompt, chooser=chooser, **ours), prompt)
            return replace(decoded, totals=dict(structure.totals))

        return draft

    arms = {AUTOREGRESSIVE: autoregress, **{name: drafting(name, method) for name, method in methods.items()}}
    if runtime is not None:
        arms = {name: without_captures(arm, runtime) for name, arm in arms.items()}
    if plain is not None:
        arms[TRANSFORMERS] = lambda prompt: transformers_generate(
            plain,
            prompt,
            sampling=sampling,
            generation=generation,
            seed=seed,
            stops=stops,
            tokenizer=tokenizer,
            **options,
        )
    return arms


def without_captures(arm: Arm, runtime: Runtime) -> Arm:
    """`arm`, run again where it captured graphs on its way: what that takes is none of decoding's time."""

    def settled(prompt: Sequence[int]) -> Generation:
        while True:
            before = runtime.captures
            generation = arm(prompt)
            if runtime.captures == before:
                return generation

    return settled


def prepare(stack: LayerStack, drafters: Drafters) -> None:
    """Make a target and its drafters ready to decode: a shared head joined, weights laid out for the device."""
    for module in (stack, drafters.early_exit, drafters.small_lm):
        if module is not None:
            fuse_layers(module)
            if can_pack(stack.device, stack.dtype):
                pack_linears(module)
    if drafters.early_exit is not None and drafters.early_exit.head is None:
        drafters.early_exit.use_head(stack.head)


def collect(rounds: Iterator[Round], clock: Clock = time.perf_counter) -> Generation:
    """Run a decoding generator to its end, timing prefill and decoding apart."""
    started = clock()
    first = next(rounds)
    prefilled = clock()
    rest = tuple(rounds)
    ended = clock()
    tokens = tuple(token for r in (first, *rest) for token in r.tokens)
    return Generation(tokens, prefilled - started, ended - prefilled, rest)


class _FirstToken(BaseStreamer):
    """Notes when the first new token arrives, which is when prefill is over."""

    def __init__(self) -> None:
        self.calls = 0
        self.at = 0.0

    def put(self, value: object) -> None:
        self.calls += 1
        if self.calls == 2:  # the first call hands over the prompt
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


@torch.inference_mode()
def transformers_generate(
    model: PreTrainedModel,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos: Collection[int],
    sampling: SamplingConfig = GREEDY,
    generation: GenerationConfig | None = None,
    seed: int = 0,
    stops: Sequence[str] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Generation:
    """The target through transformers' own `generate`, with its own attention and cache.

    generation: the target's own config, of which it keeps what `generate_settings` does not replace.
    """
    ids = torch.tensor([prompt], device=model.device)
    settings = generate_settings(generation, sampling, max_new_tokens=max_new_tokens, eos=eos, stops=stops)
    model.generation_config = settings
    ends: dict[str, Any] = {"tokenizer": tokenizer} if stops else {}
    first = _FirstToken()
    with stock_attention(model), torch.random.fork_rng():
        torch.manual_seed(seed)
        started = time.perf_counter()
        out = model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=first, **ends
        )
        ended = time.perf_counter()
    tokens = cut(out[0, len(prompt) :].tolist(), eos, max_new_tokens)
    return Generation(tokens, first.at - started, ended - first.at)


def synchronized_clock() -> float:
    """`time.perf_counter` after the CUDA device has finished what it was given."""
    torch.cuda.synchronize()
    return time.perf_counter()


def measure(
    arms: Mapping[str, Arm],
    prompt: Sequence[int],
    *,
    prompt_id: str,
    category: str,
    repeats: int,
    turn: int,
    conversation: str | None = None,
    profilers: Mapping[str, Arm] | None = None,
) -> PromptResult:
    """Continue one prompt with every arm, `repeats` times, the arms' order rotating with `turn` and repeat.

    Of an arm's repeats the one with the median decoding time counts. `profilers` are run once, untimed.
    """
    names = list(arms)
    runs: dict[str, list[Generation]] = {name: [] for name in names}
    for repeat in range(repeats):
        shift = (turn + repeat) % len(names)
        for name in names[shift:] + names[:shift]:
            runs[name].append(arms[name](prompt))
    middle = {
        name: sorted(generations, key=lambda g: g.decode_seconds)[(repeats - 1) // 2]
        for name, generations in runs.items()
    }
    reference = TRANSFORMERS if TRANSFORMERS in arms else AUTOREGRESSIVE
    profiles = {name: profiler(prompt) for name, profiler in (profilers or {}).items()}
    return PromptResult(prompt_id, category, tuple(prompt), middle, reference, profiles, conversation=conversation)


def excuse_ties(judge: PreTrainedModel, result: PromptResult) -> frozenset[str]:
    """The arms whose first mismatch with the reference the target itself cannot tell from rounding.

    Only for half precision: in float32 and float64 a mismatch is an error. `judge` is the target as
    transformers runs it, so that a fault of this runtime cannot widen its own excuse.
    """
    if judge.dtype not in (torch.bfloat16, torch.float16):
        return frozenset()
    reference = result.generations[result.reference].tokens
    excused = set()
    for name, generation in result.generations.items():
        pairs = enumerate(zip(reference, generation.tokens, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), None)
        if same is not None and is_tie(
            judge, result.prompt, reference[:same], reference[same], generation.tokens[same]
        ):
            excused.add(name)
    return frozenset(excused)


@torch.inference_mode()
def is_tie(judge: PreTrainedModel, prompt: Sequence[int], text: Sequence[int], one: int, other: int) -> bool:
    """Whether `judge`, fed one token at a time, puts `one` and `other` within its rounding noise of the best token.

    Noise is measured at that very position: the largest difference of any logit between feeding `text` a
    token at a time and all at once, the two shapes in which decoding computes it. A logit may be off by that
    on either side, hence twice the noise.
    """
    ids = torch.tensor([[*prompt, *text]], device=judge.device)
    with stock_attention(judge):
        out = judge(ids[:, : len(prompt)], use_cache=True, logits_to_keep=1)
        for place in range(len(prompt), ids.shape[1]):
            out = judge(ids[:, place : place + 1], past_key_values=out.past_key_values, use_cache=True)
        stepped = out.logits[0, -1].float()
        block = judge(ids, logits_to_keep=1).logits[0, -1].float()
    noise = (stepped - block).abs().max()
    return bool(stepped.max() - torch.minimum(stepped[one], stepped[other]) <= 2 * noise)


@contextmanager
def stock_attention(model: PreTrainedModel) -> Iterator[None]:
    """`model` with transformers' own attention; it may share its layers with the runtime, which uses ours."""
    ours = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(ours)
