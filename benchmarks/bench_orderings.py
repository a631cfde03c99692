"""Do the papers' orderings hold? Accepted length of every structure on one target, with paired intervals.

    python benchmarks/bench_orderings.py --target T --drafter SMALL_LM --checkpoint EESD --out orderings.json

Nothing here is timed, so a busy machine does no harm. τ is tokens per target pass over all prompts; its interval and
those of the differences come from resampling prompts. Draft temperatures are chosen on the first third of the
prompts and used on the rest.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from data_prep.settings import DataConfig
from data_prep.text.rows import load_rows
from draft_models.calibration.checkpoint import load_calibration
from draft_models.checkpoint import from_pretrained, provenance, read_meta
from draft_models.small_lm import load_small_lm
from draft_models.target.open_target import open_target
from draft_models.target.stack import LayerStack
from inference.drafters.calibrated import Calibrated
from inference.evaluate.arms import make_arms
from inference.evaluate.statistics import acceptance_by_candidates
from inference.generation import Generation
from inference.loading.drafters import Drafters, prepare
from inference.method_settings import MethodConfig, StopConfig, StructureConfig
from inference.sampling_settings import SamplingConfig
from outrider.machine import describe_machine
from outrider.streams import Streams

TEMPERATURES = (1.0, 0.7, 0.5, 0.4, 0.3, 0.2)
DRAWS = 2000
Results = dict[str, list[Generation]]


def chain(k: int) -> MethodConfig:
    return MethodConfig(source="small_lm", stop=StopConfig(max_draft=k))


def structured(**settings: Any) -> MethodConfig:
    return MethodConfig(source="small_lm", structure=StructureConfig(**settings))


def budget_methods(nodes: int) -> dict[str, MethodConfig]:
    """Every structure with the same number of drafted tokens a round."""
    methods = {
        "chain": chain(nodes),
        "binary": structured(kind="static", shape="binary", nodes=nodes),
        "opt_tree": structured(kind="opt_tree", nodes=nodes, delta=0.0),
    }
    if nodes == 25:
        methods["eagle"] = structured(kind="static", shape="eagle")
    for temperature in TEMPERATURES[1:]:
        methods[f"opt_tree T={temperature}"] = structured(
            kind="opt_tree", nodes=nodes, delta=0.0, temperature=temperature
        )
    return methods


def graph_methods() -> dict[str, MethodConfig]:
    """GSD's graph, the tree it is without merging, and the chain, all ten deep, at several draft temperatures."""
    methods: dict[str, MethodConfig] = {"chain": chain(10)}
    for temperature in (1.0, 0.5, 0.3):
        graph = structured(kind="token_graph", nodes=400, temperature=temperature)
        methods[f"graph T={temperature}"] = graph
        methods[f"graph, 1-grams T={temperature}"] = replace(graph, structure=replace(graph.structure, tau=1))
        methods[f"unmerged T={temperature}"] = replace(graph, structure=replace(graph.structure, tau=1000))
    return methods


def sampled_methods() -> dict[str, MethodConfig]:
    """MCSD at temperature 1: the verification rules, and one candidate against four."""
    four = structured(kind="k_config", widths=(4, 2, 2))
    return {
        "without_replacement": four,
        "with_replacement": replace(four, structure=replace(four.structure, draw="with_replacement")),
        "naive": replace(four, verify="naive"),
        "k=1": structured(kind="k_config", widths=(1, 1, 1)),
    }


def stop_methods() -> dict[str, MethodConfig]:
    """EESD's stop rules."""
    fixed = {f"fixed {k}": MethodConfig(stop=StopConfig(max_draft=k)) for k in range(2, 11)}
    rules = {name: MethodConfig(stop=StopConfig(rule=name, max_draft=10)) for name in ("beta", "calibrated")}
    return {**fixed, **rules}


def tau(generations: Sequence[Generation]) -> float:
    rounds = [r for g in generations for r in g.rounds]
    return sum(len(r.tokens) for r in rounds) / len(rounds)


def drafted(generations: Sequence[Generation]) -> float:
    """Tokens that the draft model proposed a round: a graph's before unmerging."""
    rounds = [r for g in generations for r in g.rounds]
    by_source = sum(g.totals.get("drafted_by_source", 0.0) for g in generations)
    return (by_source or sum(r.drafted for r in rounds)) / len(rounds)


def interval(count: int, statistic: Callable[[list[int]], float]) -> list[float]:
    """95 % bootstrap interval of a statistic of prompt indices."""
    picks = torch.randint(count, (DRAWS, count), generator=torch.Generator().manual_seed(0)).tolist()
    values = torch.tensor([statistic(pick) for pick in picks], dtype=torch.float64)
    return values.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()


