"""The record on a real model: every method on the same prompts of several categories, in turn.

    python benchmarks/bench_real.py target=runs/smollm2/fetch checkpoint=runs/smollm2/eesd \
        small_lm=runs/smollm2/small_lm table=runs/smollm2/trigrams dtype=float32 \
        method=[eesd_beta,eesd_cali,eesd_auto,vanilla,opt_tree_auto,gsd,mcsd,aded,ngrams,prompt_lookup] \
        --prompts chat=mt_bench.jsonl --prompts maths=gsm8k.jsonl --minutes 90

Methods are named as for evaluate-checkpoint, which measures them and writes its report to --work. bench_batch.py has
other programs.

The result of every prompt is saved. The same command resumes a run that was stopped, or whose --minutes are over. A run
replaces the entry of its dtype in --out and keeps the others. What it is made of lies beside it (record_raw.py).
"""

import argparse
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from categories import read_categories
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from record_raw import entry_of, packed, raw_file, read_raw, write_raw
from record_tables import tables

from outrider.base.errors import UserError, require
from outrider.base.files import read_json, require_writable, write_json
from outrider.commands.composing import build, compose_config, explain
from outrider.commands.ending import report_errors
from outrider.inference.evaluate.evaluation import evaluate_checkpoint
from outrider.inference.measure.results import REPORT_FILE, read_results
from outrider.inference.report.types import read_reports
from outrider.inference.settings.evaluate import EvaluateConfig

# Options of evaluate-checkpoint that this command sets itself or does not use.
SAID_OTHERWISE = ("prompts", "prompt_text", "prompt_chars", "num_prompts", "minutes", "transcripts", "tokenizer",
                  "out_dir", "resume", "debug", "plan", "card", "wandb", "show_prompts")  # fmt: skip


def evaluation(options: argparse.Namespace) -> EvaluateConfig:
    """The settings of evaluate-checkpoint. Raises `UserError` for options that have no effect here."""
    for option in options.options:
        key = option.partition("=")[0].lstrip("+~")
        if key.partition(".")[0] in SAID_OTHERWISE:
            raise UserError(f"{option}: not an option here; see --help for prompts and places")
    try:
        config = build(EvaluateConfig, compose_config("evaluate_checkpoint", options.options))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error)) from None
    require(config.sampling.temperature == 0, "sampling.temperature", config.sampling.temperature, "0: texts compare")
    require(config.target != "replay", "target", config.target, "a model: a recording has no speed")
    own: dict[str, Any] = {"resume": True, "card": False, "show_prompts": 0, "minutes": options.minutes}
    return replace(config, out_dir=str(options.work / config.dtype), **own)


def raw_of(folder: Path, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The measurements in `folder` and their conditions (see record_raw.py)."""
    reports = read_reports(folder / REPORT_FILE, "measure in another --work")
    first, measured_on = reports[0], reports[0].conditions
    measured = [one for _, one in sorted(read_results(folder).items()) if one.turns]
    conditions = {
        "target": measured_on.target,
        "digests": measured_on.digests,
        "trained_seconds": measured_on.trained_seconds,
        "dtype": measured_on.dtype,
        "machine": first.machine,
        "made_with": first.made_with,
        "max_new_tokens": measured_on.max_new_tokens,
        "threads": dict(Counter(one.threads for one in measured)),
        "prompts_asked": measured_on.prompts_given,
        "prompt_files": options.prompts,
        "per_category": options.per_category,
        "note": options.note,
        "seed": seed,
        "methods": {report.method: report.settings for report in reports},
    }
    return {"conditions": conditions, "prompts": [packed(turn) for one in measured for turn in one.turns]}


def write_entry(path: Path, name: str, entry: Mapping[str, Any]) -> None:
    """Write `entry` to the JSON file `path`, replacing an earlier entry of this name."""
    earlier: Any = read_json(path, "record", "remove it, or choose another --out") if path.exists() else {"entries": {}}
    require_writable(path.parent)
    write_json(path, {"entries": {**earlier["entries"], name: entry}})


def record(options: argparse.Namespace) -> None:
    """Measure the remaining prompts, write raw data and entry and print the tables. Raises `UserError`."""
    config = evaluation(options)
    prompts = read_categories(options.prompts, options.per_category)
    prompts.sort(key=lambda prompt: prompt.category)  # --minutes takes them evenly spread over all
    if not options.again:
        with suppress(SystemExit):  # a method that is not lossless is in the record as such
            evaluate_checkpoint(config, prompts)
    out, name = options.out or options.work / "record.json", "_".join(filter(None, (config.dtype, options.label)))
    require_writable(out.parent)
    write_raw(raw_file(out), name, raw_of(Path(config.out_dir), options, config.seed))
    entry = entry_of(read_raw(raw_file(out))[name])
    write_entry(out, name, entry)
    print(tables(entry))
    print(f"prompts={entry['prompts']} of {entry['prompts_asked']} entry={name} out={out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", nargs="*", metavar="KEY=VALUE", help="options of evaluate-checkpoint")
    which = "a category and its prompts, in any layout that evaluate-checkpoint reads; several times"
    parser.add_argument("--prompts", action="append", metavar="NAME=FILE", required=True, help=which)
    parser.add_argument("--per-category", type=int, default=16, help="prompts of each category, evenly spread")
    parser.add_argument("--minutes", type=float, help="as of evaluate-checkpoint; the same command goes on")
    parser.add_argument("--work", type=Path, default=Path("runs/record"), help="where all results are kept")
    parser.add_argument("--out", type=Path, help="the JSON file; default: record.json in --work")
    parser.add_argument("--label", default="", help="what the entry's name has after its dtype, as float32_LABEL")
    parser.add_argument("--again", action="store_true", help="measure nothing: make the entry of what --work has")
    parser.add_argument("--note", default="", help="kept in the entry, e.g. what else the machine was doing")
    with report_errors("the same command"):
        record(parser.parse_args())


if __name__ == "__main__":
    main()
