"""A paper's tables and figures on a target of yours, beside its own, and whether its claims hold there.

    python benchmarks/paper.py gsd --target T --small-lm S --prompts chat=mt_bench.jsonl

PAPER is eesd, aded, gsd, opt_tree or mcsd; or ngrams, which is no paper (papers/ngrams.py). Every table that
does not need the paper's hardware is printed with its figures and ours, and with every claim: *holds*, *does not hold*,
*undecided*, or *not run* and why. Claims are orderings and trends. They are judged by 95 % jackknife intervals over
conversations, all rows on the same ones.

Nothing is timed without --timed, so a busy machine does no harm: τ, shares and drafted tokens do not depend on it.
With --timed every row whose time a claim is about is decoded once more, in turn with plain decoding; that wants a
machine that does nothing else. --timed 4 does so on the first four prompts, of which every category has one, and counts
on all; --timed-tokens 48 on the first 48 tokens of their answers.

Counts are kept by prompt and row in --work. The same command goes on where it was cut, and measures only what is new.
A run replaces its tables in the entry --label of --out and leaves the others, so one file has several targets. Of mcsd
every pair of a target and a small LM is an entry.

    python benchmarks/paper.py gsd --judge

makes every figure and verdict of --out again, from the counts that lie beside it in counts/PAPER_LABEL.jsonl.gz. It
needs no model.
"""

import argparse
import hashlib
import importlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import torch
from papers.claims import Table
from papers.judging import described, judge_entry
from papers.keeping import counts_file, of_entry, read_kept, write_kept
from papers.loading import load
from papers.measuring import key_of, measure_all, read_counts, runnable
from papers.writing import markdown, plot

from outrider.base.errors import UserError, require
from outrider.base.files import read_json, require_writable, write_json
from outrider.base.machine import describe_machine
from outrider.commands.ending import report_errors
from outrider.data_prep.text.settings import PromptTemplate
from outrider.draft_models.early_exit.checkpoint import provenance
from outrider.draft_models.targets.open_target import open_target
from outrider.inference.settings.kinds import KINDS

