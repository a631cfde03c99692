"""The effect of weight layouts on a CPU: seconds of a pass by rows, in every layout and in the chosen ones.

    python benchmarks/bench_layouts.py --target runs/smollm2/fetch [--threads 1 2] [--dtype float32]

Loads the target once for each of `inference.engines.packing.LAYOUTS` and once as evaluate-checkpoint does, where all
layers of a pass of few tokens run in one call. One more arm, "layer by layer", does not use that call. Times passes
over 1 to 32 tokens after a text of `--context` tokens, all in turn. For comparison it also times a token of
transformers' `generate` and computes the floor: the time to read the weights, as stored in `--dtype`, at the measured
bandwidth. A pass in one call can be below the floor: it reads float32 weights that equal bfloat16 ones as bfloat16.

It also times the passes of the int8 model that `dtype=int8` decodes (another model), in the layout used there, against
the floor of its own bytes: one byte for each weight. The matrix products of a pass are also timed alone: in every
layout, and those of the int8 model in every layout that its layers have. Writes results/layouts_cpu.json.
"""

import argparse
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from floor_device import make_clock, measure_device
from torch import Tensor, nn

from draft_models.targets.int8 import Int8Linear
from draft_models.targets.model_files import load_causal_lm
from draft_models.targets.open_target import OpenTarget, open_target
from draft_models.targets.stack import LayerStack
from inference.core.ops import largest
from inference.core.tree import chain_parents
from inference.engines.choose import make_runtime
from inference.engines.cpu.by_amx import has_amx
from inference.engines.fused_layers import FusedLayer, fuse_layers
from inference.engines.packing import LAYOUTS, WidenedLinear, lay_out, pack_linears
from outrider.files import read_json, write_json
from outrider.machine import describe_machine

RESULTS = Path(__file__).parent / "results"
WIDTHS = (1, 2, 4, 8, 16, 32)
CHOSEN, BY_LAYER, INT8 = "chosen", "layer by layer", "int8"
CPU = torch.device("cpu")


class Passes:
    """Single passes of a target after a committed text."""

    def __init__(self, stack: LayerStack, text: Tensor):
        self.text = text
        self.session = make_runtime("eager", CPU).session(stack, 0, len(text) + 2 * WIDTHS[-1])
        self.session.prefill(text.tolist())
        self.session.commit(range(len(text)))

    def run(self, width: int) -> None:
        """A pass over `width` rows, and the choice of their tokens; the session is unchanged after it."""
        session, context = self.session, len(self.text)
        session.feed(self.text[:width], chain_parents(0, width))
        largest(session.finish())[1].tolist()
        session.commit((0,))
        session.first.keep(context, ())
        session.rest.keep(context, ())
        session.base = context


def laid_out(target: OpenTarget, dtype: torch.dtype, layout: str) -> LayerStack:
    """The target with all linear layers in `layout`, or as evaluate-checkpoint has it, also with `dtype=int8`."""
    stack = target.stack(dtype=dtype, device=CPU, int8=layout == INT8)
    if layout in (CHOSEN, BY_LAYER, INT8):
        lay_out(stack, stack.device)
        stack.at_once = None if layout == BY_LAYER else stack.at_once
        return stack
    fuse_layers(stack)
    pack_linears(stack, lambda _: layout)
    for module in stack.modules():
        if isinstance(module, FusedLayer):
            module.bind()
    return stack


@torch.inference_mode()
def measure(target: OpenTarget, options: argparse.Namespace) -> dict[str, Any]:
    """Everything with the threads that torch has now."""
    dtype = getattr(torch, options.dtype)
    text = torch.arange(options.context) % target.config.vocab_size
    stacks = {layout: laid_out(target, dtype, layout) for layout in (*LAYOUTS, BY_LAYER, CHOSEN, INT8)}
    passes = {layout: Passes(stack, text) for layout, stack in stacks.items()}
    plain = load_causal_lm(options.target, dtype=dtype).eval()
    seconds: dict[tuple[str, int], list[float]] = {(layout, width): [] for layout in passes for width in WIDTHS}
    token: list[float] = []
    for turn in range(1 + options.repeats):
        for (layout, width), taken in seconds.items():
            started = time.perf_counter()
            passes[layout].run(width)
            if turn:
                taken.append(time.perf_counter() - started)
        token += [seconds_a_token(plain, text)] if turn else []
    products = time_products(target, dtype, options.repeats)
    found = {
        layout: {str(width): 1e3 * statistics.median(seconds[layout, width]) for width in WIDTHS} for layout in passes
    }
    int8 = sum(linear.codes.nbytes + linear.scale.nbytes for linear in int8_linears(target, dtype))
    weights = sum(parameter.nbytes for parameter in plain.parameters())
    device = measure_device(CPU, dtype, 0.5)
    return {
        "threads": torch.get_num_threads(),
        "milliseconds": found,
        "milliseconds_of_products": products,
        "chosen": {name: kinds_of(stacks[name]) for name in (CHOSEN, INT8)},
        "rows_at_once": {name: getattr(stacks[name].at_once, "rows", 0) for name in (CHOSEN, INT8)},
        "generate_milliseconds_a_token": 1e3 * statistics.median(token),
        "weight_bytes": weights,
        "read_bytes_per_second": device["read_bytes_per_second"],
        "floor_milliseconds": 1e3 * weights / device["read_bytes_per_second"],
        "int8_weight_bytes": int8,
        "int8_floor_milliseconds": 1e3 * int8 / device["read_bytes_per_second"],
    }


