"""Whether an arm (a way of decoding) decodes exactly the target's text, up to rounding.

The reference text is that of transformers' `generate`, or of plain decoding if `generate` was not run. In float32 and
float64 the arm's text equals the reference text, or the arm is wrong. In half precision two correct programs diverge
when two logits are nearly equal. So a difference alone proves no fault, and an equal text proves little about the next.

In half precision the arm therefore decodes the reference text again, teacher-forced. The arm makes the drafts, passes,
caches and rejections; every chosen token is the reference text's (`Forced`). The keys and values of every layer and the
logits at every position are then compared with the target's in twice the precision (`double_precision`). The unit is
the error of the stock pass: the target as transformers runs it, in the arm's precision (in float32
`ORDER_OF_SUMS` times that). A correct runtime has about the same rounding error; a fault adds to it. Two ratios near 1
show that a row, for example a layer's keys, is right:

    bulk   the geometric mean over all positions and prompts. It shows a fault everywhere, even a fault below the
           rounding noise of the logits. Example: RoPE that is off by 0.2 % is lost in the logits, but makes the first
           layer's keys wrong by 12 times their rounding
    peak   the largest ratio at any position. It shows a fault somewhere: a wrong row of a cache, a position not seen

`make_reference` computes the precise states and the units, `Forced` records an arm's errors, `Forced.deviation` makes
the ratios of one text, and `judge_deviations` the judgement over all texts.

At a few positions rounding has larger effects: the last bit of an attention score changes a layer's keys ten times as
much as elsewhere. Which pass this happens in is chance, in transformers too. So if a peak exceeds its limit,
transformers reads the text again in chunks of several lengths, which round differently. If the error of one of them is
several times that of the first reading, it becomes the unit. Faults are still found: these readings run no code of this
project.

In an arm that passes both, a mismatch of the texts is excused as a tie if the precise logits of the two tokens are as
close as rounding allows there. Sampled text has no reference to equal, but bulk and peak apply as well.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import DynamicCache, PreTrainedModel

from outrider.draft_models.targets.attention import stock_attention
from outrider.inference.core.session import Session
from outrider.inference.core.token_selector import TokenSelector, VerifiedDraft
from outrider.inference.core.tree import ROOT, DraftTree

HALF = (torch.bfloat16, torch.float16)
# Limits on the ratios. Correct runtimes stay below half of the way from 1 to them; faults exceed them by far.
BULK, PEAK, GAP = 1.25, 6.0, 8.0  # GAP: in rounding errors of logits, see `Deviation`
# Tokens per pass of transformers' further readings. A tip that all of four readings missed was seen in a fine-tuned
# model; of twelve, each with its own rounding, hardly all miss one that a correct runtime had.
PIECES = (64, 29, 17, 7, 53, 41, 37, 23, 19, 13, 11, 5)
TIPS = PEAK / 2  # an error that is so many times larger in another reading is due to chance (it "tipped")
# In float32 the order of the terms of a sum makes the errors of two correct programs differ by several times. In half
# precision the rounding of each stored number hides the order. A fault exceeds the errors of float32 by thousands.
ORDER_OF_SUMS = 6.0
WORST = 1e9  # replaces larger ratios, and NaN


@dataclass(frozen=True)
class Deviation:
    """One arm's run over one reference text, against the precise target. Ratios are relative to transformers' rounding.

    bulk: per row, the mean over positions of the logarithm of the ratio. The rows are keys and values of layer 0, of
    layer 1, …, then the logits.
    peak: the largest ratio, in row `peak_row` at position `peak_position` of prompt and text; relative to
    `tipping_noise` if it would exceed `PEAK`.
    gaps: at each position where the arm would have chosen another token than the reference text has, how far the worse
    of the two is below the best token, in units of the rounding error of logits there.
    own_gaps: the number of such positions in the stock pass.
    mismatch: the gap at the first difference between the reference text and the text that the arm decodes freely; None
    if the texts are equal, `WORST` if one is a prefix of the other.
    """

    positions: int
    bulk: tuple[float, ...]
    peak: float
    peak_row: int
    peak_position: int
    gaps: tuple[float, ...] = ()
    own_gaps: int = 0
    mismatch: float | None = None


@dataclass(frozen=True)
class Judgement:
    """The verdict on the deviations of one arm; `faults` is empty for an arm that only rounds. ties: the number of
    gaps. own_ties: the number in the stock pass. largest_gap: the largest of gaps and mismatches."""

    prompts: int
    positions: int
    bulk: float
    bulk_at: str
    peak: float
    peak_at: str
    ties: int
    own_ties: int
    largest_gap: float
    faults: tuple[str, ...]


def judge_deviations(deviations: Sequence[Deviation]) -> Judgement:
    """The judgement of an arm, from its deviations on all texts (at least one)."""
    n_positions = sum(deviation.positions for deviation in deviations)
    logs = [  # by row, the logarithm of the bulk over all texts
        math.fsum(terms) / n_positions
        for terms in zip(*([x * deviation.positions for x in deviation.bulk] for deviation in deviations), strict=True)
    ]
    argmax = max(range(len(logs)), key=logs.__getitem__)
    worst = max(deviations, key=lambda deviation: deviation.peak)
    gaps = [gap for deviation in deviations for gap in deviation.gaps]
    mismatches = [deviation.mismatch for deviation in deviations if deviation.mismatch is not None]
    n_ties, stock_ties = len(gaps), sum(deviation.own_gaps for deviation in deviations)
    # Both count rare events: the root of their sum is about the standard deviation of their difference. Four standard
    # deviations are allowed, and 2 ties more: near 0 the root is too small.
    max_ties = stock_ties + 4 * math.sqrt(n_ties + stock_ties) + 2
    peak, peak_at = worst.peak, f"{_name_row(worst.peak_row, logs)} at position {worst.peak_position}"
    bulk, bulk_at = math.exp(logs[argmax]), _name_row(argmax, logs)
    max_gap = max([*gaps, *mismatches], default=0.0)
    gap_fault = f"another token than the target's is chosen across {max_gap:.1f} rounding errors, at most {GAP:.0f}"
    checks = (
        (bulk <= BULK, f"the {bulk_at} are off by {bulk:.2f} times the rounding error, at most {BULK}"),
        (peak <= PEAK, f"the {peak_at} are off by {peak:.1f} times the rounding error, at most {PEAK:.0f}"),
        (max_gap <= GAP, gap_fault),
        (n_ties <= max_ties, f"it leaves the text at {n_ties} positions, transformers at {stock_ties}"),
    )
    faults = tuple(message for holds, message in checks if not holds)
    return Judgement(len(deviations), n_positions, bulk, bulk_at, peak, peak_at, n_ties, stock_ties, max_gap, faults)


def _name_row(row: int, row_logs: Sequence[float]) -> str:
    return "logits" if row == len(row_logs) - 1 else f"{('keys', 'values')[row % 2]} of layer {row // 2}"


@dataclass(frozen=True)
class Reference:
    """A prompt and the reference text, the target's states on them in twice the precision, and the stock pass's errors.

    states: keys and values of every layer [1, heads, n, d], n = len(prompt) + len(text) − 1; logits [t, V] before each
    token of the text. states_noise [rows, n] and logits_noise [t]: the errors of the stock pass. stock_logits [t, V].
    tipping_noise: the same, or the largest error of readings in `PIECES` at positions where that exceeds it in some row
    by more than `TIPS` times; computed on first use.
    """

    prompt: tuple[int, ...]
    text: tuple[int, ...]
    states: tuple[Tensor, ...]
    logits: Tensor
    states_noise: Tensor
    logits_noise: Tensor
    stock_logits: Tensor
    tipping_noise: Callable[[], tuple[Tensor, Tensor]]


@torch.inference_mode()
def make_reference(model: PreTrainedModel, prompt: Sequence[int], text: Sequence[int]) -> Reference:
    """`text` after `prompt` through `model`, the target as transformers runs it: in twice its precision, then as it is.

    This project's runtime takes no part, so its faults cannot enlarge the tolerance for them.
    """
    ids = torch.tensor([[*prompt, *text[:-1]]], device=model.device)
    with stock_attention(model):
        with double_precision(model):
            logits, states = _forward(model, ids, len(text))
        stock_logits, stock_states = _forward(model, ids, len(text))
    unit = torch.finfo(model.dtype).eps / 2 / math.sqrt(3)  # the rounding error of storing a number in this precision
    states_noise = _noise(_state_errors(stock_states, states), unit * torch.stack([_rms(state) for state in states]))
    logits_noise = _noise(_logit_errors(stock_logits, logits)[None], unit * logits.std(-1)[None])[0]

    @functools.cache
    @torch.inference_mode()
    def tipping_noise() -> tuple[Tensor, Tensor]:
        max_states_noise, max_logits_noise = states_noise, logits_noise
        with stock_attention(model):
            for piece_length in PIECES:
                read_logits, read_states = _forward(model, ids, len(text), piece_length)
                max_states_noise = torch.maximum(max_states_noise, _state_errors(read_states, states))
                max_logits_noise = torch.maximum(max_logits_noise, _logit_errors(read_logits, logits))
        return units_after_tips((states_noise, logits_noise), (max_states_noise, max_logits_noise))

    return Reference(
        tuple(prompt), tuple(text), states, logits, states_noise, logits_noise, stock_logits, tipping_noise
    )


def units_after_tips(once: tuple[Tensor, Tensor], max_noise: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The units of states [rows, n] and logits [t]. At the positions where a reading tipped in some row they are the
    `max_noise` errors of all readings, as what tips in one layer reaches the later ones; elsewhere those of `once`."""
    (states_noise, logits_noise), (max_states_noise, max_logits_noise) = once, max_noise
    tip_mask = (max_states_noise > TIPS * states_noise).any(0)  # [n]; the logits are those of the last t positions
    text_mask = tip_mask[-len(logits_noise) :] | (max_logits_noise > TIPS * logits_noise)
    return torch.where(tip_mask, max_states_noise, states_noise), torch.where(text_mask, max_logits_noise, logits_noise)


