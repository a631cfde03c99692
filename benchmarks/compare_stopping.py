"""When to stop drafting: every stop rule on the same prompts with the same drafters, and the bounds in hindsight.

    python benchmarks/compare_stopping.py target=runs/demo/target checkpoint=runs/demo/eesd \
        small_lm=runs/demo/small_lm --prompts library=python_stdlib --entry demo-greedy --out stopping_cpu.json
    python benchmarks/compare_stopping.py target=T checkpoint=C small_lm=S sampling.temperature=1 max_new_tokens=64 \
        --prompts chat=mt_bench.jsonl --prompts code=humaneval.jsonl.gz --entry T-sampled --minutes 20 --out FILE

Two parts. First all rules decode in turn, prompt by prompt, in one process: τ, drafted and wasted tokens, tokens per
second, and the paired ratio over the K that did best on all other prompts. Then drafts of 15 tokens are
recorded at every position of the texts. From those follow, with no clock but the measured costs: the best lengths in
hindsight, the best K of a category, what is lost token by token from a cold start, what a rule that knows one text does
in another, and all of it at other costs of a draft step. Nothing in the second part depends on what else the machine
does, but for the costs at its start.

KEY=VALUE are options of evaluate-checkpoint. checkpoint (an early exit), small_lm and eagle3 are compared if given,
each by itself. Rules that ask a calibration head are among them where it has one (train/calibrate.py). What is measured
already is kept in --work, so the same command goes on after --minutes. --out takes one entry more each time. --rules
leaves all others but the fixed lengths out, for more prompts in the same time.
"""

import argparse
import hashlib
import json
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from figures import all_figures
from interleaved import Contest, add_options, evaluation, load_teams, measure_all, read_categories
from recorded_drafts import Text, read_text, record, save_text
from stopping_hindsight import FIXED, LENGTHS, Rules, in_hindsight
from stopping_tables import LABELS, plot, stopping
from tqdm import tqdm

from conf import reported
from data_prep.text.prompts import Prompt
from draft_models.checkpoint import provenance
from inference.acceptance import Chooser
from inference.auto.policy import Tuning
from inference.decode import Round, speculative
from inference.drafters.calibrated import head_identity, head_of
from inference.drafters.registry import KINDS
from inference.drafters.shaped import Shaped
from inference.evaluate.bench import longest_text, prepare_methods, render
from inference.evaluate.results import PromptResult
from inference.evaluate.speed import decoding, timed, tokens_per_second
from inference.evaluate.statistics import bootstrap_median
from inference.evaluate.subject import Models, Subject, context_length, find_subject, run_settings
from inference.generation_config import generate_settings, make_sampler
from inference.loading.drafters import new_drafter
from inference.method_settings import LONGEST_CHAIN, MethodConfig, StopConfig
from inference.settings import EvaluateConfig
from outrider.errors import UserError, require
from outrider.files import write_atomically, write_json
from outrider.machine import describe_machine
from outrider.settings import construct
from outrider.streams import Streams


def rules_of(head: bool) -> dict[str, StopConfig]:
    """All that are compared, by name. head: whether there is a calibration head."""
    free: dict[str, Any] = {
        "max-probability": {"rule": "confidence"}, "AdaEDL": {"rule": "adaedl"}, "SVIP": {"rule": "svip"},
        "Beta": {"rule": "beta"}, "Beta, discounted": {"rule": "beta", "discount": 0.9},
        "UCB over rules": {"rule": "bandit"},
    }  # fmt: skip
    asking: dict[str, Any] = {
        "SpecDec++": {"rule": "rejection_risk"}, "calibrated": {"rule": "calibrated"},
        "posterior mean": {"rule": "posterior_mean"},
    }  # fmt: skip
    stops = {name: StopConfig(max_draft=LONGEST_CHAIN, **given)
             for name, given in (free | (asking if head else {})).items()}  # fmt: skip
    stops |= {f"{FIXED}{k}": StopConfig(max_draft=k) for k in LENGTHS}
    stops |= {"auto": StopConfig(max_draft="auto"), "survival": StopConfig(rule="survival")}
    return {**stops, "survival, head": StopConfig(rule="survival", score="head")} if head else stops


def wanted_rules(stops: Mapping[str, StopConfig], wanted: Sequence[str] | None) -> dict[str, StopConfig]:
    """The fixed lengths and those `wanted` of `stops`; all where nothing is. Raises `UserError` for an unknown one."""
    known = [name for name in stops if not name.startswith(FIXED)]
    for name in wanted or ():
        require(name in known, "rules", name, f"some of: {', '.join(known)}")
    return {name: stop for name, stop in stops.items() if wanted is None or name in wanted or name not in known}


