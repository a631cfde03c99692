"""The attention kernel of fixed-shape passes: measured once per run directory, and recorded.

A fixed-shape pass has one of a few numbers of rows and reads one of a few numbers of cache positions, so a CUDA graph
can replay it. Kernels round differently, so in half precision the choice may change a token: it must not depend on a
new timing.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from math import log2
from types import ModuleType

import torch

from outrider.base.errors import UserError, reason
from outrider.draft_models.targets.attention import KERNELS, KernelChoice, grouped_attention, use_kernel
from outrider.draft_models.targets.model_spec import key_heads
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.target import RunnableLayers
from outrider.inference.engines.graphs.fixed_shapes import GraphPool

WIDTHS = (1, 4, 16, 64)  # rows of measured passes
KEYS = 128  # cache positions of measured passes: this many, 4 times as many, …, up to the longest text
REPLAYS = 20  # replays that choose between kernels
SPLIT = "split"  # a third kernel, if Triton is available: the keys of a head are split among a GPU's SMs


def triton_kernels(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """`inference.engines.graphs.triton_kernels` if it works: on a GPU, with Triton and a C compiler; else None."""
    return _built_kernels(dtype) if device.type == "cuda" else None


@cache
def _built_kernels(dtype: torch.dtype) -> ModuleType | None:
    try:
        from outrider.inference.engines.graphs import triton_kernels as kernels

        kernels.try_all("cuda", dtype)  # GPUs before Ampere have no bfloat16
    except Exception as error:  # of any kind: all works without Triton, with more kernel launches
        print(f"warning: passes on this GPU go without Triton ({reason(error)})", flush=True)
        return None
    return kernels


def kernels_on(layers: RunnableLayers) -> tuple[str, ...]:
    """The names of the kernels available for attention of `layers` over a filled cache."""
    return KERNELS if triton_kernels(layers.device, layers.dtype) is None else (*KERNELS, SPLIT)


def use_kernel_on(layers: RunnableLayers, name: str) -> AbstractContextManager[None]:
    """Context manager: attention over a filled cache uses the kernel `name`, one of `kernels_on` them."""
    if name != SPLIT:
        return use_kernel(name)
    if (kernels := triton_kernels(layers.device, layers.dtype)) is None:
        raise UserError(
            f"attention kernel {SPLIT!r}: it was the fastest on the machine where this run began. It needs Triton on a "
            "GPU, which is missing here; continue on that machine, or start again with another out_dir"
        )
    return use_kernel(kernels.attend)


def kernel_for(choices: Iterable[KernelChoice], layers: RunnableLayers, row_count: int, key_count: int) -> str:
    """The choice measured at the nearest width and length, by ratio; the first of `KERNELS` for unmeasured attention,
    as that of an EAGLE-3 head's own layers."""
    shape = None if layers.layered is None else attention_shape(layers.layered)
    matching = [c for c in choices if (c.heads, c.key_heads, c.head_dim) == shape]
    distances = [abs(log2(choice.width / row_count)) + abs(log2(choice.keys / key_count)) for choice in matching]
    return matching[distances.index(min(distances))].kernel if matching else KERNELS[0]


def attention_shape(stack: LayerStack) -> tuple[int, int, int]:
    """Query heads, key/value heads and the head dimension."""
    config = stack.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_attention_heads, key_heads(config), head_dim


@torch.inference_mode()
def measure_kernels(stacks: Sequence[LayerStack], max_positions: int) -> tuple[KernelChoice, ...]:
    """The fastest kernels for texts of up to `max_positions` tokens, for every attention shape among the models
    `stacks`. Temporarily allocates one cache."""
    graph_pool = GraphPool()
    choices_by_shape: dict[tuple[int, int, int], list[KernelChoice]] = {}
    for stack in stacks:
        if attention_shape(stack) not in choices_by_shape:
            choices_by_shape[attention_shape(stack)] = _measure_stack(stack, max_positions, graph_pool)
    return tuple(choice for choices in choices_by_shape.values() for choice in choices)


def _measure_stack(stack: LayerStack, max_positions: int, graph_pool: GraphPool) -> list[KernelChoice]:
    """The fastest kernels for one stack. A timed pass reads the KV caches of all layers, so that none is in L2."""
    query_heads, key_heads, head_dim = shape = attention_shape(stack)
    zeros = partial(torch.zeros, dtype=stack.dtype, device=stack.device)
    cache = zeros(len(stack.layers), 2, 1, key_heads, max_positions, head_dim)  # 2: keys and values
    choices = []
    for key_count in _lengths(max_positions):
        for row_count in WIDTHS:
            query, mask = zeros(1, query_heads, row_count, head_dim), zeros(1, 1, row_count, key_count)

            def attend(query: torch.Tensor = query, mask: torch.Tensor = mask, key_count: int = key_count) -> None:
                for key, value in cache:
                    grouped_attention(stack, query, key[:, :, :key_count], value[:, :, :key_count], mask)

            kernel_times = {}
            for kernel_name in kernels_on(stack):
                with use_kernel_on(stack, kernel_name):
                    kernel_times[kernel_name] = _time_replays(graph_pool.capture(attend))
            choices.append(KernelChoice(*shape, row_count, key_count, min(kernel_times, key=kernel_times.__getitem__)))
    return choices


def _lengths(max_positions: int) -> list[int]:
    """The cache lengths to measure for texts of up to `max_positions` tokens: of 1,000 they are 128, 512 and 1,000."""
    key_counts: list[int] = []
    while (key_count := KEYS * 4 ** len(key_counts)) < max_positions:
        key_counts.append(key_count)
    return [*key_counts, max_positions]


def _time_replays(graph: torch.cuda.CUDAGraph) -> float:
    """The seconds of `REPLAYS` replays."""
    graph.replay()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    return time.perf_counter() - started
