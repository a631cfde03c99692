"""A small LM that drafts in one pass against a chain, in equal minutes of training: τ on held-out prompts.

    python benchmarks/one_pass.py --target runs/smollm2/fetch --answers 'runs/answers/responses-*.jsonl' \
        --minutes 20 60 180 --work runs/one_pass --out one_pass.json

An arm is a training, or two that share the minutes (`ARMS`). Further words are options of all trainings, such as
teacher=cached. The same command continues a training that was stopped and does not repeat a finished one. --out has
the record and the log of the last training of each arm. Their τ is of drafts of four tokens, on the held-out prompts
that also choose the weights.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.base.files import write_json
from outrider.base.machine import describe_machine
from outrider.draft_models.small_lm.model import TRAINING_FILE

ALL = ("objective=forward_kl", "frozen_dtype=fast", "data=local", "data.heldout_fraction=0.15", "seq_len=512",
       "decode_prompts=24", "fit.batch_rows=8", "fit.epochs=null", "fit.steps=1000000", "fit.optimizer=muon",
       "fit.warmup=0.03", "fit.schedule=linear", "fit.eval_every=2000", "resume=true")  # fmt: skip
NEW = ("drafter=tiny", "drafter.tied=true", "drafter.layers=2", "drafter.hidden=256", "drafter.heads=4",
       "drafter.intermediate=704", "draft_vocabulary=8192", "fit.lr=0.004", "fit.muon_lr=0.02")  # fmt: skip
FINISHED = ("drafter=pretrained", "fit.lr=0.002", "fit.muon_lr=0.01")
CHAIN, ONE_PASS, CAT = (), ("parallel=4",), ("parallel=4", "position_weights=cat")
ARMS: Mapping[str, Sequence[Sequence[str]]] = {  # the options of each training of an arm
    "chain": (CHAIN,),
    "one_pass": (ONE_PASS,),
    "one_pass_from_chain": (CHAIN, ONE_PASS),
    "one_pass_cat_from_chain": (CHAIN, CAT),
}


def train_arm(arm: str, minutes: float, options: argparse.Namespace) -> dict[str, Any]:
    """Train a drafter for `minutes` in all. Arms share a chain of as many minutes."""
    trainings, start = ARMS[arm], None
    for number, words in enumerate(trainings, 1):
        name = arm if number == len(trainings) else "chain"
        folder = options.work / f"{name}_{minutes / len(trainings):g}_minutes"
        origin = NEW if start is None else (*FINISHED, f"drafter.path={start}")
        own_words = (f"target={options.target}", f"data.path={options.answers}", f"out_dir={folder}")
        limit = f"minutes={minutes / len(trainings):g}"
        command = ["-m", "outrider.cli", "finetune-drafter", *ALL, *origin, *own_words, limit, *words, *options.words]
        subprocess.run([sys.executable, *command], check=True)
        start = folder
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {"arm": arm, "minutes": minutes, "record": json.loads((folder / TRAINING_FILE).read_text()), "log": log}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--answers", required=True, help="files of generate-responses")
    parser.add_argument("--minutes", type=float, nargs="+", default=[20.0, 60.0, 180.0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["chain", "one_pass", "one_pass_cat_from_chain"])
    parser.add_argument("--work", type=Path, default=Path("runs/one_pass"))
    parser.add_argument("--out", type=Path, required=True)
    options, options.words = parser.parse_known_args()
    results = []
    for minutes in options.minutes:
        for arm in options.arms:
            results.append(train_arm(arm, minutes, options))
            write_json(options.out, {"machine": describe_machine(), "options": [*ALL, *options.words], "runs": results})
            metrics = results[-1]["record"]["metrics"]
            print(f"one_pass arm={arm} minutes={minutes:g} tau={metrics['tau']:.3f}", flush=True)


if __name__ == "__main__":
    main()
