"""The record on a real model: every method and its peers on the same prompts of several categories, in turn.

    python benchmarks/bench_real.py target=runs/smollm2/fetch checkpoint=runs/smollm2/eesd \
        small_lm=runs/smollm2/small_lm table=runs/smollm2/trigrams dtype=float32 \
        method=[eesd_beta,eesd_cali,eesd_auto,vanilla,opt_tree_auto,gsd,mcsd,aded,ngrams,prompt_lookup] \
        --prompts chat=mt_bench.jsonl --prompts maths=gsm8k.jsonl --minutes 90

Methods are named as for evaluate-checkpoint, whose options these are. Peers with the same weights: transformers'
`generate`, its prompt lookup, and its assisted generation by the same small LM and by the same early exit, put
together as a model; each of those with K tokens and with its defaults. With --llama-python also llama.cpp, in a
separate process (see peer_llamacpp.py).

The result of every prompt is saved. The same command resumes a run that was stopped, or whose --minutes are over. A run
replaces the entry of its dtype in --out and keeps the others.
"""

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from figures import all_figures
from interleaved import ArmsFor, Contest, add_options, evaluation, measure_all, read_categories
from peer_llamacpp import llama_server, llama_version
from record_tables import tables
from transformers_arms import as_model, assisted_arms, load_drafter

from outrider.base.errors import require
from outrider.base.files import read_json, require_writable, write_json
from outrider.base.machine import describe_machine
from outrider.commands import reported
from outrider.draft_models.early_exit.checkpoint import from_pretrained, provenance
from outrider.draft_models.targets.model_files import load_causal_lm
from outrider.inference.loading.generation_config import generate_settings
from outrider.inference.loading.targets import Models, TargetSetup
from outrider.inference.measure.bench import JUDGED
from outrider.inference.measure.results import Arm
from outrider.inference.report.facts import trained_seconds
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kinds import KINDS

HERE = Path(__file__).parent
PEERS = (  # modules whose code decides what is measured
    "transformers_arms.py", "peer_llamacpp.py", "llamacpp_server.py", "interleaved.py",
)  # fmt: skip


def transformers_peers(config: EvaluateConfig, draft_tokens: int, setup: TargetSetup, models: Models) -> ArmsFor:
    """transformers' own assisted generation by the drafters of `config`."""
    placed: dict[str, Any] = {"dtype": setup.dtype, "device": setup.device}
    helpers: dict[str, dict[str, Any]] = {}
    if config.checkpoint is not None:
        early_exit = from_pretrained(
            config.checkpoint, setup.target.config, setup.target.fingerprint, **placed
        ).requires_grad_(False)
        helpers["assisted_early_exit"] = {"assistant": as_model(setup.target.source, early_exit, **placed)}
    if config.small_lm is not None:
        small = load_drafter(config.small_lm, known_tokens(config), setup.config.vocab_size, setup.dtype)
        helpers["assisted_small_lm"] = {"assistant": small.to(setup.device)}

    def arms_for(new_tokens: int) -> dict[str, Arm]:
        own = setup.inherited.config
        settings = generate_settings(own, config.sampling, max_new_tokens=new_tokens, eos=setup.eos)
        return assisted_arms(models.plain, settings, draft_tokens, helpers)

    return arms_for


def left_of(arms: Mapping[str, Arm], without: Sequence[str]) -> dict[str, Arm]:
    """`arms` without those named. Raises `UserError` for a name that no arm has."""
    for name in without:
        require(name in arms, "without", name, f"peers, among {sorted(arms)}")
    return {name: arm for name, arm in arms.items() if name not in without}


def known_tokens(config: EvaluateConfig) -> Sequence[int] | None:
    """The tokens that the small LM knows, if it does not know all."""
    return None if config.small_lm is None else KINDS["small_lm"].load_plugin().known_tokens(config.small_lm)


def trained(config: EvaluateConfig) -> dict[str, Any]:
    """For every drafter its path and the digests that identify it."""
    found = {}
    for kind in KINDS.values():
        where = config.where(kind)
        if where is not None:
            found[kind.name] = {"path": where, **kind.load_plugin().identity(where)}
    return found


