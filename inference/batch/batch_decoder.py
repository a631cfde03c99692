"""Continuation of many prompts by a target: the first tokens greedy, the others sampled."""

import itertools
import math
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.base.progress import Stage, track_progress
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.batch.batch_state import Forward, begin_batch
from outrider.inference.batch.client import UNANSWERED
from outrider.inference.batch.tasks import Answer, TopK
from outrider.inference.core.batch import Batch, BatchText
from outrider.inference.core.decode import autoregressive
from outrider.inference.core.sampling import Sampler, invert, top_k_chunked
from outrider.inference.core.token_selector import TokenSelector

_NAN_TOKEN = -1  # instead of a token: the target's logits were NaN
_MIN_STEPS = 4  # steps of a batch before its time is first estimated; then after 8, 16, … steps
_SLOWER = 2  # a batch that is estimated to take more than this times the seconds left is made smaller

# (index, answer to the prompt at that index) → the next prompt for the index and its uniform numbers; None: no prompt.
After = Callable[[int, Answer], tuple[Sequence[int], Tensor] | None]


class Generator:
    """Continues prompts with `model`, a target's layers, or a causal LM that keeps its state in `past_key_values`.

    The first `greedy_tokens` of an answer are the most likely tokens. The rest are drawn from `sampler`'s distribution,
    by inverting its cumulative sum at the prompt's own uniform numbers (Liu et al. 2023's hybrid generation). So an
    answer is a function of its prompt and its numbers. top_k_logits: the k of `Answer.top`; 0: none.

    A `LayerStack` decodes each prompt by the loop of one text, in a `Batch`. A model is fed padded batches: then other
    prompts change last bits of an answer's logits. Raises `UserError` if a model keeps its state elsewhere. A batch too
    slow for `seconds_left` goes on with fewer prompts, at least `smallest_batch`; the others stay `UNANSWERED`.
    """

    def __init__(
        self,
        model: PreTrainedModel | LayerStack,
        sampler: Sampler,
        eos: Collection[int],
        *,
        greedy_tokens: int,
        top_k_logits: int = 0,
        smallest_batch: int = sys.maxsize,  # then no batch is made smaller
    ):
        if sampler.reads_context:
            raise ValueError("prompts are decoded without their texts: no repetition penalty")
        self.sampler, self.eos = sampler, frozenset(eos)
        self.greedy_tokens, self.top_k_logits = greedy_tokens, top_k_logits
        self._max_batch_size = sys.maxsize  # largest batch that fits in memory, in prompts
        self._smallest_batch = smallest_batch
        self.seconds_left: Callable[[], float] = lambda: math.inf  # seconds that the current batch may still take
        self.model = model
        self._forward = None if isinstance(model, LayerStack) else Forward(model)

    def answer(self, prompts: Sequence[Sequence[int]], uniform_draws: Sequence[Tensor]) -> list[Answer]:
        """Continue each prompt (at least one token).

        uniform_draws: of each prompt, numbers in [0, 1), one per token that its answer may have. A single prompt that
        is too large for the device's memory fails alone. A too large padded batch is halved, as are all later batches.
        """
        if self._forward is None:
            answers = [Answer()] * len(prompts)
            self.converse(prompts, uniform_draws, answers.__setitem__)  # returns None: no prompt joins
            return answers
        if len(prompts) <= self._max_batch_size:
            try:
                return self._answer_padded(self._forward, prompts, uniform_draws)
            except torch.OutOfMemoryError:
                if len(prompts) == 1:
                    return [Answer(failure="memory")]
                self._max_batch_size = len(prompts) // 2
            torch.cuda.empty_cache()  # outside the handler, since the traceback holds the batch's tensors
        half = len(prompts) // 2
        return self.answer(prompts[:half], uniform_draws[:half]) + self.answer(prompts[half:], uniform_draws[half:])

    def converse(self, prompts: Sequence[Sequence[int]], uniform_draws: Sequence[Tensor], on_answer: After) -> None:
        """`answer` for layers. `on_answer` gets each answer when it ends, and returns a prompt that joins the batch."""
        stage, fit_rows = Stage(f"a batch of {len(prompts)}", 0, "tokens at most"), self._pace()
        with closing(Batch()) as batch, stage:

            def begin(index: int, prompt: Sequence[int], numbers: Tensor) -> None:
                assert isinstance(self.model, LayerStack)
                selector, max_new_tokens = _Continuation(self, numbers), len(numbers)
                stage.total = (stage.total or 0) + max_new_tokens
                rounds = autoregressive(
                    self.model, prompt, max_new_tokens=max_new_tokens, eos=self.eos, selector=selector, runtime=batch
                )
                batch.add(BatchText(rounds, lambda _: stage.advance(), partial(end, index, selector)))

            def end(index: int, selector: _Continuation, error: Exception | None) -> None:
                stage.total = (stage.total or 0) - (len(selector.numbers) - len(selector.tokens))  # the unused numbers
                next_prompt = on_answer(index, selector.finish(error))
                if next_prompt is not None:
                    begin(index, *next_prompt)

            for index, (prompt, uniforms) in enumerate(zip(prompts, uniform_draws, strict=True)):
                begin(index, prompt, uniforms)
            all_read = False  # whether every prompt was read, and has had a token
            while batch.texts:
                batch.step()
                all_read = all_read or all(text.positions for text in batch.texts)
                for text in batch.texts[fit_rows(len(batch.texts), stage.done, stage.total or 0) :] if all_read else ():
                    batch.drop(text)
                    text.end(TimeoutError())  # `finish` then answers `UNANSWERED`

    def _pace(self) -> Callable[[int, float, float], int]:
        """For one batch, a function that tells after each step how many of its `row_count` prompts go on.

        The first call is after all prompts were read, since reading takes other times than decoding. token_count,
        total_tokens: so far and in all, of the batch or of a row. Example: 60 seconds were left at the first call, and
        10 are left after half of the tokens. The other half takes 50, more than `_SLOWER` times the 10 seconds. So a
        fifth of the rows goes on.
        """
        step_counter, seconds, first_tokens = itertools.count(), math.inf, 0.0

        def rows_that_fit(row_count: int, token_count: float, total_tokens: float) -> int:
            nonlocal seconds, first_tokens
            if not (step := next(step_counter)):
                seconds, first_tokens = self.seconds_left(), token_count
            if seconds == math.inf or step < _MIN_STEPS or step & (step - 1):  # if `step` is no power of two
                return row_count
            seconds_left = self.seconds_left()
            seconds_due = (seconds - seconds_left) / max(1.0, token_count - first_tokens) * (total_tokens - token_count)
            count = row_count if seconds_due <= _SLOWER * seconds_left else int(row_count * seconds_left / seconds_due)
            return min(row_count, max(self._smallest_batch, count))

        return rows_that_fit

    @torch.inference_mode()
    def _answer_padded(
        self, forward: Forward, prompts: Sequence[Sequence[int]], uniform_draws: Sequence[Tensor]
    ) -> list[Answer]:
        """The answers, decoded in steps of one token: each answer is a row of a batch."""
        continuations = [_Continuation(self, numbers) for numbers in uniform_draws]
        device, by_row, max_steps = forward.model.device, [*continuations], max(map(len, uniform_draws))
        uniforms = torch.nn.utils.rnn.pad_sequence([*uniform_draws], batch_first=True).to(device)
        pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
        ids = [torch.tensor(prompt) for prompt in prompts]
        masks = [torch.ones_like(prompt) for prompt in ids]  # padding is id 0 under mask 0
        fit_rows = self._pace()
        batch, logits = begin_batch(forward, pad(ids).to(device), pad(masks).to(device), max_steps)
        for step in track_progress(range(max_steps), f"a batch of {len(continuations)}", "tokens each at most"):
            tokens, top_tensors = self.choose(logits, uniforms[:, step], step), self.top_of(logits)
            for row, (continuation, token) in enumerate(zip(by_row, tokens.tolist(), strict=True)):
                if continuation.open:
                    continuation.take(token, [top_part[row : row + 1] for top_part in top_tensors])
            open_rows = [row for row, continuation in enumerate(by_row) if continuation.open]
            fitting_count = fit_rows(len(open_rows), step + 1, max_steps)
            for row in open_rows[fitting_count:]:
                by_row[row].is_late = True
            open_rows = open_rows[:fitting_count]
            if not open_rows:
                break
            tokens = tokens.clamp(min=0)
            if batch.should_shrink(len(by_row), len(open_rows)):
                selection = torch.tensor(open_rows, device=device)
                batch.keep(selection)
                tokens, uniforms, by_row = tokens[selection], uniforms[selection], [by_row[row] for row in open_rows]
            logits = batch.feed(tokens)
        return [continuation.finish() for continuation in continuations]

    def choose(self, logits: Tensor, uniform: Tensor, step: int) -> Tensor:
        """The next token [B] from logits [B, V] and numbers [B]; `_NAN_TOKEN` where a row has NaN logits."""
        is_greedy = step < self.greedy_tokens
        tokens = logits.argmax(-1) if is_greedy else invert(self.sampler.probabilities(logits), uniform[:, None])[:, 0]
        return torch.where(logits.amax(-1).isnan(), _NAN_TOKEN, tokens)  # the maximum of a row with a NaN is NaN

    def top_of(self, logits: Tensor) -> list[Tensor]:
        """`top_k_of` logits [B, V] on the CPU; empty if the top-k logits are not requested."""
        return [part.cpu() for part in top_k_of(logits, self.top_k_logits)] if self.top_k_logits else []


