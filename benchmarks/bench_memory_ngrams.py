"""What memory across prompts gains: τ of recorded answers of one kind, by quarter, with ngrams.keep and without.

    python benchmarks/bench_memory_ngrams.py --answers gsm8k_train.jsonl --table runs/ngrams --tokenizer llama.model \
        [--prompts 400] [--out benchmarks/results]

--answers: JSON lines with "question" and "answer", which stand in for what a target says. They are replayed in order,
beside the table and without one. The memory is held to several sizes. Writes ngram_memory.json and a plot beside it.
"""

import argparse
import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from bench_aded import Result
from matplotlib.figure import Figure
from ngram_sources import ALL

from data_prep.text.prompts import Prompt
from draft_models.ngrams.table import TrigramTable
from inference.drafters.ngram_memory import close, open_memory
from inference.evaluate.replay import Recording, load_vocabulary, recordings, replay_turns
from inference.evaluate.statistics import decode_statistics
from inference.method_settings import MethodConfig, NgramConfig
from outrider.machine import describe_machine

QUARTERS, TOKENS = 4, 256
LIMITS = (64.0, 8.0, 2.0)  # MB


def turns_of(args: argparse.Namespace, table: TrigramTable) -> list[Recording]:
    vocabulary = load_vocabulary(args.tokenizer)
    table.require_tokenizer(vocabulary.vocabulary_digest, "--table")
    lines = args.answers.read_text(encoding="utf-8").splitlines()[: args.prompts]
    asked = {str(number): json.loads(line) for number, line in enumerate(lines)}
    prompts = [Prompt(name, args.answers.stem, (one["question"],), True) for name, one in asked.items()]
    return recordings(prompts, {name: (one["answer"],) for name, one in asked.items()}, vocabulary)


def by_quarter(config: NgramConfig, table: TrigramTable, turns: Sequence[Recording]) -> list[float]:
    """τ of every quarter of `turns`, in order, in one go."""
    method = MethodConfig("ngrams", ngrams=config)
    if config.keep is not None:
        open_memory(config, table, {})
    found = replay_turns("m", method, {"ngrams": table}, turns, max_new_tokens=TOKENS, seed=0)
    if config.keep is not None:
        close(config.keep)
    cuts = np.linspace(0, len(found), QUARTERS + 1).astype(int)
    return [decode_statistics(found[begin:end])["tau"] for begin, end in itertools.pairwise(cuts)]


def measure(table: TrigramTable, turns: Sequence[Recording], folder: Path) -> Result:
    found: Result = {}
    nothing = replace(table, levels={}, suffixes=None)
    for name, used in (("table", replace(table, suffixes=None)), ("no table", nothing)):
        found[name] = {"every text anew": by_quarter(ALL, used, turns)}
        for limit in LIMITS:
            kept = replace(ALL, keep=str(folder / f"{name} {limit:g}"), keep_mb=limit)
            found[name][f"kept, {limit:g} MB"] = by_quarter(kept, used, turns)
    return found


def plot(found: Result) -> Figure:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, lines in found.items():
        for style, (label, taus) in zip((":", "-", "--", "-."), lines.items(), strict=True):
            axes.plot(range(1, QUARTERS + 1), taus, f"o{style}", label=f"{name}, {label}")
    axes.set(xlabel="quarter of the prompts", ylabel="τ", xticks=range(1, QUARTERS + 1))
    axes.legend(fontsize="small")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--table", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = TrigramTable.open(args.table)
    turns = turns_of(args, table)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(table, turns, Path(folder))
    result = {
        "answers": args.answers.name, "turns": len(turns), "nodes": ALL.nodes, "machine": describe_machine(),
        "table": {key: table.facts.get(key) for key in ("tokens", "documents", "min_count")},
        "tokens": sum(len(turn.answer) for turn in turns), "results": found,
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "ngram_memory.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(found).savefig(args.out / "ngram_memory.png", dpi=120)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
