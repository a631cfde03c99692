"""The choice of multiply kernels on a CPU: measured once per run, then recorded.

Kernels round differently, so in 16 bits the choice may change a token: it must not depend on a new timing. A choice is
the answer to a question. Example: "bfloat16 weights in float32" → "floats", the name of a kernel.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch

from outrider.base.errors import UserError
from outrider.base.words import list_words

_answers: ContextVar[dict[str, str] | None] = ContextVar("choices", default=None)  # by question; None: not recorded
_is_imposed: ContextVar[bool] = ContextVar("imposed", default=False)  # a resumed run: new questions are errors
_is_ruled: ContextVar[bool] = ContextVar("ruled", default=False)  # see `decide_by_rule`
_RULE_ORDER = ("amx", "at once", "blocked", "floats", "plain")  # of all answers, the first that is possible

Answer = TypeVar("Answer", bound=str)


@contextmanager
def record_choices(choices: Mapping[str, str] | None = None) -> Iterator[dict[str, str]]:
    """Inside the context, models are laid out by the answers in `choices`, or by measurement if that is None. Yields
    the answers by question; new ones are added as they are made, so every caller gets the same. A nested context shares
    the outer one's answers. `settle` raises `UserError` for a given choice that is not possible here."""
    outer_answers = _answers.get()
    if outer_answers is not None:
        yield outer_answers
        return
    answers = dict(choices or {})
    reset_tokens = _answers.set(answers), _is_imposed.set(choices is not None)
    try:
        yield answers
    finally:
        _answers.reset(reset_tokens[0])
        _is_imposed.reset(reset_tokens[1])


@contextmanager
def decide_by_rule() -> Iterator[None]:
    """Inside the context no timing decides: layouts follow a fixed rule, the same on all machines of one CPU model."""
    reset_token = _is_ruled.set(True)
    try:
        yield
    finally:
        _is_ruled.reset(reset_token)


def settle(question: str, possible_answers: Sequence[Answer], choose: Callable[[], Answer]) -> Answer:
    """The recorded answer to `question`; without one, the answer of `choose`, which is then recorded.

    possible_answers: the answers that are possible here. They may differ between machines, but not between callers.
    """
    if _is_ruled.get():
        return min(possible_answers, key=lambda answer: (*_RULE_ORDER, answer).index(answer))  # others are last
    answers = _answers.get()
    if answers is None:
        return choose()
    if question not in answers:
        if _is_imposed.get():
            raise UserError(f"resume=true: the run does not record by what kernel it multiplied {question}; {_REMEDY}")
        answers[question] = choose()
    choice = next((answer for answer in possible_answers if answer == answers[question]), None)
    if choice is None:
        raise UserError(
            f"resume=true: the run multiplied {question} by the kernel {answers[question]!r}, which this machine does "
            f"not have (expected one of {list_words(possible_answers)}); {_REMEDY}"
        )
    return choice


_REMEDY = "continue on the machine where it began, or give another out_dir"


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of PyTorch has layouts for weights of `dtype` on `device` that are fast on the processor."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    is_fast = dtype == torch.float32 or (dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported())
    return is_fast and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
