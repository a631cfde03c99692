"""Registers, shared memory and spills of the Triton kernels on GPUs that need not be here.

    python benchmarks/compile_kernels.py [--targets 80 90 100] --out FILE

Every kernel is compiled ahead of time as a pass over a target of each shape below would launch it, in bfloat16 and in
float32. ptxas, which is in Triton's wheel, says what a kernel takes.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from outrider.base.files import write_json
from outrider.base.machine import describe_machine
from outrider.inference.engines.graphs import triton_kernels as kernels

# Heads, key heads, head dimension, width, inner width; rows of the pass, positions of the cache.
SHAPES = {
    "Llama-2-7B, 1 row": (32, 32, 128, 4096, 11008, 1, 4096),
    "Llama-2-7B, 64 rows": (32, 32, 128, 4096, 11008, 64, 4096),
    "SmolLM2-135M, 16 rows": (9, 3, 64, 576, 1536, 16, 8192),
    "Gemma-2B, 7 rows": (8, 1, 256, 2048, 16384, 7, 32768),
}
TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
FLAGS = ("adds", "norms", "rotates")  # kernels are compiled anew for each value of these
USED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", re.DOTALL)


def launch_all(shape: Sequence[int], dtype: torch.dtype) -> None:
    """Every kernel, as the passes of a target call them."""
    heads, key_heads, head_dim, width, inner, rows, positions = shape

    def empty(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    x, weight, rotary = empty(1, rows, width), empty(width), empty(1, rows, head_dim)
    kernels.norm(x, weight, 1e-5)
    kernels.add_and_norm(x, x, weight, 1e-5)
    kernels.gate(empty(1, rows, 2 * inner))
    cache, joined = empty(1, key_heads, positions, head_dim), empty(1, rows, heads + 2 * key_heads, head_dim)
    slots = torch.empty(rows, dtype=torch.long)
    for scales in (None, empty(heads + key_heads, head_dim)):
        for table in (None, (rotary, rotary)):
            query = kernels.rotate_and_store(joined, table, scales, 1e-5, slots, cache, cache)
    kernels.attend(query, cache, cache, empty(1, 1, rows, positions), 1.0)


def compiled(arch: int, dtype: str) -> list[dict[str, Any]]:
    """What every kernel takes for every shape."""
    asked = {"target": GPUTarget("cuda", arch, 32), "device": arch}  # it names them, and launches nothing
    named: Any = {f"get_current_{what}": lambda answer=answer: answer for what, answer in asked.items()}
    driver.set_active(SimpleNamespace(**named, get_current_stream=lambda _: 0))
    whole, found = JITFunction.run, []

    def compile_only(function: Any, *given: Any, grid: object, warmup: bool, **options: Any) -> None:
        kernel = whole(function, *given, grid=grid, warmup=True, **options)
        name = " ".join([function.__name__.strip("_").removesuffix("_kernel"), *filter(options.get, FLAGS)])
        taken = {"shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps}
        found.append({"kernel": name, "target": f"sm_{arch}", "dtype": dtype, **taken, **used(kernel.asm["ptx"], arch)})

    JITFunction.run = compile_only
    try:
        for name, shape in SHAPES.items():
            before = len(found)
            launch_all(shape, TYPES[dtype])
            found[before:] = [{**one, "shape": name} for one in found[before:]]
    finally:
        JITFunction.run = whole
    return found


def used(ptx: str, arch: int) -> dict[str, int]:
    """Registers per thread, and bytes that are stored and loaded for lack of registers."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        options = ["-v", f"--gpu-name={sm_arch_from_capability(arch)}", "-o", "/dev/null"]
        said = subprocess.run([get_ptxas(arch).path, *options, file.name], capture_output=True, text=True, check=True)
    numbers = USED.search(said.stderr)
    assert numbers is not None, said.stderr
    stores, loads, registers = map(int, numbers.groups())
    return {"registers": registers, "spilled": stores + loads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", type=int, default=[80, 90, 100])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    found = [one for arch in given.targets for dtype in TYPES for one in compiled(arch, dtype)]
    write_json(given.out, {"machine": describe_machine(), "triton": triton.__version__, "kernels": found})


if __name__ == "__main__":
    main()
