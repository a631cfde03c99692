"""How much memory a computation asks for at a time."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """bytes: of the largest tensor that any operation inside made."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        made = (leaf.untyped_storage().nbytes() for leaf in tree_leaves(results) if isinstance(leaf, Tensor))
        self.bytes = max(self.bytes, *made, 0)
        return results


class Alive(TorchDispatchMode):
    """peak: bytes of all tensors that operations inside made and that were there at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        given, made = (
            [leaf.untyped_storage() for leaf in tree_leaves(some) if isinstance(leaf, Tensor)]
            for some in ((args, kwargs), results)
        )
        self.made = {key: one for key, one in self.made.items() if not one[0].expired()}
        own = {storage._cdata for storage in given}
        for storage in made:
            if storage._cdata not in own:
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self.made.values()))
        return results