def entry_of(contest: Contest, config: EvaluateConfig, options: argparse.Namespace, peers: Any) -> dict[str, Any]:
    """The measurements and their conditions, JSON-able."""
    return {
        "target": contest.setup.target.source,
        "target_digest": asdict(contest.setup.target.fingerprint),
        "drafters": trained(config),
        "trained_seconds": trained_seconds(config),
        "dtype": contest.setup.numbers,
        "machine": describe_machine(str(contest.setup.device)),
        "threads": contest.threads,
        "made_with": provenance(),
        "peers": peers,
        "prompts": len(contest.results),
        "prompts_asked": contest.asked,
        "prompt_tokens": sum(len(result.prompt) for result in contest.results),
        "max_new_tokens": config.max_new_tokens,
        "prompt_files": options.prompts,
        "per_category": options.per_category,
        "note": options.note,
        "methods": {name: asdict(method) for name, method in contest.methods.items()},
        "arms": all_figures(contest.results, config.seed),
    }


def write_entry(path: Path, entry: Mapping[str, Any]) -> None:
    """Write `entry` to the JSON file `path`, replacing an earlier entry of its dtype."""
    earlier = read_json(path, "record", "remove it, or choose another --out")["entries"] if path.exists() else {}
    require_writable(path.parent)
    write_json(path, {"entries": {**earlier, entry["dtype"]: entry}})


def record(options: argparse.Namespace) -> None:
    """Measure the remaining prompts, write the entry and print the tables. Raises `UserError`."""
    config = evaluation(options.options)
    prompts = read_categories(options.prompts, options.per_category)
    code = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in PEERS)).hexdigest()[:12]
    identity = {"code": code, "draft_tokens": options.draft_tokens, "llama_cpp": None}
    identity |= {"without": sorted(options.without)} if options.without else {}
    if options.llama_python:
        identity["llama_cpp"] = llama_version(options.llama_python)
    folder = options.work / config.dtype
    with ExitStack() as held:

        def peers(setup: TargetSetup, models: Models, positions: int) -> ArmsFor:
            require(not setup.stops, "stop_strings", setup.stops, "none: not every peer knows them")
            ours = transformers_peers(config, options.draft_tokens, setup, models)
            if not options.llama_python:
                return ours
            require(not setup.int8, "dtype", config.dtype, "floats with --llama-python: it would decode another model")
            asked = {"positions": positions, "draft_tokens": options.draft_tokens, "threads": torch.get_num_threads()}
            where, dtype = setup.target, setup.dtype
            target = load_causal_lm(where.source, where.revision, dtype=dtype)  # the loaded one may be repacked
            small = config.small_lm and load_causal_lm(config.small_lm, role="small_lm", dtype=dtype)
            started = llama_server(options.llama_python, folder, target, small, known_tokens(config), **asked)
            server = held.enter_context(started)
            return lambda count: {**ours(count), **{n: server.arm(n, setup.eos, count) for n in server.arms}}

        def wanted(setup: TargetSetup, models: Models, positions: int) -> ArmsFor:
            arms_for = peers(setup, models, positions)
            return lambda count: left_of(arms_for(count), options.without)

        contest = measure_all(config, prompts, folder, options.minutes, peers=wanted, identity=identity, judged=JUDGED)
    entry = entry_of(contest, config, options, identity)
    out = options.out or options.work / "record.json"
    write_entry(out, entry)
    print(tables(entry))
    print(f"prompts={len(contest.results)} of {contest.asked} entry={entry['dtype']} out={out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "runs/record")
    parser.add_argument("--draft-tokens", type=int, default=5, help="K of transformers' and llama.cpp's drafts")
    parser.add_argument("--llama-python", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--without", action="append", default=[], metavar="ARM", help="a peer that takes no part")
    parser.add_argument("--out", type=Path, help="the JSON file; default: record.json in --work")
    parser.add_argument("--note", default="", help="kept in the entry, e.g. what else the machine was doing")
    with reported(goes_on=True):
        record(parser.parse_args())


if __name__ == "__main__":
    main()
