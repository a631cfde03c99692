"""Seconds of a drafter's loss in a training step, by the number of rows of logits that exist at a time.

    python benchmarks/bench_losses.py [--rows 1300] [--repeats 7] [--out results/losses_cpu.json]

Times forward and backward of a loss of hidden · weightᵀ, in bfloat16 with float32 weights as in training. There are two
heads: a small LM's over a draft vocabulary (256 → 8,192), and one over a whole vocabulary (576 → 49,152). The numbers
of rows take turns in one process; medians are reported. A loss on cached distributions has the 16 most probable tokens.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from draft_models.losses import linear_cross_entropy, linear_divergence, linear_topk_divergence, rows_at_once
from outrider.files import write_json
from outrider.machine import describe_machine

RESULTS = Path(__file__).parent / "results" / "losses_cpu.json"
HEADS = ((256, 8192), (576, 49152))
CHUNKS = (64, 128, 256, 512, 1024)
KNOWN = 16
Loss = Callable[[Tensor, Tensor, int], Tensor]  # of hidden states, the weight of a head, and rows at a time


def losses(rows: int, width: int, tokens: int) -> dict[str, Loss]:
    """The losses by name, on random targets."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(tokens, (rows,), generator=generator)
    taught = torch.randn(rows, width, generator=generator).bfloat16()
    head = (torch.randn(tokens, width, generator=generator) / width**0.5).bfloat16()
    ids = torch.randint(tokens // KNOWN, (rows, KNOWN), generator=generator)
    ids += torch.arange(KNOWN) * (tokens // KNOWN)  # no two alike
    logprobs = torch.randn(rows, KNOWN + 1, generator=generator).log_softmax(-1)
    known = (ids, logprobs[:, 1:], logprobs[:, 0].exp())
    return {
        "cross_entropy": lambda h, w, chunk: linear_cross_entropy(h, w, labels, chunk),
        "forward_kl, cached": lambda h, w, chunk: linear_topk_divergence(h, w, *known, labels, "forward_kl", chunk),
        "forward_kl": lambda h, w, chunk: linear_divergence(h, w, taught, head, labels, "forward_kl", chunk),
        "kl_tv": lambda h, w, chunk: linear_divergence(h, w, taught, head, labels, "kl_tv", chunk),
    }


def seconds_of(loss: Loss, hidden: Tensor, weight: Tensor, chunk: int) -> float:
    hidden.grad = weight.grad = None
    started = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(hidden, weight, chunk)
    value.backward()
    return time.perf_counter() - started


def measure(rows: int, width: int, tokens: int, repeats: int) -> dict[str, dict[int, float]]:
    """Seconds of a step's loss, by loss and by rows at a time."""
    hidden = torch.randn(rows, width).requires_grad_()
    weight = (torch.randn(tokens, width) / width**0.5).requires_grad_()
    found: dict[str, dict[int, float]] = {}
    for name, loss in losses(rows, width, tokens).items():
        taken: dict[int, list[float]] = {chunk: [] for chunk in CHUNKS}
        for turn in range(repeats + 1):
            for chunk in CHUNKS:
                seconds = seconds_of(loss, hidden, weight, chunk)
                if turn:  # the first is warm-up
                    taken[chunk].append(seconds)
        found[name] = {chunk: statistics.median(each) for chunk, each in taken.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1300, help="supervised positions of a step")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    heads = []
    for width, tokens in HEADS:
        seconds = measure(given.rows, width, tokens, given.repeats)
        chosen = rows_at_once(tokens, torch.device("cpu"))
        heads.append({"width": width, "tokens": tokens, "chosen": chosen, "seconds": seconds})
        print(f"\n{width} → {tokens}, {given.rows} rows: ms by rows at once\n| loss | {' | '.join(map(str, CHUNKS))} |")
        print("|---" * (1 + len(CHUNKS)) + "|")
        for name, by_chunk in seconds.items():
            print(f"| {name} | {' | '.join(f'{1000 * by_chunk[chunk]:.0f}' for chunk in CHUNKS)} |")
    write_json(given.out, {"machine": describe_machine(), "rows": given.rows, "heads": heads})


if __name__ == "__main__":
    main()