def summarise(results: Results) -> dict[str, Any]:
    """τ with its interval, drafted tokens, and what the structures count, by method."""
    table = {}
    for name, generations in results.items():
        rounds = sum(len(g.rounds) for g in generations)
        success = sum(g.totals.get("graph_success", 0.0) for g in generations)
        table[name] = {
            "tau": tau(generations),
            "ci95": interval(len(generations), lambda pick, g=generations: tau([g[i] for i in pick])),
            "drafted_per_round": drafted(generations),
            "graph_success": success / rounds,
            "acceptance_by_candidates": acceptance_by_candidates(generations),
        }
    return table


def compare(results: Results, order: Sequence[str]) -> list[dict[str, Any]]:
    """Is τ of each method at least the next one's? Differences on the same prompts, with their intervals."""
    rows = []
    for better, worse in itertools.pairwise(order):
        a, b = results[better], results[worse]
        low, high = interval(len(a), lambda pick, a=a, b=b: tau([a[i] for i in pick]) - tau([b[i] for i in pick]))
        rows.append({"claim": f"{better} ≥ {worse}", "difference": tau(a) - tau(b), "ci95": [low, high]})
    return rows


def best(results: Results, prefix: str, count: int) -> str:
    """The variant of a method that does best on the first `count` prompts."""
    variants = [name for name in results if name.startswith(prefix)]
    return max(variants, key=lambda name: tau(results[name][:count]))


def run_all(
    stack: LayerStack,
    drafters: Drafters,
    methods: Mapping[str, MethodConfig],
    prompts: Sequence[list[int]],
    new_tokens: int,
    sampling: SamplingConfig,
    label: str,
) -> Results:
    arms = make_arms(stack, drafters, methods, None, max_new_tokens=new_tokens, eos=(), sampling=sampling)
    results: Results = {name: [] for name in methods}
    reference = [
        None if sampling.temperature else arms["autoregressive"](prompt, Streams(0)).tokens for prompt in prompts
    ]
    shown = tqdm(prompts, desc=label, disable=None)
    for number, (prompt, wanted) in enumerate(zip(shown, reference, strict=True)):
        for name in methods:
            generation = arms[name](prompt, Streams(0, str(number)))
            assert wanted is None or generation.tokens == wanted, name
            results[name].append(generation)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True, help="small LM directory")
    parser.add_argument("--checkpoint", help="EESD drafter with a calibration head, for the stop rules")
    parser.add_argument("--prompts", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompt-tokens", type=int, default=160)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    target = open_target(options.target)
    tokenizer, stack = target.tokenizer, target.stack(dtype=torch.float32)
    small = load_small_lm(options.drafter, tokenizer, dtype=torch.float32, device=torch.device("cpu"))
    drafters = {"small_lm": small}
    if options.checkpoint:
        early_exit = from_pretrained(options.checkpoint, target.config, target.fingerprint, dtype=torch.float32)
        head = load_calibration(options.checkpoint, read_meta(options.checkpoint).weights_sha256)
        drafters = {"early_exit": Calibrated(early_exit, head), "small_lm": small}
    prepare(stack, drafters)
    rows = load_rows(DataConfig(source="python_stdlib"), tokenizer, 512, "heldout")
    starts = range(1, len(rows), max(1, len(rows) // options.prompts))[: options.prompts]
    prompts = [rows[i]["input_ids"][: options.prompt_tokens].tolist() for i in starts]
    tuning = len(prompts) // 3
    report: dict[str, Any] = {
        "machine": describe_machine(),
        "made_with": provenance(),
        "arguments": {key: str(value) for key, value in vars(options).items()},
    }

    def measured(methods: Mapping[str, MethodConfig], label: str, temperature: float = 0.0) -> Results:
        sampling = SamplingConfig(temperature=temperature)
        return run_all(stack, drafters, methods, prompts, options.tokens, sampling, label)

    for nodes in (25, 60):
        results = measured(budget_methods(nodes), f"{nodes} nodes")
        chosen = best(results, "opt_tree", tuning)
        test = {name: generations[tuning:] for name, generations in results.items()}
        order = [chosen, *(["eagle"] if nodes == 25 else []), "binary", "chain"]
        report[f"nodes_{nodes}"] = {"methods": summarise(test), "chosen": chosen, "order": compare(test, order)}
    results = measured(graph_methods(), "graphs")
    report["graphs"] = {"methods": summarise({n: g[tuning:] for n, g in results.items()})}
    sampled = measured(sampled_methods(), "sampled", temperature=1.0)
    order = ["without_replacement", "with_replacement", "naive"]
    claims = compare(sampled, order) + compare(sampled, ["without_replacement", "k=1"])
    report["sampled"] = {"methods": summarise(sampled), "order": claims}
    if options.checkpoint:
        report["stop_rules"] = {"methods": summarise(measured(stop_methods(), "stop rules"))}
    text = json.dumps(report, indent=2, ensure_ascii=False)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
