"""The overhead of a round of speculative decoding: its seconds outside the models' passes.

    python benchmarks/bench_decode.py [--target runs/demo/target --checkpoint runs/demo/eesd --drafter DIR]

Prints the seconds of each part of a round (see round_parts.py) for a random target (Llama, 8 layers × 1024) and, if
given, for a trained one with its drafters. bench_peers.py compares whole generations with those of transformers.
"""

import argparse
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from round_parts import profile, summarise
from subjects import Subject, add_options, load_subjects, parse

from draft_models.targets.open_target import pick_device
from inference.core.rounds import synchronized_clock
from inference.engines.choose import make_runtime
from inference.measure.probe import tune
from inference.settings.method import MethodConfig, StopConfig, StructureConfig
from outrider.files import write_json
from outrider.machine import describe_machine

RESULTS = Path(__file__).parent / "results"
MAX_NGRAM = 3


def methods_for(draft_tokens: int) -> dict[str, MethodConfig]:
    """The methods whose rounds are measured by part; chains and prompt lookup draft `draft_tokens`."""
    fixed = StopConfig(rule="fixed", max_draft=draft_tokens)
    return {
        "chain_early_exit": MethodConfig(stop=fixed),
        "chain_small_lm": MethodConfig(source="small_lm", stop=fixed),
        "opt_tree": MethodConfig(structure=StructureConfig(kind="opt_tree")),
        "k_config": MethodConfig(structure=StructureConfig(kind="k_config")),
        "token_graph": MethodConfig(structure=StructureConfig(kind="token_graph")),
        "prompt_lookup": MethodConfig(source="prompt_lookup", stop=fixed, max_ngram=MAX_NGRAM),
    }


def run(subject: Subject, options: argparse.Namespace) -> dict[str, Any]:
    """The rounds of every method on one subject."""
    clock = synchronized_clock if subject.stack.device.type == "cuda" else time.perf_counter
    runtime = make_runtime(options.runtime, subject.stack.device)
    methods, _ = tune(
        methods_for(options.draft_tokens), subject.stack, subject.drafters, subject.prompts[0], runtime=runtime,
        clock=clock,
    )  # fmt: skip
    profiles = profile(subject, {"autoregressive": None, **methods}, options.max_new_tokens, runtime, clock)
    return {
        "target": subject.name,
        "dtype": str(subject.stack.dtype).removeprefix("torch."),
        "runtime": runtime.name,
        "draft_tokens": options.draft_tokens,
        "max_new_tokens": options.max_new_tokens,
        "methods": {name: asdict(method) for name, method in methods.items()},
        "rounds": {name: summarise(measured) for name, measured in profiles.items()},
    }


def show(result: Mapping[str, Any]) -> None:
    """The table on standard output."""
    names = sorted({n for r in result["rounds"].values() for n in r["median_seconds_by_part"]})
    print(f"\n{result['target']}: median ms per round")
    print(f"| method | τ | drafted | round | {' | '.join(names)} | not forward |")
    print("|---" * (len(names) + 5) + "|")
    for method, r in result["rounds"].items():
        parts = " | ".join(f"{1e3 * r['median_seconds_by_part'].get(name, 0.0):.3f}" for name in names)
        print(
            f"| {method} | {r['tau']:.2f} | {r['drafted_per_round']:.1f} | {1e3 * r['median_seconds']:.3f} | "
            f"{parts} | {100 * r['share_not_forward']:.1f} % |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--out", type=Path, help="default: results/decode_DEVICE.json")
    options = parse(parser)
    device = pick_device(options.device)
    results = []
    for subject in load_subjects(options, device):
        results.append(run(subject, options))
        show(results[-1])
    out = options.out or RESULTS / f"decode_{device.type}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, {"machine": describe_machine(), "results": results})


if __name__ == "__main__":
    main()
