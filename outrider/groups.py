"""Groups of processes that hold one copy of a model together, each a part of it (tensor parallelism).

A launcher's processes form groups of equal size, neighbours together. Between groups is what was between processes
before: each has its own rows or prompts. Within a group all do the same at the same time, and one of them, the leader,
writes and prints.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

from accelerate import PartialState
from torch import Tensor, distributed

from outrider.errors import UserError
from outrider.processes import PATIENCE

Value = TypeVar("Value")
# Its name from torch 2.13 on, or before.
_all_gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


@dataclass(frozen=True)
class Group:
    """This process's group: the `index`-th of `count`; in it, this process is the `rank`-th of `size`."""

    index: int = 0
    count: int = 1
    rank: int = 0
    size: int = 1
    processes: Any = None  # torch's process group; None where this process is alone in its own

    def __deepcopy__(self, memo: dict[int, Any]) -> "Group":
        return self  # the processes stay the same for a copied model

    @property
    def is_first(self) -> bool:
        """Whether the main process is in it."""
        return self.index == 0

    @property
    def leads(self) -> bool:
        """Whether this process writes and prints for its group."""
        return self.rank == 0

    def add(self, part: Tensor) -> Tensor:
        """The sum of all processes' `part`, the same bits on all of them; `part` is overwritten."""
        if self.size > 1:
            distributed.all_reduce(part, group=self.processes)
        return part

    def side_by_side(self, part: Tensor) -> Tensor:
        """All processes' `part` [..., n] in the order of their ranks: [..., size · n]."""
        if self.size == 1:
            return part
        whole = part.new_empty(self.size * part.shape[0], *part.shape[1:])
        _all_gather(whole, part.contiguous(), group=self.processes)
        return whole.view(self.size, *part.shape).movedim(0, -2).flatten(-2)

    def agreed(self, value: Value) -> Value:
        """The leader's `value` (picklable), on every process."""
        if self.size == 1:
            return value
        sent = [value]
        distributed.broadcast_object_list(sent, group_src=0, group=self.processes)
        return sent[0]

    def require_same(self, value: object, what: str) -> None:
        """Raise `UserError` on all processes unless all of them have the same `value` (picklable)."""
        if self.size == 1:
            return
        values: list[object] = [None] * self.size
        distributed.all_gather_object(values, value, group=self.processes)
        if any(other != values[0] for other in values):
            raise UserError(f"tensor_parallel={self.size}: the processes of a group differ in {what}; report this")


ALONE = Group()


def each_alone(state: PartialState) -> Group:
    """This process's group where all groups are of one."""
    return Group(state.process_index, state.num_processes)


def join_group(state: PartialState, size: int) -> Group:
    """This process's group of `size`. All processes call it, with the same size. Raises `UserError`."""
    count, left = divmod(state.num_processes, size)
    if left:
        raise UserError(
            f"tensor_parallel={size}: the launcher started {state.num_processes} processes, expected a multiple of it; "
            f"start {size} or {2 * size}, by torchrun --nproc_per_node, or on GPUs accelerate launch --num_processes"
        )
    if size == 1:
        return each_alone(state)
    index, rank = divmod(state.process_index, size)
    made = [distributed.new_group([*range(first, first + size)], PATIENCE) for first in range(0, count * size, size)]
    return Group(index, count, rank, size, made[index])
