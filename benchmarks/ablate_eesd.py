"""EESD's ablation table (the paper's Table 4) on a target of yours, from nothing but that target.

    python benchmarks/ablate_eesd.py --target runs/demo/target --out runs/ablation

Runs the commands a user would run, each skipped if it is done: responses of the target, three drafters (self-distilled,
open data only, no exit layer), a calibration head for the first, and one evaluation per drafter, where the stop rules
are arms of the same run. Drafters are compared under Beta-TS, as in the paper. Ends with the table and writes
ablation.json and ablation.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from commands import run_command

from outrider.files import write_atomically, write_json

TRAIN = ["fit.epochs=null", "fit.optimizer=adamw", "fit.lr=2e-3", "fit.batch_rows=4", "fit.schedule=linear",
         "fit.warmup=20", "fit.eval_every=null", "seq_len=512", "eval_rows=16", "exit_layer=1",
         "fit.log_every=50", "fit.wandb.mode=disabled", "objective=cross_entropy"]  # fmt: skip
# name of the row → (drafter, method); "–" rows of the paper's table are what is left out
ROWS = {
    "EESD, calibrated": ("self_distilled", "eesd_cali"),
    "EESD, Beta": ("self_distilled", "eesd_beta"),
    "– Thompson sampling (K = 10)": ("self_distilled", "eesd_fixed"),
    "– exit layer (norm and head only)": ("no_layer", "eesd_beta"),
    "– self-distillation (open data only)": ("open_data", "eesd_beta"),
    "– sampling prediction": ("self_distilled", "eesd_cali_model"),
    "– model prediction": ("self_distilled", "eesd_cali_sample"),
}


def run_all(target: str, out: Path, steps: int, prompts: int, split: int) -> dict[str, Any]:
    """Everything the table needs; the reports by drafter and method. split: see `run_command`.

    Training reads a few layers only, and is one process.
    """
    responses = out / "responses"
    run_command(
        "data_prep/generate_responses.py", responses, "summary.json", f"target={target}",
        "data=python_stdlib", "max_new_tokens=384", "resume=true", split=split,
    )  # fmt: skip
    mixed = ["data=self_distillation", "data@data.mix.open=python_stdlib",
             f"data.mix.generated.path={responses}/responses-*.jsonl"]  # fmt: skip
    drafters = {
        "self_distilled": mixed,
        "open_data": ["data=python_stdlib"],
        "no_layer": [*mixed, "train_layer=false"],
    }
    reports: dict[str, Any] = {}
    for name, overrides in drafters.items():
        folder = out / name
        run_command("train/eesd.py", folder, "drafter.json", f"target={target}", f"fit.steps={steps}", *TRAIN,
                    *overrides, "resume=true")  # fmt: skip
        methods = sorted({method for drafter, method in ROWS.values() if drafter == name})
        if any(method.startswith("eesd_cali") for method in methods):
            run_command("train/calibrate.py", out / f"{name}_head", "calibration.json", f"checkpoint={folder}",
                        f"target={target}", "data=python_stdlib", "prompts=160", "heldout_prompts=32",
                        "fit.wandb.mode=disabled", "resume=true", split=split)  # fmt: skip
        fixed = ["methods.eesd_fixed.stop.max_draft=10"] if "eesd_fixed" in methods else []
        run_command("inference/evaluate_checkpoint.py", out / f"{name}_report", "report.json", f"checkpoint={folder}",
                    f"target={target}", f"num_prompts={prompts}", f"method=[{','.join(methods)}]", *fixed,
                    "resume=true", split=split)  # fmt: skip
        read = json.loads((out / f"{name}_report/report.json").read_text())
        reports[name] = {report["method"]: report for report in read.get("reports", [read])}
    return reports


def table(reports: dict[str, Any]) -> str:
    """The rows as Markdown."""
    lines = [
        "| | τ | v_d | r_d | HM | drafted/round | speed-up [95 %] | identical |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, (drafter, method) in ROWS.items():
        report = reports[drafter][method]
        low, high = report["speedup"]["ci95"]
        lines.append(
            f"| {row} | {report['tau']:.2f} | {report['acceptance_rate']:.2f} | {report['draft_share']:.2f} | "
            f"{100 * report['harmonic_mean']:.1f} | {report['drafted_tokens_per_round']:.2f} | "
            f"{report['speedup']['median']:.2f}× [{low:.2f}, {high:.2f}] | "
            f"{report['lossless']['identical']}/{report['lossless']['checked']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--split", type=int, default=1, help="processes that hold a target larger than one GPU")
    options = parser.parse_args()
    reports = run_all(options.target, options.out, options.steps, options.prompts, options.split)
    write_json(options.out / "ablation.json", {"rows": ROWS, "reports": reports})
    write_atomically(options.out / "ablation.md", table(reports).encode())
    print(table(reports))


if __name__ == "__main__":
    main()
