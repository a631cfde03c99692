"""The contract of CUDA graphs, kept on a CPU: what a pass did when it was captured, it does in every later call.

A graph launches the operations of its capture again: on the same addresses, with the numbers that Python had then. So
in the place of a replay the Python of the present call runs, and each of its operations is compared with the capture's.
A difference is what the graph would not do. The first broken rule is named, at the line
that breaks it.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.inference.engines import packing
from outrider.inference.engines.graphs import attention_kernels, cuda_graphs
from outrider.inference.engines.graphs.attention_kernels import kernel_for, use_kernel_on
from outrider.inference.engines.graphs.fixed_shapes import GraphPool

# The rules, as `BrokenError` names them.
WAITS = "the host waits for the device, or hands it memory of its own"
STAYS = "memory of a pass outlives it"
WARM_UP = "memory made in the warm-up is read, which no replay computes again"
REBOUND = "an input was rebound, not copied into"
CHANGED = "Python's state changed since the capture"
UNFROZEN = "a weight is not frozen: a backward pass would keep memory of the graph"
UPDATED = "a pass changes its own input, which is not restored after the warm-up"
FREED = "memory that the graph reads was freed"
# The host waits for the device, or hands it memory of its own.
WAITING = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.__bool__,
           torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.nonzero,
           torch.Tensor.masked_select, torch.nonzero, torch.masked_select, torch.unique, torch.tensor, torch.as_tensor,
           torch.from_numpy}  # fmt: skip
WAITING_OPS = {"_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "equal", "is_nonzero", "item"}
OVERWRITING = {"copy_", "fill_", "zero_", "index_copy_"}  # in place, without reading what they overwrite
Pass = Callable[[], None]
Tables = tuple[tuple[Tensor, Tensor], ...]


class BrokenError(AssertionError):
    """A rule of the contract is broken."""


@dataclass
class Watch:
    """What the passes of a test have in common.

    allowed: how many tensors a pass may leave to its caller. made: memory of warm-ups and of earlier passes that is
    still there, with the rule that whoever reads it breaks. tables: the rotary tables of the arena that runs.
    """

    allowed: int = 0
    graphs: list["Contract"] = field(default_factory=list)
    replayed: list[cuda_graphs.Key] = field(default_factory=list)
    made: dict[int, tuple[str, StorageWeakRef]] = field(default_factory=dict)
    tables: Tables = ()
    noting: bool = False  # not in a warm-up

    @contextmanager
    def as_graph(self) -> Iterator[None]:
        self.noting = True
        try:
            yield
        finally:
            self.noting = False

    def remember(self, rule: str, made: Iterable[StorageWeakRef]) -> None:
        self.made |= {ref.cdata: (rule, ref) for ref in made}


@dataclass(frozen=True)
class Step:
    """An operation: its name, numbers and the shapes of its tensors, and the places of these."""

    what: tuple[Any, ...]
    places: tuple[Any, ...]


class _OnDevice(TorchFunctionMode):
    """Refuses calls that a CPU does not mind and a capture does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__ == "__get__":  # of an attribute
            return func(*args, **kwargs)
        to_host = any(isinstance(one, str) and one == "cpu" for one in (*args, kwargs.get("device")))
        nowhere = func in _device_constructors() and kwargs.get("device") is None
        if func in WAITING or to_host or nowhere:
            raise BrokenError(f"{WAITS}: {func}")
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in _flat((args, kwargs))):
            raise BrokenError(f"{UNFROZEN}: {func}")
        return func(*args, **kwargs)


