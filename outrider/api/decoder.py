"""Decoding from Python: a target with a drafter, loaded once and used for many generations.

    model = Decoder.load("runs/eesd")
    model.generate("The")              # a text  =  the pieces of `stream`  =  the tokens of `rounds`

The runtime is that of the command evaluate-checkpoint. Greedy text is the target's, token for token. Sampled text has
the target's distribution. Several threads may use a model: one worker thread decodes their texts together.

A method says how to draft: by which kind of drafter, in which shape, and when to stop. A preset is a named method. A
round is one pass of the target and the tokens that it commits. `require` raises `UserError` unless its condition holds.
"""

import functools
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self, overload

from annotated_types import Ge, Le
from transformers import PreTrainedTokenizerBase

from outrider.api import arguments as checks
from outrider.api.arguments import Messages, PromptInput, TextArgument, read_prompt, refuse_unknown_options
from outrider.base.errors import require
from outrider.base.progress import Stage
from outrider.base.settings import Count, construct
from outrider.base.streams import Streams
from outrider.data_prep.text.chat import StreamedText
from outrider.data_prep.text.settings import PromptTemplate
from outrider.draft_models.targets.open_target import use_device
from outrider.draft_models.targets.settings import DecodeDtype
from outrider.draft_models.targets.vocabulary import KWARGS
from outrider.inference.core.batch import Batch, Worker
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.core.logprobs import ScoringSelector
from outrider.inference.core.rounds import Round, synchronized_clock
from outrider.inference.core.stop_strings import StopStrings, cut_at_stop
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.loading.drafters import load_drafters, new_drafter
from outrider.inference.loading.generation_config import Inherited, TextSettings, inherit
from outrider.inference.loading.memory_plan import budget_of
from outrider.inference.loading.models import load_stack, make_runtime, prepare_models
from outrider.inference.loading.target_setup import config_with_drafter, find_setup
from outrider.inference.settings import kinds
from outrider.inference.settings.evaluate import EvaluateConfig, Runtime
from outrider.inference.settings.method import AUTOREGRESSIVE, MethodConfig, method_key, preset
from outrider.inference.settings.sampling import GREEDY, SamplingConfig
from outrider.inference.sizing.policy import Tuning


@dataclass(frozen=True)
class GenerationCounts:
    """The counts of a generation."""

    tokens: int  # new tokens, the end token included
    passes: int  # of the target, which decoded all new tokens but the first
    prompt: int = 0  # tokens of the prompt
    ended: bool = False  # whether an end token ended the text
    ids: tuple[int, ...] = ()  # of the new tokens

    @property
    def tau(self) -> float:
        """Tokens per pass; 1 for plain decoding."""
        return (self.tokens - 1) / self.passes if self.passes else 1.0


