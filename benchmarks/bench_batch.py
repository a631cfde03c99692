"""One request, or many at once, beside what users run: tokens a second, time to the first token and latency.

    python benchmarks/bench_batch.py --target runs/smollm2/fetch --prompts chat=mt_bench.jsonl --in-flight 1 \
        --python vllm=.engines/vllm/bin/python --python openvino=.engines/openvino/bin/python \
        --openvino int8=runs/openvino_int8 --llama-server bin/llama-server --gguf Q8_0=q8_0.gguf --gguf Q4_K_M=q4.gguf

Peers are set as their users leave them: vLLM and OpenVINO GenAI (`make engines`), each in its own environment; a
`llama-server`; transformers, also compiled with a static cache. All of them decode after the same token ids, by default
greedily, with the target's weights, which --gguf and --openvino name as made for them. OpenVINO and transformers are
measured with one request at a time only.

Every arm answers a part of the prompts, a turn, in a process of its own, with every number of requests in flight: at
most --each prompts for each request. Every second turn has the arms in reverse order. The same command resumes a run
that was stopped, or whose --minutes are over (0: only the prompts are chosen). --out has the seconds of every request.
"""

import argparse
import fnmatch
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain, product
from pathlib import Path
from typing import Any

from bench_real import write_entry
from categories import read_categories
from record_raw import PLAIN, figures_of_requests
from record_tables import requests

from outrider.base.errors import UserError, require
from outrider.base.files import digest_of, read_json, require_writable
from outrider.base.machine import describe_machine
from outrider.commands.ending import report_errors
from outrider.draft_models.early_exit.checkpoint import provenance
from outrider.draft_models.targets.open_target import open_target
from outrider.inference.core.rounds import Generation
from outrider.inference.loading.target_setup import end_tokens
from outrider.inference.serving.engine_process import EngineProcess, start_engine

HERE = Path(__file__).parent
MAX_NGRAM = 3  # what look-ups compare
WARM = 64  # tokens of the prompts that warm up
# What an entry says of its run. One with other values begins anew.
ASKED = ("target", "prompts", "per_category", "prompt_tokens", "in_flight", "requests", "parts", "each", "new_tokens",
         "draft_tokens", "threads", "early_exit", "small_lm", "table", "ends", "talk", "temperature", "top_p",
         "note")  # fmt: skip
Json = dict[str, Any]


def jobs(options: argparse.Namespace) -> dict[str, Json]:
    """What the process of every arm is started with, by the arm's name."""
    shared: Json = {"target": options.target, "revision": None, "dtype": "bfloat16", "device": "cpu", "options": {}}
    shared |= {"context": options.prompt_tokens + options.new_tokens + 16, "most": max(options.in_flight)}
    every: dict[str, Json] = {"": {}, " prompt_lookup": {}, " ngrams": {"table": options.table}}
    every[" small_lm"] = {"small_lm": options.small_lm}
    every[" early_exit"] = {"source": options.early_exit, "target": options.target}
    ours = {name: own for name, own in every.items() if all(own.values())}
    found: dict[str, Json] = {"serve prompt_lookup": {"engine": "serve", "draft": {}}}
    for (kind, dtype), name in product({"": "bfloat16", " int8": "int8"}.items(), ours):
        own: Json = {"draft": {} if name else None, "options": ours[name]}
        found[f"{PLAIN}{kind}{name}"] = {"engine": PLAIN, "dtype": dtype, **own}
    lookup = {"method": "ngram", "tokens": options.draft_tokens, "max_ngram": MAX_NGRAM}
    for name, draft in (("", None), (" ngram", lookup)):
        found[f"vllm{name}"] = {"engine": "vllm", "draft": draft}
        if options.in_flight == [1]:  # the others take one request at a time
            found[f"transformers{name}"] = {"engine": "transformers", "draft": draft}
            own = {"engine": "openvino", "dtype": "default", "draft": draft}  # it chooses what it computes in
            found |= {f"openvino {kind}{name}": {**own, "target": at} for kind, at in pairs(options.openvino).items()}
            found["transformers compiled"] = {"engine": "compiled", "draft": None}
    drafts = {"": [], **{f" ngram-{one}": ["--spec-type", f"ngram-{one}"] for one in ("simple", "mod", "cache")}}
    size = ["--spec-ngram-simple-size-n", f"{MAX_NGRAM}", "--spec-ngram-simple-size-m", f"{options.draft_tokens}"]
    drafts[" ngram-simple"] += size  # its own defaults look for 12 tokens and draft 48
    if options.gguf_small_lm:
        drafts[" small_lm"] = ["--spec-type", "draft-simple", "--spec-draft-model", options.gguf_small_lm]
    for (kind, target), name in product(pairs(options.gguf).items(), drafts):
        own = {"server": options.llama_server, "words": ["--threads", f"{options.threads}", *drafts[name]]}
        found[f"llama.cpp {kind}{name}"] = {"engine": "llama.cpp", "target": target, "options": own, "draft": None}
    asked = {pattern: fnmatch.filter(found, pattern) for pattern in options.arms}
    require(all(asked.values()), "arms", options.arms, f"patterns of some of {sorted(found)}")
    return {name: {**shared, **found[name]} for name in found if name in {PLAIN, *chain(*asked.values())}}


