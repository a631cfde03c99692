"""What pays for a drafter: every objective, for an early exit and for a small LM, each trained for as long.

    python benchmarks/compare_objectives.py --target runs/demo/target --minutes 5 --out runs/objectives
    python benchmarks/compare_objectives.py --target T --minutes 20 --both data=local data.path='R/responses-*.jsonl' \
        teacher=cached --eesd exit_layer=3 train_head=false

Trains by the settings of the commands train/eesd.py and train/finetune_drafter.py, in this process; what is done
already is kept. Of each training a few steps are timed first, which fixes its number of steps. No step is chosen by an
evaluation: the end of each training counts. On its held-out rows: τ of real decoding at draft length 4, greedy; the
analytic τ, of sampling at temperature 1 by the whole target's law; the agreement with the target's argmax. Ends with
the table and writes compare_objectives.json and compare_objectives.md.
"""

import argparse
import gc
import itertools
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf import build, register
from conf.options import compose_defaults
from draft_models.checkpoint import META_FILE, provenance
from draft_models.small_lm import TRAINING_FILE
from inference.evaluate.report import describe_machine
from outrider.files import require_writable, write_atomically, write_json
from train.early_exit import train_early_exit
from train.progress import LOG_FILE
from train.settings import OBJECTIVES, EesdConfig, FinetuneConfig
from train.small_lm import finetune_drafter

COMMON = ["fit.epochs=null", "fit.eval_every=null", "fit.save_every=null", "fit.wandb.mode=disabled", "fit.warmup=0",
          "fit.schedule=linear", "fit.optimizer=muon", "fit.muon_lr=0.02", "fit.lr=4e-3", "fit.batch_rows=8",
          "seq_len=256", "decode_prompts=16", "decode_tokens=64", "resume=true"]  # fmt: skip
TIMED = 5  # steps between two lines of the log of what is timed, of which the first is warming up
LINES = 4
WATCHED = {"tau": "eval_tau", "tau_analytic": "eval_tau_analytic", "top1_target": "eval_top1_target"}


@dataclass(frozen=True)
class Kind:
    """A kind of drafter: its command in conf/, its settings, what trains it, and the file that is written last."""

    label: str
    command: str
    schema: type[Any]
    train: Callable[[Any], None]
    done: str
    overrides: tuple[str, ...]


KINDS = {
    "eesd": Kind("early exit", "eesd", EesdConfig, train_early_exit, META_FILE, ()),
    "small_lm": Kind(
        "small LM", "finetune_drafter", FinetuneConfig, finetune_drafter, TRAINING_FILE, ("drafter=tiny",)
    ),
}


def train(kind: Kind, out_dir: Path, overrides: list[str]) -> Any:
    """Train by the command's settings unless that is done already; returns the settings."""
    register(kind.command, kind.schema)
    config = build(kind.schema, compose_defaults(kind.command, [*overrides, f"out_dir={out_dir}"]))
    if not (out_dir / kind.done).exists():
        print("+", kind.command, *overrides, f"out_dir={out_dir}", flush=True)
        kind.train(config)
        gc.collect()  # what trains is part of cycles, and holds the models
    return config


def overrides_of(kind: Kind, objective: str, options: argparse.Namespace) -> list[str]:
    """What the command is told besides the number of steps. cross_entropy asks no teacher."""
    own = options.eesd if kind.command == "eesd" else options.small_lm
    given = [*COMMON, *kind.overrides, *options.both, *own, f"target={options.target}", f"objective={objective}"]
    given += ["teacher=online"] if objective == "cross_entropy" else []
    return list({one.partition("=")[0]: one for one in given}.values())  # the last one of a name counts


def steps_of(kind: Kind, overrides: list[str], minutes: float, out_dir: Path) -> int:
    """Optimizer steps that take about `minutes` here, by a short training that is kept in `out_dir`."""
    timing = [f"fit.steps={LINES * TIMED}", f"fit.log_every={TIMED}", "decode_prompts=1", "decode_tokens=2"]
    config = train(kind, out_dir, [one for one in overrides if not one.startswith("decode_")] + timing)
    rates = [line["tokens_per_s"] for line in steps_in(out_dir)]
    tokens = config.fit.batch_rows * config.seq_len
    return max(1, int(60 * minutes * statistics.median(rates[1:]) / tokens))


def measured(kind: Kind, objective: str, options: argparse.Namespace) -> dict[str, Any]:
    """One drafter: trained, and what its last evaluation says."""
    overrides, out_dir = overrides_of(kind, objective, options), options.out / f"{kind.command}_{objective}"
    steps = steps_of(kind, overrides, options.minutes, out_dir.with_name(f"{out_dir.name}_timed"))
    config = train(kind, out_dir, [*overrides, f"fit.steps={steps}"])
    per_step, lines = config.fit.batch_rows * config.seq_len, steps_in(out_dir)
    evaluated = [line for line in log_of(out_dir) if "eval_tau" in line][-1]
    pairs = itertools.pairwise([{"step": 0}, *lines])
    seconds = [(line["step"] - before["step"]) * per_step / line["tokens_per_s"] for before, line in pairs]
    return {
        "drafter": kind.label,
        "objective": objective,
        "teacher": config.teacher if config.distils else None,
        "steps": steps,
        "tokens": steps * per_step,  # places in rows: padding too
        "minutes": sum(seconds) / 60,  # of steps, without evaluations
        **{name: evaluated.get(key) for name, key in WATCHED.items()},
    }


def steps_in(out_dir: Path) -> list[dict[str, Any]]:
    """The log's lines of training steps; where a run was begun again, the last ones."""
    return list({line["step"]: line for line in log_of(out_dir) if "tokens_per_s" in line}.values())


def log_of(out_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out_dir / LOG_FILE).read_text().splitlines()]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| drafter | objective | steps | tokens seen | minutes | τ, decoded | τ, analytic | agreement, top 1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = " | ".join("–" if row[name] is None else f"{row[name]:.3f}" for name in WATCHED)
        lines.append(
            f"| {row['drafter']} | {row['objective']} | {row['steps']} | {row['tokens']} | {row['minutes']:.2f} | "
            f"{figures} |"
        )
    return "\n".join(lines) + "\n"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--minutes", type=float, required=True, help="of training steps, for each drafter")
    parser.add_argument("--out", type=Path, default=Path("runs/objectives"))
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--both", nargs="*", default=[], help="options of both commands, e.g. data=… teacher=cached")
    parser.add_argument("--eesd", nargs="*", default=[], help="options of train/eesd.py alone")
    parser.add_argument("--small-lm", nargs="*", default=[], help="options of train/finetune_drafter.py alone")
    parser.add_argument("--note", default="", help="kept in the JSON, e.g. what else the machine was doing")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    asked = {key: getattr(options, key) for key in ("target", "minutes", "both", "eesd", "small_lm")}
    made_for = require_writable(options.out) / "settings.json"
    if made_for.exists() and json.loads(made_for.read_text()) != {**asked, "common": COMMON}:
        sys.exit(f"error: out={options.out}: holds drafters of other settings; choose another --out")
    write_json(made_for, {**asked, "common": COMMON})
    rows = [measured(kind, objective, options) for kind in KINDS.values() for objective in options.objectives]
    facts = {"command": shlex.join(["python", "benchmarks/compare_objectives.py", *arguments]), **asked}
    facts |= {"common": COMMON, "note": options.note, "machine": describe_machine(), "made_with": provenance()}
    write_json(options.out / "compare_objectives.json", {**facts, "rows": rows})
    write_atomically(options.out / "compare_objectives.md", table(rows).encode())
    print(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
