"""What one tree of a drafter and n-grams gains over its two parts, by category of prompts.

    python benchmarks/compare_fused.py target=runs/smollm2/fetch eagle3=runs/eagle3 table=runs/smollm2/trigrams \
        method=[fused_eagle3] --prompts chat=mt_bench.jsonl --prompts maths=gsm8k.jsonl --minutes 30
    python benchmarks/compare_fused.py … --nodes 24 --depth 4 --ablate

The options are evaluate-checkpoint's, with one method of structure.kind=fused. Its parts are the same drafter as an
OPT-Tree and the same n-grams alone. All of them continue every prompt in turn, so ratios are of pairs on the same
prompt. With --nodes every arm submits so many nodes at most and the drafter makes --depth steps: τ then compares at
equal sizes, and says the same on a busy machine. Else sizes are chosen here; --ngram-nodes fixes those of the n-grams.

--ablate adds the larger one of both probabilities instead of the joined one, weights that do not learn, and no
recycled logits. Writes the JSON and, beside it, a plot.
"""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from figures import all_figures
from interleaved import Contest, add_beside, add_options, evaluation, joined, measure_all, read_categories
from matplotlib.figure import Figure
from record_tables import fused_table

from conf import reported
from draft_models.checkpoint import provenance
from inference.evaluate.bench import JUDGED
from inference.evaluate.drafter_facts import drafter_folders
from inference.evaluate.speed import speedup
from inference.method_settings import AUTO, MethodConfig, StructureConfig
from inference.settings import EvaluateConfig
from outrider.errors import require
from outrider.files import require_writable, write_json
from outrider.machine import describe_machine
from outrider.streams import Streams

HERE = Path(__file__).parent
FUSED, MODEL, NGRAMS = "fused", "drafter alone", "n-grams alone"
PARTS = (MODEL, NGRAMS)
FROZEN = 1e9  # tokens that the prior counts for: weights stay what they begin as
BASELINES = {"autoregressive", "transformers_generate"}
COLOURS = {MODEL: ("#D55E00", "s"), NGRAMS: ("#009E73", "^"), FUSED: ("#0072B2", "o")}  # Okabe and Ito's


def arms_of(fused: MethodConfig, options: argparse.Namespace) -> dict[str, MethodConfig]:
    """The method, its two parts and what is asked for besides, by name."""
    size = {"nodes": options.nodes or AUTO, "max_depth": options.depth if options.nodes else AUTO}
    fused = replace(fused, structure=replace(fused.structure, **size))
    delta = 0.0 if options.nodes else None
    tree = StructureConfig("opt_tree", temperature=0.5, width=fused.structure.width, delta=delta, **size)
    alone = replace(fused.ngrams, nodes=options.nodes or options.ngram_nodes or AUTO)
    arms = {
        FUSED: fused,
        MODEL: MethodConfig(fused.source, tree, skip=fused.skip),
        NGRAMS: MethodConfig("ngrams", ngrams=alone),
    }
    if options.ablate:
        arms["maximum"] = replace(fused, structure=replace(fused.structure, join="maximum"))
        arms["weights that do not learn"] = replace(fused, ngrams=replace(fused.ngrams, strength=FROZEN))
        arms["without recycled logits"] = replace(fused, ngrams=replace(fused.ngrams, recycle=0))
    return arms


def contestants(options: argparse.Namespace) -> EvaluateConfig:
    """What evaluate-checkpoint would be told. Raises `UserError`."""
    config = evaluation(options.options)
    fused = [method for method in config.methods.values() if method.structure.kind == "fused"]
    require(len(fused) == len(config.methods) == 1, "method", sorted(config.methods), "one of structure.kind=fused")
    require(config.table is not None, "table", config.table, "an n-gram table, which the n-grams alone need")
    return replace(config, methods=arms_of(fused[0], options))


