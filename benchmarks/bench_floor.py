"""Decoding against the floor of a device: the time to read the weights once.

    python benchmarks/bench_floor.py [--device cuda] [--shapes 7b 68m toy] [--contexts 192 960] [--runtime auto]

Measures the device (bandwidth of memory far larger than its caches, what a launch costs), then targets of known shapes
with random weights, in bf16 on CUDA and float32 on a CPU, through the runtime's own sessions:

- an autoregressive step against its floor: bytes of layers, head, keys and values / bandwidth. On a CPU weights that
  fit its caches can be read faster than that floor;
- a verify pass by width, as a multiple of width 1;
- a draft step of an early-exit drafter on 8 % of the layers, against the floor of its share of the bytes;
- a whole round (a chain of 4, a tree of 32, none) and its part outside of the models' passes;
- with --compiled the same step of transformers' own layers over a static cache under
  `torch.compile(mode="reduce-overhead")`, for 1 and 16 rows: whether the runtime's own kernels are worth their lines.

Everything is repeated in turn; medians and quartiles. Prints tables, writes results/floor_DEVICE.json and a plot.
"""

import argparse
import copy
import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from floor_device import Clock, make_clock, measure_device, sample
from floor_shapes import SHAPES, Target, free_bytes, make_target, needed_bytes
from matplotlib.figure import Figure
from torch import Tensor
from transformers import AutoModelForCausalLM, StaticCache

from draft_models.targets.open_target import pick_device
from inference.core.decode import autoregressive, speculative
from inference.core.session import Session
from inference.core.target_session import Runtime
from inference.core.tree import ROOT, chain_parents
from inference.drafters.early_exit import EarlyExitSource
from inference.drafters.shaped import Calibrated
from inference.engines.choose import make_runtime
from inference.loading.drafters import new_drafter
from inference.settings.evaluate import RUNTIMES
from inference.settings.method import MethodConfig, StopConfig, StructureConfig
from outrider.files import write_json
from outrider.machine import describe_machine
from outrider.streams import Streams

RESULTS = Path(__file__).parent / "results"
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
DRAFT = 4  # tokens of the chain
ROUNDS: dict[str, MethodConfig | None] = {
    "autoregressive": None,
    "chain of 4": MethodConfig(stop=StopConfig(rule="fixed", max_draft=DRAFT)),
    "tree of 32": MethodConfig(structure=StructureConfig(kind="opt_tree", nodes=32, delta=0.0)),
}
ROUND_TOKENS = 48  # new tokens of a generation whose rounds are timed
SPARE = 66  # rows of a round at most
COMPILED_ROWS = (1, 16)


# --- passes -------------------------------------------------------------------------------------------------------


class Steps:
    """Single passes of a target and its drafter after `context` committed positions."""

    def __init__(self, target: Target, runtime: Runtime, prompt: Tensor, repeats: int):
        self.context = len(prompt)
        self.tokens = prompt[:SPARE]
        positions = self.context + 8 * repeats + SPARE
        self.session = runtime.session(target.stack, 0, positions + SPARE, positions).layered()
        prefill(self.session, prompt)
        self.session.commit(range(self.context))
        self.source = EarlyExitSource(target.drafter)
        self.drafting = runtime.session(target.stack, self.source.split, positions + SPARE, positions)
        prefill(self.drafting, prompt)
        self.source.begin(self.drafting)
        self.drafting.commit(range(self.context))

    def target_pass(self, width: int) -> None:
        """A pass over `width` rows, and the choice of their tokens; the session is unchanged after it."""
        session = self.session
        session.feed(self.tokens[:width], chain_parents(0, width))
        session.finish().argmax(-1).tolist()
        session.commit((0,))
        session.first.keep(self.context, ())
        session.rest.keep(self.context, ())
        session.base = self.context

    def draft(self, clock: Clock) -> float:
        """Seconds of one draft step of a chain. It commits the root, so that the text grows by a token."""
        root = token = self.tokens[:1]
        started = clock()
        for parent in range(ROOT, DRAFT + ROOT):
            token = self.source.extend(token, (parent,)).argmax(-1)
        seconds = (clock() - started) / DRAFT
        self.drafting.finish()
        self.source.commit((0,), root.tolist())
        self.drafting.commit((0,))
        return seconds


def prefill(session: Session, prompt: Tensor) -> None:
    session.feed(prompt, chain_parents(0, len(prompt)))
    session.finish(last_only=True)


