"""Train the drafters of drafters/smollm2 on a GPU: the target's own prompts, its answers, an early exit and a small LM.

    python benchmarks/smollm2_drafters.py --target runs/smollm2/fetch --prompts maths=gsm8k_train.jsonl

Most prompts are the target's own: after the template's words before a user's turn, a chat model writes what users
ask it (Magpie, arXiv 2406.08464). So no kind of text is chosen by hand. `--prompts` adds kinds that such a small model
rarely asks for. Answers are greedy, then sampled for the rest of their minutes. Every step resumes where it stopped.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from categories import read_categories
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.base.files import write_atomically

HERE = Path(__file__).parent.parent
MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
SHARED = [
    "objective=forward_kl", "teacher=online", "draft_vocabulary=8192", "frozen_dtype=fast", "fit.precision=fast",
    "seq_len=512", "decode_prompts=16", "decode_tokens=64", "fit.batch_rows=32", "fit.epochs=null",
    "fit.steps=1000000", "fit.optimizer=muon", "fit.muon_lr=0.02", "fit.lr=0.004", "fit.warmup=0",
    "fit.schedule=linear", "fit.eval_every=null", "fit.save_every=300", "data=responses", "data.heldout_fraction=0.01",
]  # fmt: skip
TRAININGS = {
    "eesd": ["exit_layer=2", "train_head=false", "eval_rows=64"],
    "small_lm": [
        "drafter=tiny", "drafter.layers=2", "drafter.hidden=256", "drafter.intermediate=704", "drafter.tied=true",
    ],
}  # fmt: skip
COMMANDS = {"eesd": "train/eesd.py", "small_lm": "train/finetune_drafter.py"}


def own_prompts(target: str, count: int, batch: int, device: str) -> Iterator[str]:
    """Users' turns as the target writes them, each once; such as end by themselves within 128 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).to(device).eval()
    turn = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    before, after = turn.split(MARK)
    start = tokenizer(before, add_special_tokens=False, return_tensors="pt").input_ids.to(device)
    end = tokenizer(after.strip(), add_special_tokens=False).input_ids[0]
    torch.manual_seed(0)
    seen: set[str] = set()
    for _ in range(4 * count // batch + 1):
        written = model.generate(
            start.expand(batch, -1), attention_mask=torch.ones_like(start).expand(batch, -1), do_sample=True,
            temperature=0.9, top_k=0, top_p=1.0, max_new_tokens=128, eos_token_id=end, pad_token_id=end,
        )  # fmt: skip
        for row in written[:, start.shape[1] :].tolist():
            text = tokenizer.decode(row[: row.index(end)]).strip() if end in row else ""
            key = " ".join(text.lower().split())
            if len(text) >= 16 and key not in seen:
                seen.add(key)
                yield text
                if len(seen) == count:
                    return


def write_prompts(options: argparse.Namespace, path: Path) -> None:
    """Write all prompts in one random order, so that any part of them has every kind."""
    asked = [prompt.turns[0] for prompt in read_categories(options.prompts, 10**6)] if options.prompts else []
    texts = [*own_prompts(options.target, options.own, options.batch, options.device), *asked]
    random.Random(0).shuffle(texts)
    write_atomically(path, b"".join(json.dumps({"turns": [text]}).encode() + b"\n" for text in texts))


def run(script: str, *words: str) -> None:
    began = time.monotonic()
    subprocess.run([sys.executable, str(HERE / script), *words, "resume=true"], check=True)
    print(f"step={script} seconds={time.monotonic() - began:.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", action="append", default=[], metavar="NAME=FILE", help="of a kind; repeatable")
    parser.add_argument("--work", type=Path, default=Path("runs/smollm2_drafters"))
    parser.add_argument("--own", type=int, default=40_000, help="prompts that the target writes itself")
    parser.add_argument("--batch", type=int, default=4096, help="prompts that it writes at once")
    parser.add_argument("--answers", type=float, nargs=2, default=(2.5, 1.0), help="minutes: greedy, sampled")
    parser.add_argument("--answer-batch", type=int, default=640)
    parser.add_argument("--minutes", type=float, default=4.3, help="of each training")
    parser.add_argument("--only", nargs="+", choices=["prompts", "answers", *TRAININGS], help="do these steps alone")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("overrides", nargs="*", help="of both trainings")
    options = parser.parse_args()
    steps, work = options.only or ["prompts", "answers", *TRAININGS], options.work
    work.mkdir(parents=True, exist_ok=True)
    prompts = work / "prompts.jsonl"
    if "prompts" in steps and not prompts.exists():
        began = time.monotonic()
        write_prompts(options, prompts)
        print(f"step=prompts count={sum(1 for _ in prompts.open())} seconds={time.monotonic() - began:.0f}", flush=True)
    target, answers = f"target={options.target}", ["answers_greedy", "answers_sampled"]
    for name, minutes, temperature in zip(answers, options.answers, (0, 0.8), strict=True):
        if "answers" in steps and minutes:
            run(
                "data_prep/generate_responses.py", target, "data=local", f"data.path={prompts}", "data.layout=prompts",
                f"temperature={temperature}", "max_new_tokens=192", f"batch_size={options.answer_batch}",
                "shard_size=4096", f"minutes={minutes}", f"seed={temperature > 0:d}", f"out_dir={work / name}",
            )  # fmt: skip
    there = [name for name, minutes in zip(answers, options.answers, strict=True) if minutes]
    paths = ",".join(f"{work / name}/responses-*.jsonl" for name in there)
    for name in [name for name in TRAININGS if name in steps]:
        words = [*SHARED, *TRAININGS[name], f"minutes={options.minutes}", *options.overrides]
        run(COMMANDS[name], target, f"data.path=[{paths}]", *words, f"out_dir={work / name}")


if __name__ == "__main__":
    main()
