"""Fit what a fused draft begins with: λ by class (inference/drafters/fused_priors.py), gains by band (auto/feeding.py).

    python benchmarks/fit_fused.py target=runs/smollm2/fetch eagle3=runs/eagle3 table=runs/smollm2/trigrams \
        method=[fused_eagle3] --prompts chat=mt_bench.jsonl --prompts maths=gsm8k.jsonl --rounds 3

Every round continues all prompts with what the last one found, by rounds of expectation–maximisation as decoding does
them; a class counts the prior of the first round as --prior tokens. Sizes are --nodes and --depth, as what is fitted
depends on no machine. Several commands with --into the same JSON add up. Prints the constants and writes the counts.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from interleaved import add_options, evaluation, load_teams, read_categories

from conf import reported
from inference.auto.feeding import BANDS, GAINS
from inference.decode import speculative
from inference.drafters.fused import Fused
from inference.drafters.fused_priors import SHARES
from inference.evaluate.bench import render
from inference.evaluate.subject import find_subject
from inference.generation import collect
from inference.loading.drafters import new_drafter
from outrider.errors import require
from outrider.files import read_json, write_json
from outrider.streams import Streams


def fit(options: argparse.Namespace) -> None:
    """Run the rounds, print the constants. Raises `UserError`."""
    config = evaluation(options.options)
    fused = [method for method in config.methods.values() if method.structure.kind == "fused"]
    require(len(fused) == 1, "method", sorted(config.methods), "one of structure.kind=fused")
    shape = replace(fused[0].structure, nodes=options.nodes, max_depth=options.depth)
    method = replace(fused[0], structure=shape)
    prompts = read_categories(options.prompts, options.per_category)
    subject = find_subject(config)
    texts = [render(subject, prompt, prompt.turns) for prompt in prompts]
    (models,) = load_teams([replace(config, methods={"fused": method})], subject)
    known = read_json(options.into, "counts", "remove it") if options.into and options.into.exists() else {}
    earlier = {name: np.array(known.get(name, 0.0)) for name in ("hits", "trials", "gained", "fed")}
    first = SHARES.copy()
    counts = earlier
    for number in range(options.rounds):
        counts = {name: value.copy() for name, value in earlier.items()}
        tokens = passes = 0
        for text in texts:
            drafter = new_drafter(method, models.drafters, Streams(0))
            assert isinstance(drafter, Fused)
            made = collect(
                speculative(models.stack, drafter, text, max_new_tokens=config.max_new_tokens, eos=subject.eos)
            )
            tokens, passes = tokens + len(made.tokens) - 1, passes + len(made.rounds)
            for name, value in drafter.learnt().items():
                counts[name] = counts[name] + value
        SHARES[:] = (options.prior * first + counts["hits"]) / (options.prior + counts["trials"])
        print(f"round={number} tau={tokens / passes:.3f}", flush=True)
    print("SHARES, in percent:")
    for row in SHARES.reshape(BANDS, BANDS):
        print("   ", " ".join(f"{round(100 * share):02d}" for share in row))
    gains = (options.prior * np.array(GAINS) / 20 + counts["gained"]) / (options.prior / 20 + counts["fed"])
    print("GAINS:", ", ".join(f"{gain:.2f}" for gain in gains))
    if options.into:
        write_json(options.into, {name: np.asarray(value).tolist() for name, value in counts.items()})


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "runs/fit_fused")
    parser.add_argument("--nodes", type=int, default=24)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prior", type=float, default=20.0, help="tokens that a class's first value counts for")
    parser.add_argument("--into", type=Path, help="a JSON of counts to add to")
    options = parser.parse_args(arguments)
    with reported():
        fit(options)


if __name__ == "__main__":
    main(sys.argv[1:])