# --- rounds -------------------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """A runtime whose sessions record the time of their passes; on CUDA the device's time between events."""

    runtime: Runtime
    device: torch.device
    spans: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.runtime.name

    @property
    def captures(self) -> int:
        return self.runtime.captures

    def session(self, target: Any, split: int | None, capacity: int, context: int | None = None) -> Any:
        session: Any = self.runtime.session(target, split, capacity, context)
        for name in ("_run", "_step"):
            if hasattr(session, name):
                setattr(session, name, self._watch(getattr(type(session), name), weakref.ref(session)))
        return session

    def _watch(self, run: Callable[..., Any], owner: weakref.ref[Any]) -> Callable[..., Any]:
        """`run` of a session, recorded. The reference is weak: a session that held itself would count as in use."""

        def watched(*args: Any) -> Any:
            begin = self._now()
            outputs = run(owner(), *args)
            self.spans.append((begin, self._now()))
            return outputs

        return watched

    def lap(self) -> float:
        """Seconds of the passes since the last lap."""
        spans, self.spans = self.spans, []
        if self.device.type != "cuda":
            return sum(end - begin for begin, end in spans)
        torch.cuda.synchronize(self.device)
        return sum(begin.elapsed_time(end) for begin, end in spans) / 1e3

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def time_rounds(target: Target, runtime: Runtime, prompt: Sequence[int], method: MethodConfig | None) -> list[Any]:
    """(seconds, seconds in passes, drafted tokens) of the rounds of a generation.

    Prefill, the last round, and rounds in which graphs were captured are left out.
    """
    device = target.stack.device
    clock, watched = make_clock(device), Watched(runtime, device)
    if method is None:
        rounds = autoregressive(target.stack, prompt, max_new_tokens=ROUND_TOKENS, runtime=watched)
    else:
        drafter = new_drafter(method, {"early_exit": Calibrated(target.drafter)}, Streams(0))
        rounds = speculative(target.stack, drafter, prompt, max_new_tokens=ROUND_TOKENS, runtime=watched)
    found = []
    captures, started = runtime.captures, clock()
    for r in rounds:
        seconds = clock() - started
        found.append((seconds, watched.lap(), r.drafted) if runtime.captures == captures else None)
        captures, started = runtime.captures, clock()
    return [timed for timed in found[1:-1] if timed is not None]


