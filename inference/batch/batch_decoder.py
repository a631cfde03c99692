"""Batched continuation of prompts by a target: the first tokens greedy, the rest sampled."""

import sys
from collections.abc import Collection, Sequence
from contextlib import closing
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.base.errors import UserError
from outrider.base.progress import Stage, counted
from outrider.draft_models.targets.model_files import layer_stack
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.batch.batch_state import Forward, begin_batch
from outrider.inference.batch.tasks import Answer, TopK
from outrider.inference.core.batch import Batch, Text
from outrider.inference.core.decode import autoregressive
from outrider.inference.core.sampling import Sampler, invert, largest
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.engines.cpu.at_once import PanelLinear, fits_panels
from outrider.inference.engines.fused_layers import fuse_layers
from outrider.inference.engines.packing import pack_linears, run_at_once

_FAILED = -1  # instead of a token: the target's logits were NaN


class Generator:
    """Continues prompts with `model`, a causal LM of transformers that keeps its state in `past_key_values`.

    The first `greedy_tokens` of an answer are the most likely tokens. The rest are drawn from `sampler`'s distribution,
    by inverting its cumulative sum at the prompt's own uniform numbers (Liu et al. 2023's hybrid generation). So an
    answer is a function of its prompt and its numbers. Other prompts in the batch change only last bits of its logits.

    stack: the model's layers, if each prompt is decoded by its own loop over them, in a `Batch`: then an answer's bits
    do not depend on the other prompts. Raises `UserError` for a model that keeps its state elsewhere.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sampler: Sampler,
        eos: Collection[int],
        *,
        greedy_tokens: int,
        top_k_logits: int = 0,
        stack: LayerStack | None = None,
    ):
        if sampler.reads_context:
            raise ValueError("prompts are decoded without their texts: no repetition penalty")
        self.model, self.sampler, self.eos = model, sampler, frozenset(eos)
        self.greedy_tokens, self.top_k_logits = greedy_tokens, top_k_logits
        self._fits = sys.maxsize  # largest batch that fits in memory, in prompts
        self.stack = stack
        self._forward = Forward(model)

    def answer(self, prompts: Sequence[Sequence[int]], draws: Sequence[Tensor]) -> list[Answer]:
        """Continue each prompt (at least one token).

        draws: uniform numbers in [0, 1), one per token it may emit. A batch too large for the device's memory is
        halved, as are all later batches. A single prompt that is too large fails alone.
        """
        if len(prompts) <= self._fits:
            try:
                answer = self._answer if self.stack is None else self._answer_by_loops
                return answer(prompts, draws)
            except torch.OutOfMemoryError:
                if len(prompts) == 1:
                    return [Answer(failure="memory")]
                self._fits = len(prompts) // 2
            torch.cuda.empty_cache()  # outside the handler, since the traceback holds the batch's tensors
        half = len(prompts) // 2
        return self.answer(prompts[:half], draws[:half]) + self.answer(prompts[half:], draws[half:])

    def _answer_by_loops(self, prompts: Sequence[Sequence[int]], draws: Sequence[Tensor]) -> list[Answer]:
        """The answers, each decoded by a loop of its own."""
        assert self.stack is not None
        selectors = [_Selector(self, numbers) for numbers in draws]
        longest = max(map(len, draws))
        stage = Stage(f"a batch of {len(prompts)}", longest, "tokens each at most")
        with closing(Batch()) as batch, stage:
            for prompt, selector in zip(prompts, selectors, strict=True):
                rounds = autoregressive(
                    self.stack,
                    prompt,
                    max_new_tokens=len(selector.numbers),
                    eos=self.eos,
                    selector=selector,
                    runtime=batch,
                )
                batch.add(Text(rounds, lambda _: None, selector.done))
            while batch.texts:
                batch.step()
                stage.done = max(len(selector.tokens) for selector in selectors)
        return [self._finish(selector.tokens, selector.top_k()) for selector in selectors]

    @torch.inference_mode()
    def _answer(self, prompts: Sequence[Sequence[int]], draws: Sequence[Tensor]) -> list[Answer]:
        device = self.model.device
        budgets = [len(numbers) for numbers in draws]
        uniform = torch.nn.utils.rnn.pad_sequence(list(draws), batch_first=True).to(device)
        emitted: list[list[int]] = [[] for _ in prompts]
        top: list[tuple[list[int], tuple[Tensor, Tensor, Tensor]]] = []  # per step: the rows' prompts, and their top-k
        rows = list(range(len(prompts)))  # the prompt in each row of the batch
        ids, mask = (part.to(device) for part in left_pad(prompts))
        batch, logits = begin_batch(self._forward, ids, mask, max(budgets))
        for step in counted(range(max(budgets)), f"a batch of {len(prompts)}", "tokens each at most"):
            tokens = self.choose(logits, uniform[:, step], step)
            if self.top_k_logits:
                top.append((rows, top_k_of(logits, self.top_k_logits)))
            open_rows = []
            for row, (prompt, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
                if self._open(emitted[prompt], budgets[prompt]):
                    emitted[prompt].append(token)
                    if self._open(emitted[prompt], budgets[prompt]):
                        open_rows.append(row)
            if not open_rows:
                break
            tokens = tokens.clamp(min=0)
            if batch.should_shrink(len(rows), len(open_rows)):
                kept = torch.tensor(open_rows, device=device)
                batch.keep(kept)
                tokens, uniform = tokens[kept], uniform[kept]
                rows = [rows[row] for row in open_rows]
            logits = batch.feed(tokens)
        tops = gather_top_k(top, emitted) if self.top_k_logits else [None] * len(prompts)
        return [self._finish(tokens, top) for tokens, top in zip(emitted, tops, strict=True)]

    def choose(self, logits: Tensor, uniform: Tensor, step: int) -> Tensor:
        """The next token [B] from logits [B, V] and numbers [B]; `_FAILED` where a row has NaN logits."""
        greedy = step < self.greedy_tokens
        tokens = logits.argmax(-1) if greedy else invert(self.sampler.probabilities(logits), uniform[:, None])[:, 0]
        return torch.where(logits.amax(-1).isnan(), _FAILED, tokens)  # the maximum of a row with a NaN is NaN

    def _open(self, tokens: list[int], budget: int) -> bool:
        return len(tokens) < budget and (not tokens or (tokens[-1] != _FAILED and tokens[-1] not in self.eos))

    def _finish(self, tokens: list[int], top: TopK | None) -> Answer:
        if tokens[-1] == _FAILED:
            return Answer(failure="not_a_number")
        return Answer(tuple(tokens), tokens[-1] in self.eos, top)


class _Selector(TokenSelector):
    """Chooses one answer's tokens as `Generator.choose` does, and keeps their top-k.

    numbers: the answer's own uniform numbers, one per token.
    """

    def __init__(self, generator: Generator, numbers: Tensor):
        super().__init__()
        self.plain = False
        self.numbers = numbers
        self.tokens: list[int] = []
        self._generator = generator
        self._top: list[tuple[Tensor, Tensor, Tensor]] = []

    def next_token(self, logits: Tensor) -> Tensor:
        """See `TokenSelector.next_token`."""
        step, logits = len(self.tokens), logits.float()
        if self._generator.top_k_logits:
            self._top.append(top_k_of(logits, self._generator.top_k_logits))
        token = self._generator.choose(logits, self.numbers[step : step + 1], step)
        self.tokens.append(int(token))
        return token

    def done(self, error: Exception | None) -> None:
        """See `Text`. Raises `error`, unless it is the target's NaN, which `_FAILED` marks."""
        if error is not None and self.tokens[-1:] != [_FAILED]:
            raise error

    def top_k(self) -> TopK | None:
        """The distributions of all tokens so far."""
        if not self._top:
            return None
        return TopK(torch.tensor(self.tokens), *(torch.cat(parts) for parts in zip(*self._top, strict=True)))