def pairs(given: Sequence[str]) -> dict[str, str]:
    """NAME=FILE by name."""
    return dict(one.split("=", 1) for one in given)


def opened(options: argparse.Namespace, name: str, job: Mapping[str, Any]) -> AbstractContextManager[EngineProcess]:
    """The process of an arm."""
    python, own = pairs(options.python).get(job["engine"], sys.executable), {"OMP_NUM_THREADS": f"{options.threads}"}
    return start_engine(python, job, options.work / f"{name.replace(' ', '_')}.log", own, HERE / "batch_peers.py")


def ask(arm: EngineProcess, prompts: Sequence[Sequence[int]], in_flight: int, new_tokens: int, **how: Any) -> Any:
    """A generation for each prompt, and the seconds of them all. how: as the engine's worker reads it."""
    asked: Json = {"concurrency": in_flight, "max_new_tokens": new_tokens, "seeds": [*range(len(prompts))]}
    return arm.continue_prompts(prompts, {**asked, "eos": [], "temperature": 0, "sampling": {}, **how}, 0)


def choose(arm: EngineProcess, options: argparse.Namespace, eos: Sequence[int]) -> list[list[int]]:
    """The ids of the first --requests prompts that --ends allows. Raises `UserError` for too few."""
    tokenizer, found = open_target(options.target).tokenizer, list[list[int]]()
    for one in read_categories(options.prompts, options.per_category, options.talk):
        talk = list[Json]()
        for text in one.turns:
            talk.append({"role": "user", "content": text})
            ids: Any = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
            if len(ids) > options.prompt_tokens or len(found) == options.requests:
                break
            (said,), _ = ask(arm, [ids], 1, options.new_tokens, eos=eos)
            talk.append({"role": "assistant", "content": tokenizer.decode(said.tokens, skip_special_tokens=True)})
            found += [ids] if options.ends == "any" or len(said.tokens) == options.new_tokens else []
    require(len(found) == options.requests, "prompts", len(found), f"{options.requests} with long answers; give more")
    return found


def begun(options: argparse.Namespace, plain: Mapping[str, Any]) -> Json:
    """The entry that an earlier run like this left in --out; else a new one, for which prompts are chosen."""
    asked = {name: getattr(options, name) for name in ASKED}
    found: Any = read_json(options.out, "record", "give another --out") if options.out.exists() else {"entries": {}}
    entry: Json = found["entries"].get(options.entry, {})
    if {name: entry.get(name) for name in ASKED} == asked:
        return entry
    asked["eos"] = [] if options.ends == "ignored" else sorted(end_tokens(open_target(options.target)))
    with opened(options, PLAIN, plain) as arm:
        asked["prompt_ids"] = choose(arm, options, asked["eos"])
    return {"machine": describe_machine("cpu"), "made_with": provenance(), **asked, "versions": {}, "turns": []}


