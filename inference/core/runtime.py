"""How passes run: one by one as they come, or in fixed shapes that a CUDA graph replays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from draft_models.targets.stack import LayerStack
from draft_models.targets.whole_model import PlainLM
from inference.core.plain_session import PlainTargetSession
from inference.core.session import TargetSession


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

    def choose_kernels(self, stacks: Sequence[LayerStack], positions: int) -> tuple[KernelChoice, ...]:
        """The attention kernels to `prepare` for, where there is a choice: measured on texts of up to `positions`."""
        ...

    def prepare(self, positions: int, kernels: Sequence[KernelChoice]) -> None:
        """Before the first session: texts will have up to `positions` tokens, and `kernels` are to be used."""
        ...

    def session(self, stack: LayerStack, split: int, capacity: int, context: int | None = None) -> TargetSession:
        """As `TargetSession(stack, split, capacity, context)`."""
        ...


def plain_session(stack: Any, capacity: int, context: int | None) -> TargetSession | None:
    """The session of a target that runs by its own forward; None for one that runs layer by layer."""
    return PlainTargetSession(stack, capacity, context) if isinstance(stack, PlainLM) else None


class Eager:
    """Every pass as it comes: the reference, and the way on a CPU."""

    name = "eager"
    captures = 0

    def choose_kernels(self, stacks: Sequence[LayerStack], positions: int) -> tuple[KernelChoice, ...]:
        return ()

    def prepare(self, positions: int, kernels: Sequence[KernelChoice]) -> None:
        """Sessions are made as large as each text needs, and know one kernel."""

    def session(self, stack: LayerStack, split: int, capacity: int, context: int | None = None) -> TargetSession:
        return plain_session(stack, capacity, context) or TargetSession(stack, split, capacity, context)