def stack_at_once(model: PreTrainedModel) -> LayerStack | None:
    """The layers of `model`, for loops whose passes run together in compiled calls; None if these cannot run them.

    It holds copies of the layers' weights, in the order in which they are read. Nothing is chosen by timing.
    """
    try:
        stack = layer_stack(model)
    except UserError:  # its layers cannot be run individually
        return None
    fuse_layers(stack)
    if not run_at_once(stack):
        return None
    if fits_panels(stack.head):
        stack.head = PanelLinear(stack.head)
    pack_linears(stack)
    return stack


def left_pad(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """(ids, mask), int64 [B, longest] each: every prompt ends in the last column; padding is id 0 under mask 0."""
    ids = [torch.tensor(prompt) for prompt in prompts]
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
    return pad(ids), pad([torch.ones_like(own) for own in ids])


def top_k_of(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids [B, k], log-probabilities [B, k], probability of the rest [B]) of the softmax of logits [B, V]."""
    logprobs, ids = largest(logits.log_softmax(-1), min(k, logits.shape[-1]))
    return ids, logprobs, (1 - logprobs.exp().sum(-1)).clamp(min=0)


def gather_top_k(
    top: Sequence[tuple[list[int], tuple[Tensor, Tensor, Tensor]]], emitted: Sequence[list[int]]
) -> list[TopK]:
    """The steps' rows per prompt, cut to the tokens that it emitted, on the CPU."""
    steps: list[list[tuple[Tensor, ...]]] = [[] for _ in emitted]
    for rows, parts in top:
        on_cpu = [part.cpu() for part in parts]
        for row, prompt in enumerate(rows):
            if len(steps[prompt]) < len(emitted[prompt]):
                steps[prompt].append(tuple(part[row] for part in on_cpu))
    return [
        TopK(torch.tensor(tokens), *(torch.stack(parts) for parts in zip(*found, strict=True)))
        for tokens, found in zip(emitted, steps, strict=True)
    ]
