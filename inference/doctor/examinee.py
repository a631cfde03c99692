"""A drafter as the doctor examines it: variants of reading it, and facts known without a pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Recording:
    """A prompt and the target's answer to it, read once by the target.

    tokens: the whole text [n], on the target's device. places: the judged positions of the answer. log_p [places, V]
    and choices [places]: the target's log-probabilities and most likely tokens there. taps: the target's hidden states
    [1, n, d] by layer boundary (see `LayerStack.run_with_aux`). category: of the prompt.
    """

    tokens: Tensor
    places: tuple[int, ...]
    log_p: Tensor
    choices: Tensor
    aux_hidden: dict[int, Tensor]
    category: str


# The drafter's logits [steps, places, V] on a recording, predicting each place: in step s the last s tokens before it
# were drafted, correctly.
Drafting = Callable[[Recording], Tensor]


@dataclass(frozen=True)
class Variant:
    """A variant of reading a drafter's checkpoint.

    name: how it differs from the declared one. option: the option that selects it; "": not available here.
    meaning: what is wrong with the drafter if this variant is better. boundaries: the layer boundaries at which it
    needs the target's hidden states.
    """

    name: str
    drafting: Drafting
    option: str = ""
    meaning: str = ""
    boundaries: tuple[int, ...] = ()


class Fact(NamedTuple):
    """A fact known without a pass. suspect: whether it may explain a bad drafter."""

    name: str
    said: str
    suspect: bool = False


def numbers(stored: object, run: torch.dtype) -> Fact:
    """The stored dtype of the weights (None: unknown), and the dtype they run in."""
    said, here = (str(one).removeprefix("torch.") for one in (stored or "a type not said", run))
    narrow = here == "float16" and said != here
    return Fact("numbers", f"stored in {said}, run in {here}" + ", whose range is smaller" * narrow, narrow)


@dataclass(frozen=True)
class Examinee:
    """A drafter to examine.

    declared: as its config declares. others: variants with one difference. known_tokens: its draft vocabulary; None:
    all tokens. data: the data settings in its training record; None: not recorded. tokenizer: its own, if it has one.
    """

    declared: Variant
    others: Sequence[Variant] = ()
    known_tokens: Sequence[int] | None = None
    facts: Sequence[Fact] = ()
    data: object = None
    tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def boundaries(self) -> set[int]:
        """Boundaries of the target's layers at which its variants need hidden states."""
        return {one for way in (self.declared, *self.others) for one in way.boundaries}
