"""What pays for a drafter: every objective, for an early exit and for a small LM, each trained for as long.

    python benchmarks/compare_objectives.py --target runs/demo/target --minutes 5 --out runs/objectives
    python benchmarks/compare_objectives.py --target T --minutes 20 --both data=local data.path='R/responses-*.jsonl' \
        teacher=cached --eesd exit_layer=3 train_head=false

Trains by the settings of the commands train/eesd.py and train/finetune_drafter.py, in this process; what is done
already is kept. Each is trained with minutes=…, which times a few steps first and fixes their number. No step is
chosen by an evaluation: the end of each training counts. On its held-out rows: τ of real decoding at draft length 4,
greedy; the analytic τ, of sampling at temperature 1 by the whole target's law; the agreement with the target's argmax.
Ends with the table and writes compare_objectives.json and compare_objectives.md.
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from trainings import COMMON, KINDS, Kind, log_of, require_same, train, trained_for

from draft_models.checkpoint import provenance
from outrider.files import write_atomically, write_json
from outrider.machine import describe_machine
from train.settings import OBJECTIVES

WATCHED = {"tau": "eval_tau", "tau_analytic": "eval_tau_analytic", "top1_target": "eval_top1_target"}


def measured(kind: Kind, objective: str, options: argparse.Namespace) -> dict[str, Any]:
    """One drafter: trained, and what its last evaluation says. cross_entropy asks no teacher."""
    own = options.eesd if kind.command == "eesd" else options.small_lm
    out_dir = options.out / f"{kind.command}_{objective}"
    overrides = [*options.both, *own, f"target={options.target}", f"objective={objective}"]
    overrides += [f"minutes={options.minutes}", *(["teacher=online"] if objective == "cross_entropy" else [])]
    config, known = train(kind, out_dir, *overrides), trained_for(out_dir)
    evaluated = [line for line in log_of(out_dir) if "eval_tau" in line][-1]
    return {
        "drafter": kind.label,
        "objective": objective,
        "teacher": config.teacher if config.distils else None,
        **known,  # minutes of steps, without evaluations
        "tokens": known["steps"] * config.fit.batch_rows * config.seq_len,  # places in rows: padding too
        **{name: evaluated.get(key) for name, key in WATCHED.items()},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| drafter | objective | steps | tokens seen | minutes of steps | of all | τ, decoded | τ, analytic | top 1 |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        figures = " | ".join("–" if row[name] is None else f"{row[name]:.3f}" for name in WATCHED)
        lines.append(
            f"| {row['drafter']} | {row['objective']} | {row['steps']} | {row['tokens']} | {row['minutes']:.2f} | "
            f"{spent_of(row)} | {figures} |"
        )
    return "\n".join(lines) + "\n"


def spent_of(row: dict[str, Any]) -> str:
    """The minutes that a training took, evaluations and checkpoints included."""
    spent = row.get("minutes_spent")
    return "–" if spent is None else f"{spent:.2f}"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--minutes", type=float, required=True, help="of training steps, for each drafter")
    parser.add_argument("--out", type=Path, default=Path("runs/objectives"))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of drafters")
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--both", nargs="*", default=[], help="options of both commands, e.g. data=… teacher=cached")
    parser.add_argument("--eesd", nargs="*", default=[], help="options of train/eesd.py alone")
    parser.add_argument("--small-lm", nargs="*", default=[], help="options of train/finetune_drafter.py alone")
    parser.add_argument("--note", default="", help="kept in the JSON, e.g. what else the machine was doing")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    asked = {key: getattr(options, key) for key in ("target", "minutes", "both", "eesd", "small_lm")}
    require_same(options.out, asked)
    rows = [measured(KINDS[kind], objective, options) for kind in options.kinds for objective in options.objectives]
    facts = {"command": shlex.join(["python", "benchmarks/compare_objectives.py", *arguments]), **asked}
    facts |= {"common": COMMON, "note": options.note, "machine": describe_machine(), "made_with": provenance()}
    write_json(options.out / "compare_objectives.json", {**facts, "rows": rows})
    write_atomically(options.out / "compare_objectives.md", table(rows).encode())
    print(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
