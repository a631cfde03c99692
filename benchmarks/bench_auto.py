"""Sizes chosen while decoding ("auto") against the best ones picked by hand, in tokens a second.

    python benchmarks/bench_auto.py --target runs/demo/target --checkpoint runs/demo/eesd --drafter runs/demo/small_lm

Every prompt is continued by every setting of a family in turn. "best" is the hand-picked setting with the most tokens
a second on half of the prompts, and what counts are the other prompts; then the halves change places. "hindsight" is
the best setting on the very prompts that count, which nobody can pick beforehand. Intervals (95 %) come from
resampling prompts. --cpu-time counts this process's own seconds, for a machine that others use as well.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from subjects import add_options, parse, trained_subject
from tqdm import tqdm

from draft_models.checkpoint import provenance
from draft_models.target.open_target import pick_device
from inference.auto.policy import Tuning
from inference.auto.probe import tune
from inference.engines.choose import make_runtime
from inference.evaluate.arms import make_arms
from inference.evaluate.results import AUTOREGRESSIVE
from inference.evaluate.statistics import chosen_sizes, decode_statistics
from inference.generation import Generation
from inference.method_settings import AUTO, MethodConfig, StopConfig, StructureConfig
from inference.sampling_settings import GREEDY, SamplingConfig
from inference.stopwatch import synchronized_clock
from outrider.files import write_json
from outrider.machine import describe_machine
from outrider.streams import Streams

RESULTS = Path(__file__).parent / "results" / "auto_cpu.json"
DRAWS = 2000
WIDTHS = ((1, 1), (1, 1, 1), (2,), (2, 1), (2, 1, 1), (3, 1), (4,), (4, 2), (2, 2, 1), (4, 2, 2), (8, 2))


@dataclass(frozen=True)
class Family:
    """One method with sizes of "auto", and with numbers picked by hand, by name."""

    auto: MethodConfig
    picked: Mapping[str, MethodConfig]
    sampling: SamplingConfig = GREEDY


def chains(source: str) -> Family:
    def chain(length: int | str) -> MethodConfig:
        return MethodConfig(source=source, stop=StopConfig(max_draft=length))

    return Family(chain(AUTO), {f"K={length}": chain(length) for length in range(1, 11)})


def opt_trees(source: str, nodes: Sequence[int], depths: Sequence[int]) -> Family:
    def tree(n: int | str, depth: int | str, delta: float | None) -> MethodConfig:
        shape = StructureConfig(kind="opt_tree", nodes=n, max_depth=depth, delta=delta, temperature=0.5)
        return MethodConfig(source=source, structure=shape)

    picked = {f"nodes={n} depth={depth}": tree(n, depth, 0.0) for n in nodes for depth in depths if n >= depth}
    return Family(tree(AUTO, AUTO, None), picked)


def k_configs() -> Family:
    def tree(widths: tuple[int, ...] | str) -> MethodConfig:
        return MethodConfig(source="small_lm", structure=StructureConfig(kind="k_config", widths=widths))

    return Family(tree(AUTO), {"x".join(map(str, widths)): tree(widths) for widths in WIDTHS}, SamplingConfig(1.0))


def families(quick: bool) -> dict[str, Family]:
    nodes, depths = ((4, 8, 16), (2, 4)) if quick else ((4, 8, 16, 25, 50), (2, 3, 5, 8))
    return {
        "eesd": chains("early_exit"),
        "vanilla": chains("small_lm"),
        "eesd_tree": opt_trees("early_exit", nodes, depths),
        "opt_tree": opt_trees("small_lm", nodes, depths),
        "mcsd": k_configs(),
    }


def rate(generations: Sequence[Generation]) -> float:
    """Tokens a second, of all that came after the prefills."""
    return sum(len(g.tokens) - 1 for g in generations) / sum(g.decode_seconds for g in generations)


def best(results: Mapping[str, Sequence[Generation]], prompts: Sequence[int]) -> str:
    """The hand-picked setting with the most tokens a second on these prompts."""
    return max(results, key=lambda name: rate([results[name][i] for i in prompts]))


def compare(auto: Sequence[Generation], picked: Mapping[str, Sequence[Generation]]) -> dict[str, Any]:
    """auto over best and over hindsight, with intervals."""
    everything = list(range(len(auto)))
    choices = {0: best(picked, everything[1::2]), 1: best(picked, everything[0::2])}
    rivals = {"best": [picked[choices[i % 2]][i] for i in everything], "hindsight": picked[best(picked, everything)]}
    picks = torch.randint(len(auto), (DRAWS, len(auto)), generator=torch.Generator().manual_seed(0)).tolist()
    found: dict[str, Any] = {"chosen_on_other_half": list(choices.values()), "hindsight_is": best(picked, everything)}
    for name, rival in rivals.items():
        drawn = torch.tensor([rate([auto[i] for i in pick]) / rate([rival[i] for i in pick]) for pick in picks])
        interval = drawn.quantile(torch.tensor([0.025, 0.975])).tolist()
        found[f"auto_over_{name}"] = {"ratio": rate(auto) / rate(rival), "ci95": interval}
    return found


def run(family: Family, label: str, subject: Any, options: argparse.Namespace, clock: Callable[[], float]) -> Any:
    """One family on all prompts."""
    runtime = make_runtime(options.runtime, subject.stack.device)
    common: dict[str, Any] = {"sampling": family.sampling, "runtime": runtime}
    waiting = synchronized_clock if subject.stack.device.type == "cuda" else clock
    methods = {AUTO: family.auto, **family.picked}
    started = clock()
    methods, tunings = tune(methods, subject.stack, subject.drafters, subject.prompts[0], clock=waiting, **common)
    measuring = clock() - started
    arms = make_arms(
        subject.stack, subject.drafters, methods, None,
        max_new_tokens=options.max_new_tokens, eos=(), tunings=tunings, clock=clock, **common,
    )  # fmt: skip
    for arm in arms.values():
        arm(subject.prompts[0], Streams(0).within("warm-up"))
    results: dict[str, list[Generation]] = {name: [] for name in arms}
    for turn, prompt in enumerate(tqdm(subject.prompts[1:], desc=label, disable=None)):
        names = list(arms)
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            repeats = range(options.repeats)
            generations = [arms[name](prompt, Streams(0, str(turn), repeat)) for repeat in repeats]
            results[name].append(min(generations, key=lambda g: g.decode_seconds))
        if not family.sampling.temperature and subject.stack.dtype.itemsize >= 4:  # 16 bits may decide a tie otherwise
            assert len({results[name][-1].tokens for name in names}) == 1
    auto, picked = results[AUTO], {name: results[name] for name in family.picked}
    tuning: Tuning = tunings[AUTO]
    return {
        **compare(auto, picked),
        "tokens_per_second": {name: rate(generations) for name, generations in results.items()},
        "tau": {
            name: decode_statistics(generations)["tau"]
            for name, generations in results.items()
            if name != AUTOREGRESSIVE
        },
        "chosen": chosen_sizes(auto),
        "costs": tuning.costs.summary(),
        "prior": {"tried": tuning.tried, "right": tuning.right},
        "seconds_measuring": measuring,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--families", nargs="+", choices=families(quick=True), default=list(families(quick=True)))
    parser.add_argument("--quick", action="store_true", help="a smaller grid of OPT-Trees")
    parser.add_argument("--repeats", type=int, default=1, help="of every generation; the fastest counts")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parse(parser)
    if not options.target:
        parser.error("give --target, --checkpoint and --drafter: what pays with a random target says nothing")
    subject = trained_subject(options, pick_device(options.device))
    clock = time.process_time if options.cpu_time else time.perf_counter
    report: dict[str, Any] = {
        "machine": describe_machine(),
        "made_with": provenance(),
        "clock": "this process's CPU seconds" if options.cpu_time else "wall clock",
        "prompts": len(subject.prompts) - 1,
        "max_new_tokens": options.max_new_tokens,
        "families": {},
    }
    for name, family in families(options.quick).items():
        if name in options.families:
            report["families"][name] = found = run(family, name, subject, options, clock)
            shown = {key: value for key, value in found.items() if key.startswith(("auto", "chosen"))}
            print(json.dumps({name: shown}, indent=1), flush=True)
            write_json(options.out, report)


if __name__ == "__main__":
    main()
