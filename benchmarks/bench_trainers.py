"""The same drafter, answers and minutes by every trainer: what it learns from, and what that gives as a drafter here.

    python benchmarks/bench_trainers.py --target runs/smollm2/fetch --answers 'runs/answers/responses-*.jsonl' \
        --prompts chat=mt_bench.jsonl --prompts maths=gsm8k.jsonl --minutes 5 \
        --python trl=/tmp/trl/bin/python --python speculators=/tmp/speculators/bin/python

Small LMs of one shape by `outrider finetune-drafter` on the text, also with a draft vocabulary, and by TRL's
SFTTrainer. EAGLE-3 heads by `outrider eagle3` and by `speculators train`, from states of the target in files. SpecForge
0.2 is left out: its loss is a Triton kernel.

Every arm has the same documents, token for token. A peer has its defaults, and of two learning rates that with the
lower loss in the last 10 of --trial-steps. Its first steps are not counted; ours are. --work keeps what is done.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_real import write_entry
from categories import read_categories
from record_raw import judged_trainers
from record_tables import trainers
from torch import Tensor

import outrider
from outrider.base.errors import require
from outrider.base.files import require_writable, write_json
from outrider.base.machine import describe_machine
from outrider.commands import reported
from outrider.data_prep.text.rows import load_rows
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.early_exit.checkpoint import provenance
from outrider.draft_models.losses import IGNORE
from outrider.draft_models.small_lm.model import load_small_lm
from outrider.draft_models.targets.open_target import OpenTarget, open_target
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.core.rounds import Generation, collect
from outrider.train.parts.heldout import WATCHED_DRAFT, supervised_hidden

HERE = Path(__file__).parent
SEQ_LEN, ROWS, HEAD_ROWS, STEPS = 512, 4, 2, 4  # tokens of a row here; rows of a batch; steps a head unrolls
SHAPE = {"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 704,
         "tie_word_embeddings": True, "max_position_embeddings": 2048}  # fmt: skip
RATES = (1e-3, 3e-3)  # what peers try
PEERS = {"trl_sft": "trl", "speculators_eagle3": "speculators"}
TEXT = ["objective=cross_entropy"]
OURS = {"outrider": TEXT, "outrider_some": TEXT, "outrider_eagle3": [], "outrider_eagle3_keep": ["keep=0.8"]}
HEADS = [name for name in (*OURS, *PEERS) if "eagle3" in name]
Json = dict[str, Any]


def documents(options: argparse.Namespace, target: OpenTarget, name: str, most: int | None) -> float:
    """Write the documents of the rows here to a file, for peers; returns the supervised tokens of a row."""
    held = options.heldout_fraction
    data = DataConfig(source="local", path=(options.answers,), max_records=most, heldout_fraction=held)
    rows, found = load_rows(data, target.tokenizer, SEQ_LEN, "train"), list[Json]()
    for row in (rows[place] for place in range(len(rows))):
        for each in row["documents"].unique()[row["documents"].unique() >= 0]:
            ids = row["input_ids"][own := row["documents"] == each]
            marked = torch.cat([torch.tensor([False]), row["labels"][own][:-1] != IGNORE])
            labels = torch.where(marked, ids, IGNORE).tolist()
            one = {"input_ids": ids.tolist(), "completion_mask": marked.int().tolist(), "labels": labels, "prompt": ""}
            found += [one] if bool(marked.any()) else []
    (options.work / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
    return sum(sum(one["completion_mask"]) for one in found) / len(rows)


def ran(words: Sequence[object], threads: int, log: Path, **own: str) -> Json:
    """Run a command; its seconds and its peak memory in MB. Raises `UserError` with its last words."""
    environment = {**os.environ, "OMP_NUM_THREADS": f"{threads}", "HF_HUB_OFFLINE": "1", **own}
    began = time.perf_counter()
    with log.open("w") as said:
        process = subprocess.Popen([*map(str, words)], stdout=said, stderr=subprocess.STDOUT, env=environment)
        _, status, used = os.wait4(process.pid, 0)
    require(status == 0, "command", str(words[2]), f"one that ends well; {log}: {log.read_text()[-600:]}")
    return {"command_seconds": time.perf_counter() - began, "peak_megabytes": used.ru_maxrss / 1024}


def here(name: str, options: argparse.Namespace, out: Path, *limit: str) -> Json:
    """Train an arm by Outrider."""
    head, rows = name in HEADS, HEAD_ROWS if name in HEADS else ROWS
    words = [f"target={options.target}", "data=local", f"data.path={options.answers}", f"seq_len={SEQ_LEN}", *limit]
    words += ["fit.optimizer=muon", "fit.warmup=0.03", "fit.log_every=5", f"fit.batch_rows={rows}", "fit.epochs=null"]
    words += [*OURS[name], f"out_dir={out}", "decode_prompts=8", "resume=true", f"fit.lr={2e-3 if head else 4e-3}"]
    words += [f"data.heldout_fraction={options.heldout_fraction}"]
    words += [f"draft_vocabulary={options.draft_vocabulary}"] * (name in (*HEADS, "outrider_some"))
    if head:
        words += [f"features={options.work / f'features_{name}'}", f"data.max_records={options.head_answers}"]
        words += ["eval_rows=8", f"draft_steps={STEPS}"]
    else:
        words += [f"drafter.{one}" for one in ("tied=true", "layers=2", "hidden=256", "heads=4", "intermediate=704")]
    command = "eagle3" if head else "finetune-drafter"
    spent = ran([sys.executable, "-m", "outrider.cli", command, *words], options.threads, out / "words.txt")
    record = json.loads((out / f"{command.replace('-', '_')}.json").read_text())
    curve, seconds, before = list[tuple[float, float]](), 0.0, 0
    for line in map(json.loads, (out / "log.jsonl").open()):
        if "tokens_per_s" in line:
            seconds += (line["step"] - before) * rows * SEQ_LEN / line["tokens_per_s"]
            curve, before = [*curve, (seconds, line["loss"])], line["step"]
    return {**spent, "seconds": record["training_seconds"], "steps": record["steps"], "curve": curve,
            "supervised": record["steps"] * rows * options.per_row[head]}  # fmt: skip


def by_peer(name: str, options: argparse.Namespace, out: Path, rate: float, limit: Json) -> Json:
    """Train an arm by a peer, in its own environment, unless that is done."""
    if not (out / "spent.json").exists():
        pythons = dict(one.split("=", 1) for one in options.python)
        require(PEERS[name] in pythons, "python", options.python, f"{PEERS[name]}=FILE for {name}; or other --arms")
        job = {"trainer": name, "target": options.target, "out": str(out), "lr": rate, "limit": limit, "batch": 8,
               "documents": str(options.work / f"{'heads' if name in HEADS else 'small'}.jsonl"), "steps": STEPS,
               "states": str(options.work / "states"), "batch_tokens": HEAD_ROWS * SEQ_LEN, "seq_len": SEQ_LEN,
               "draft_vocabulary": options.draft_vocabulary, "shape": SHAPE,
               "packages": ["torch", "transformers", PEERS[name]]}  # fmt: skip
        write_json(require_writable(out) / "job.json", job)
        words = [pythons[PEERS[name]], HERE / "trainer_peers.py", out / "job.json"]
        write_json(out / "spent.json", ran(words, options.threads, out / "words.txt", PYTHONPATH=""))
    spent, found = (json.loads((out / f"{file}.json").read_text()) for file in ("spent", "trained"))
    return {**spent, **found, "rate": rate}


def trained(name: str, options: argparse.Namespace) -> Json:
    """What the training of an arm tells; it is done unless --work has it."""
    out = options.where(name)
    if not (file := out / "arm.json").exists():
        require_writable(out)
        if name in OURS:
            found = here(name, options, out, "fit.steps=1000000", f"minutes={options.minutes}")
        else:
            losses = dict[float, float]()
            for rate in RATES:
                tried = by_peer(name, options, options.work / f"{name}_{rate:g}", rate, {"steps": options.trial_steps})
                losses[rate] = float(np.mean([loss for _, loss in tried["curve"][-10:]]))
            best = min(losses, key=lambda rate: losses[rate])
            found = by_peer(name, options, out, best, {"seconds": 60 * options.minutes}) | {"trials": [*losses.items()]}
        write_json(file, found)
    kept: Json = json.loads(file.read_text())
    return kept


def decoded(name: str, options: argparse.Namespace, prompts: Sequence[list[int]]) -> list[Generation]:
    """The texts after `prompts` with drafts of `WATCHED_DRAFT` tokens."""
    kind, method = ("eagle3", "eagle3") if name in HEADS else ("small_lm", "vanilla")
    own = replace(preset := outrider.preset(method), stop=replace(preset.stop, max_draft=WATCHED_DRAFT))
    where: Any = {kind: str(options.where(name))}
    model = outrider.load(options.target, method=own, dtype="float32", **where)
    return [collect(model.rounds(prompt, max_new_tokens=options.new_tokens)) for prompt in prompts]


@torch.no_grad()
def surprise(folder: str, target: OpenTarget, texts: Sequence[tuple[list[int], int]]) -> Json:
    """The cross-entropy of the target's answers by a small LM, over the tokens that it can propose; and their share.

    texts: the ids of prompt and answer, and the prompt's length.
    """
    found, lm = list[Tensor](), load_small_lm(folder, target.tokenizer, dtype=torch.float32)
    assert isinstance(lm, LayerStack)
    for ids, begin in texts:
        row, place = torch.tensor([ids]), torch.arange(len(ids))[None]
        labels = torch.where((place + 1 >= begin) & (place + 1 < len(ids)), row.roll(-1), IGNORE)
        batch = {"input_ids": row, "labels": labels, "positions": place, "documents": torch.zeros_like(row)}
        logits = LayerStack.logits_after_norm(lm, supervised_hidden(lm, batch))
        found.append(logits.log_softmax(-1).gather(1, labels[labels != IGNORE][:, None])[:, 0])
    known = (said := torch.cat(found)) > torch.finfo(torch.float32).min / 8
    return {"cross_entropy": -said[known].mean().item(), "can_propose": known.float().mean().item()}


def record(options: argparse.Namespace) -> None:
    """Train what is not trained yet, measure every arm and write --out. Raises `UserError`."""
    target = open_target(options.target)
    require_writable(options.work)
    options.where = lambda name: options.work / f"{name}_{options.minutes:g}"
    options.per_row = [documents(options, target, *of) for of in (("small", None), ("heads", options.head_answers))]
    arms = {name: trained(name, options) for name in options.arms}
    texts = [one.turns[0] for one in read_categories(options.prompts, options.per_category)]
    talks = [[{"role": "user", "content": text}] for text in texts]
    every: Any = [target.tokenizer.apply_chat_template(t, add_generation_prompt=True, return_dict=False) for t in talks]
    prompts = [one for one in every if len(one) <= SEQ_LEN]
    made = {name: decoded(name, options, prompts) for name in arms}
    first, *others = ([one.tokens for one in each] for each in made.values())
    require(all(each == first for each in others), "dtype", "float32", "one text whatever drafts")
    answers = [([*prompt, *text], len(prompt)) for prompt, text in zip(prompts, first, strict=True)]
    for name, each in made.items():
        arms[name]["rounds"] = [[(len(r.tokens), r.depth, r.accepted) for r in one.rounds] for one in each]
        arms[name] |= {} if name in HEADS else surprise(str(options.where(name)), target, answers)
    told = ("target", "answers", "prompts", "minutes", "threads", "trial_steps", "head_answers", "new_tokens")
    entry = {"machine": describe_machine("cpu"), "made_with": provenance(), "measured_prompts": len(prompts)}
    entry |= {key: getattr(options, key) for key in told} | {"arms": judged_trainers(arms)}
    write_entry(options.out, f"{options.minutes:g} minutes{options.label}", entry)
    print(trainers(entry))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="a folder of a chat model")
    parser.add_argument("--answers", required=True, help="its recorded answers, a file or a pattern")
    parser.add_argument("--prompts", action="append", metavar="NAME=FILE", required=True, help="several times")
    parser.add_argument("--per-category", type=int, default=10, help="prompts of each file, without those too long")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--python", action="append", default=[], metavar="PEER=FILE", help="trl=…, speculators=…")
    parser.add_argument("--arms", nargs="+", choices=[*OURS, *PEERS], default=[*OURS, *PEERS])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--label", default="", help="what the entry's name has after its minutes")
    parser.add_argument("--trial-steps", type=int, default=60, help="of each learning rate of a peer")
    parser.add_argument("--head-answers", type=int, default=400, help="records that the heads learn from")
    parser.add_argument("--heldout-fraction", type=float, default=0.05, help="of the answers: no arm learns from them")
    parser.add_argument("--draft-vocabulary", type=int, default=8192, help="tokens of the heads and of one small LM")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("runs/trainers"))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "trainers_cpu.json")
    with reported():
        record(parser.parse_args())


if __name__ == "__main__":
    main()