def kinds_of(stack: LayerStack) -> dict[str, int]:
    """The number of linear layers of a stack by layout; where one layout wraps another, the inner one counts."""
    kinds = (type(module).__name__ for module in stack.modules() if type(module) is not WidenedLinear)
    return dict(Counter(kind for kind in kinds if "Linear" in kind))


def int8_linears(target: OpenTarget, dtype: torch.dtype) -> list[Int8Linear]:
    """The linear layers of the int8 model as a pass runs them; some are joined."""
    stack = target.stack(dtype=dtype, device=CPU, int8=True)
    fuse_layers(stack)
    return [module for module in stack.modules() if isinstance(module, Int8Linear)]


def time_products(target: OpenTarget, dtype: torch.dtype, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of all linear layers of a pass, run alone and in sequence, by layout and width."""
    stack = target.stack(dtype=dtype, device=CPU)
    fuse_layers(stack)
    linears = [module for module in stack.modules() if isinstance(module, nn.Linear)]
    codes = int8_linears(target, dtype)
    sides = {name: [make(linear) for linear in linears] for name, make in LAYOUTS.items()}
    sides |= {f"int8 {name}": [make(linear) for linear in codes] for name, make in LAYOUTS.items()}
    inputs = {width: [torch.ones(width, linear.in_features, dtype=dtype) for linear in linears] for width in WIDTHS}
    seconds: dict[tuple[str, int], list[float]] = {(name, width): [] for name in sides for width in WIDTHS}
    for turn in range(1 + repeats):
        for (name, width), taken in seconds.items():
            started = time.perf_counter()
            for module, x in zip(sides[name], inputs[width], strict=True):
                module(x)
            if turn:
                taken.append(time.perf_counter() - started)
    return {name: {str(width): 1e3 * statistics.median(seconds[name, width]) for width in WIDTHS} for name in sides}


def seconds_a_token(plain: nn.Module, text: Tensor, tokens: int = 8) -> float:
    """Seconds a token of transformers' `generate` after `text`; the difference of two lengths, so without prefill."""
    clock, ends = make_clock(CPU), []
    for count in (1, 1 + tokens):
        started = clock()
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        plain.generate(text[None], attention_mask=torch.ones_like(text[None]), **options)  # type: ignore[operator]
        ends.append(clock() - started)
    return (ends[1] - ends[0]) / tokens


def show(result: dict[str, Any]) -> None:
    """The table on standard output."""
    print(f"\n{result['threads']} threads, chosen: {result['chosen']}; at once up to {result['rows_at_once']} tokens")
    for what in ("milliseconds", "milliseconds_of_products"):
        print(f"| {what} | {' | '.join(map(str, WIDTHS))} |\n|{'---|' * (1 + len(WIDTHS))}")
        for layout, by_width in result[what].items():
            print(f"| {layout} | {' | '.join(f'{by_width[str(width)]:.1f}' for width in WIDTHS)} |")
    print(f"generate: {result['generate_milliseconds_a_token']:.1f} ms a token")
    speed = result["read_bytes_per_second"] / 1e9
    for name, key in ((CHOSEN, "floor_milliseconds"), (INT8, "int8_floor_milliseconds")):
        floor, token = result[key], result["milliseconds"][name][str(WIDTHS[0])]
        share = 100 * floor / token
        print(f"{name}: {1e3 / token:.1f} tokens/s, {share:.0f} % of the floor: {floor:.1f} ms at {speed:.1f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--context", type=int, default=192, help="tokens before the pass")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS / "layouts_cpu.json")
    options = parser.parse_args()
    target, results = open_target(options.target), []
    for threads in options.threads:
        torch.set_num_threads(threads)
        results.append(measure(target, options))
        show(results[-1])
    machine = describe_machine()
    facts = {"target": options.target, "dtype": options.dtype, "context": options.context, "machine": machine}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    earlier = read_json(options.out, "timings", "give another --out")["entries"] if options.out.exists() else {}
    device = f"{machine['device']} with AMX" if has_amx() else machine["device"]
    entry = {f"{options.dtype} on {device}": {**facts, "results": results}}
    write_json(options.out, {"entries": {**earlier, **entry}})  # entries of other dtypes and machines are kept


if __name__ == "__main__":
    main()
