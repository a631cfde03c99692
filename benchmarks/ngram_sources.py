"""The n-gram mixture's sources: what each of them gives, and the fit of what they begin with.

    python benchmarks/ngram_sources.py ablate --table runs/ngrams --transcripts 7b.jsonl 13b.jsonl \
        --prompts mt_bench.jsonl --tokenizer llama.model
    python benchmarks/ngram_sources.py decode --table runs/trigrams --target runs/target --prompts prompts.jsonl
    python benchmarks/ngram_sources.py prune --table runs/ngrams --transcripts 7b.jsonl --prompts mt_bench.jsonl \
        --tokenizer llama.model
    python benchmarks/ngram_sources.py fit --table runs/ngrams --transcripts 7b.jsonl --prompts mt_bench.jsonl \
        --tokenizer llama.model

ablate: τ on recorded answers, with all sources and with each of them left out.
decode: the same with a target that runs, greedily, so that recycled logits are one of the sources.
prune: τ on the first transcript, and megabytes, without n-grams of fewer than 2, 3, 5, … occurrences.
fit: λ by source and class, as inference/drafters/ngram_priors.py has it, by three rounds over the first transcript.

Each writes ngram_sources_COMMAND.json.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from bench_aded import MAX_NEW_TOKENS, Result, turns_of

from data_prep.text.chat import render_prompt
from data_prep.text.prompts import read_prompts
from draft_models.ngrams.table import TrigramTable, prune
from draft_models.target.open_target import open_target
from inference.decode import speculative
from inference.drafters import ngrams
from inference.drafters.ngram_mixing import Weights, new_weights
from inference.evaluate.replay import Recording, replay_turns
from inference.evaluate.statistics import decode_statistics
from inference.evaluate.subject import end_tokens, load_stack
from inference.generation import Generation, collect
from inference.loading.drafters import prepare
from inference.method_settings import MethodConfig, NgramConfig
from outrider.machine import describe_machine

ALL = NgramConfig(evidence="mixed", depth=30)
FROZEN = 1e9  # tokens that the prior counts for: λ stays what it begins as
FIT_ROUNDS, PRIOR_TOKENS = 3, 20


def arms(table: TrigramTable, recycle: int) -> Iterator[tuple[str, TrigramTable, NgramConfig]]:
    """(name, table, settings): everything, each source left out, and each alone."""
    settings = replace(ALL, recycle=recycle)
    no_corpus = replace(table, levels={}, suffixes=None)
    yield "all", table, settings
    yield "without the text", table, replace(settings, longest=0)
    if recycle:
        yield "without recycled logits", table, replace(settings, recycle=0)
        yield "recycled logits alone", no_corpus, replace(settings, longest=0)
    if table.suffixes is not None:
        yield "without suffixes", replace(table, suffixes=None), settings
    yield "without n-grams", replace(table, levels={}), settings
    yield "without the corpus", no_corpus, settings
    yield "without learning of weights", table, replace(settings, strength=FROZEN)
    yield "the text alone", no_corpus, replace(settings, recycle=0)


def summary(generations: Sequence[Generation]) -> Result:
    found = decode_statistics(generations)
    return {"tau": found["tau"], "drafted_per_round": found["drafted_tokens_per_round"]}


def replayed(table: TrigramTable, config: NgramConfig, turns: Sequence[Recording]) -> Result:
    method = MethodConfig(source="ngrams", ngrams=config)
    return summary(replay_turns("m", method, {"ngrams": table}, turns, max_new_tokens=MAX_NEW_TOKENS, seed=0))


def ablate(table: TrigramTable, args: argparse.Namespace) -> Result:
    found: Result = {}
    for transcripts in args.transcripts:
        turns = turns_of(args, transcripts, table)
        for name, changed, config in arms(table, recycle=0):
            found.setdefault(Path(transcripts).stem, {})[name] = replayed(changed, config, turns)
    return found


def decode(table: TrigramTable, args: argparse.Namespace) -> Result:
    """Raises `AssertionError` where an arm emits other tokens than the first."""
    target = open_target(args.target)
    table.require_tokenizer(target.vocabulary_digest, args.table)
    stack = load_stack(target, None, torch.float32, torch.device("cpu"), by_layers=True)
    prepare(stack, {})
    prompts = [
        render_prompt(prompt.turns[:1], target.tokenizer, "auto" if prompt.chat else "none")
        for prompt in read_prompts(args.prompts, limit=args.questions)
    ]
    options = {"max_new_tokens": args.max_new_tokens, "eos": end_tokens(target)}
    found: Result = {}
    texts = None
    for name, changed, config in arms(table, recycle=8):
        made = [ngrams.make_ngram_drafter(changed, replace(config, nodes=args.nodes), 0) for _ in prompts]
        generations = [
            collect(speculative(stack, drafter, prompt, **options))
            for drafter, prompt in zip(made, prompts, strict=True)
        ]
        said = [generation.tokens for generation in generations]
        texts = texts or said
        assert said == texts, name
        found[name] = summary(generations)
    return found


def prunings(table: TrigramTable, args: argparse.Namespace) -> Result:
    turns = turns_of(args, args.transcripts[0], table)
    found: Result = {}
    for count in (2, 3, 5, 10, 30, 100):
        pruned = prune(table, count)
        found[str(count)] = {"level_mb": round(pruned.level_bytes / 1e6, 1), **replayed(pruned, ALL, turns)}
    return found


def fit(table: TrigramTable, args: argparse.Namespace) -> Result:
    """Of every source by class, and the τ of each round."""
    turns = turns_of(args, args.transcripts[0], table)
    prior = new_weights(ALL.longest, suffixes=table.suffixes is not None).prior
    made: list[Weights] = []

    def begin(*_: object) -> Weights:
        empty = np.zeros_like(prior)
        integers, numbers = np.empty((2, len(prior)), np.int64), np.empty((2, len(prior)))
        made.append(Weights(prior.copy(), prior, empty, empty.copy(), integers, numbers))
        return made[-1]

    taus = []
    ngrams.weights_from = begin
    for _ in range(FIT_ROUNDS):
        made.clear()
        taus.append(replayed(table, ALL, turns)["tau"])
        hits, trials = (sum(getattr(weights, key) for weights in made) for key in ("hits", "trials"))
        for rows in alike(len(prior)):
            share = (hits[rows].sum(0) + PRIOR_TOKENS * prior[rows[0]]) / (trials[rows].sum(0) + PRIOR_TOKENS)
            prior[rows] = share.round(2).clip(0.01, 0.99)
    return {"tau": taus, "percent": [(100 * row).round().astype(int).tolist() for row in prior]}


def alike(sources: int) -> list[list[int]]:
    """The sources that begin with the same λ: contexts of the text from six tokens on, of the corpus from seven."""
    text, suffixes = 3, 3 + ALL.longest
    groups = [[i] for i in range(text + 5)] + [list(range(text + 5, suffixes))]
    if sources > suffixes:
        groups += [[suffixes + i] for i in range(3)] + [list(range(suffixes + 3, sources))]
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {"ablate": ablate, "decode": decode, "prune": prunings, "fit": fit}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--table", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--transcripts", nargs="+", default=[])
    parser.add_argument("--tokenizer")
    parser.add_argument("--target")
    parser.add_argument("--questions", type=int)
    parser.add_argument("--nodes", type=int, default=ALL.nodes, help="of a draft that a target verifies")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    needed = ("target",) if args.command == "decode" else ("transcripts", "tokenizer")
    if not all(getattr(args, name) for name in needed):
        parser.error(f"{args.command} needs " + " and ".join(f"--{name}" for name in needed))
    torch.set_num_threads(1)
    table = TrigramTable.open(args.table)
    result = {
        "command": args.command,
        "transcripts": [Path(name).name for name in args.transcripts],
        "nodes": args.nodes,
        "table": {key: table.facts.get(key) for key in ("tokens", "documents", "min_count", "max_successors")}
        | {"mb": round(table.nbytes / 1e6, 1), "suffixes": table.suffixes is not None},
        "machine": describe_machine(),
        "results": commands[args.command](table, args),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"ngram_sources_{args.command}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["results"], indent=1))


if __name__ == "__main__":
    main()
