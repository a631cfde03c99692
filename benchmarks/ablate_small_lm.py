"""A small LM as a drafter, before and after fine-tuning: every objective, all weights and LoRA, from one start.

    python benchmarks/ablate_small_lm.py --target runs/demo/target --out runs/ablation_small_lm

Runs the commands a user would run, each skipped if it is done: a tiny drafter pretrained by cross-entropy, the start of
all others; one training for each row, of equally many steps on other rows of the text unless the row says so; and one
greedy evaluation for each on the same held-out prompts. No step is chosen by an evaluation: the end of each training
counts. τ is a function of the weights; seconds, of training and of decoding, hold for the machine as it was.
Ends with the table and writes ablation.json and ablation.md.
"""

import argparse
import json
import shlex
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from commands import run_command

from draft_models.checkpoint import provenance
from outrider.files import require_writable, write_atomically, write_json
from outrider.machine import describe_machine
from train.settings import OBJECTIVES

DRAWS = 2000  # of the bootstrap
BATCH_ROWS, SEQ_LEN, METHOD = 8, 256, "vanilla"
COMMON = [f"seq_len={SEQ_LEN}", f"fit.batch_rows={BATCH_ROWS}", "fit.epochs=null", "fit.schedule=linear",
          "fit.eval_every=null", "fit.save_every=200", "fit.log_every=20", "decode_prompts=4", "decode_tokens=32",
          "fit.wandb.mode=disabled", "resume=true"]  # fmt: skip
PRETRAIN = ["drafter=tiny", "objective=cross_entropy", "fit.optimizer=muon", "fit.muon_lr=0.02", "fit.lr=4e-3",
            "fit.warmup=0", "fit.seed=0"]  # fmt: skip
FINETUNE = ["drafter=pretrained", "fit.optimizer=adamw", "fit.warmup=0.05", "fit.seed=1"]
# Trained weights → what it takes; learning rates by the training loss of forward KL, the same for all objectives.
WEIGHTS = {"all": ["fit.lr=2e-3"], "LoRA": ["fit.lr=1e-2", "lora_rank=16"]}
START, SCRATCH = "start", "scratch"
LONGER = 8  # times the steps: about the seconds of a distillation, whose target is run along


@dataclass(frozen=True)
class Row:
    """One drafter of the table. `overrides` are of train/finetune_drafter.py, besides the steps."""

    label: str
    weights: str
    steps: int
    overrides: tuple[str, ...]


def plan(options: argparse.Namespace) -> dict[str, Row]:
    """The drafters by the name of their directory, the start first."""
    text, steps, both = ("data=python_stdlib",), options.steps, options.start_steps + options.steps
    cached = ("data=local", f"data.path={options.out / 'responses'}", "teacher=cached", "objective=forward_kl")

    def finetuned(label: str, weights: str, *overrides: str, longer: int = 1) -> Row:
        start = f"drafter.path={options.out / START}"
        return Row(label, weights, longer * steps, (*FINETUNE, start, *WEIGHTS[weights], *overrides))

    found = {
        START: Row("the start: cross-entropy from random weights", "all", options.start_steps, (*PRETRAIN, *text)),
        SCRATCH: Row("cross-entropy from random weights", "all", both, (*PRETRAIN, *text)),
    }
    for weights in WEIGHTS:
        for objective in OBJECTIVES:
            row = finetuned(objective.replace("_", " ").replace("kl", "KL"), weights, f"objective={objective}", *text)
            found[f"{objective}_{weights.lower()}"] = row
    cross_entropy, forward = "objective=cross_entropy", "objective=forward_kl"
    return found | {
        "on_policy": finetuned("forward KL, 20 % on-policy", "all", forward, "on_policy=0.2", *text),
        "cached": finetuned("forward KL, cached top 16 of its answers", "all", *cached),
        "longer": finetuned(f"cross entropy, {LONGER} × the steps", "all", cross_entropy, *text, longer=LONGER),
    }


def run_all(options: argparse.Namespace, rows: dict[str, Row]) -> None:
    """Train and evaluate every drafter that is not there yet."""
    target = f"target={options.target}"
    answers = ["data=python_stdlib", "max_new_tokens=128", "batch_size=64", "top_k_logits=16", "resume=true"]
    run_command("data_prep/generate_responses.py", options.out / "responses", "summary.json", target, *answers,
                split=options.split)  # fmt: skip
    for name, row in rows.items():
        run_command("train/finetune_drafter.py", options.out / name, "finetune_drafter.json", target, *COMMON,
                    f"fit.steps={row.steps}", *row.overrides, split=options.split)  # fmt: skip
        run_command("inference/evaluate_checkpoint.py", options.out / f"{name}_report", "report.json", target,
                    f"small_lm={options.out / name}", f"method=[{METHOD}]", f"num_prompts={options.prompts}",
                    f"max_new_tokens={options.tokens}", "compare_transformers=false", "resume=true",
                    split=options.split)  # fmt: skip


def jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tau_per_prompt(folder: Path) -> dict[str, float]:
    """τ of each prompt by its id, from an evaluation's generations.jsonl: tokens after the prefill's, by rounds."""
    lines = [line for line in jsonl(folder / "generations.jsonl") if line["arm"] == METHOD and line["accepted"]]
    return {line["id"]: (len(line["tokens"]) - 1) / len(line["accepted"]) for line in lines}


def mean_difference(after: dict[str, float], before: dict[str, float]) -> dict[str, Any]:
    """The mean over prompts of after − before, with its 95 % bootstrap interval over prompts."""
    values = torch.tensor([after[name] - before[name] for name in before], dtype=torch.float64)
    picks = torch.randint(len(values), (DRAWS, len(values)), generator=torch.Generator().manual_seed(0))
    ends = values[picks].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return {"mean": values.mean().item(), "ci95": ends.tolist(), "higher": int((values > 0).sum())}


def measured(out: Path, name: str, row: Row) -> dict[str, Any]:
    """A row's settings and figures; "versus_start" is what training has changed, prompt by prompt."""
    report = json.loads((out / f"{name}_report/report.json").read_text())
    log = [line for line in jsonl(out / name / "log.jsonl") if "loss" in line]
    after, before = tau_per_prompt(out / f"{name}_report"), tau_per_prompt(out / f"{START}_report")
    kept = ("tau", "acceptance_rate", "acceptance_by_position", "tokens_per_second", "speedup", "lossless")
    return {
        **asdict(row),
        "last_loss": log[-1]["loss"],  # of its own objective: not to be compared across them
        "seconds_per_step": statistics.median(BATCH_ROWS * SEQ_LEN / line["tokens_per_s"] for line in log),
        **{key: report[key] for key in kept},
        "versus_start": mean_difference(after, before),
        "tau_per_prompt": after,
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| objective | trained | steps | s/step | τ | τ − start's, per prompt [95 %] | higher on | accepted at 1 … 5 | "
        "speed-up [95 %] | identical |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        change, (low, high) = row["versus_start"], row["speedup"]["ci95"]
        (least, most), prompts = change["ci95"], len(row["tau_per_prompt"])
        compared = f"{change['mean']:+.2f} [{least:+.2f}, {most:+.2f}] | {change['higher']}/{prompts}"
        positions = " ".join(f"{place['accepted']:.2f}" for place in row["acceptance_by_position"])
        lines.append(
            f"| {row['label']} | {row['weights']} | {row['steps']} | {row['seconds_per_step']:.2f} | "
            f"{row['tau']:.2f} | {' | ' if name == START else compared} | {positions} | "
            f"{row['speedup']['median']:.2f}× [{low:.2f}, {high:.2f}] | "
            f"{row['lossless']['identical']}/{row['lossless']['checked']} |"
        )
    return "\n".join(lines) + "\n"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/ablation_small_lm"))
    parser.add_argument("--start-steps", type=int, default=250, help="of the start")
    parser.add_argument("--steps", type=int, default=200, help="of every fine-tuning")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--split", type=int, default=1, help="processes that hold a target larger than one GPU")
    parser.add_argument("--note", default="", help="kept in ablation.json, e.g. what else the machine was doing")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    rows = plan(options)
    asked = {"target": options.target, "prompts": options.prompts, "tokens": options.tokens}
    settings = {**asked, "common": COMMON, "rows": {name: asdict(row) for name, row in rows.items()}}
    made_for = require_writable(options.out) / "settings.json"
    if made_for.exists() and json.loads(made_for.read_text()) != json.loads(json.dumps(settings)):
        sys.exit(f"error: out={options.out}: holds drafters of other settings; choose another --out")
    write_json(made_for, settings)
    run_all(options, rows)
    found = {name: measured(options.out, name, row) for name, row in rows.items()}
    facts = {"command": shlex.join(["python", "benchmarks/ablate_small_lm.py", *arguments]), **asked, "common": COMMON}
    facts |= {"method": METHOD, "note": options.note, "machine": describe_machine(), "made_with": provenance()}
    write_json(options.out / "ablation.json", {**facts, "rows": found})
    write_atomically(options.out / "ablation.md", table(found).encode())
    print(table(found))


if __name__ == "__main__":
    main(sys.argv[1:])
