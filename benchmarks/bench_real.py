"""The record on a real model: every method and its peers on the same prompts of several categories, in turn.

    python benchmarks/bench_real.py target=runs/smollm2/fetch checkpoint=runs/smollm2/eesd \
        small_lm=runs/smollm2/small_lm table=runs/smollm2/trigrams dtype=float32 \
        method=[eesd_beta,eesd_cali,eesd_auto,vanilla,opt_tree_auto,gsd,mcsd,aded,ngrams,prompt_lookup] \
        --prompts chat=mt_bench.jsonl --prompts maths=gsm8k.jsonl --minutes 90

Methods are named as for evaluate-checkpoint, which measures them and writes its report to --work. Peers with the same
weights: transformers' `generate`, its prompt lookup, and its assisted generation by the same small LM and by the same
early exit, put together as a model; each of those with K tokens and with its defaults. bench_batch.py has llama.cpp.

The result of every prompt is saved. The same command resumes a run that was stopped, or whose --minutes are over. A run
replaces the entry of its dtype in --out and keeps the others.
"""

import argparse
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from categories import read_categories
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from record_tables import tables
from transformers_arms import as_model, assisted_arms, widened

from outrider.base.errors import UserError, require
from outrider.base.files import read_json, require_writable, write_json
from outrider.base.streams import Streams
from outrider.commands import build, explain, register, reported
from outrider.commands.options import compose_defaults
from outrider.draft_models.early_exit.checkpoint import from_pretrained
from outrider.draft_models.targets.model_files import load_causal_lm
from outrider.inference.evaluate.compare import evaluate_checkpoint
from outrider.inference.loading.targets import Models, TargetSetup
from outrider.inference.measure.bench import Peers
from outrider.inference.measure.results import REPORT_FILE, Arm, PromptResult, read_results
from outrider.inference.measure.speed import end_to_end, prefill_seconds, speedups_over_baselines, tokens_per_second
from outrider.inference.measure.statistics import decode_statistics
from outrider.inference.report.report import lossless_section
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kinds import KINDS

HERE = Path(__file__).parent
PEERS = HERE / "transformers_arms.py"  # whose code decides what is measured
# Options of evaluate-checkpoint that this command sets itself or does not use.
SAID_OTHERWISE = ("prompts", "prompt_text", "prompt_chars", "num_prompts", "minutes", "transcripts", "tokenizer",
                  "out_dir", "resume", "debug", "plan", "card", "wandb", "show_prompts")  # fmt: skip
Figures = dict[str, Any]
ArmsFor = Callable[[int], Mapping[str, Arm]]  # new tokens of these


# ------------------------------------------------------------------------------------------------------------- options


def evaluation(options: argparse.Namespace) -> EvaluateConfig:
    """The settings of evaluate-checkpoint. Raises `UserError` for options that have no effect here."""
    for option in options.options:
        key = option.partition("=")[0].lstrip("+~")
        if key.partition(".")[0] in SAID_OTHERWISE:
            raise UserError(f"{option}: not an option here; see --help for prompts and places")
    register("evaluate_checkpoint", EvaluateConfig)
    try:
        config = build(EvaluateConfig, compose_defaults("evaluate_checkpoint", options.options))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error)) from None
    require(config.sampling.temperature == 0, "sampling.temperature", config.sampling.temperature, "0: texts compare")
    require(config.target != "replay", "target", config.target, "a model: a recording has no speed")
    own: dict[str, Any] = {"resume": True, "card": False, "show_prompts": 0, "minutes": options.minutes}
    return replace(config, out_dir=str(options.work / config.dtype), **own)


# --------------------------------------------------------------------------------------------------------------- peers


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
        small, known = load_causal_lm(config.small_lm, role="small_lm", dtype=setup.dtype), known_tokens(config)
        if known is not None:
            small = widened(small, torch.tensor(known), setup.config.vocab_size)
        helpers["assisted_small_lm"] = {"assistant": small.requires_grad_(False).eval().to(setup.device)}

    def arms_for(new_tokens: int) -> dict[str, Arm]:
        settings = setup.text(new_tokens, config.sampling).for_generate()
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


def arms_of_peers(options: argparse.Namespace, config: EvaluateConfig) -> Peers:
    """All peers but those of --without."""
    code = hashlib.sha256(PEERS.read_bytes()).hexdigest()[:12]
    identity = {"code": code, "draft_tokens": options.draft_tokens}
    identity |= {"without": sorted(options.without)} if options.without else {}

    def make(setup: TargetSetup, models: Models, positions: int) -> ArmsFor:
        require(not setup.stops, "stop_strings", setup.stops, "none: not every peer knows them")
        ours = transformers_peers(config, options.draft_tokens, setup, models)
        return lambda count: left_of(ours(count), options.without)

    return Peers(make, identity)


# ---------------------------------------------------------------------------------------------------------- the record