class _Continuation(TokenSelector):
    """An answer so far. numbers: its uniform numbers, one per token that it may have. is_late: it is given up."""

    def __init__(self, generator: Generator, numbers: Tensor):
        super().__init__()
        self.takes_argmax = False  # else plain decoding would bypass the selector
        self.numbers = numbers
        self.tokens: list[int] = []
        self.is_late = False
        self._generator = generator
        self._top: list[list[Tensor]] = []

    @property
    def open(self) -> bool:
        """Whether a further token is wanted."""
        has_ended = bool(self.tokens) and (self.tokens[-1] == _NAN_TOKEN or self.tokens[-1] in self._generator.eos)
        return not (has_ended or self.is_late) and len(self.tokens) < len(self.numbers)

    def take(self, token: int, top_tensors: list[Tensor]) -> None:
        """Add a token. top_tensors: `Generator.top_of` the logits [1, V] before it."""
        self.tokens.append(token)
        self._top.append(top_tensors)

    def next_token(self, logits: Tensor) -> Tensor:
        step, logits = len(self.tokens), logits.float()
        token = self._generator.choose(logits, self.numbers[step : step + 1], step)
        self.take(int(token), self._generator.top_of(logits))
        return token

    def finish(self, error: Exception | None = None) -> Answer:
        """The answer as it is now. error: what ended it; raised unless it is a lack of memory, or the target's NaN."""
        if isinstance(error, torch.OutOfMemoryError):
            return Answer(failure="memory")
        if self.is_late or isinstance(error, TimeoutError):
            return Answer(failure=UNANSWERED)
        if self.tokens[-1:] == [_NAN_TOKEN]:
            return Answer(failure="not_a_number")
        if error is not None:
            raise error
        top_tensors = [torch.cat(step_tensors) for step_tensors in zip(*self._top, strict=True)]
        ended = self.tokens[-1] in self._generator.eos
        return Answer(tuple(self.tokens), ended, TopK(torch.tensor(self.tokens), *top_tensors) if top_tensors else None)


def top_k_of(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids [B, k], log-probabilities [B, k], probability of the rest [B]) of the softmax of logits [B, V]."""
    logprobs, ids = top_k_chunked(logits.log_softmax(-1), min(k, logits.shape[-1]))
    return ids, logprobs, (1 - logprobs.exp().sum(-1)).clamp(min=0)
