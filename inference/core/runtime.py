"""How passes run: one by one as they come, or in fixed shapes that a CUDA graph replays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from draft_models.targets.target import Target
from inference.core.session import Session
from inference.core.target_session import eager_session


@dataclass(frozen=True)
class KernelChoice:
    """The kernel, one of `kernels_on` the device, that was fastest where `width` rows see `keys` cache positions.

    heads, key_heads, head_dim: of the attention that this holds for.
    """

    heads: int
    key_heads: int
    head_dim: int
    width: int
    keys: int
    kernel: str


class Runtime(Protocol):
    """Makes the sessions that generations run in. captures: how many graphs it has made so far, each of which took
    time that is none of decoding's."""

    name: str
    captures: int

    def choose_kernels(self, targets: Sequence[Target], positions: int) -> tuple[KernelChoice, ...]:
        """The attention kernels to `prepare` for, where there is a choice: measured on texts of up to `positions`."""
        ...

    def prepare(self, positions: int, kernels: Sequence[KernelChoice]) -> None:
        """Before the first session: texts will have up to `positions` tokens, and `kernels` are to be used."""
        ...

    def session(self, target: Target, split: int | None, capacity: int, context: int | None = None) -> Session:
        """As `eager_session(target, split, capacity, context)`."""
        ...


class Eager:
    """Every pass as it comes: the reference, and the way on a CPU."""

    name = "eager"
    captures = 0

    def choose_kernels(self, targets: Sequence[Target], positions: int) -> tuple[KernelChoice, ...]:
        return ()

    def prepare(self, positions: int, kernels: Sequence[KernelChoice]) -> None:
        """Sessions are made as large as each text needs, and know one kernel."""

    def session(self, target: Target, split: int | None, capacity: int, context: int | None = None) -> Session:
        return eager_session(target, split, capacity, context)