def figures(results: Sequence[PromptResult], arm: str, seed: int) -> Figures:
    """The figures of one arm by `results`: speeds of decoding without prefill; ratios as medians over prompts with 95 %
    intervals. τ is None for an arm that does not report its passes."""
    mine = [result.generations[arm] for result in results]
    streams = Streams(seed).within(arm, "bootstrap")
    rounds = [each for generation in mine for each in generation.rounds]
    statistics = decode_statistics(mine) if any(each.drafted for each in rounds) else {}
    return {
        "prompts": len(results),
        "tokens": sum(len(generation.tokens) for generation in mine),
        "identical": sum(result.identical(arm) for result in results),
        "tokens_per_second": tokens_per_second(results, arm),
        "tau": sum(len(each.tokens) for each in rounds) / len(rounds) if rounds else None,
        **statistics,
        "prefill_seconds": prefill_seconds(results, arm, streams),
        "speedup": speedups_over_baselines(results, arm, streams),
        "end_to_end": speedups_over_baselines(results, arm, streams, end_to_end),
    }


def all_figures(results: Sequence[PromptResult], seed: int) -> dict[str, Figures]:
    """`figures` of every arm by name, over all prompts and `by_category`, and its judgement, if it was judged."""
    categories = sorted({result.category for result in results})
    groups = {name: [result for result in results if result.category == name] for name in categories}
    found = {}
    for arm in results[0].generations:
        judged = lossless_section(results, arm, sampled=False)["judged"][arm]
        parts = {name: figures(group, arm, seed) for name, group in groups.items()}
        found[arm] = {**figures(results, arm, seed), "judged": judged, "by_category": parts}
    return found


def entry_of(folder: Path, options: argparse.Namespace, seed: int, peers: Peers) -> dict[str, Any]:
    """The measurements in `folder` and their conditions, JSON-able."""
    report: Any = read_json(folder / REPORT_FILE, "report", "measure again in another --work")
    reports = report.get("reports", [report])
    measured = [one for _, one in sorted(read_results(folder).items()) if one.turns]
    results = [turn for one in measured for turn in one.turns]
    facts = ("target", "digests", "trained_seconds", "dtype", "machine", "made_with", "max_new_tokens")
    return {
        **{name: reports[0][name] for name in facts},
        "threads": dict(Counter(one.threads for one in measured)),
        "peers": dict(peers.identity),
        "prompts": len(results),
        "prompts_asked": reports[0]["prompts_given"],
        "prompt_tokens": sum(len(result.prompt) for result in results),
        "prompt_files": options.prompts,
        "per_category": options.per_category,
        "note": options.note,
        "methods": {one["method"]: one["settings"] for one in reports},
        "arms": all_figures(results, seed),
    }


def write_entry(path: Path, name: str, entry: Mapping[str, Any]) -> None:
    """Write `entry` to the JSON file `path`, replacing an earlier entry of this name."""
    earlier: Any = read_json(path, "record", "remove it, or choose another --out") if path.exists() else {"entries": {}}
    require_writable(path.parent)
    write_json(path, {"entries": {**earlier["entries"], name: entry}})


def record(options: argparse.Namespace) -> None:
    """Measure the remaining prompts, write the entry and print the tables. Raises `UserError`."""
    config = evaluation(options)
    prompts = read_categories(options.prompts, options.per_category)
    peers = arms_of_peers(options, config)
    with suppress(SystemExit):  # a method that is not lossless is in the record as such
        evaluate_checkpoint(config, prompts, peers=peers)
    entry = entry_of(Path(config.out_dir), options, config.seed, peers)
    out = options.out or options.work / "record.json"
    write_entry(out, entry["dtype"], entry)
    print(tables(entry))
    print(f"prompts={entry['prompts']} of {entry['prompts_asked']} entry={entry['dtype']} out={out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", nargs="*", metavar="KEY=VALUE", help="options of evaluate-checkpoint")
    which = "a category and its prompts, in any layout that evaluate-checkpoint reads; several times"
    parser.add_argument("--prompts", action="append", metavar="NAME=FILE", required=True, help=which)
    parser.add_argument("--per-category", type=int, default=16, help="prompts of each category, evenly spread")
    parser.add_argument("--minutes", type=float, help="as of evaluate-checkpoint; the same command goes on")
    parser.add_argument("--work", type=Path, default=Path("runs/record"), help="where all results are kept")
    parser.add_argument("--draft-tokens", type=int, default=5, help="K of transformers' drafts")
    parser.add_argument("--without", action="append", default=[], metavar="ARM", help="a peer that takes no part")
    parser.add_argument("--out", type=Path, help="the JSON file; default: record.json in --work")
    parser.add_argument("--note", default="", help="kept in the entry, e.g. what else the machine was doing")
    with reported(resumes=True):
        record(parser.parse_args())


if __name__ == "__main__":
    main()