PAPERS = ("eesd", "aded", "gsd", "opt_tree", "mcsd", "ngrams")
RESULTS = Path(__file__).parent / "results"
ALL = 10**9  # prompts
AGAIN = "give another --out"
OPTIONS = {"small_lm": "--small-lm", "early_exit": "--checkpoint", "eagle3": "--eagle3", "ngrams": "--table"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paper", choices=PAPERS)
    parser.add_argument("--judge", action="store_true", help="only judge again what --out has")
    parser.add_argument("--target", help="the model that decodes")
    parser.add_argument("--small-lm", help="a small LM for it")
    parser.add_argument("--checkpoint", help="an early exit for it")
    parser.add_argument("--eagle3", help="an EAGLE-3 head for it")
    parser.add_argument("--table", action="append", help="an n-gram table; aded and ngrams: several")
    parser.add_argument("--ablation", help="eesd: a folder with the drafters no_layer and open_data")
    parser.add_argument("--skip", type=int, nargs="+", help="layers that self-speculation leaves out; eesd chooses")
    parser.add_argument("--shot", action="store_true", help="one solved example before every prompt")
    parser.add_argument("--code-table", help="aded: a table of source code, for prompts named code")
    parser.add_argument("--transcripts", help="aded: recorded greedy answers instead of --target")
    parser.add_argument("--tokenizer", help="of --transcripts")
    parser.add_argument("--prompts", action="append", metavar="NAME=FILE", help="a category and its prompts; several")
    parser.add_argument("--template", default="auto", choices=get_args(PromptTemplate), help="as evaluate-checkpoint's")
    parser.add_argument("--num-prompts", type=int, default=12, help="of each category, evenly spread")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer at most")
    parser.add_argument("--ignore-eos", action="store_true", help="always so many tokens")
    parser.add_argument("--tables", nargs="+", metavar="KEY", help="only these, e.g. table_1 figure_5")
    parser.add_argument("--minutes", type=float, help="begin no prompt later; the same command goes on")
    parser.add_argument("--timed", type=int, nargs="?", const=ALL, default=0, metavar="PROMPTS",
                        help="take times too, on a quiet machine; of so many prompts, or all")  # fmt: skip
    parser.add_argument("--timed-tokens", type=int, default=0, metavar="N", help="only the first N of a timed answer")
    parser.add_argument("--dtype", default="float32", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--label", help="of the entry; else the target's folder")
    parser.add_argument("--work", type=Path, help="where counts are kept; else runs/paper_PAPER_LABEL")
    parser.add_argument("--out", type=Path, help="else benchmarks/results/paper_PAPER.json")
    return parser.parse_args()


def read_options(options: argparse.Namespace) -> argparse.Namespace:
    """The options, with what was left open. Raises `UserError` for those that do not go together."""
    require((options.target is None) != (options.transcripts is None), "target", options.target,
            "either --target or --transcripts")  # fmt: skip
    recorded = options.transcripts is not None
    require(not recorded or options.paper in ("aded", "ngrams"), "transcripts", options.transcripts, "a target")
    require(not recorded or options.tokenizer is not None, "tokenizer", None, "the tokenizer of --transcripts")
    require(not (recorded and options.timed), "timed", True, "a target: recordings take no time")
    require(options.tokens >= 2, "tokens", options.tokens, "at least 2")
    options.prompts = options.prompts or ["python=python_stdlib"]
    options.label = options.label or Path(options.target or options.transcripts).stem
    options.work = require_writable(options.work or Path("runs") / f"paper_{options.paper}_{options.label}")
    options.out = options.out or RESULTS / f"paper_{options.paper}.json"
    return options


def require_same(options: argparse.Namespace) -> None:
    """Raise `UserError` where --work has counts of other models, prompts or lengths."""
    free = ("work", "out", "tables", "minutes", "timed", "timed_tokens", "label", "judge", "num_prompts")
    asked = {key: value for key, value in vars(options).items() if key not in free}
    asked |= {"digests": digests_of(options)}
    path = options.work / "options.json"
    before = read_json(path, "options", "remove it and the counts beside it") if path.exists() else {}
    changed = sorted(key for key in asked if key in before and before[key] != asked[key])
    if changed:
        raise UserError(f"--work {options.work}: has counts of another --{', --'.join(changed)}; choose another --work")
    write_json(path, {**asked, **before})


def digests_of(options: argparse.Namespace) -> dict[str, Any]:
    """Of every model, table and file of prompts what it holds: one that was made again in its place is another."""
    kinds = {"small_lm": options.small_lm, "early_exit": options.checkpoint, "eagle3": options.eagle3}
    known = {kind: KINDS[kind].load_plugin().identity(where) for kind, where in kinds.items() if where}
    tables = [*(options.table or ()), options.code_table]
    known["tables"] = [KINDS["ngrams"].load_plugin().identity(where) for where in tables if where]
    target = asdict(open_target(options.target).fingerprint) if options.target else None
    known["target"] = target and {name: target[name] for name in target if name not in ("target", "revision")}
    files = [Path(one.partition("=")[2]) for one in options.prompts]
    files += [Path(file) for file in (options.transcripts,) if file]
    known["files"] = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()]
    found: dict[str, Any] = json.loads(json.dumps(known))
    return found


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """The JSON and its picture."""
    write_json(path, record)
    picture = plot(record)
    if picture is not None:
        picture.savefig(path.with_suffix(".png"), format="png", dpi=100)


def paper_of(options: argparse.Namespace) -> ModuleType:
    return importlib.import_module(f"papers.{options.paper}")


def every_table(options: argparse.Namespace) -> dict[str, Table]:
    categories = [one.partition("=")[0] for one in options.prompts]
    found: dict[str, Table] = paper_of(options).tables(options=options, categories=categories)
    return found


def chosen(options: argparse.Namespace) -> dict[str, Table]:
    """The tables that were asked for; rows whose drafter or category is not there say so."""
    module = paper_of(options)
    given = {"small_lm": options.small_lm, "early_exit": options.checkpoint, "eagle3": options.eagle3}
    given |= {"ngrams": options.table, "prompt_lookup": True, "skip_layers": options.target}
    categories = [one.partition("=")[0] for one in options.prompts]
    found = every_table(options)
    keys = options.tables or list(found)
    unknown = [key for key in keys if key not in found]
    require(not unknown, "tables", unknown, f"some of {', '.join(found)}")

    def settled(table: Table) -> Table:
        rows = []
        for row in table.rows:
            source = row.method.source if row.method else getattr(module, "SOURCES", ("",))[0]
            there = not source or row.other or given.get(source)
            lacking = "" if there else f"needs {OPTIONS.get(source, source)}"
            if not lacking and not options.transcripts and row.category and row.category not in categories:
                lacking = f"needs --prompts {row.category}=FILE"
            if options.transcripts and row.sampling.temperature:
                lacking = lacking or "needs --target: recordings are greedy"
            rows.append(replace(row, never=row.never or lacking))
        return replace(table, rows=tuple(rows))

    return {key: settled(found[key]) for key in keys}


def entry_of(
    options: argparse.Namespace, tables: Mapping[str, Any], asked: Mapping[str, str], dtype: str
) -> dict[str, Any]:
    """All of an entry but its figures. asked: the categories of its prompts."""
    models = {"target": options.target, "small LM": options.small_lm, "early exit": options.checkpoint,
              "EAGLE-3": options.eagle3, "table": options.table and options.table[0],
              "recorded answers": options.transcripts}  # fmt: skip
    known = digests_of(options)
    return {
        "models": {name: where and Path(where).name for name, where in models.items()},
        "digests": {kind: known[kind] for kind in ("small_lm", "early_exit", "eagle3", "target") if kind in known},
        "categories": sorted(set(asked.values())),
        "length": "whole answers" if options.transcripts else f"up to {options.tokens} tokens",
        "dtype": dtype,
        "machine": describe_machine(),
        "made_with": provenance(),
        "asked": dict(asked),
        "tables": dict(tables),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One entry, measured and written; returns all that is known of the paper. Raises `UserError`."""
    tables = chosen(options)
    bench, prompts = load(options, tables, paper_of(options))
    measure_all(
        bench, list(tables.values()), prompts, options.work, minutes=options.minutes, timed_prompts=options.timed
    )
    record: Any = {"paper": options.paper, "entries": {}}
    record = read_json(options.out, "results of a paper", AGAIN) if options.out.exists() else record
    old = record["entries"].get(options.label, {"tables": {}, "asked": {}})
    keys = {name: {row.name: key_of(row) for row in runnable([table])} for name, table in tables.items()}
    found = {**old["tables"], **{name: described(table, keys[name]) for name, table in tables.items()}}
    found = {**{name: found[name] for name in every_table(options) if name in found}, **found}  # also those gone
    dtype = "replayed" if bench.stack is None else str(bench.stack.dtype).removeprefix("torch.")
    asked = old["asked"] | {one.id: one.category for one in prompts}
    entry = entry_of(options, found, asked, dtype)
    counts = {**read_kept(counts_file(options.out, options.paper, options.label)), **read_counts(options.work)}
    counts = of_entry(entry, counts)
    record["entries"][options.label] = judge_entry(entry, counts)
    write_kept(counts_file(options.out, options.paper, options.label), counts)
    write_record(options.out, record)
    return record


def judge_again(options: argparse.Namespace) -> dict[str, Any]:
    """The results of --out with all figures and verdicts made again. Raises `UserError`."""
    given = [name for name in ("target", "transcripts", "tables", "label") if getattr(options, name)]
    require(not given, "judge", True, f"without --{' or --'.join(given)}: it judges all that --out has")
    out = options.out or RESULTS / f"paper_{options.paper}.json"
    record = read_json(out, "results of a paper", AGAIN)
    for label, entry in record["entries"].items():
        counts = read_kept(counts_file(out, options.paper, label))
        record["entries"][label] = judge_entry(entry, counts)
    write_record(out, record)
    return record


def main() -> None:
    given = parse()
    with report_errors("the same command"):
        if given.judge:
            print(markdown(judge_again(given)))
            return
        options = read_options(given)
        require_same(options)
        record = measure(options)
    print(markdown({"entries": {options.label: record["entries"][options.label]}}))


if __name__ == "__main__":
    with torch.no_grad():
        main()
