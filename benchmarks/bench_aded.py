"""ADED's drafters on recorded answers: draft times, and the ablations of its paper.

    python benchmarks/bench_aded.py COMMAND --table runs/table --transcripts answers.jsonl --prompts mt_bench.jsonl \
        --tokenizer llama.model [--questions 20] [--out benchmarks/results]

COMMAND:
  times        CPU microseconds of a round's search and of its adaptation, in the decode loop, one thread, warm
  sizes        τ of every method, in all and by category, for each of --transcripts (Fig. 4b)
  adaptation   τ over output length, with and without Algorithm 2 (Fig. 4a)
  searches     τ and time by the number of searches, against best-first by its node budget (Fig. 6)
  exploration  τ by C1 and by 1/C2 (Fig. 7)
  orders       τ with bi-, tri- and 4-grams
  corpus       τ by the size of the corpus: several --table, built from growing parts of it (Table 2)

Each writes aded_COMMAND.json, with the machine and the settings, and all but `times` a plot beside it.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from data_prep.text.prompts import read_prompts
from draft_models.ngrams.table import TrigramTable
from inference.decode import Round
from inference.drafters.ngrams import make_ngram_drafter
from inference.evaluate.replay import Recording, load_vocabulary, read_transcripts, recordings, replay, replay_turns
from inference.evaluate.statistics import decode_statistics
from inference.generation import Generation
from inference.method_settings import MethodConfig, NgramConfig
from outrider.machine import describe_machine

MAX_NEW_TOKENS = 1024  # the limit under which MT-Bench answers are recorded
PAPER = NgramConfig(search="puct")
METHODS = {
    "aded": PAPER,
    "aded_best_first": NgramConfig(depth=10),
    "ngrams": NgramConfig(evidence="mixed", depth=30),
}
Result = dict[str, Any]


def turns_of(args: argparse.Namespace, transcripts: str, table: TrigramTable) -> list[Recording]:
    vocabulary = load_vocabulary(args.tokenizer)
    table.require_tokenizer(vocabulary.vocabulary_digest, "--table")
    prompts = read_prompts(args.prompts, limit=args.questions)
    return recordings(prompts, read_transcripts(transcripts), vocabulary)


def run(name: str, config: NgramConfig, table: TrigramTable, turns: Sequence[Recording]) -> list[Generation]:
    method = MethodConfig(source="ngrams", ngrams=config)
    return replay_turns(name, method, {"ngrams": table}, turns, max_new_tokens=MAX_NEW_TOKENS, seed=0)


def summary(generations: Sequence[Generation]) -> Result:
    """τ, drafted tokens per round, and the median microseconds a round spends on drafting and learning."""
    rounds = [r for g in generations for r in g.rounds]
    found = decode_statistics(generations)
    return {
        "tau": found["tau"],
        "drafted_per_round": found["drafted_tokens_per_round"],
        "round_us": 1e6 * statistics.median(r.structure_seconds for r in rounds),
    }


def times(table: TrigramTable, turns: Sequence[Recording], args: argparse.Namespace) -> Result:
    """Medians and 90th percentiles over rounds; the first turn, decoded once more before, warms up."""
    found: Result = {}
    arms = {name: (table, config) for name, config in METHODS.items()}
    if table.suffixes is not None:
        arms["ngrams_without_suffixes"] = (replace(table, suffixes=None), METHODS["ngrams"])
    for name, (searched, config) in arms.items():
        spent: dict[str, list[float]] = {"search": [], "adaptation": [], "round": []}
        for number, turn in enumerate([turns[0], *turns]):
            drafter = make_ngram_drafter(searched, config, seed=0)
            budget = max(MAX_NEW_TOKENS, len(turn.answer))
            options: dict[str, Any] = {"max_new_tokens": budget, "eos": {turn.answer[-1]}, "clock": time.thread_time}
            rounds = replay(drafter, turn.prompt, turn.answer, **options)
            next(rounds)  # the prompt, which is learnt once and not by the round
            if number:
                for part, method in (("search", "_search"), ("adaptation", "_learn")):
                    setattr(drafter, method, timed(getattr(drafter, method), spent[part]))
            seconds = [r.structure_seconds for r in rounds]
            if number:
                spent["round"] += seconds
        found[name] = {part: percentiles(values) for part, values in spent.items()}
    return found


def timed(function: Callable, seconds: list[float]) -> Callable:
    def call(*args: Any) -> Any:
        started = time.thread_time()  # other processes do not count
        result = function(*args)
        seconds.append(time.thread_time() - started)
        return result

    return call


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    median, high = np.percentile(seconds, [50, 90]).tolist()
    return {"median_us": round(1e6 * median, 1), "p90_us": round(1e6 * high, 1), "calls": len(seconds)}


def sizes(table: TrigramTable, turns: Sequence[Recording], args: argparse.Namespace) -> Result:
    found: Result = {}
    for transcripts in args.transcripts:
        turns = turns_of(args, transcripts, table)
        for name, config in METHODS.items():
            generations = run(name, config, table, turns)
            by_category: dict[str, list[Generation]] = {}
            for turn, generation in zip(turns, generations, strict=True):
                by_category.setdefault(turn.category, []).append(generation)
            categories = {key: decode_statistics(group)["tau"] for key, group in by_category.items()}
            found.setdefault(Path(transcripts).stem, {})[name] = {**summary(generations), "by_category": categories}
    return found


def plot_sizes(found: Result) -> Figure:
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for name, result in next(iter(found.values())).items():
        axes.plot(list(result["by_category"]), list(result["by_category"].values()), "o-", label=name)
    axes.set(ylabel="τ", ylim=(1, None), title=next(iter(found)))
    axes.legend()
    return figure


def adaptation(table: TrigramTable, turns: Sequence[Recording], args: argparse.Namespace) -> Result:
    """τ of the rounds that begin within each stretch of 64 output tokens."""
    found: Result = {}
    for search in ("puct", "best_first"):
        for adapt in (True, False):
            config = replace(METHODS["aded" if search == "puct" else "aded_best_first"], adapt=adapt)
            generations = run(f"{search}, {'adapted' if adapt else 'as built'}", config, table, turns)
            stretches: dict[int, list[Round]] = {}
            for generation in generations:
                place = 1
                for r in generation.rounds:
                    stretches.setdefault(place // 64 * 64, []).append(r)
                    place += len(r.tokens)
            by_length = {
                at: sum(len(r.tokens) for r in rounds) / len(rounds)
                for at, rounds in sorted(stretches.items())
                if len(rounds) >= 200
            }
            found[f"{search}, {'adapted' if adapt else 'as built'}"] = {**summary(generations), "by_length": by_length}
    return found


def searches(table: TrigramTable, turns: Sequence[Recording], args: argparse.Namespace) -> Result:
    found: Result = {"puct": {}, "best_first": {}}
    for count in (10, 25, 50, 100, 150, 300):
        config = replace(PAPER, iterations=count)
        found["puct"][count] = summary(run(f"puct {count}", config, table, turns))
    for nodes in (8, 16, 32, 64, 128):
        config = replace(METHODS["aded_best_first"], nodes=nodes)
        found["best_first"][nodes] = summary(run(f"best_first {nodes}", config, table, turns))
    return found


def exploration(table: TrigramTable, turns: Sequence[Recording], args: argparse.Namespace) -> Result:
    found: Result = {"c1": {}, "1/c2": {}}
    for c1 in (0.0, 0.5, 2.414, 8.0, 32.0, 128.0):
        found["c1"][c1] = summary(run(f"c1 {c1}", replace(PAPER, c1=c1), table, turns))
    for inverse in (0.01, 0.125, 1.0, 10.0, 1000.0):
        config = replace(PAPER, c2=1 / inverse)
        found["1/c2"][inverse] = summary(run(f"1/c2 {inverse}", config, table, turns))
    return found


def orders(table: TrigramTable, turns: Sequence[Recording], args: argparse.Namespace) -> Result:
    found: Result = {}
    for name in ("aded", "aded_best_first"):
        for order in sorted(table.levels):
            config = replace(METHODS[name], order=order)
            found.setdefault(name, {})[order] = summary(run(f"{name} {order}", config, table, turns))
    return found


def corpus(table: TrigramTable, turns: Sequence[Recording], args: argparse.Namespace) -> Result:
    found: Result = {}
    digest = load_vocabulary(args.tokenizer).vocabulary_digest
    for path in args.table:
        table = TrigramTable.open(path)
        table.require_tokenizer(digest, path)
        tokens = table.facts["tokens"]
        for name, config in METHODS.items():
            found.setdefault(name, {})[tokens] = {
                **summary(run(f"{name} {tokens}", config, table, turns)),
                "table_mb": table.nbytes / 1e6,
            }
    return found


def plot_lines(found: Result, label: str, key: str | None = None, log: bool = True) -> Figure:
    """τ of every line of `found`, over the keys of the line (of its entry `key`, which then holds τ itself)."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, line in found.items():
        points = line[key] if key else {at: result["tau"] for at, result in line.items()}
        axes.plot([float(at) for at in points], list(points.values()), "o-", label=name)
    if log:
        axes.set_xscale("symlog" if any(0 in map(float, line) for line in found.values() if not key) else "log")
    axes.set(xlabel=label, ylabel="τ")
    axes.legend()
    return figure


