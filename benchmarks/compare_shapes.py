"""Which shape of a drafter pays, on any target (EESD, Fig. 4): exit layers, heads, and small LMs of a few layers.

    python benchmarks/compare_shapes.py --target runs/demo/target --train-minutes 5 --layers 1 2 3 --heads shared own \
        --small-lm-layers 1 2 --prompts library=python_stdlib
    python benchmarks/compare_shapes.py max_new_tokens=128 --target T --train-minutes 20 --layers 2 3 5 \
        --heads shared own:4096 --both data=responses data.path='R/responses-*.jsonl' --eesd objective=kl \
        --prompts chat=heldout.jsonl

Every drafter is trained for the same minutes=, by the settings of the commands train/eesd.py and
train/finetune_drafter.py; what is done already is kept. Then all of them continue the same held-out prompts in one
process, prompt by prompt in turn, with chains of K. Training and measuring may be done apart, with --train-only and
with --measure-only on a quiet machine. KEY=VALUE are options of evaluate-checkpoint. A head is shared with the target
or its own; shared:4096 and own:4096 predict that many tokens. Ends with the table and writes compare_shapes.json, .md
and .png.
"""

import argparse
import io
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from figures import all_figures
from interleaved import add_options, evaluation, measure_all, read_categories
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from record_tables import interval
from trainings import COMMON, KINDS, Kind, require_same, train, trained_for

from conf import reported
from draft_models.checkpoint import provenance
from inference.evaluate.results import AUTOREGRESSIVE, TRANSFORMERS
from inference.method_settings import MethodConfig, StopConfig
from inference.settings import EvaluateConfig
from outrider.errors import UserError, require
from outrider.files import write_atomically, write_json
from outrider.machine import describe_machine

OWN = ("target", "checkpoint", "small_lm", "table", "drafters", "method", "methods")  # of evaluate-checkpoint
HEADS = {"shared": "train_head=false", "own": "train_head=true"}


@dataclass(frozen=True)
class Shape:
    """A drafter to train: its kind, how many layers, which head, and what its command is told of that."""

    kind: Kind
    layers: int
    head: str
    overrides: tuple[str, ...]

    @property
    def line(self) -> str:
        """What it has in common with those of other depths."""
        return f"{self.kind.label}, {self.head} head" if self.head else self.kind.label

    @property
    def folder(self) -> str:
        return f"{self.kind.command}_{self.layers}_{self.head}".rstrip("_").replace(":", "_")


def shapes_of(options: argparse.Namespace) -> list[Shape]:
    """All that is asked for. Raises `UserError` for an unknown head or shape, and where nothing is asked for."""
    found = []
    for head in options.heads:
        name, _, size = head.partition(":")
        if name not in HEADS or (size and not size.isdecimal()):
            raise UserError(f"heads={head}: expected shared or own, or either over some tokens, as own:4096")
        told = (HEADS[name], *([f"draft_vocabulary={size}"] if size else []))
        found += [Shape(KINDS["eesd"], n, head, (f"exit_layer={n}", *told)) for n in options.layers]
    found += [Shape(KINDS["small_lm"], n, "", (f"drafter.layers={n}",)) for n in options.small_lm_layers]
    folders = [shape.folder for shape in found]
    for name in options.without:
        require(name in folders, "without", name, f"one of {folders}")
    found = [shape for shape in found if shape.folder not in options.without]
    if not found:
        raise UserError("nothing to compare: give --layers or --small-lm-layers")
    return found


def train_all(shapes: Sequence[Shape], options: argparse.Namespace) -> None:
    """Train every drafter that is not there yet."""
    for shape in shapes:
        own = options.eesd if shape.kind.command == "eesd" else options.small_lm
        told = [*options.both, *own, *shape.overrides, f"target={options.target}", f"minutes={options.train_minutes}"]
        train(shape.kind, options.work / shape.folder, *told)


def decoders(shape: Shape, options: argparse.Namespace) -> EvaluateConfig:
    """How a drafter decodes: in chains of every K."""
    folder = options.work / shape.folder
    if not (folder / shape.kind.done).exists():
        raise UserError(f"{folder}: no finished drafter there; train it first, without --measure-only")
    early_exit = shape.kind.command == "eesd"
    where, method = (f"checkpoint={folder}", "eesd_fixed") if early_exit else (f"small_lm={folder}", "vanilla")
    config = evaluation([*options.options, f"target={options.target}", where, f"method=[{method}]"])
    source = "early_exit" if early_exit else "small_lm"
    chains = {
        name_of(shape, k): MethodConfig(source=source, stop=StopConfig(max_draft=k)) for k in options.draft_tokens
    }
    return replace(config, methods=chains)


def name_of(shape: Shape, k: int) -> str:
    """Of an arm."""
    return f"{shape.folder} K={k}"