PRESETS = {"checkpoint": "eesd_fixed", "small_lm": "vanilla", "eagle3": "eagle3"}  # that need them


# --- decoding --------------------------------------------------------------------------------------------------------


def decode_in_turn(
    config: EvaluateConfig, source: str, stops: Mapping[str, StopConfig], prompts: Sequence[Prompt],
    folder: Path, minutes: float | None,
) -> Contest:  # fmt: skip
    """Every rule on every prompt; those that are done are kept in `folder`."""
    methods = {name: MethodConfig(source=source, stop=stop) for name, stop in stops.items()}
    return measure_all([replace(config, methods=methods, compare_transformers=False)], prompts, folder, minutes)


def tuned_elsewhere(results: Sequence[PromptResult]) -> list[tuple[PromptResult, str]]:
    """Every result with the K that decoded fastest on all other prompts, which are of the same categories."""
    others = {unit: [result for result in results if result.unit != unit] for unit in {r.unit for r in results}}
    best = {unit: fastest_length(rest) for unit, rest in others.items()}
    return [(result, best[result.unit]) for result in results]


def fastest_length(results: Sequence[PromptResult]) -> str:
    """The arm of a fixed length with the most tokens per second."""
    names = [name for name in results[0].generations if name.startswith(FIXED)]
    return max(names, key=lambda name: tokens_per_second(results, name) or 0.0)


def paired(results: Sequence[PromptResult], arm: str, streams: Streams) -> dict[str, Any]:
    """How many times as fast as K tuned on other prompts: the median over prompts, with its interval."""
    pairs = [(r, k) for r, k in tuned_elsewhere(results) if timed([r], arm, k)]
    ratios = [decoding(r.generations[k]) / decoding(r.generations[arm]) for r, k in pairs]
    units = [r.unit for r, _ in pairs]
    median, interval = bootstrap_median(ratios, streams.within(arm, "over K").arrays(), units=units)
    return {"median": median, "ci95": interval, "prompts": len(pairs)}


def over_hindsight(results: Sequence[PromptResult], arm: str) -> dict[str, float]:
    """By category: tokens per second over those of the K that is best in this category."""
    found = {}
    for category in sorted({result.category for result in results}):
        mine = [result for result in results if result.category == category]
        best = tokens_per_second(mine, fastest_length(mine))
        found[category] = (tokens_per_second(mine, arm) or math.nan) / (best or math.nan)
    return found


def live(contest: Contest, seed: int) -> dict[str, Any]:
    """What the clock says of every rule."""
    results, streams = contest.results, Streams(seed)
    several = len({result.unit for result in results}) > 1
    arms = all_figures(results, seed)
    for name, arm in arms.items():
        rounds = [r for result in results for r in result.generations[name].rounds]
        many = max(1, len(rounds))  # none where every answer ended with its first token
        arm["drafted"] = sum(r.drafted for r in rounds) / many
        arm["wasted"] = sum(r.drafted - r.accepted for r in rounds) / many
        if several:
            arm["over_tuned"] = paired(results, name, streams)
            arm["over_hindsight"] = over_hindsight(results, name)
    chosen = sorted({k for _, k in tuned_elsewhere(results)}) if several else []
    return {"arms": arms, "tuned": chosen, "prompts": len(results), "asked": contest.asked}


# --- recording -------------------------------------------------------------------------------------------------------


def record_all(
    config: EvaluateConfig, source: str, head: bool, prompts: Sequence[Prompt], folder: Path
) -> tuple[list[Text], Tuning]:
    """The recorded texts of all prompts, and the costs measured here; what is in `folder` already is kept."""
    stop = StopConfig(rule="survival", score="head" if head else "draft")
    config = replace(config, methods={"m": MethodConfig(source=source, stop=stop)}, compare_transformers=False)
    subject = find_subject(config)
    identity = json.dumps(run_settings(config, subject, prompts), sort_keys=True, default=str)
    folder = folder / hashlib.sha256(identity.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{number:04d}.json" for number in range(len(prompts))]
    costs = folder / "tuning.json"
    if not (costs.exists() and all(file.exists() for file in files)):
        models = load_teams([config], subject)[0]
        ids = [render(subject, prompt, prompt.turns) for prompt in prompts]
        longest = longest_text(
            [[each] for each in ids], config.max_new_tokens, context_length(subject, models.drafters)
        )
        prepared = prepare_methods(config, subject, models, ids[0], longest)
        if not costs.exists():
            write_json(costs, asdict(prepared.tunings["m"]))
        for file, prompt, text in tqdm(
            list(zip(files, prompts, ids, strict=True)), desc=f"record {source}", unit="text"
        ):
            if not file.exists():
                save_text(file, record_one(config, source, subject, models, prompt, text))
    return [read_text(file) for file in files], construct(Tuning, json.loads(costs.read_text()))


def record_one(
    config: EvaluateConfig, source: str, subject: Subject, models: Models, prompt: Prompt, ids: Sequence[int]
) -> Text:
    """The drafts at every position of the answer to `prompt`."""
    streams, sampled = Streams(config.seed, prompt.id), config.sampling.temperature > 0
    options: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "eos": subject.eos}
    settings = generate_settings(subject.inherited.config, config.sampling, **options)
    sampler = make_sampler(settings, config.sampling, ids, models.stack.device)
    method = MethodConfig(source=source, stop=StopConfig(max_draft=LONGEST_CHAIN))
    drafter = new_drafter(method, models.drafters, streams, sampled)
    assert isinstance(drafter, Shaped)

    def rounds(watched: Shaped, chooser: Chooser) -> Iterator[Round]:
        return speculative(models.stack, watched, ids, chooser=chooser, runtime=models.runtime, **options)

    chooser = Chooser(sampler, streams.of("verify") if sampled else None)
    return Text(prompt.id, prompt.category, record(rounds, drafter, chooser, head_of(models.drafters[source])))


