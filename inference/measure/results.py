"""The measurements of a prompt."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from inference.core.rounds import Generation, Round
from inference.core.token_selector import TokenSelector
from inference.core.tree import DraftTree
from inference.measure.lossless import Deviation
from outrider.streams import Streams

NODES_KEPT = 1000  # of a text's trees together: a page of some texts by ten methods stays below a megabyte

_Verified = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # a tree's tokens and parents, the accepted nodes


@dataclass(frozen=True)
class ShownRound:
    """One round as it can be looked at; the first of a text is the prefill, which has no draft.

    tokens: committed; the first `accepted` of them were drafted, a token after those is the target's own.
    drafted, parents: the tree (see `DraftTree`). path: its accepted nodes, also those beyond the end of the text.
    All three are empty where a text's trees had more than `NODES_KEPT` nodes before.
    """

    tokens: tuple[int, ...]
    accepted: int = 0
    drafted: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    path: tuple[int, ...] = ()


class Noting(TokenSelector):
    """Chooses as `like` does, and notes every tree that is verified."""

    def __init__(self, like: TokenSelector):
        self.__dict__.update(like.__dict__)
        self.verified: list[_Verified] = []

    def verify(self, tree: DraftTree, logits: Tensor) -> tuple[list[int], list[int], Tensor, int]:
        tokens, nodes, following, bonus = super().verify(tree, logits)
        if 0 <= bonus < logits.shape[-1]:  # else the root is verified again, alone
            self.verified.append((tuple(tokens), tuple(tree.parents), tuple(nodes)))
        return tokens, nodes, following, bonus


def shown_rounds(first: int, rounds: Sequence[Round], verified: Sequence[_Verified]) -> tuple[ShownRound, ...]:
    """The rounds of one text, of which `first` is the prefill's token."""
    shown, nodes = [ShownRound((first,))], 0
    for r, (tokens, parents, path) in zip(rounds, verified, strict=True):
        nodes += len(tokens)
        tree = (tokens, parents, path) if nodes <= NODES_KEPT else ()
        shown.append(ShownRound(r.tokens, r.accepted, *tree))
    return tuple(shown)


AUTOREGRESSIVE, TRANSFORMERS = "autoregressive", "transformers_generate"  # the two baselines' names


@dataclass(frozen=True)
class PromptResult:
    """One prompt continued by every arm.

    profiles: runs of our arms with a clock that synchronises with the device, if the timed ones do not (CUDA), for the
    split of a round's time. deviations: of the judged arms (see `lossless`). answer: plain decoding's first repeat.
    conversation: the id of the prompt that this is a turn of. shown: recorded rounds by method, if this text was chosen
    for display.
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
        """The unit of resampling: the conversation, as its turns are correlated.

        Results of several runs may have the same ids for different prompts, which are then different units.
        """
        own = f"{self.prompt_id} {self.prompt}" if self.conversation is None else self.conversation
        return f"{self.category}/{own}"

    def identical(self, arm: str) -> bool:
        """Whether `arm` emitted exactly the reference arm's tokens."""
        return self.generations[arm].tokens == self.generations[self.reference].tokens


@dataclass(frozen=True)
class Skipped:
    """A turn that was skipped, and why."""

    prompt_id: str
    reason: str


Arm = Callable[[Sequence[int], Streams], Generation]  # from a prompt's ids and the generation's random streams


Choosing = Callable[[TokenSelector], TokenSelector]


MakeArms = Callable[[Choosing], Mapping[str, Arm]]  # arms whose selectors are replaced
