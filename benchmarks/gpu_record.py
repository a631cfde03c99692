"""Everything that a GPU can tell in ten minutes, in one command that can be stopped and repeated.

    python benchmarks/gpu_record.py --target runs/smollm2/fetch --prompts chat=mt_bench.jsonl --prompts code=mine.jsonl
    python benchmarks/gpu_record.py --rehearse --work /tmp/rehearsal     # all parts on tiny models, on a CPU

A part is a command with a time limit of its own. What it found is in WORK/gpu_record.json as soon as it ends, also if
it failed or was cut; the same command does the parts again that did not end well. The parts:

- tests: `pytest -m gpu`;
- smollm2: the target as it is in bfloat16, plain, `generate`, and every method with the shipped drafters;
- answers: answers a second.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.base.errors import UserError
from outrider.base.files import read_json, require_writable, write_atomically, write_json
from outrider.base.machine import describe_machine
from outrider.cli import report_crash
from outrider.commands.ending import report_errors
from outrider.draft_models.tiny.models import save_tiny_models

HERE = Path(__file__).parent
RECORD = "gpu_record.json"
METHODS = "eesd_fixed,early_exit/opt_tree_auto,vanilla,opt_tree_auto,gsd,mcsd,aded,ngrams,prompt_lookup"


@dataclass(frozen=True)
class Part:
    """A command of Python, its seconds at most, and the JSON file that it leaves; None: what it prints last counts."""

    name: str
    seconds: float
    words: Sequence[str]
    product: Path | None = None


def parts(options: argparse.Namespace) -> list[Part]:
    """All parts, in order."""
    work, tiny, chat = options.work, options.rehearse, options.target
    drafters = {kind: options.drafters / kind for kind in ("eesd", "small_lm", "trigrams")}
    if tiny:
        save_tiny_models(work / "models")
        drafters = dict(zip(drafters, (work / "models" / n for n in ("early_exit", "small_lm", "table")), strict=True))
        chat = shutil.copytree(work / "models/target", work / "models/chat", dirs_exist_ok=True)
        (chat / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}: {% endfor %}")
        prompts = work / "prompts.jsonl"
        write_atomically(prompts, b"".join(b'{"prompt": "number %d: "}\n' % number for number in range(8)))
        options.target, options.prompts = str(work / "models/target"), [f"texts={prompts}"]
    some = [word for given in options.prompts for word in ("--prompts", given)]
    first_prompts = options.prompts[0].partition("=")[2]
    size = ["max_new_tokens=8", "dtype=float32"] if tiny else ["max_new_tokens=128", "dtype=bfloat16"]

    def real(name: str, minutes: float, target: str, exit_at: Path, small: Path) -> Part:
        given = [f"target={target}", f"checkpoint={exit_at}", f"small_lm={small}", f"table={drafters['trigrams']}"]
        methods = "eesd_fixed,vanilla,ngrams" if tiny else METHODS
        limits = ["--minutes", f"{0.05 if tiny else minutes}", "--per-category", "2" if tiny else "4"]
        out = work / f"{name}.json"
        words = [str(HERE / "bench_real.py"), *given, f"method=[{methods}]", *size, "doctor=false", *some, *limits]
        return Part(name, 60 * minutes + 120, [*words, "--work", str(work / name), "--out", str(out)], out)

    answers = ["max_new_tokens=8", "batch_size=4"] if tiny else ["max_new_tokens=160", "batch_size=512"]
    found = work / "answers"
    gpu_tests = ["-m", "pytest", "-q", "-m", "gpu", "-n0", "-p", "no:cacheprovider"]
    return [
        Part("tests", 150, [*gpu_tests, *(["tests/test_gpu.py", "--collect-only"] if tiny else [])]),
        real("smollm2", 1.2, options.target, drafters["eesd"], drafters["small_lm"]),
        Part("answers", 300 if tiny else 60, [
            "-m", "outrider.cli", "generate-responses", f"target={chat}", "data=local", f"data.path={first_prompts}",
            "data.layout=prompts", "data.heldout_fraction=0", *answers, f"out_dir={found}", "resume=true",
        ], found / "summary.json"),
    ]  # fmt: skip


def run(part: Part, log: Path) -> dict[str, Any]:
    """Run a part to its end or its limit; what is recorded of it."""
    began = time.monotonic()
    with log.open("wb") as file:
        try:
            done = subprocess.run(
                [sys.executable, *part.words], stdout=file, stderr=subprocess.STDOUT, timeout=part.seconds, check=False
            )
            state = "done" if done.returncode == 0 else f"failed with status {done.returncode}"
        except subprocess.TimeoutExpired:
            state = f"cut after {part.seconds:.0f} s"
    there = part.product is not None and part.product.exists()
    result = json.loads(part.product.read_text()) if part.product is not None and there else None
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    return {
        "state": state,
        "seconds": time.monotonic() - began,
        "command": [*part.words],
        "said": last,
        "found": result,
    }


def record(options: argparse.Namespace) -> dict[str, Any]:
    """Do the parts that are not done. Raises `UserError` for inputs that are missing."""
    work = require_writable(options.work)
    options.device = "cpu" if options.rehearse else "cuda"
    if not options.rehearse and not (options.target and options.prompts and torch.cuda.is_available()):
        raise UserError("expected --target, --prompts and a GPU; or --rehearse")
    path = work / RECORD
    found: dict[str, Any] = read_json(path, "record", "remove it") if path.exists() else {}
    found["machine"] = describe_machine()
    for part in parts(options):
        if found.get(part.name, {}).get("state") != "done":
            print(f"part={part.name} seconds_at_most={part.seconds:.0f}", flush=True)
            found[part.name] = run(part, work / f"{part.name}.log")
            write_json(path, found)
        done = found[part.name]
        print(f"part={part.name} state='{done['state']}' seconds={done['seconds']:.1f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="SmolLM2-135M-Instruct: a directory or a GGUF file")
    parser.add_argument("--prompts", action="append", default=[], metavar="NAME=FILE", help="of a kind; repeatable")
    parser.add_argument("--drafters", type=Path, default=HERE.parent / "drafters/smollm2")
    parser.add_argument("--work", type=Path, default=Path("runs/gpu_record"))
    parser.add_argument("--rehearse", action="store_true", help="everything tiny, on a CPU")
    options = parser.parse_args()
    with report_errors("the same command"):
        found = record(options)
    failed = [name for name, part in found.items() if "state" in part and part["state"] != "done"]
    print(f"gpu_record out={options.work / RECORD} failed={','.join(failed) or 'none'}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    with report_crash():  # status 1 says what was found
        main()
