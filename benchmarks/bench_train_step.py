"""EESD's training step against one that runs the whole target on the same batch: seconds and peak memory.

    python benchmarks/bench_train_step.py [target=runs/demo/target] [steps=8] [rows=4] [seq_len=512]

Both arms train the same exit layer, norm and head with AdamW; they differ in the frozen layers below it (the
first N, or all L as methods do that train heads on the target's last hidden states). Times come from one
process with the arms taking turns; memory from one fresh process per arm, as the peak over what the process
held before it opened the target.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.base.machine import describe_machine
from outrider.draft_models.early_exit.model import exit_layers
from outrider.draft_models.targets.open_target import open_target
from outrider.train.recipes.early_exit import EarlyExitStudent
from outrider.train.students.early_exit import default_exit_layer

RESULTS = Path(__file__).parent / "results" / "train_step_cpu.json"
DEEP = {
    "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 32,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 2048,
}  # fmt: skip


def make_student(source: str, arm: str) -> tuple[EarlyExitStudent, int, int]:
    """The student of one arm, the bytes read for it, and the frozen layers it runs."""
    target = open_target(source)
    exit_layer = default_exit_layer(target.config)
    layers: list[int] | None = exit_layers(target.config, exit_layer)
    if arm == "whole":
        exit_layer, layers = target.config.num_hidden_layers, None
    student = EarlyExitStudent(target.layers(layers, dtype=torch.bfloat16), exit_layer, train_head=True)
    return student, target.files.bytes_read, exit_layer


def steps_of(student: EarlyExitStudent, rows: int, seq_len: int) -> Iterator[float]:
    """Endless training steps on one random batch; yields the seconds of each."""
    optimizer = torch.optim.AdamW([p for p in student.parameters() if p.requires_grad], lr=1e-4, fused=True)
    vocabulary = student.stack.config.vocab_size
    ids = torch.randint(vocabulary, (rows, seq_len), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(seq_len).expand(rows, -1)
    while True:
        started = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            loss = student(ids, ids.roll(-1, 1), positions, torch.zeros_like(positions))["loss_sum"] / ids.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield time.perf_counter() - started


def memory(field: str) -> int:
    """VmRSS (bytes held now) or VmHWM (their peak since the last reset) of this process; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure_memory(source: str, arm: str, rows: int, seq_len: int) -> int:
    """Peak memory of two steps of `arm` over what the process held before it opened the target."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = memory("VmRSS")
    steps = steps_of(make_student(source, arm)[0], rows, seq_len)
    for _ in range(2):
        next(steps)
    return memory("VmHWM") - before


def compare(name: str, source: str, count: int, rows: int, seq_len: int) -> dict:
    """Both arms on one target: interleaved step times, memory, bytes read."""
    made = {arm: make_student(source, arm) for arm in ("eesd", "whole")}
    runs = {arm: steps_of(student, rows, seq_len) for arm, (student, _, _) in made.items()}
    seconds: dict[str, list[float]] = {arm: [] for arm in runs}
    for turn in range(count + 1):
        for arm, steps in runs.items():
            taken = next(steps)
            if turn:  # the first is warm-up
                seconds[arm].append(taken)
    ratios = [whole / eesd for whole, eesd in zip(seconds["whole"], seconds["eesd"], strict=True)]
    result: dict = {"target": name, "rows": rows, "seq_len": seq_len, "steps": count}
    for arm, (_, bytes_read, frozen) in made.items():
        here = [sys.executable, __file__, f"memory={arm}", f"target={source}", f"rows={rows}", f"seq_len={seq_len}"]
        peak = int(subprocess.run(here, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        result[arm] = {
            "frozen_layers": frozen,
            "bytes_read": bytes_read,
            "peak_bytes": peak,
            "median_seconds": statistics.median(seconds[arm]),
        }
    result["step_time_ratio"] = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    result["peak_memory_ratio"] = result["whole"]["peak_bytes"] / result["eesd"]["peak_bytes"]
    return result


def main() -> None:
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    rows, seq_len = int(options.get("rows", 4)), int(options.get("seq_len", 512))
    target = options.get("target", "runs/demo/target")
    if "memory" in options:
        print(measure_memory(target, options["memory"], rows, seq_len))
        return
    steps = int(options.get("steps", 8))
    results = [compare("toy target", target, steps, rows, seq_len)]
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**DEEP)).to(torch.bfloat16).save_pretrained(folder)
        results.append(compare("random, 32 layers × 512, vocabulary 32000", folder, steps, rows, seq_len))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": describe_machine(), "results": results}, indent=2) + "\n")
    print("| target | arm | frozen layers | read MB | step s | peak MB |\n|---|---|---|---|---|---|")
    for result in results:
        for arm in ("eesd", "whole"):
            r = result[arm]
            print(
                f"| {result['target']} | {arm} | {r['frozen_layers']} | {r['bytes_read'] / 1e6:.1f} | "
                f"{r['median_seconds']:.3f} | {r['peak_bytes'] / 1e6:.0f} |"
            )
        print(
            f"whole / eesd: step ×{result['step_time_ratio']['median']:.2f}, memory ×{result['peak_memory_ratio']:.2f}"
        )


if __name__ == "__main__":
    main()
