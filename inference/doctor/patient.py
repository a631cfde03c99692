"""What of a drafter can be examined: the ways to read it, and what is known of it before anything runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from inference.doctor.recording import Recording

# Of a recording, the drafter's logits [steps, places, V] after the text before each place: step s has drafted s tokens
# of it, which were right.
Drafting = Callable[[Recording], Tensor]


@dataclass(frozen=True)
class Way:
    """A way to read a drafter.

    name: in what it differs from the declared one. option: what a user gives to have it; "": it cannot be had here.
    meaning: what is wrong with the drafter if it is the better one.
    """

    name: str
    drafting: Drafting
    option: str = ""
    meaning: str = ""


class Fact(NamedTuple):
    """Something that shows without a pass. suspect: it explains a bad drafter."""

    name: str
    said: str
    suspect: bool = False


@dataclass(frozen=True)
class Patient:
    """A drafter to examine.

    declared: it, read as it says. others: ways that differ in one thing. boundaries: of the target, at which its ways
    need hidden states. known_tokens: the only ones that it predicts; None: all. data: what its training recorded of
    its data; None: nothing. tokenizer: its own; None: it has none.
    """

    declared: Way
    others: Sequence[Way] = ()
    boundaries: tuple[int, ...] = ()
    known_tokens: Sequence[int] | None = None
    facts: Sequence[Fact] = field(default_factory=list)
    data: Any = None
    tokenizer: PreTrainedTokenizerBase | None = None
