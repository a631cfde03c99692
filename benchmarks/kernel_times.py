"""GPU time of a pass over a target's layers, by kernel.

    python benchmarks/kernel_times.py [--shapes 7b smollm2] [--context 192] [--width 1] [--out FILE]

Targets have random weights in the shapes of bench_floor.py and run as in decoding: bf16, CUDA graphs. Prints a table
per target: launches and microseconds per pass, longest first, and the part of the pass in which no kernel runs.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from bench_floor import Steps
from floor_device import make_clock, sample
from floor_shapes import SHAPES, make_target
from torch.profiler import ProfilerActivity, profile

from draft_models.targets.open_target import pick_device
from inference.engines.choose import make_runtime
from outrider.files import write_json
from outrider.machine import describe_machine

PASSES = 20
SHOWN = 72  # characters of a kernel's name


@torch.inference_mode()
def measure(name: str, context: int, width: int, device: torch.device) -> dict[str, Any]:
    """Kernels of a pass over `width` rows after `context` positions, and seconds of a pass without a profiler."""
    target = make_target(name, torch.bfloat16, device)
    runtime = make_runtime("auto", device)
    runtime.prepare(2 * context, runtime.choose_kernels([target.stack], 2 * context))
    prompt = torch.randint(target.stack.config.vocab_size, (context,), generator=torch.Generator().manual_seed(0))
    steps = Steps(target, runtime, prompt.to(device), 4)
    steps.target_pass(width)
    seconds = min(sample(lambda: steps.target_pass(width), make_clock(device), PASSES))
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(PASSES):
            steps.target_pass(width)
        torch.cuda.synchronize(device)
    kernels = [
        {"name": row.key, "launches": row.count / PASSES, "microseconds": row.self_device_time_total / PASSES}
        for row in profiled.key_averages()
        if row.self_device_time_total > 0
    ]
    chosen = sorted({choice.kernel for choice in getattr(runtime, "kernels", ())})
    return {
        "shape": name, "context": context, "width": width, "seconds": seconds, "attention": chosen,
        "kernels": sorted(kernels, key=lambda kernel: -kernel["microseconds"]),
    }  # fmt: skip


def show(found: dict[str, Any]) -> None:
    """The table of one target."""
    busy = sum(kernel["microseconds"] for kernel in found["kernels"])
    print(f"\n{found['shape']}, {found['context']} positions, {found['width']} rows, attention {found['attention']}")
    print(f"pass: {1e6 * found['seconds']:.0f} µs at best, of which kernels {busy:.0f} µs")
    print("| kernel | launches | µs |\n|---|---|---|")
    for kernel in found["kernels"]:
        print(f"| {kernel['name'][:SHOWN]} | {kernel['launches']:.1f} | {kernel['microseconds']:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["7b", "smollm2"])
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--width", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args()
    device = pick_device("auto")
    if device.type != "cuda":
        parser.error("needs a CUDA device")
    found = [measure(name, options.context, options.width, device) for name in options.shapes]
    for one in found:
        show(one)
    if options.out is not None:
        write_json(options.out, {"machine": describe_machine(str(device)), "targets": found})


if __name__ == "__main__":
    main()