def gains(contest: Contest, arms: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """By category, and in all as "all": every arm's speed-up and τ, and the fused one's over the better of its parts.

    The better one is that of the larger median over plain decoding.
    """
    streams = Streams(seed).within("fused")
    categories = sorted({result.category for result in contest.results})
    found = {}
    for name in ("all", *categories):
        results = [result for result in contest.results if name in ("all", result.category)]
        shown = {arm: facts if name == "all" else facts["by_category"][name] for arm, facts in arms.items()}
        better = max(PARTS, key=lambda arm: shown[arm]["speedup"]["median"] or 0.0)
        found[name] = {
            "prompts": len(results),
            "better_part": better,
            "over_better_part": speedup(results, FUSED, better, streams.within(name)),
            "tau": {arm: facts["tau"] for arm, facts in shown.items()},
            "speedup": {arm: facts["speedup"] for arm, facts in shown.items()},
        }
    return found


def plot(found: Mapping[str, Any]) -> Figure:
    """By category the speed-up of the fused tree and of its parts, with intervals; with --ablate τ of all arms."""
    arms = [arm for arm, tau in found["all"]["tau"].items() if tau is not None]
    return plot_tau(found, arms) if set(arms) - COLOURS.keys() - BASELINES else plot_speed(found)


def plot_tau(found: Mapping[str, Any], arms: Sequence[str]) -> Figure:
    """By category τ of every arm that drafts. At fixed sizes only that compares."""
    figure = Figure(figsize=(8.0, 4.0), layout="constrained")
    axes = figure.subplots()
    drafting = [arm for arm in arms if arm not in BASELINES]
    for place, arm in enumerate(drafting):
        across = [at + (place - len(drafting) / 2) * 0.8 / len(drafting) for at in range(len(found))]
        axes.plot(across, [row["tau"][arm] for row in found.values()], "o", color=f"C{place}", label=arm)
    axes.set_xticks(range(len(found)), [f"{name}\n{row['prompts']} prompts" for name, row in found.items()])
    axes.set_ylabel("τ, tokens a pass")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=7)
    return figure


def plot_speed(found: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(8.0, 4.0), layout="constrained")
    axes = figure.subplots()
    for place, (arm, (colour, marker)) in enumerate(COLOURS.items()):
        for at, row in enumerate(found.values()):
            known = row["speedup"][arm]
            if known["median"] is not None:
                low, high = known["ci95"]
                axes.errorbar(
                    at + 0.15 * (place - 1), known["median"], yerr=[[known["median"] - low], [high - known["median"]]],
                    fmt=marker, color=colour, capsize=3, label=arm if not at else None,
                )  # fmt: skip
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--")
    axes.set_xticks(range(len(found)), [f"{name}\n{row['prompts']} prompts" for name, row in found.items()])
    axes.set_ylabel("speed-up over plain decoding, 95 % interval")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    return figure


def compare(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Measure what is left to measure, write the JSON and the plot, show the table. Raises `UserError`."""
    config = contestants(options)
    prompts = read_categories(options.prompts, options.per_category)
    contest = measure_all([config], prompts, options.work, options.minutes, judged=JUDGED)
    contest = joined(contest, options.beside)
    arms = all_figures(contest.results, config.seed)
    found = gains(contest, arms, config.seed)
    out = options.out or options.work / "fused.json"
    require_writable(out.parent)
    record = {
        "command": shlex.join(["python", "benchmarks/compare_fused.py", *arguments]),
        "target": contest.subject.target.source,
        "drafters": drafter_folders(config),
        "dtype": contest.subject.numbers,
        "machine": describe_machine(str(contest.subject.device)),
        "threads": contest.threads,
        "made_with": provenance(),
        "note": options.note,
        "prompts": len(contest.results),
        "prompts_asked": contest.asked,
        "max_new_tokens": config.max_new_tokens,
        "methods": {name: asdict(method) for name, method in contest.methods.items()},
        "gains": found,
        "arms": arms,
    }
    write_json(out, record)
    plot(found).savefig(out.with_suffix(".png"), dpi=150)
    print(fused_table(found))
    print(f"prompts={len(contest.results)} of {contest.asked} out={out}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "runs/fused")
    parser.add_argument("--nodes", type=int, help="submitted by every arm at most; default: chosen here")
    parser.add_argument("--depth", type=int, default=4, help="steps of the drafter, with --nodes")
    parser.add_argument("--ngram-nodes", type=int, help="of the n-grams alone, without --nodes; default: chosen here")
    parser.add_argument("--ablate", action="store_true", help="also with one thing left out or done otherwise")
    add_beside(parser)
    parser.add_argument("--out", type=Path, help="the JSON; default: fused.json in --work")
    parser.add_argument("--note", default="", help="kept in the JSON, e.g. what else the machine was doing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    with reported(goes_on=True):
        compare(options, arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