COMMANDS: dict[str, tuple[Callable[..., Result], Callable[[Result], Figure] | None]] = {
    "times": (times, None),
    "sizes": (sizes, plot_sizes),
    "adaptation": (adaptation, lambda found: plot_lines(found, "output tokens so far", "by_length", log=False)),
    "searches": (searches, lambda found: plot_lines(found, "searches, or nodes")),
    "exploration": (exploration, lambda found: plot_lines(found, "C1, or 1/C2")),
    "orders": (orders, lambda found: plot_lines(found, "n", log=False)),
    "corpus": (corpus, lambda found: plot_lines(found, "tokens counted")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--table", nargs="+", required=True)
    parser.add_argument("--transcripts", nargs="+", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--questions", type=int)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = TrigramTable.open(args.table[0])
    measure, plot = COMMANDS[args.command]
    turns = turns_of(args, args.transcripts[0], table)
    found = measure(table, turns, args)
    result = {
        "command": args.command,
        "transcripts": [Path(name).name for name in args.transcripts],
        "turns": len(turns),
        "table": table.facts | {"mb": round(table.nbytes / 1e6, 1)},
        "machine": describe_machine(),
        "results": found,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"aded_{args.command}.json").write_text(json.dumps(result, indent=1) + "\n")
    if plot is not None:
        plot(found).savefig(args.out / f"aded_{args.command}.png", dpi=120)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
