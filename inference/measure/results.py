"""What was measured on a prompt."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from inference.core.acceptance import Chooser
from inference.core.generation import Generation
from inference.measure.lossless import Deviation
from inference.measure.shown import ShownRound
from outrider.streams import Streams

AUTOREGRESSIVE, TRANSFORMERS = "autoregressive", "transformers_generate"  # the two baselines' names


@dataclass(frozen=True)
class PromptResult:
    """One prompt continued by every arm.

    profiles: runs of our arms with a clock that waits for the device, where the timed ones' does not (CUDA);
    they say how a round's time divides. deviations: of the arms that were judged (see `lossless`). answer:
    what plain decoding said first, whichever of its repeats counts. conversation: the id of the prompt that this is
    one of several turns of. shown: by method the rounds that people can look at, where this text was chosen for it.
    """

    prompt_id: str
    category: str
    prompt: tuple[int, ...]
    generations: Mapping[str, Generation]
    reference: str
    profiles: Mapping[str, Generation] = field(default_factory=dict)
    deviations: Mapping[str, Deviation] = field(default_factory=dict)
    answer: tuple[int, ...] = ()
    conversation: str | None = None
    shown: Mapping[str, tuple[ShownRound, ...]] = field(default_factory=dict)

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


Arm = Callable[[Sequence[int], Streams], Generation]  # of a prompt's ids, by this generation's streams of randomness


Choosing = Callable[[Chooser], Chooser]


MakeArms = Callable[[Choosing], Mapping[str, Arm]]  # with other choosers in the place of their own