def rows_of(shapes: Sequence[Shape], arms: Mapping[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every drafter and K, JSON-able. arms: what was measured of each, by name."""
    return [
        {
            "drafter": shape.line,
            "layers": shape.layers,
            "draft_tokens": k,
            "trained": trained_for(options.work / shape.folder),
            **arms[name_of(shape, k)],
        }
        for shape in shapes
        for k in options.draft_tokens
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| drafter | layers | K | steps | minutes | identical | τ | tokens/s | over plain decoding [95 %] |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        trained = row["trained"]
        lines.append(
            f"| {row['drafter']} | {row['layers']} | {row['draft_tokens']} | {trained['steps']} | "
            f"{trained['minutes']:.2f} | {row['identical']}/{row['prompts']} | {row['tau']:.2f} | "
            f"{row['tokens_per_second']:.1f} | {interval(row['speedup'])} |"
        )
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Mapping[str, Any]], plain: float) -> Figure:
    """τ and tokens per second by the number of layers. plain: tokens per second of plain decoding."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    lines = dict.fromkeys((row["drafter"], row["draft_tokens"]) for row in rows)
    for axes, key, label in zip(figure.subplots(1, 2), ("tau", "tokens_per_second"), ("τ", "tokens/s"), strict=True):
        for marker, line in zip("os^Dvpx*" * len(lines), lines, strict=False):
            mine = sorted((r["layers"], r[key]) for r in rows if (r["drafter"], r["draft_tokens"]) == line)
            axes.plot(*zip(*mine, strict=True), marker=marker, label=f"{line[0]}, K = {line[1]}")
        axes.set(xlabel="layers: under the exit layer, or of the small LM", ylabel=label, ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    axes.axhline(plain, color="black", linewidth=1, linestyle="--", label="plain decoding")
    axes.legend(fontsize=8)
    return figure


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "runs/shapes")
    parser.add_argument("--target", required=True)
    parser.add_argument("--train-minutes", type=float, required=True, help="of training steps, for each drafter")
    parser.add_argument("--layers", type=int, nargs="*", default=[], help="target layers under the exit layer")
    parser.add_argument(
        "--heads", nargs="+", default=["shared"], help="shared or own; over some tokens shared:TOKENS or own:TOKENS"
    )
    parser.add_argument("--small-lm-layers", type=int, nargs="*", default=[], help="layers of the small LMs")
    parser.add_argument("--without", nargs="+", default=[], help="shapes of these that are left out, as eesd_6_own")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[4], help="K of the chains")
    parser.add_argument("--both", nargs="*", default=[], help="options of both commands, e.g. data=… teacher=cached")
    parser.add_argument("--eesd", nargs="*", default=[], help="options of train/eesd.py alone")
    parser.add_argument("--small-lm", nargs="*", default=[], help="options of train/finetune_drafter.py alone")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--train-only", action="store_true", help="measure later, with --measure-only")
    part.add_argument("--measure-only", action="store_true", help="what has been trained")
    parser.add_argument("--note", default="", help="kept in the JSON, e.g. what else the machine was doing")
    return parser.parse_args(arguments)


def compare(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Train, measure, and write the table, the JSON and the plot. Raises `UserError`."""
    for option in options.options:
        if option.partition("=")[0].partition(".")[0].lstrip("+~") in OWN:
            raise UserError(f"{option}: not an option here; see --help for the target and its drafters")
    shapes = shapes_of(options)
    trained = {key: getattr(options, key) for key in ("target", "train_minutes", "both", "eesd", "small_lm")}
    require_same(options.work, trained)
    if not options.measure_only:
        train_all(shapes, options)
    if options.train_only:
        return
    configs = [decoders(shape, options) for shape in shapes]
    prompts = read_categories(options.prompts, options.per_category)
    contest = measure_all(configs, prompts, options.work / "measured", options.minutes)
    arms = all_figures(contest.results, configs[0].seed)
    rows = rows_of(shapes, arms, options)
    facts = {
        "command": shlex.join(["python", "benchmarks/compare_shapes.py", *arguments]),
        **trained,
        "common": COMMON,
        "note": options.note,
        "machine": describe_machine(str(contest.subject.device)),
        "threads": contest.threads,
        "dtype": contest.subject.numbers,
        "made_with": provenance(),
        "prompts": len(contest.results),
        "prompts_asked": contest.asked,
        "max_new_tokens": configs[0].max_new_tokens,
        "methods": {name: asdict(method) for name, method in contest.methods.items()},
        "baselines": {name: arms[name] for name in (AUTOREGRESSIVE, TRANSFORMERS) if name in arms},
    }
    image = io.BytesIO()
    plot(rows, arms[AUTOREGRESSIVE]["tokens_per_second"]).savefig(image, format="png", dpi=150)
    write_atomically(options.work / "compare_shapes.png", image.getvalue())
    write_atomically(options.work / "compare_shapes.md", table(rows).encode())
    write_json(options.work / "compare_shapes.json", {**facts, "rows": rows})
    print(table(rows))
    print(f"prompts={len(contest.results)} of {contest.asked} out={options.work}/compare_shapes.json")


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    with reported(goes_on=True):
        compare(options, arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
