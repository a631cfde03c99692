"""How much memory a computation asks for at a time."""

from typing import Any

from torch import Tensor
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
