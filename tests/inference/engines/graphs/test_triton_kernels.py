"""Kernels for what lies between a layer's products: the numbers of PyTorch's operations.

On a GPU (`make test-gpu`), or on a CPU by Triton's interpreter (`make test-kernels`). The interpreter does not compute
bfloat16 faithfully, so there float16 stands for it.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.gpu
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
ROOT = Path(__file__).parents[4]
SOURCE = ROOT / "inference" / "engines" / "graphs" / "triton_kernels.py"
# Of the largest value; a token in 16 bits may be rounded to its neighbour where float32 sums were taken in other order.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
TYPES = [dtype for dtype in TOLERANCE if dtype != torch.bfloat16 or not INTERPRETED]
EPS = 1e-3
SIZES = [(1, 576), (5, 96), (2, 33), (3, 11008), (64, 4096)]
# Heads, key heads, head dimension, rows, positions: odd ones, one position, blocks of rows, several turns of a split.
SHAPES = [
    (5, 5, 10, 1, 1), (4, 2, 16, 5, 40), (3, 1, 80, 7, 90), (6, 2, 8, 3, 130), (9, 3, 64, 1, 256),
    (4, 4, 32, 20, 200), (16, 8, 16, 2, 2460), (4, 1, 128, 64, 1000),
]  # fmt: skip


class Between(TorchDispatchMode):
    """Tensors whose floats lie between others: NaN, to be noticed when they are read, or 777, when they are written.

    Within it, floats that are allocated are NaN until they are written.
    """

    AROUND = 2**13

    def __init__(self) -> None:
        super().__init__()
        self.edges: list[tuple[Tensor, float]] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        fresh = func.overloadpacket in (torch.ops.aten.empty_like, torch.ops.aten.new_empty)
        return self.place(made, torch.nan, edge=777.0) if fresh and made.numel() else made

    def place(self, tensor: Tensor, values: Tensor | float, edge: float) -> Tensor:
        """`values` in the shape of `tensor`."""
        whole = tensor.new_full((tensor.numel() + 2 * self.AROUND,), edge)
        self.edges += [(whole[: self.AROUND], edge), (whole[-self.AROUND :], edge)]
        inner = whole[self.AROUND : -self.AROUND].view(tensor.shape)
        inner[...] = values
        return inner

    def drawn(self, *shape: int, dtype: torch.dtype) -> Tensor:
        values = torch.randn(shape, device=DEVICE).to(dtype)
        return self.place(values, values, edge=torch.nan)

    def require_edges(self) -> None:
        for found, edge in self.edges:
            assert torch.equal(found.nan_to_num(-1.0), torch.full_like(found, edge).nan_to_num(-1.0))


@contextmanager
def between() -> Iterator[Between]:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    memory = Between()
    yield memory
    memory.require_edges()


def same(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype
    error = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
    assert error <= TOLERANCE[ours.dtype]


def kernels_of(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return kernels_of(SOURCE)


def check_norms_and_gates(kernels: ModuleType, dtype: torch.dtype, rows: int, size: int) -> None:
    with between() as memory:
        x, added = (memory.drawn(1, rows, size, dtype=dtype) for _ in range(2))
        weight, joined = memory.drawn(size, dtype=dtype), memory.drawn(1, rows, 2 * size, dtype=dtype)
        with memory:
            summed, normed = kernels.add_and_norm(x, added, weight, EPS)
            alone, gated = kernels.norm(x, weight, EPS), kernels.gate(joined)
        assert torch.equal(summed, x + added)
        same(normed, F.rms_norm(summed, (size,), None, EPS) * weight)
        same(alone, F.rms_norm(x, (size,), None, EPS) * weight)
        gate, up = joined.chunk(2, -1)
        same(gated, F.silu(gate) * up)


def check_places(
    kernels: ModuleType, dtype: torch.dtype, heads: int, key_heads: int, width: int, queries: int, capacity: int
) -> None:
    """Rotated, normed, and into slots in any order; no other slot of the cache is touched."""
    for norms, rotates in ((False, True), (True, True), (False, False), (True, False)):
        with between() as memory:
            given = memory.drawn(1, queries, heads + 2 * key_heads, width, dtype=dtype)
            cos, sin = (memory.drawn(1, queries, width, dtype=dtype) for _ in range(2))
            scales = memory.drawn(heads + key_heads, width, dtype=dtype)
            sizes = ((capacity, width), (capacity + 3, width + 8))
            keys, values = (memory.drawn(1, key_heads, *size, dtype=dtype)[..., :width].zero_() for size in sizes)
            slots = torch.randperm(capacity, device=DEVICE)[:queries]
            rotary, scale = (cos, sin) if rotates else None, scales if norms else None
            with memory:
                query = kernels.rotate_and_store(given, rotary, scale, EPS, slots, keys, values)
            expected = given[:, :, : heads + key_heads]
            if norms:
                expected = F.rms_norm(expected, (width,), None, EPS) * scales
            if rotates:
                low, high = expected.chunk(2, -1)
                expected = expected * cos[:, :, None] + torch.cat([-high, low], -1) * sin[:, :, None]
            same(query, expected[:, :, :heads].transpose(1, 2))
            same(keys[:, :, slots], expected[:, :, heads:].transpose(1, 2))
            assert torch.equal(values[:, :, slots], given[:, :, heads + key_heads :].transpose(1, 2))
            for cache in (keys, values):
                cache[:, :, slots] = 0
                assert not cache.any()


def check_attention(
    kernels: ModuleType, dtype: torch.dtype, heads: int, key_heads: int, width: int, queries: int, count: int
) -> None:
    """Masked at will, and in a cache that is empty but for the pass itself; in views of longer and wider caches.

    The last of several rows sees nothing, and is a number, for padding.
    """
    with between() as memory:
        query = memory.drawn(1, heads, queries, width, dtype=dtype)
        wider = [(count + 9, width + 8), (count + 2, width + 16)]
        keys, values = (memory.drawn(1, key_heads, *size, dtype=dtype)[:, :, :count, :width] for size in wider)
        random = torch.rand(1, 1, queries, count, device=DEVICE) < 0.5
        random[..., 0] = False
        own, seeing = torch.ones_like(random).triu(1), max(1, queries - 1)
        for hidden in (random, own):
            hidden[:, :, seeing:] = True
            mask = memory.drawn(1, 1, queries, count + 5, dtype=dtype)[..., :count].zero_()
            mask.masked_fill_(hidden, torch.finfo(dtype).min)
            expected = F.scaled_dot_product_attention(
                query.double(), keys.double(), values.double(), attn_mask=mask.double(), scale=0.3, enable_gqa=True
            )
            with memory:
                mixed = kernels.attend(query, keys, values, mask, 0.3)
            same(mixed[:, :seeing], expected.transpose(1, 2)[:, :seeing].to(dtype))
            assert mixed.isfinite().all()


@pytest.mark.parametrize(("rows", "size"), SIZES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_norms_and_gates(kernels: ModuleType, dtype: torch.dtype, rows: int, size: int) -> None:
    check_norms_and_gates(kernels, dtype, rows, size)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_heads_go_where_they_belong(kernels: ModuleType, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check_places(kernels, dtype, *shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_attention_split_over_keys(kernels: ModuleType, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check_attention(kernels, dtype, *shape)


# In the source of a kernel: what is there, and what a fault has instead.
FAULTS = {
    "_norm_kernel": [
        ("inside = columns < width", "inside = columns < block"),  # the mask
        ("normed + row * width", "normed + row * block"),
        ("summed + row * width", "summed"),
        ("added + row * width", "added"),
        ("weight + columns", "weight + row + columns"),
        ("/ width + eps", "/ block + eps"),
        ("/ width + eps", "/ width"),
        ("if adds:", "if False:"),
    ],
    "_place_kernel": [
        ("inside = columns < half", "inside = columns < block"),
        ("high = tl.load(head_start + half + columns", "high = tl.load(head_start + columns"),
        ("keys + (head - query_heads) * key_head_stride", "keys + (head - query_heads) * value_head_stride"),
        ("slot * key_slot_stride", "slot * value_slot_stride"),
        ("- key_heads) * value_head_stride", "- key_heads) * key_head_stride"),
        ("slot * value_slot_stride", "slot * width"),
        ("(head - query_heads - key_heads)", "(head - query_heads)"),
        ("slot = tl.load(slots + row)", "slot = row"),
        ("- turned_low", "+ turned_low"),
        ("rotary_index = row * width + columns", "rotary_index = columns"),
        ("cos + rotary_index + half", "cos + rotary_index"),
        ("sin + rotary_index + half", "sin + rotary_index"),
        ("scales + head * width + half", "scales + half"),
        ("squares / width", "squares / half"),
        ("(head * queries + row) * width", "(row * query_heads + head) * width"),
        ("if head < query_heads + key_heads:\n        if norms", "if head < query_heads:\n        if norms"),
        ("if norms:", "if False:"),
        ("if rotates:", "if False:"),
    ],
    "_gate_kernel": [
        ("inside = columns < width", "inside = columns < 2 * width"),
        ("tl.program_id(1) * block + ", ""),
        ("+ width + columns", "+ columns"),
        ("gate = tl.load(joined + row * 2 * width", "gate = tl.load(joined + row * width"),
        ("out + row * width", "out + row * 2 * width"),
        ("tl.exp(-gate)", "tl.exp(gate)"),
    ],
    "_attend_kernel": [
        ("(split * turns + turn) * step", "(split * turns) * step"),  # a turn is lost
        ("(split * turns + turn) * step", "turn * step"),
        ("seen = position < key_count", "seen = position >= 0"),
        ("seen = position < key_count", "seen = position < key_count - 1"),  # a key
        ("scores + mask_values.to(tl.float32), float", "scores, float"),  # the mask
        ("mask + token[:, None] * mask_stride", "mask + row[:, None] * mask_stride"),
        ("token[:, None] * mask_stride", "token[:, None] * key_count"),
        ("position[None, :] * key_stride", "position[None, :] * width"),
        ("position[:, None] * value_stride", "position[:, None] * key_stride"),
        ("values + key_head * value_head_stride", "values + key_head * key_head_stride"),
        ("value_sum = value_sum * rescale[:, None] +", "value_sum = value_sum +"),
        ("weight_sum = weight_sum * rescale", "weight_sum = weight_sum"),
        ("group + group_head) * queries + token", "group + token) * queries + group_head"),
        ("row // queries, row % queries", "row % group, row // group"),
        ("input_precision=\"ieee\") * scale", "input_precision=\"ieee\")"),
        ("valid = row < rows", "valid = row < rows + block"),
        ("row = row_block * block + ", "row = "),  # the rows after the first block
        ("in_head = dimension < width", "in_head = dimension < depth"),
        ("out_row = (key_head * splits + split) * rows", "out_row = key_head * splits * rows"),
    ],
    "_join_kernel": [
        ("is_split = split < splits", "is_split = split < splits - 1"),  # a split is lost
        ("split_weight = tl.exp(peak - tl.max(peak, 0))", "split_weight = tl.exp(peak - peak)"),
        ("other=0.0) * split_weight, 0)", "other=0.0), 0)"),
        ("(key_head * splits + split)", "(key_head + split)"),
        ("row // queries, row % queries", "row % group, row // group"),
        ("(token * heads + head)", "(head * queries + token)"),
        ("in_head = dimension < width", "in_head = dimension < depth"),
    ],
}  # fmt: skip
CHECKS = {
    "_norm_kernel": (check_norms_and_gates, SIZES),
    "_place_kernel": (check_places, SHAPES),
    "_gate_kernel": (check_norms_and_gates, SIZES),
    "_attend_kernel": (check_attention, SHAPES),
    "_join_kernel": (check_attention, SHAPES),
}


@pytest.mark.skipif(not INTERPRETED, reason="what a fault writes where it must not is no matter on a CPU alone")
@pytest.mark.parametrize(
    ("kernel", "old", "new"), [(kernel, *fault) for kernel, faults in FAULTS.items() for fault in faults]
)
def test_a_fault_in_a_kernel_is_found(tmp_path: Path, kernel: str, old: str, new: str) -> None:
    before, own, after = split(SOURCE.read_text(), kernel)
    assert own.count(old) == 1
    broken = tmp_path / "broken_kernels.py"
    broken.write_text(before + own.replace(old, new) + after)
    check, cases = CHECKS[kernel]

    def check_all() -> None:
        for case in cases:
            check(kernels_of(broken), torch.float32, *case)

    with pytest.raises(AssertionError):
        check_all()


def split(source: str, kernel: str) -> tuple[str, str, str]:
    """What is before the kernel, its own source, what is after it."""
    start = source.index(f"def {kernel}(")
    end = source.index("\n\n\n", start)
    return source[:start], source[start:end], source[end:]


# Registers of a thread; shared memory is what every GPU since Ampere grants a program.
REGISTERS = {"norm": 40, "place": 56, "gate": 40, "attend": 168, "join": 168}
SHARED = 99 * 1024


@pytest.mark.parametrize("target", [80, 90, 100])
def test_they_compile_for_every_gpu_and_spill_nothing(tmp_path: Path, target: int) -> None:
    """Ahead of time, in a process in which none are interpreted."""
    words = ["benchmarks/compile_kernels.py", "--targets", target, "--out", tmp_path / "found.json"]
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    here = os.pathsep.join([str(ROOT), *filter(None, [outside.get("PYTHONPATH")])])
    env = {**outside, "PYTHONPATH": here}
    run = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, env=env, text=True, capture_output=True)
    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "found.json").read_text())["kernels"]
    assert len({one["kernel"] for one in found}) == 9
    assert {one["dtype"] for one in found} == {"bfloat16", "float32"}
    for one in found:
        assert one["spilled"] == 0, one
        assert one["registers"] <= REGISTERS[one["kernel"].split()[0]], one
        assert one["shared"] <= SHARED, one