def measure(arm: EngineProcess, options: argparse.Namespace, entry: Mapping[str, Any], turn: int) -> Iterator[Json]:
    """A turn of an arm, with every number of requests in flight."""
    how = {"eos": entry["eos"], "temperature": options.temperature}
    how["sampling"] = {"top_p": options.top_p} if options.temperature else {}
    for count in options.in_flight:
        places = range(turn, len(entry["prompt_ids"]), options.parts)[: options.each * count]
        prompts = [entry["prompt_ids"][place] for place in places]
        ask(arm, [ids[-WARM:] for ids in prompts[:count]], count, 4, **how)
        answers, seconds = ask(arm, prompts, count, options.new_tokens, **how)
        found = [request(place, said) for place, said in zip(places, answers, strict=True)]
        yield {"turn": turn, "in_flight": count, "seconds": seconds, "requests": found}


def request(prompt: int, said: Generation) -> Json:
    """The tokens of an answer and those after its first step, a digest, and the seconds until that step and in all."""
    later, first = sum(len(each.tokens) for each in said.rounds), said.prefill_seconds
    counts = {"prompt": prompt, "tokens": len(said.tokens), "later": later, "text": digest_of([*said.tokens])[:12]}
    return {**counts, "first": first, "whole": first + said.decode_seconds}


def record(options: argparse.Namespace) -> None:
    """Measure what is left, write the entry after every arm, and print its table. Raises `UserError`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process is left
    require_writable(options.work)
    every, until = jobs(options), time.monotonic() + 60 * options.minutes
    entry = begun(options, every[PLAIN])
    write_entry(options.out, options.entry, {**entry, "arms": figures_of_requests(entry)})
    order = [(turn, name) for turn in range(options.parts) for name in [*every][:: (-1) ** turn]]
    for turn, name in order:
        ready = any((one["arm"], one["turn"]) == (name, turn) for one in entry["turns"])
        if ready or time.monotonic() > until:
            continue
        try:
            with opened(options, name, every[name]) as arm:
                entry["turns"] += [{"arm": name, **one} for one in measure(arm, options, entry, turn)]
                entry["versions"][name] = arm.version
        except UserError as error:
            entry["versions"][name] = str(error)
        write_entry(options.out, options.entry, {**entry, "arms": figures_of_requests(entry)})
        print(f"turn {turn}, {name}: {entry['versions'][name]}", flush=True)
    print(requests(entry := {**entry, "arms": figures_of_requests(entry)}))
    print(f"arms={len(entry['arms'])} of {len(every)} entry={options.entry} out={options.out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="a folder of safetensors, of a chat model")
    parser.add_argument("--prompts", action="append", metavar="NAME=FILE", required=True, help="several times")
    parser.add_argument("--per-category", type=int, default=24, help="prompts of each file, evenly spread")
    parser.add_argument("--prompt-tokens", type=int, default=384, help="longer prompts are left out")
    parser.add_argument("--python", action="append", default=[], metavar="PEER=FILE", help="the interpreter of a peer")
    for peer in ("gguf", "openvino"):
        parser.add_argument(f"--{peer}", action="append", default=[], metavar="NAME=PATH", help="the target, for it")
    parser.add_argument("--llama-server", help="the program")
    for drafter in ("early-exit", "small-lm", "table", "gguf-small-lm"):
        parser.add_argument(f"--{drafter}", help="a drafter, for more arms")
    parser.add_argument("--arms", nargs="+", default=["*"], metavar="PATTERN", help="such as 'vllm*'; default: all")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--requests", type=int, default=48, help="prompts in all")
    parser.add_argument("--turns", dest="parts", type=int, default=3, help="among which they are divided")
    parser.add_argument("--each", type=int, default=4, help="prompts of a turn at most, for each request in flight")
    parser.add_argument("--new-tokens", type=int, default=96)
    which = "long: those without an end token in --new-tokens; any: all; ignored: end tokens end nothing"
    parser.add_argument("--ends", choices=("long", "any", "ignored"), default="long", help=f"answers taken; {which}")
    parser.add_argument("--talk", type=int, default=1, help="turns of a conversation that are asked")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--draft-tokens", type=int, default=4, help="that the peers' look-ups draft")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no arm starts after these")
    parser.add_argument("--work", type=Path, default=Path("runs/batch"), help="what is done, and what arms print")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "requests_cpu.json")
    parser.add_argument("--entry", default="requests", help="the name in --out, whose other entries stay")
    parser.add_argument("--note", default="", help="of the target; the first line of the table")
    with report_errors("the same command"):
        record(parser.parse_args())


if __name__ == "__main__":
    main()
