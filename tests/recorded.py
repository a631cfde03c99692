"""CUDA graphs on a CPU: a pass is recorded operation by operation, and replayed on the memory it was recorded with.

A replay sees what a graph would: the same addresses, and every number that the host computed as it was then. What a
capture forbids is refused, memory that was freed since is noticed, and what a pass leaves outside of memory that was
there before is overwritten, as another graph of the same pool would.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from inference.engines import packing
from inference.engines.graphs import attention_kernels, cuda_graphs
from inference.engines.graphs.fixed_shapes import GraphPool

# The host waits for the device, or hands it memory of its own.
WAITING = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.__bool__,
           torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.nonzero,
           torch.Tensor.masked_select, torch.nonzero, torch.masked_select, torch.unique, torch.tensor, torch.as_tensor,
           torch.from_numpy}  # fmt: skip
WAITING_OPS = {"_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "equal", "is_nonzero", "item"}


class _NoWaiting(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in WAITING, f"{func} while a graph is captured"
        return func(*args, **(kwargs or {}))


class Recording(TorchDispatchMode):
    """What `run` does, as a `torch.cuda.CUDAGraph`."""

    def __init__(self, run: Callable[[], None]):
        super().__init__()
        self._steps: list[tuple[Any, Any, Any, list[Tensor]]] = []  # operation, arguments, its new results
        self._own: dict[int, Tensor] = {}  # by storage: a tensor in it
        self._borrowed: dict[int, StorageWeakRef] = {}
        with _NoWaiting(), self:
            run()
        self._overwrite()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        assert not waits(func, given), f"{func} while a graph is captured"
        results = func(*args, **(kwargs or {}))
        known = {storage_key(tensor) for tensor in given}
        fresh = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor) and storage_key(leaf) not in known]
        if fresh or func._schema.is_mutable:
            args, kwargs = tree_map_only(Tensor, self._reference, (args, kwargs or {}))
            self._steps.append((func, args, kwargs, fresh))
        self._own |= {storage_key(tensor): tensor for tensor in fresh}
        return results

    def _reference(self, tensor: Tensor) -> Tensor:
        """`tensor`, which does not keep its memory alive unless it was made in here."""
        storage = tensor.untyped_storage()
        if storage_key(tensor) in self._own or not storage.nbytes():
            return tensor
        self._borrowed[storage_key(tensor)] = StorageWeakRef(storage)
        memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), storage.device, storage.nbytes())
        alias = torch.empty(0, dtype=tensor.dtype)
        return alias.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())

    def replay(self) -> None:
        assert not any(memory.expired() for memory in self._borrowed.values()), "a graph reads memory that was freed"
        for func, args, kwargs, fresh in self._steps:
            results = func(*args, **kwargs)
            if fresh:
                known = {storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
                again = [
                    leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor) and storage_key(leaf) not in known
                ]
                for place, tensor in zip(fresh, again, strict=True):
                    place.copy_(tensor)
        self._overwrite()

    def _overwrite(self) -> None:
        for tensor in self._own.values():
            storage = tensor.untyped_storage()
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)  # NaN, or −1


def waits(func: Any, given: Sequence[Tensor]) -> bool:
    """Whether the host waits for the result of an operation on the tensors `given`, or for its size."""
    name = func.overloadpacket.__name__
    by_mask = name.startswith("index") and any(tensor.dtype in (torch.bool, torch.uint8) for tensor in given[1:])
    return name in WAITING_OPS or (by_mask and name not in ("index_select", "index_copy", "index_copy_"))


def storage_key(tensor: Tensor) -> int:
    """Names its storage while that lives."""
    return tensor.untyped_storage()._cdata


def record_graphs(patch: pytest.MonkeyPatch) -> None:
    """Have arenas record and replay their passes."""
    patch.setattr(cuda_graphs, "can_capture", lambda device: True)
    patch.setattr(GraphPool, "_capture", lambda _, run: Recording(run))
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    patch.setattr(attention_kernels, "TRIALS", 1)


def lay_out_as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Have `prepare` fuse layers only: weights are not packed, and layers run one by one."""
    patch.setattr(packing, "can_pack", lambda *_: False)
    patch.setattr(packing, "run_at_once", lambda model: [])
