"""The runtime against transformers' own assisted generation, with the same target and the same drafters.

    python benchmarks/bench_peers.py [--target runs/demo/target --checkpoint runs/demo/eesd --drafter DIR]

Arms, prompt by prompt in turn, of a random target (Llama, 8 layers × 1024) and, where given, of a trained one:

- plain decoding against `generate`;
- the early-exit drafter in chains of K against transformers' assisted generation by the same layers (the target's
  first, exit layer, norm and head, put together as a model of its own), and against its early-exit self-speculation,
  `generate(assistant_early_exit=N)`. That one has no trained exit layer: it puts the target's own norm and head on as
  many layers as the drafter has;
- the small LM in chains of K against assisted generation;
- prompt lookup against prompt lookup.

Where transformers drafts with a model it runs twice: with K tokens, all of them submitted, and with its defaults (up to
20 tokens, stopped by the draft's confidence). It runs its models unchanged with its stock attention. The runtime packs
weights for the device as evaluate-checkpoint does. Rates exclude the time to the first tokens. With transformers'
assisted generation these come from prefill and the first draft together.

`--temperature 1` samples; then texts differ, and only the rates are compared. In 16 bits ties may be resolved
differently; `equal_to_generate` counts equal texts and excuses no tie.
"""

import argparse
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from subjects import Subject, add_options, load_subjects, parse
from transformers_arms import MAX_NGRAM, assisted_arms, generate_arm

from draft_models.targets.open_target import pick_device
from inference.core.rounds import Generation
from inference.engines.choose import make_runtime
from inference.loading.generation_config import generate_settings
from inference.measure.arms import make_arms, measure
from inference.measure.results import TRANSFORMERS, Arm
from inference.measure.statistics import bootstrap_median
from inference.settings.method import MethodConfig, StopConfig
from inference.settings.sampling import SamplingConfig
from outrider.files import write_json
from outrider.machine import describe_machine
from outrider.streams import Streams

RESULTS = Path(__file__).parent / "results"
PAIRS = (
    ("autoregressive", "transformers_generate"),
    ("early_exit", "transformers_generate"),
    ("early_exit", "transformers_assisted_early_exit"),
    ("early_exit", "transformers_assisted_early_exit_default"),
    ("early_exit", "transformers_self_speculation"),
    ("early_exit", "transformers_self_speculation_default"),
    ("small_lm", "transformers_assisted_small_lm"),
    ("small_lm", "transformers_assisted_small_lm_default"),
    ("prompt_lookup", "transformers_prompt_lookup"),
)


def contest_arms(subject: Subject, options: argparse.Namespace, max_new_tokens: int) -> dict[str, Arm]:
    """Ours and transformers', by name."""
    count, sampling = options.draft_tokens, SamplingConfig(temperature=options.temperature)
    fixed = StopConfig(rule="fixed", max_draft=count)
    methods = {
        "early_exit": MethodConfig(stop=fixed),
        "small_lm": MethodConfig(source="small_lm", stop=fixed),
        "prompt_lookup": MethodConfig(source="prompt_lookup", stop=fixed, max_ngram=MAX_NGRAM),
    }
    runtime = make_runtime(options.runtime, subject.stack.device)
    arms = make_arms(
        subject.stack, subject.drafters, methods, None, max_new_tokens=max_new_tokens, eos=(), sampling=sampling,
        runtime=runtime,
    )  # fmt: skip
    settings = generate_settings(None, sampling, max_new_tokens=max_new_tokens, eos=())
    helpers: dict[str, dict[str, Any]] = {
        "assisted_early_exit": {"assistant": subject.exit_model},
        "self_speculation": {"early_exit": subject.exit_model.config.num_hidden_layers},
        "assisted_small_lm": {"assistant": subject.assistant},
    }
    return {
        **arms,
        TRANSFORMERS: generate_arm(subject.plain, settings, TRANSFORMERS),
        **assisted_arms(subject.plain, settings, count, helpers),
    }


def contest(subject: Subject, options: argparse.Namespace) -> dict[str, Any]:
    """Every arm on every prompt: tokens/s, tokens per pass, equality with `generate`, and the ratios of the pairs."""
    for warm_up in contest_arms(subject, options, 8).values():
        warm_up(subject.prompts[0], Streams(0).within("warm-up"))
    arms = contest_arms(subject, options, options.max_new_tokens)
    results = [
        measure(arms, prompt, prompt_id=str(turn), category="", repeats=options.repeats, turn=turn)
        for turn, prompt in enumerate(subject.prompts)
    ]
    table = {}
    for name in arms:
        mine = [r.generations[name] for r in results]
        median, interval = bootstrap_median([tokens_per_second(g) for g in mine], Streams(0).arrays("bootstrap", name))
        table[name] = {
            "tokens_per_second": median,
            "ci95": interval,
            "first_tokens_seconds": statistics.median(g.prefill_seconds for g in mine),
            "tau": sum(len(r.tokens) for g in mine for r in g.rounds) / sum(len(g.rounds) for g in mine),
            "equal_to_generate": None if options.temperature else sum(r.identical(name) for r in results),
        }
    ratios = {}
    for ours, other in PAIRS:
        values = [tokens_per_second(r.generations[ours]) / tokens_per_second(r.generations[other]) for r in results]
        median, interval = bootstrap_median(values, Streams(0).arrays("bootstrap", ours, other))
        ratios[f"{ours} / {other}"] = {"median": median, "ci95": interval}
    return {
        "target": subject.name,
        "dtype": str(subject.stack.dtype).removeprefix("torch."),
        "draft_tokens": options.draft_tokens,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "prompts": len(results),
        "arms": table,
        "ratios": ratios,
    }


def tokens_per_second(generation: Generation) -> float:
    """Tokens per second after the first tokens."""
    return sum(len(r.tokens) for r in generation.rounds) / generation.decode_seconds


def show(result: Mapping[str, Any]) -> None:
    """The tables on standard output."""
    print(f"\n{result['target']}, K = {result['draft_tokens']}, temperature {result['temperature']:g}")
    print(f"| arm | tokens/s | τ | equal to generate, of {result['prompts']} |\n|---|---|---|---|")
    for arm, r in result["arms"].items():
        equal = "" if r["equal_to_generate"] is None else r["equal_to_generate"]
        print(f"| {arm} | {r['tokens_per_second']:.1f} | {r['tau']:.2f} | {equal} |")
    for pair, r in result["ratios"].items():
        print(f"{pair}: {r['median']:.2f}× [{r['ci95'][0]:.2f}, {r['ci95'][1]:.2f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--repeats", type=int, default=1, help="timed passes over each prompt; their median counts")
    parser.add_argument("--out", type=Path, help="default: results/peers_DEVICE.json")
    options = parse(parser)
    device = pick_device(options.device)
    results = []
    for subject in load_subjects(options, device):
        results.append(contest(subject, options))
        show(results[-1])
    out = options.out or RESULTS / f"peers_{device.type}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, {"machine": describe_machine(), "results": results})


if __name__ == "__main__":
    main()
