"""Runtimes, which run passes: eagerly, or in fixed shapes replayed as CUDA graphs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from draft_models.targets.target import Target
from inference.core.session import Session
from inference.core.target_session import eager_session


@dataclass(frozen=True)
class KernelChoice:
    """The kernel, one of `kernels_on` the device, that was fastest when `width` rows see `keys` cache positions.

    heads, key_heads, head_dim: of the attention to which this applies.
    """

    heads: int
    key_heads: int
    head_dim: int
    width: int
    keys: int
    kernel: str


class Runtime(Protocol):
    """Makes the sessions of generations. captures: CUDA graphs captured so far; capture time is excluded from decode
    time."""

    name: str
    captures: int

    def choose_kernels(self, targets: Sequence[Target], positions: int) -> tuple[KernelChoice, ...]:
        """The attention kernels for `prepare`, if there is a choice: measured on texts of up to `positions` tokens."""
        ...

    def prepare(self, positions: int, kernels: Sequence[KernelChoice]) -> None:
        """Called before the first session: texts have up to `positions` tokens; `kernels` are used."""
        ...

    def session(self, target: Target, split: int | None, capacity: int, context: int | None = None) -> Session:
        """As `eager_session(target, split, capacity, context)`."""
        ...


class Eager:
    """Runs every pass eagerly: the reference, and the runtime on a CPU."""

    name = "eager"
    captures = 0

    def choose_kernels(self, targets: Sequence[Target], positions: int) -> tuple[KernelChoice, ...]:
        return ()

    def prepare(self, positions: int, kernels: Sequence[KernelChoice]) -> None:
        """Nothing to do: each session is allocated for its text, and there is only one kernel."""

    def session(self, target: Target, split: int | None, capacity: int, context: int | None = None) -> Session:
        return eager_session(target, split, capacity, context)