class _Making(TorchDispatchMode):
    """Notes the memory that a pass makes."""

    def __init__(self) -> None:
        super().__init__()
        self._own: dict[int, int] = {}  # by storage: its number
        self._held: list[Tensor] = []  # in them, so that no address is used twice in a pass

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        known = {storage_key(leaf) for leaf in _flat((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in _flat(results):
            if isinstance(leaf, Tensor) and storage_key(leaf) not in known:
                self._own[storage_key(leaf)] = len(self._held)
                self._held.append(leaf)
        return results

    def remaining(self) -> list[StorageWeakRef]:
        """After the pass: what it made and is still there."""
        made = [StorageWeakRef(one.untyped_storage()) for one in self._held if one.untyped_storage().nbytes()]
        self._held.clear()
        return [ref for ref in made if not ref.expired()]


class Notes(_Making):
    """A run of a pass, operation by operation; each is compared with `captured`, if given.

    Memory is named by its address if it was there before, by a number if this pass made it. restored: what is put back
    after a warm-up.
    """

    def __init__(self, watch: Watch, restored: Sequence[Tensor], captured: "Notes | None" = None):
        super().__init__()
        self.steps: list[Step] = []
        self.given: dict[int, StorageWeakRef] = {}
        self._watch, self._captured = watch, captured
        self._tables = {storage_key(one): place for place, one in enumerate(tree_leaves(watch.tables))}
        self._restored = set(map(storage_key, restored))
        self._read: set[int] = set()
        self._written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = _flat((args, kwargs or {}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if waits(func, tensors):
            raise BrokenError(f"{WAITS}: {func}")
        self._note_access(func, tensors, _written_by(func, args, kwargs or {}))
        what = (self._shape_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        self._compare(Step((str(func), *what), tuple(map(self._place_of, tensors))))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _note_access(self, func: Any, tensors: Sequence[Tensor], written: set[int]) -> None:
        """Of memory from outside: what is read before it is written was made outside, and stays or is restored."""
        overwritten = written if func.overloadpacket.__name__ in OVERWRITING else set()
        read = () if func.is_view else tensors
        for key in set(map(storage_key, read)) - self._own.keys() - self._written - overwritten:
            rule, ref = self._watch.made.get(key, ("", None))
            if ref is not None and not ref.expired():
                raise BrokenError(f"{rule}: {func}")
            self._read.add(key)
        for key in written - self._own.keys():
            self._written.add(key)
            self._watch.made.pop(key, None)
        if (self._read & self._written) - self._restored:
            raise BrokenError(f"{UPDATED}: {func}")

    def _shape_of(self, tensor: Tensor) -> Any:
        if storage_key(tensor) in self._tables:  # longer ones begin alike, see `_require_same_start`
            return tensor.dtype
        return tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype

    def _place_of(self, tensor: Tensor) -> tuple[str, int]:
        key = storage_key(tensor)
        if key in self._own:
            return "own", self._own[key]
        if key in self._tables:
            return "table", self._tables[key]
        self.given[key] = StorageWeakRef(tensor.untyped_storage())
        return "given", tensor.untyped_storage().data_ptr()

    def _compare(self, step: Step) -> None:
        place = len(self.steps)
        self.steps.append(step)
        if self._captured is None:
            return
        before = self._captured.steps[place] if place < len(self._captured.steps) else Step((), ())
        if before.what != step.what:
            raise BrokenError(f"{CHANGED}: operation {place} is {step.what}, was {before.what}")
        if before.places != step.places:
            raise BrokenError(
                f"{REBOUND}: operation {place}, {step.what[0]}, is on {step.places}, was on {before.places}"
            )

    def require_the_rest(self) -> None:
        """After a replay."""
        captured = self._captured
        if captured is not None and len(self.steps) < len(captured.steps):
            raise BrokenError(f"{CHANGED}: {len(self.steps)} operations, were {len(captured.steps)}")
        if captured is not None and any(ref.expired() for ref in captured.given.values()):
            raise BrokenError(FREED)


def waits(func: Any, given: Sequence[Tensor]) -> bool:
    """Whether the host waits for the result of an operation on the tensors `given`, or for its size."""
    name = func.overloadpacket.__name__
    by_mask = name.startswith("index") and any(tensor.dtype in (torch.bool, torch.uint8) for tensor in given[1:])
    return name in WAITING_OPS or (by_mask and name not in ("index_select", "index_copy", "index_copy_"))


def storage_key(tensor: Tensor) -> int:
    """Names its storage while that lives."""
    return tensor.untyped_storage()._cdata


def _written_by(func: Any, args: Any, kwargs: Any) -> set[int]:
    """The memory that an operation says it writes."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return {storage_key(leaf) for leaf in _flat([given.get(name) for name in written]) if isinstance(leaf, Tensor)}


def _flat(nested: Any) -> list[Any]:
    """The leaves of lists, tuples and dicts, with how many there were in each."""
    if isinstance(nested, dict):
        nested = [*nested.items()]
    if not isinstance(nested, list | tuple):
        return [nested]
    return [len(nested), *(leaf for each in nested for leaf in _flat(each))]


class Contract:
    """Stands in the place of a `torch.cuda.CUDAGraph`. run: a pass, which an arena replaces by the present call's."""

    def __init__(self, run: Pass, watch: Watch, restored: Sequence[Tensor] = ()):
        self.run, self._watch, self._restored = run, watch, restored
        watch.graphs.append(self)
        self._notes = self._noted(None)

    def replay(self) -> None:
        self._noted(self._notes)

    def _noted(self, captured: Notes | None) -> Notes:
        watch, notes = self._watch, Notes(self._watch, self._restored, captured)
        with watch.as_graph(), _OnDevice(), notes:
            self.run()
        notes.require_the_rest()
        stays = notes.remaining()
        if len(stays) > watch.allowed:  # of a cycle perhaps
            gc.collect()
            stays = [ref for ref in stays if not ref.expired()]
        if len(stays) > watch.allowed:
            raise BrokenError(f"{STAYS}: {len(stays)} tensors")
        watch.remember(STAYS, stays)
        return notes


def keep_contracts(patch: pytest.MonkeyPatch) -> Watch:
    """Every graph of arenas and pools keeps the contract from now on, or raises `BrokenError`."""
    watch, capture = Watch(), GraphPool.capture

    class Watched(cuda_graphs.Arena):
        def run(self, key: cuda_graphs.Key, run: Pass, changed: Sequence[Tensor] = ()) -> None:
            watch.tables = self.layers.tables
            if key in self.graphs:
                _require_same_start(self.tables[key], watch.tables)
                self.graphs[key].run = run  # type: ignore[attr-defined]
                watch.replayed.append(key)
            with use_kernel_on(self.layers, kernel_for(self.runtime.kernels, self.layers, *key[1:])):
                super().run(key, run, changed)

    def watched_capture(pool: GraphPool, run: Pass, changed: Sequence[Tensor] = ()) -> Any:
        pool._capture = lambda phased: Contract(phased, watch, changed)  # type: ignore[method-assign]

        def phased() -> None:
            making = _Making()
            if watch.noting:
                run()
                return
            with making:
                run()
            watch.remember(WARM_UP, making.remaining())

        return capture(pool, phased, changed)

    patch.setattr(cuda_graphs, "Arena", Watched)
    patch.setattr(cuda_graphs, "can_capture", lambda device: True)
    patch.setattr(GraphPool, "capture", watched_capture)
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    patch.setattr(attention_kernels, "REPLAYS", 1)
    return watch


def _require_same_start(older: Tables, newer: Tables) -> None:
    """Tables may be replaced by longer ones: a graph goes on reading the older."""
    for old, new in zip(tree_leaves(older), tree_leaves(newer), strict=True):
        if old is not new and not torch.equal(old, new[: len(old)]):
            raise BrokenError(f"{CHANGED}: rotary tables")


def lay_out_as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Have `prepare` fuse layers only: weights are not packed, and layers run one by one."""
    patch.setattr(packing, "can_pack", lambda *_: False)
    patch.setattr(packing, "run_at_once", lambda model: [])