def _forward(
    model: PreTrainedModel, ids: Tensor, n_logits: int, piece_length: int | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Logits [rows, V] after the last of ids [1, n], and keys and values of all; `piece_length` tokens per pass."""
    cache: Any = DynamicCache()  # without a config it keeps all positions of sliding layers too
    logits: list[Tensor] = []
    for piece in ids.split(piece_length or ids.shape[1], dim=1):
        out = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=min(n_logits, piece.shape[1]))
        logits.append(out.logits[0])
    return torch.cat(logits)[-n_logits:], tuple(state for layer in cache.layers for state in (layer.keys, layer.values))


@contextmanager
def double_precision(model: PreTrainedModel) -> Iterator[None]:
    """`model` computing in twice its precision: half in float32, float32 in float64. The weights of a module are
    converted while it runs, so that no second copy of the model is needed."""
    dtype = torch.float32 if model.dtype in HALF else torch.float64
    modules = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]

    def run_upcast(module: nn.Module) -> Callable[..., object]:
        def forward(*args: object, **kwargs: object) -> object:
            weights = {name: weight.to(dtype) for name, weight in module.named_parameters(recurse=False)}
            module.__dict__.pop("forward")  # restore the module's own forward for this call
            try:
                return functional_call(module, weights, args, kwargs)
            finally:
                module.__dict__["forward"] = forward

        return forward

    for module in modules:
        module.__dict__["forward"] = run_upcast(module)
    try:
        yield
    finally:
        for module in modules:
            module.__dict__.pop("forward")


def _noise(errors: Tensor, floor: Tensor) -> Tensor:
    """The unit of ratios [rows, n]: the error at the position, at least the row's median and `floor`."""
    return torch.maximum(errors, errors.median(-1, keepdim=True).values).maximum(floor)


def _rms(state: Tensor) -> Tensor:
    """The root mean square [n] of state [1, heads, n, d] at every position."""
    return state.square().mean((0, 1, 3)).sqrt()


def _state_errors(rounded_states: Sequence[Tensor], states: Sequence[Tensor]) -> Tensor:
    """The errors of keys and values [rows, n]."""
    return torch.stack([_rms(row.to(state.dtype) - state) for row, state in zip(rounded_states, states, strict=True)])


def _logit_errors(rounded_logits: Tensor, logits: Tensor) -> Tensor:
    """The errors [t] of logits [t, V], invariant to a constant added to all logits of a row."""
    errors = rounded_logits.to(logits.dtype) - logits
    return (errors - errors.mean(-1, keepdim=True)).square().mean(-1).sqrt()


class Forced(TokenSelector):
    """Chooses the tokens of the reference text whatever the logits are, and records the logits' errors. selector: the
    arm's; its processors act, and drafts are drawn from its distributions."""

    def __init__(self, selector: TokenSelector, reference: Reference):
        self.__dict__.update(selector.__dict__)  # in place of super().__init__
        self.takes_argmax = False  # else plain decoding would bypass the selector
        self._reference = reference
        self._position = 0  # index in the text
        self._errors: list[Tensor] = []  # of the logits, [1] for each token
        self._choices: list[Tensor] = []  # the tokens [1] that the arm would have chosen

    def begin(self, session: Session, prompt: Sequence[int]) -> None:
        super().begin(session, prompt)
        self._session = session

    def next_token(self, logits: Tensor) -> Tensor:
        return self._take(logits)

    def verify(self, tree: DraftTree, logits: Tensor) -> VerifiedDraft:
        tokens, text = tree.tokens.tolist(), self._reference.text
        accepted: list[int] = []
        next_id = self._take(logits[:1])
        for node, (token, parent) in enumerate(zip(tokens, tree.parents, strict=True)):
            if parent == (accepted[-1] if accepted else ROOT) and token == int(next_id) and self._position < len(text):
                accepted.append(node)
                next_id = self._take(logits[node + 1 : node + 2])
        return VerifiedDraft(tokens, accepted, next_id, int(next_id))

    def _take(self, logits: Tensor) -> Tensor:
        """The text's next token [1], which the arm would have chosen from logits [1, V]."""
        self._errors.append(_logit_errors(logits, self._reference.logits[self._position][None]))
        if self.greedy:
            self._choices.append(self._scores(logits, [self.text] if self.reads_context else None).argmax(-1))
        token = self._token(self._reference.text[self._position])
        self._position += 1
        self._extend_text(token)
        return token

    def deviation(self, free_text: Sequence[int]) -> Deviation:
        """The finished run's deviation. free_text: the text that the arm decoded freely."""
        reference = self._reference
        states = [state for layer in self._session.content() for state in layer]
        error_scale = ORDER_OF_SUMS if reference.logits.dtype == torch.float64 else 1.0  # of a target in float32
        errors = _state_errors(states, reference.states) / error_scale, torch.cat(self._errors)[None] / error_scale
        ratios = _ratios(errors, (reference.states_noise, reference.logits_noise))
        first_position = len(reference.prompt) - 1  # the position whose logits choose the text's first token
        peak_entry = _highest(ratios, first_position)
        if peak_entry[0] > PEAK:
            peak_entry = _highest(_ratios(errors, reference.tipping_noise()), first_position)
        bulk_logs = [ratio.clamp(min=0.01).log().mean(-1).tolist() for ratio in ratios]  # 0 has no logarithm
        deviation = Deviation(len(reference.text), (*bulk_logs[0], *bulk_logs[1]), *peak_entry)
        return self._with_gaps(deviation, free_text) if self.greedy else deviation

    def _with_gaps(self, deviation: Deviation, free_text: Sequence[int]) -> Deviation:
        """`deviation` with gaps, own_gaps and mismatch, for greedy decoding."""
        text, stock_logits = self._reference.text, self._reference.stock_logits
        choices = torch.cat(self._choices).tolist()
        stock_gaps = sum(int(self._scores_at(i, stock_logits).argmax()) != token for i, token in enumerate(text))
        mismatch_at = next((i for i, (a, b) in enumerate(zip(text, free_text, strict=False)) if a != b), None)
        if mismatch_at is None:  # equal, or one is a prefix of the other
            mismatch = None if len(free_text) == len(text) else WORST
        else:
            mismatch = self._gap(mismatch_at, free_text[mismatch_at])
        gaps = tuple(self._gap(i, choice) for i, choice in enumerate(choices) if choice != text[i])
        return replace(deviation, gaps=gaps, own_gaps=stock_gaps, mismatch=mismatch)

    def _gap(self, position: int, token: int) -> float:
        """How far the less likely of `token` and the text's token is below the best, in rounding errors of logits."""
        scores = self._scores_at(position, self._reference.logits)[None]
        pair = torch.tensor([[token, self._reference.text[position]]], device=scores.device)
        return float(measure_regrets(scores, pair, self._reference.logits_noise[position]))

    def _scores_at(self, position: int, logits: Tensor) -> Tensor:
        """The scores [V] that greedy decoding compares before token `position` of the text, from logits [t, V]."""
        reference = self._reference
        context = torch.tensor([*reference.prompt, *reference.text[:position]], device=logits.device)
        return self._scores(logits[position][None], [context] if self.reads_context else None)[0]


def measure_regrets(scores: Tensor, tokens: Tensor, noise: Tensor) -> Tensor:
    """How far the least likely of tokens [n, k] is below the best of scores [n, V], in the unit of each row [n]."""
    return _units(scores.amax(-1) - scores.gather(-1, tokens).amin(-1), noise)


def _ratios(errors: tuple[Tensor, Tensor], noise: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The errors of states [rows, n] and logits [1, t], in units of `noise`."""
    return _units(errors[0], noise[0]), _units(errors[1], noise[1])


def _highest(ratios: tuple[Tensor, Tensor], first_position: int) -> tuple[float, int, int]:
    """The largest ratio of states and logits, its row and its position. first_position: of the first logits."""
    states, logits = ratios
    larger, row, position = (states, 0, 0) if states.max() >= logits.max() else (logits, len(states), first_position)
    flat_index = int(larger.argmax())
    return float(larger.max()), row + flat_index // larger.shape[1], position + flat_index % larger.shape[1]


def _units(errors: Tensor, noise: Tensor) -> Tensor:
    """Errors in units of `noise`, limited to finite numbers, for JSON; none is 0 also where there is no noise."""
    return (errors / noise).where(errors != 0, 0.0).double().nan_to_num(nan=WORST).clamp(max=WORST)