# --- a target -----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def measure_target(
    target: Target, runtime: Runtime, context: int, bandwidth: float, repeats: int, with_compiled: bool
) -> dict[str, Any]:
    """All measurements after `context` positions."""
    vocabulary = target.stack.config.vocab_size
    prompt = torch.randint(vocabulary, (context,), generator=torch.Generator().manual_seed(0))
    passes, drafts = time_steps(target, runtime, prompt, repeats)
    compiled = time_compiled(target, prompt, repeats) if with_compiled else {}
    rounds: dict[str, list[Any]] = {name: [] for name in ROUNDS}
    for turn in range(max(1, repeats // 4) + 1):
        for name, method in ROUNDS.items():
            timed = time_rounds(target, runtime, prompt.tolist(), method)
            rounds[name] += timed if turn else []  # the first one warms up
    layers, itemsize = len(target.stack.layers), target.stack.dtype.itemsize
    step_bytes = itemsize * target.weights.read(layers, context)
    draft_bytes = itemsize * target.weights.read(target.drafter.exit_layer + 1, context)
    single = statistics.median(passes[1])
    return {
        "context": context,
        "autoregressive_step": against_floor(passes[1], step_bytes, bandwidth),
        "verify": {
            str(width): {**spread(seconds), "of_width_1": statistics.median(seconds) / single}
            for width, seconds in passes.items()
        },
        "draft_step": {
            "layers": target.drafter.exit_layer + 1,
            **against_floor(drafts, draft_bytes, bandwidth),
            "share_of_bytes": draft_bytes / step_bytes,
            "share_of_step": statistics.median(drafts) / single,
        },
        "compiled": {str(width): spread(seconds) for width, seconds in compiled.items()},
        "rounds": {name: summarise_rounds(found) for name, found in rounds.items()},
    }


def time_steps(
    target: Target, runtime: Runtime, prompt: Tensor, repeats: int
) -> tuple[dict[int, list[float]], list[float]]:
    """Seconds of target passes by width, and of draft steps."""
    clock = make_clock(target.stack.device)
    steps = Steps(target, runtime, prompt.to(target.stack.device), repeats)
    passes: dict[int, list[float]] = {width: [] for width in WIDTHS}
    drafts: list[float] = []
    for width in WIDTHS:
        steps.target_pass(width)
    steps.draft(clock)
    for _ in range(repeats):
        for width, seconds in passes.items():
            seconds += sample(partial(steps.target_pass, width), clock, 3)
        drafts += [steps.draft(clock) for _ in range(3)]
    return passes, drafts


@torch.inference_mode()
def time_compiled(
    target: Target, prompt: Tensor, repeats: int, rows: Sequence[int] = COMPILED_ROWS
) -> dict[int, list[float]]:
    """Seconds of a pass of transformers' model of this shape by rows, compiled, and of the choice of tokens."""
    stack, clock = target.stack, make_clock(target.stack.device)
    with torch.device(stack.device):
        plain = copy.deepcopy(stack.config)
        model = AutoModelForCausalLM.from_config(plain, dtype=stack.dtype, attn_implementation="sdpa").eval()
        cache = StaticCache(plain, max_cache_len=len(prompt) + SPARE)
    tokens = prompt.to(stack.device)[None]
    model(tokens, past_key_values=cache)
    compiled = torch.compile(model, mode="reduce-overhead", dynamic=False)

    def step(width: int) -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(len(prompt))
        compiled(tokens[:, :width], past_key_values=cache).logits.argmax(-1).tolist()

    seconds: dict[int, list[float]] = {width: [] for width in rows}
    for width in rows:
        sample(partial(step, width), clock, 3)  # compiles, and captures
    for _ in range(repeats):
        for width, found in seconds.items():
            found += sample(partial(step, width), clock, 3)
    return seconds


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of seconds, and the least."""
    quartiles = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.25, 0.75], dtype=torch.float64))
    return {"seconds": statistics.median(values), "quartiles": quartiles.tolist(), "least": min(values)}


def against_floor(values: Sequence[float], size: int, bandwidth: float) -> dict[str, Any]:
    """`spread` of seconds, and the seconds to read `size` bytes; share_of_floor: 1 is as fast as reading."""
    floor = size / bandwidth
    share = floor / statistics.median(values)
    return {**spread(values), "bytes": size, "floor_seconds": floor, "share_of_floor": share}


def summarise_rounds(found: Sequence[Any]) -> dict[str, Any]:
    """Median seconds of a round and of its part outside of passes; the share is the ratio of these two."""
    whole = spread([seconds for seconds, *_ in found])
    outside = spread([seconds - passes for seconds, passes, _ in found])
    return {
        "rounds": len(found),
        "drafted": statistics.fmean(drafted for *_, drafted in found),
        **whole,
        "outside_passes": outside,
        "share_outside": outside["seconds"] / whole["seconds"],
    }


# --- the command --------------------------------------------------------------------------------------------------


def show(shape: Mapping[str, Any]) -> None:
    """The tables of one target."""
    ms = 1e3
    for found in shape["contexts"]:
        step, draft = found["autoregressive_step"], found["draft_step"]
        print(f"\n{shape['shape']}, {shape['dtype']}, {shape['runtime']}, {found['context']} positions")
        print("| step | ms [quartiles] | floor ms | of the floor |\n|---|---|---|---|")
        for name, entry in (("autoregressive", step), (f"draft, {draft['layers']} layers", draft)):
            low, high = entry["quartiles"]
            print(
                f"| {name} | {ms * entry['seconds']:.3f} [{ms * low:.3f}, {ms * high:.3f}] | "
                f"{ms * entry['floor_seconds']:.3f} | {100 * entry['share_of_floor']:.0f} % |"
            )
        for width, compiled in found["compiled"].items():
            ours = found["verify"][width]["seconds"]
            print(f"torch.compile, {width} rows: {ms * compiled['seconds']:.3f} ms, here {ms * ours:.3f} ms")
        print(f"| verify width | {' | '.join(found['verify'])} |\n|---{'|---' * len(WIDTHS)}|")
        print(f"| × width 1 | {' | '.join(format(v['of_width_1'], '.2f') for v in found['verify'].values())} |")
        print("| round | drafted | ms | outside of passes, µs | |\n|---|---|---|---|---|")
        for name, r in found["rounds"].items():
            print(
                f"| {name} | {r['drafted']:.1f} | {ms * r['seconds']:.3f} | "
                f"{1e6 * r['outside_passes']['seconds']:.0f} | {100 * r['share_outside']:.1f} % |"
            )


def plot(result: Mapping[str, Any]) -> Figure:
    """Verify passes by width, and steps against their floors."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    labels, shares = [], []
    for shape in result["shapes"]:
        for found in shape.get("contexts", ()):
            label = f"{shape['shape']}, {found['context']}"
            left.plot(WIDTHS, [v["of_width_1"] for v in found["verify"].values()], "o-", label=label)
            labels.append(label)
            shares.append([100 * found[key]["share_of_floor"] for key in ("autoregressive_step", "draft_step")])
    left.set(xscale="log", xticks=WIDTHS, xticklabels=WIDTHS, xlabel="rows", ylabel="time of a pass, width 1 = 1")
    left.legend()
    for place, name in enumerate(("autoregressive step", "draft step")):
        positions = [i + 0.4 * place for i in range(len(labels))]
        right.bar(positions, [share[place] for share in shares], 0.4, label=name)
    right.set(ylabel="% of the floor reached", xticks=[i + 0.2 for i in range(len(labels))])
    right.set_xticklabels(labels, rotation=30, ha="right")
    right.axhline(100, color="grey", lw=0.8)
    right.legend()
    return figure


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: see above")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: 7b, 68m and toy on CUDA, else the small")
    parser.add_argument("--contexts", nargs="+", type=int, default=[192, 960], help="committed positions of a pass")
    parser.add_argument("--runtime", choices=RUNTIMES, default="auto")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--compiled", action="store_true", help="also torch.compile's, of transformers' own layers")
    parser.add_argument("--buffer-gb", type=float, help="of the bandwidth measurement; default: 4 on CUDA, else 1")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    longest = min(config.max_position_embeddings for config in SHAPES.values()) - 8 * options.repeats - SPARE
    if options.repeats < 1 or not SPARE <= min(options.contexts) <= max(options.contexts) <= longest:
        parser.error(f"--repeats starts at 1, --contexts go from {SPARE} to {longest}")
    return options


def measure_shape(
    name: str, options: argparse.Namespace, device: torch.device, dtype: torch.dtype, bandwidth: float
) -> dict[str, Any]:
    """One target in all contexts, or why it is left out."""
    facts = {"shape": name, "dtype": str(dtype).removeprefix("torch.")}
    needed = needed_bytes(SHAPES[name], dtype, max(options.contexts) + 8 * options.repeats + 2 * SPARE)
    free = free_bytes(device)
    if needed > free:
        reason = f"needs {needed / 2**30:.1f} GiB in {facts['dtype']}, {free / 2**30:.1f} GiB are free on {device}"
        print(f"\n{name}: left out, it {reason}")
        return {**facts, "left_out": reason}
    target = make_target(name, dtype, device)
    runtime = make_runtime(options.runtime, device)
    longest = max(options.contexts) + 8 * options.repeats + 2 * SPARE
    runtime.prepare(longest, runtime.choose_kernels([target.stack], longest))
    contexts = [
        measure_target(target, runtime, c, bandwidth, options.repeats, options.compiled) for c in options.contexts
    ]
    result = {**facts, "runtime": runtime.name, "exit_layer": target.drafter.exit_layer, "contexts": contexts}
    show(result)
    return result


def main() -> None:
    options = parse()
    device = pick_device(options.device)
    cuda = device.type == "cuda"
    dtype = getattr(torch, options.dtype or ("bfloat16" if cuda else "float32"))
    found = measure_device(device, dtype, options.buffer_gb or (4.0 if cuda else 1.0))
    bandwidth = max(found["read_bytes_per_second"], found["copy_bytes_per_second"])
    for key, value in found.items():
        scale, unit = (1e-9, "GB/s") if "bytes" in key else (1e6, "µs")
        print(f"{key.partition('_bytes')[0].removesuffix('_seconds')}: {scale * value:.2f} {unit}")
    names = options.shapes or (("7b", "68m", "toy") if cuda else ("toy", "68m", "8x1024"))
    shapes = [measure_shape(name, options, device, dtype, bandwidth) for name in names]
    result = {"machine": describe_machine(), "repeats": options.repeats, "measured": found, "shapes": shapes}
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / f"floor_{device.type}.json", result)
    if any("contexts" in shape for shape in shapes):
        plot(result).savefig(options.out / f"floor_{device.type}.png", dpi=120)


if __name__ == "__main__":
    main()
