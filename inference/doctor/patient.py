"""What of a drafter can be examined: the ways to read it, and what is known of it before anything runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Recording:
    """A prompt and the target's answer to it, read once by the target.

    tokens: all of the text [n], on the target's device. places: the positions of the answer that are judged, of which
    log_p [places, V] is the target's law and choices [places] its likeliest tokens. taps: its hidden states [1, n, d]
    by boundary (see `LayerStack.run_tapped`). category: of the prompt.
    """

    tokens: Tensor
    places: tuple[int, ...]
    log_p: Tensor
    choices: Tensor
    taps: dict[int, Tensor]
    category: str


# Of a recording, the drafter's logits [steps, places, V] after the text before each place: step s has drafted s tokens
# of it, which were right.
Drafting = Callable[[Recording], Tensor]


@dataclass(frozen=True)
class Way:
    """A way to read a drafter.

    name: in what it differs from the declared one. option: what a user gives to have it; "": it cannot be had here.
    meaning: what is wrong with the drafter if it is the better one. boundaries: of the target, at which it needs
    hidden states.
    """

    name: str
    drafting: Drafting
    option: str = ""
    meaning: str = ""
    boundaries: tuple[int, ...] = ()


class Fact(NamedTuple):
    """Something that shows without a pass. suspect: it explains a bad drafter."""

    name: str
    said: str
    suspect: bool = False


def numbers(stored: object, run: torch.dtype) -> Fact:
    """What its weights are stored as, a dtype or its name (None: that is not said), and what they run in."""
    said, here = (str(one).removeprefix("torch.") for one in (stored or "a type not said", run))
    narrow = here == "float16" and said != here
    return Fact("numbers", f"stored in {said}, run in {here}" + ", whose range is smaller" * narrow, narrow)


@dataclass(frozen=True)
class Patient:
    """A drafter to examine.

    declared: it, read as it says. others: ways that differ in one thing. known_tokens: the only ones that it predicts;
    None: all. data: what its training recorded of its data; None: nothing. tokenizer: its own; None: it has none.
    """

    declared: Way
    others: Sequence[Way] = ()
    known_tokens: Sequence[int] | None = None
    facts: Sequence[Fact] = ()
    data: object = None
    tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def boundaries(self) -> set[int]:
        """Of the target, at which its ways need hidden states."""
        return {one for way in (self.declared, *self.others) for one in way.boundaries}