# --- the command -----------------------------------------------------------------------------------------------------


def compare(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure, and add the entry to the JSON. Raises `UserError`."""
    keys = {option.partition("=")[0] for option in options.options}
    presets = [preset for key, preset in PRESETS.items() if key in keys]
    if not presets:
        raise UserError("no drafter: give checkpoint=…, small_lm=… or eagle3=…")
    config = evaluation([*options.options, f"method=[{','.join(presets)}]"], sampled=True)
    prompts = read_categories(options.prompts, options.per_category)
    given = [source for source in LABELS if config.where(KINDS[source]) is not None]
    minutes = None if options.minutes is None else options.minutes / len(given)
    nothing = options.recorded_only and not options.recorded
    require(not nothing, "recorded", options.recorded, "a number above 0 with --recorded-only")
    heads = {source: has_head(config, source) for source in given}
    rules = {source: wanted_rules(rules_of(head), options.rules) for source, head in heads.items()}
    sources: dict[str, Any] = {}
    contest = None
    for source, stops in rules.items():
        head = heads[source]
        work = options.work / hashlib.sha256(options.entry.encode()).hexdigest()[:8] / source
        found: dict[str, Any] = {"head": head}
        if not options.recorded_only:
            contest = decode_in_turn(config, source, stops, prompts, work / "measured", minutes)
            found["live"] = live(contest, config.seed)
        if options.recorded:
            texts, tuning = record_all(config, source, head, prompts[: options.recorded], work / "recorded")
            found["recorded"] = in_hindsight(texts, Rules(stops, tuning, drawn=config.sampling.temperature > 0))
        sources[source] = found
    entry = {
        "command": shlex.join(["python", "benchmarks/compare_stopping.py", *arguments]),
        "note": options.note,
        "machine": describe_machine(str(find_subject(config).device)),
        "made_with": provenance(),
        "threads": {} if contest is None else contest.threads,
        "target": config.target,
        "temperature": config.sampling.temperature,
        "max_new_tokens": config.max_new_tokens,
        "sources": sources,
    }
    known: dict[str, Any] = {"entries": {}}
    with suppress(FileNotFoundError):
        known = json.loads(options.out.read_text())
    known["entries"][options.entry] = short(entry)
    write_atomically(options.out, json.dumps(known, separators=(",", ":")).encode())  # most of it is for the plot
    write_atomically(options.out.with_suffix(".png"), plot(known["entries"]))
    return entry


def short(value: Any) -> Any:
    """`value` with six digits of every number: what is measured has fewer that mean something."""
    if isinstance(value, dict):
        return {key: short(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [short(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def has_head(config: EvaluateConfig, source: str) -> bool:
    """Whether the drafter of `source` has a calibration head beside it."""
    return head_identity(source, config.where(KINDS[source])) is not None


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "runs/stopping")
    parser.add_argument("--rules", nargs="+", metavar="RULE", help="measure only these and fixed lengths")
    parser.add_argument("--recorded", type=int, default=24, help="record drafts in the first so many prompts; 0: none")
    parser.add_argument("--recorded-only", action="store_true", help="nothing is timed but a draft's costs")
    parser.add_argument("--entry", required=True, help="the name of this measurement in the JSON")
    parser.add_argument("--out", type=Path, required=True, help="JSON; a plot goes beside it")
    parser.add_argument("--note", default="", help="kept in the JSON, e.g. what else the machine was doing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    with reported(goes_on=True):
        print(stopping(compare(options, arguments)))


if __name__ == "__main__":
    main(sys.argv[1:])
