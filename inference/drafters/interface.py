"""What the decoding loop asks of a drafter."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from inference.session import TargetSession


class Drafter(Protocol):
    """Whatever drafts follow the text with: told the prompt, then every round's outcome."""

    split: int  # target layers it shares: the session it works in is split there

    def begin(self, session: TargetSession) -> None:
        """Called once, with the prompt fed to the session's first half and not yet committed."""
        ...

    def commit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """The round ends with the path `tokens` committed, root first; called before the session's own commit.

        rows: the row of each, in the session where the source shares it, else as the source was fed them, with
        −1 (or a row it never had) for a token it was not fed.
        """
        ...


class DraftModel(Drafter, Protocol):
    """An autoregressive drafter: gives next-token distributions after any node of the round's tree."""

    @property
    def hidden(self) -> Tensor:
        """The drafter's last hidden states [n, d] of the rows that were just extended."""
        ...

    @property
    def target_hidden(self) -> Tensor:
        """The target's last hidden state [1, d] at the last verified position."""
        ...

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        """Feed rows (tokens [n], parents as in `TargetSession.feed`); returns next-token logits [n, V] after each.

        `hidden` and the logits hold until the next call.
        """
        ...