class Decoder:
    """A target and its drafter, ready to decode. Made by `load`.

    Threads may share a decoder, and the decoders that `by` makes of it. Up to `batch` of their texts are decoded at
    once: on a CPU in common passes, elsewhere in turn, round by round. last: the counts of the last text that a thread
    generated to its end.
    """

    def __init__(
        self, config: EvaluateConfig, name: str, conversations: bool | str, batch: int, cache_bytes: int | None
    ):
        self.config, self.name = config, name
        self.method: MethodConfig = config.methods[name]
        with Stage("loading"):
            self.setup = setup = find_setup(config)
            if conversations is not False:  # raises if no template is known, or if it refuses a system message
                system_turns = [{"role": "system", "content": conversations}] if isinstance(conversations, str) else []
                self.ids([*system_turns, {"role": "user", "content": "?"}])
            target, dtype, device = setup.target, setup.dtype, setup.device
            self.drafters = load_drafters(config, target, dtype=dtype, device=device)
            # None: transformers' own model of the target is not loaded.
            self.stack = load_stack(target, None, dtype, device, by_layers=config.by_layers, int8=setup.int8)
            prepare_models(self.stack, self.drafters)
        self.runtime = make_runtime(config.runtime, self.setup.device)
        self.budget = budget_of(self.stack, self.drafters, cache_bytes)  # bytes for KV caches
        text_batch = Batch(self.runtime, budget=self.budget)
        self._worker = Worker(text_batch, batch, functools.partial(use_device, self.stack.device))  # runs all passes
        self.last: GenerationCounts | None = None
        self._inherited: dict[tuple[bool, bool], Inherited] = {}  # see `_inherit`
        self._tuning: Tuning | None = None  # the costs that `_tune` measured
        self._tuned = False

    def __repr__(self) -> str:
        dtype = "int8" if self.setup.int8 else str(self.setup.dtype).removeprefix("torch.")
        facts = f"target={self.setup.target.source!r}, method={self.name!r}, dtype={dtype!r}"
        return f"{type(self).__name__}({facts}, device={str(self.setup.device)!r})"

    @classmethod
    @refuse_unknown_options
    def load(
        cls,
        source: str | Path,
        *,
        method: str | MethodConfig | None = None,
        name: str | None = None,
        target: str | None = None,
        revision: str | None = None,
        small_lm: str | None = None,
        eagle3: str | None = None,
        mtp: str | None = None,
        dflash: str | None = None,
        table: str | None = None,
        drafters: Mapping[str, str] | None = None,
        dtype: DecodeDtype = "auto",
        device: str = "auto",
        runtime: Runtime = "auto",
        template: PromptTemplate = "auto",
        chat_template_kwargs: Mapping[str, object] | None = None,
        conversations: bool | str = False,
        batch: int = 8,
        cache_bytes: int | None = None,
    ) -> Self:
        """Load a target with a drafter, ready to decode.

        source: a drafter's directory, or else a target: a directory, Hub name or GGUF file. An early exit records its
        target. With any other drafter (an EAGLE-3 head, an n-gram table, a small LM) `target` must be given.
        method: as the option `method`, such as "eesd_beta" or "eagle3/opt_tree"; or your own settings. None:
        eesd_survival for an early exit, small_lm/survival, eagle3/survival for an EAGLE-3 head, mtp/survival for an MTP
        head, dflash/survival for a block drafter, ngrams with a table, else prompt_lookup.
        name: a name for your own settings.
        target: the drafter's target; for an early exit, the target's current path.
        small_lm, eagle3, mtp, dflash, table, drafters, template, chat_template_kwargs: options of evaluate-checkpoint.
        conversations: whether prompts will be conversations, or the system message of all: then it is an error now,
        before the weights are loaded, if no template for them is known.
        batch: the most texts that are decoded at once; each has its own KV cache, which grows with it.
        cache_bytes: the memory for the caches of all texts; None: half of what is free after loading. Texts that do not
        fit wait, the oldest goes on at any size.

        Raises `UserError` for missing or unusable inputs.
        """
        kind = kinds.kind_in(str(source))
        require(kind is not None or target is None, "target", target, f"None: {source} is no drafter's directory")
        is_drafter = kind is not None and (target is not None or kind != kinds.SMALL_LM)  # an LM alone is a target
        if method is None:
            drafter_kinds = (kinds.SMALL_LM, kinds.EAGLE3, kinds.MTP, kinds.DFLASH, kinds.NGRAMS)
            kind_paths = zip(drafter_kinds, (small_lm, eagle3, mtp, dflash, table), strict=True)
            preset_names = kinds.presets_of({str(kind.option): path for kind, path in kind_paths})
            method = (kind.preset if kind and is_drafter else None) or [*preset_names, kinds.PROMPT_LOOKUP.name][0]
        name = construct(str, name or (method_key(method) if isinstance(method, str) else "method"), "name")
        config = EvaluateConfig(
            checkpoint=str(source) if is_drafter else None,
            target=target if is_drafter else str(source), revision=revision,
            small_lm=small_lm, eagle3=eagle3, mtp=mtp, dflash=dflash, table=table,
            drafters=construct(dict[str, str], drafters or {}, "drafters"),
            methods={name: preset(method) if isinstance(method, str) else method},
            dtype=dtype, device=device, runtime=runtime, template=template,
            chat_template_kwargs=construct(dict[str, object], chat_template_kwargs or {}, KWARGS),
        )  # fmt: skip
        max_cache_bytes = construct(Count | None, cache_bytes, "cache_bytes")
        return cls(config, name, conversations, construct(Count, batch, "batch"), max_cache_bytes)

    @overload
    def generate(self, prompt: PromptInput, each: tuple[()] = (), **options: object) -> str: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[Messages] | list[list[int]],
        each: Sequence[Mapping[str, object]] = (),
        **options: object,
    ) -> list[str]: ...

    def generate(self, prompt: Any, each: Sequence[Mapping[str, Any]] = (), **options: Any) -> str | list[str]:
        """The text that follows `prompt`; options as in `stream`.

        A list of prompts gives a list of texts in the same order. They are decoded together, each as if it were alone.
        Text i (0, 1, …) has the seed `seed` + i. each: for every prompt of a list, options that replace the common
        `options`. All prompts are checked before the first is decoded.
        """
        for option_set in (options, *each):
            checks.require_known_options("generate", option_set, checks.option_names(self.stream))
        if not checks.is_prompt_list(prompt):
            require(not each, "each", each, "nothing for a single prompt")
            return "".join(self.stream(prompt, **options))
        require(len(each) in (0, len(prompt)), "each", each, f"options of each of the {len(prompt)} prompts")
        seed, option_changes = construct(int, options.get("seed", 0), "seed"), each or [{}] * len(prompt)
        all_options = [{**options, "seed": seed + index, **change} for index, change in enumerate(option_changes)]
        template_kwargs = [text_options.pop(KWARGS, None) for text_options in all_options]
        prompt_ids = [self.ids(item, f"prompt[{i}]", template_kwargs[i]) for i, item in enumerate(prompt)]
        streams = [self.stream(ids, **text_options) for ids, text_options in zip(prompt_ids, all_options, strict=True)]
        with ThreadPoolExecutor(min(self._worker.max_texts, len(streams))) as pool:
            return [*pool.map("".join, streams)]

    @refuse_unknown_options
    def stream(
        self,
        prompt: PromptInput,
        *,
        max_new_tokens: int = 128,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float | None = None,
        stop_strings: Sequence[str] = (),
        seed: int = 0,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> Generator[str, None, GenerationCounts]:
        """Yield the text after `prompt` in pieces, each as soon as its round is decoded; return its counts.

        prompt: a text to continue; a conversation, which is rendered by a chat template (see `load`); or token ids, to
        which nothing is added. An answer in a conversation may have the "ids" that it was written with (`last.ids`),
        which the target then reads, as far as the template gives their text again.
        The options mean the same as in transformers; top_k=0 keeps all tokens. Settings of the target's generation
        config that affect greedy decoding apply unless an option replaces them.
        seed: of sampling. The same seed gives the same text if the drafts are the same. Drafts whose sizes depend on
        measured times may differ between runs.

        The text ends with an end token, which is not shown, or with one of stop_strings, which is shown. The pieces
        joined are `tokenizer.decode(ids, skip_special_tokens=True)` of all new tokens but the end token. A piece holds
        no text that later tokens may change.

        Raises `UserError` for an invalid prompt, for options that contradict each other, and if the context is too
        short.
        """
        sampling = checks.sampling_of(do_sample, temperature, top_k, top_p, min_p, repetition_penalty)
        ids = self.ids(prompt, arguments=chat_template_kwargs)
        rounds = self.rounds(ids, sampling, max_new_tokens=max_new_tokens, stop_strings=stop_strings, seed=seed)
        return self._pieces(rounds, len(ids))

    @refuse_unknown_options
    def rounds(
        self,
        prompt: PromptInput,
        sampling: SamplingConfig = GREEDY,
        *,
        max_new_tokens: int = 128,
        stop_strings: Sequence[str] = (),
        seed: int = 0,
        speculate: bool = True,
        logprobs: int | None = None,
    ) -> Iterator[Round]:
        """The rounds of a generation: the committed tokens of every pass, and how many of them were drafted.

        The first round is the prefill. speculate=False: the target alone, one token a pass. logprobs: the rounds are
        `ScoredRound`s, with the target's log-probabilities of their tokens, and of the `logprobs` likeliest tokens at
        each position. Raises `UserError` as `stream`.
        """
        require(isinstance(sampling, SamplingConfig), "sampling", sampling, "a SamplingConfig")
        token_limit = construct(Count, max_new_tokens, "max_new_tokens")
        top_logprobs = construct(Annotated[int, Ge(0), Le(self.setup.config.vocab_size)] | None, logprobs, "logprobs")
        stop_list = [stop_strings] if isinstance(stop_strings, str) else stop_strings
        stops = tuple(construct(list[TextArgument], stop_list, "stop_strings"))
        random_streams = Streams(construct(int, seed, "seed")).within(self.name if speculate else AUTOREGRESSIVE)
        # Before the text's turn, so that a long prompt or many stop strings delay no other generation.
        ids, rule = self.ids(prompt), self.stop_rule(stops, sampling)
        text_settings = TextSettings(token_limit, self.setup.eos, sampling, self._inherit(sampling, stops).config)
        decode = functools.partial(self._decode, ids, text_settings, rule, random_streams, speculate, top_logprobs)
        reserved = token_limit if self.runtime.name == "graphed" else 0  # CUDA graphs need a cache for the whole text
        return self._worker.rounds(self._worker.do(decode), len(ids) + reserved)

    def by(self, method: str | MethodConfig, name: str | None = None) -> Self:
        """The same loaded target with another method: a preset, or your own settings.

        name: a name for your own settings. Raises `UserError` for an unknown preset, and if its drafter was not given.
        """
        name = name or (method_key(method) if isinstance(method, str) else "method")
        methods = {name: preset(method) if isinstance(method, str) else method}
        return self._with_drafters(replace(self.config, methods=methods))

    def with_drafter(self, checkpoint: str) -> Self:
        """The same loaded target with the drafter in the directory `checkpoint`, of any kind.

        It drafts by the method of this decoder if it is of the same kind, else by the default method of its kind. Texts
        of this decoder go on. Raises `UserError` as `load`, and if prompts would be rendered by another template.
        """
        config = config_with_drafter(self.config, self.setup, checkpoint)
        fits_stack = self.stack.layered is not None or not config.by_layers
        require(fits_stack, "checkpoint", checkpoint, "a drafter without layers of the target, which runs as a whole")
        self._worker.do(self.runtime.forget_idle)  # buffers and graphs of the drafter that goes
        return self._with_drafters(config)

    def _with_drafters(self, config: EvaluateConfig) -> Self:
        """The same loaded target with the one method and the drafters of `config`."""
        decoder, setup = copy(self), self.setup
        [(decoder.name, decoder.method)] = config.methods.items()
        decoder.config = config
        decoder.drafters = load_drafters(decoder.config, setup.target, dtype=setup.dtype, device=self.stack.device)
        for drafter_kind, drafter in decoder.drafters.items():
            self._worker.do(functools.partial(kinds.KINDS[drafter_kind].load_plugin().prepare, drafter, self.stack))
        decoder.budget = budget_of(self.stack, decoder.drafters, self.budget.max_bytes)
        batch = self._worker.batch  # shared with this decoder: the larger budget of both holds
        batch.budget = max(batch.budget or self.budget, decoder.budget)
        decoder.last, decoder._tuning, decoder._tuned = None, None, False
        return decoder

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.setup.tokenizer

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end a text."""
        return self.setup.eos

    def stop_rule(self, stops: tuple[str, ...] = (), sampling: SamplingConfig = GREEDY) -> StopStrings | None:
        """What ends a text: `stops`, or else the stop strings of the target's generation config; None without any.

        Raises `UserError` for stops that no token of the tokenizer can end.
        """
        stops = stops or tuple(self._inherit(sampling, ()).fields.get("stop_strings", ()))
        return StopStrings(stops, self.tokenizer, self.ends) if stops else None

    def ids(self, prompt: PromptInput, key: str = "prompt", arguments: Mapping[str, object] | None = None) -> list[int]:
        """The token ids of one prompt; perhaps not all if they exceed the context. Raises `UserError` naming `key`."""
        return read_prompt(self.setup, prompt, key, construct(dict[str, object], arguments or {}, KWARGS))

    def _inherit(self, sampling: SamplingConfig, stop_strings: tuple[str, ...]) -> Inherited:
        """The target's generation config, as far as `sampling` and `stop_strings` leave fields unset.

        The config is read once for each combination of unset fields.
        """
        setup, unset_flags = self.setup, (sampling.repetition_penalty is None, not stop_strings)
        if unset_flags not in self._inherited:
            self._inherited[unset_flags] = inherit(
                setup.target.source, setup.target.revision, sampling, stop_strings, eos=setup.eos,
                vocabulary=setup.config.vocab_size, ignore=False,
            )  # fmt: skip
        return self._inherited[unset_flags]

    def _decode(
        self,
        ids: list[int],
        settings: TextSettings,
        stop_rule: StopStrings | None,
        rng_streams: Streams,
        speculate: bool,
        top_logprobs: int | None,
    ) -> Iterator[Round]:
        """The rounds of a text after `ids`, in the worker's thread; the other arguments as of `rounds`."""
        is_sampled = settings.sampling.temperature > 0
        sampler, verify_rng = settings.sampler(ids, self.setup.device), rng_streams.of("verify") if is_sampled else None
        selector = TokenSelector(sampler, verify_rng, self.method.verification)
        if top_logprobs is not None:
            selector = ScoringSelector(sampler, verify_rng, self.method.verification, top=top_logprobs)
        if speculate:
            self._tune(ids, settings.sampling)
            drafter = new_drafter(self.method, self.drafters, rng_streams, is_sampled, self._tuning)
            decode: Callable[..., Iterator[Round]] = functools.partial(speculative, self.stack, drafter)
        else:
            decode = functools.partial(autoregressive, self.stack)
        batch = self._worker.batch
        rounds = decode(ids, max_new_tokens=settings.max_new_tokens, eos=settings.eos, selector=selector, runtime=batch)
        rounds = cut_at_stop(rounds, ids, stop_rule.first_end) if stop_rule is not None else rounds
        return selector.score_rounds(rounds) if isinstance(selector, ScoringSelector) else rounds

    def _tune(self, prompt_ids: list[int], sampling: SamplingConfig) -> None:
        """Measure the costs for "auto" sizes once, by decoding after the first prompt, which is `prompt_ids`."""
        if self._tuned or not (self.method.adapts or self.method.lacks_delta):
            return
        from outrider.inference.measure.probe import tune  # loaded only for what is measured

        clock = synchronized_clock if self.setup.device.type == "cuda" else time.perf_counter
        tuned_methods, tunings = tune(
            {self.name: self.method}, self.stack, self.drafters, prompt_ids, self.setup.text(1, sampling),
            runtime=self.runtime, clock=clock,  # the 1 of `text` is not read: `tune` sets the number of tokens
        )  # fmt: skip
        self.method, self._tuned = tuned_methods[self.name], True
        if tuning := tunings.get(self.name):
            self._tuning = tuning.of_all(functools.partial(self._worker.batch.sharing, self.stack))

    def _pieces(self, rounds: Iterator[Round], prompt_len: int) -> Generator[str, None, GenerationCounts]:
        """The text of `rounds` in pieces, then its counts. prompt_len: the number of its tokens."""
        streamed_text, passes = StreamedText(self.tokenizer, self.ends), -1  # the prefill decides the first token
        for decoded_round in rounds:
            passes += 1
            if piece := streamed_text.add(decoded_round.tokens):
                yield piece
        if piece := streamed_text.flush():
            yield piece
        tokens = streamed_text.tokens
        self.last = counts = GenerationCounts(len(tokens), passes, prompt_len, tokens[-1] in self.ends, tuple(tokens))
        return counts
