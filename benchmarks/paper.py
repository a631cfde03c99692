"""A paper's tables and figures on a target of yours, beside its own, and whether its claims hold there.

    python benchmarks/paper.py gsd --target T --small-lm S --prompts chat=mt_bench.jsonl

PAPER is eesd, aded, gsd, opt_tree or mcsd. Every table that does not need the paper's hardware is printed with its
figures and ours, and with every claim: *holds*, *does not hold*, *undecided*, or *not run* and why. Claims are
orderings and trends. They are judged by the 95 % bootstrap interval over prompts, all rows on the same prompts.

Nothing is timed without --timed, so a busy machine does no harm: τ, shares and drafted tokens do not depend on it.
With --timed every row is decoded once more, in turn with plain decoding; that wants a machine that does nothing else.

Counts are kept by prompt and row in --work. The same command goes on where it was cut, and measures only what is new.
A run replaces its tables in the entry --label of --out and leaves the others, so one file has several targets.
"""

import argparse
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from interleaved import read_categories
from papers.claims import Table, judged
from papers.measuring import Asked, Bench, by_row, key_of, measure_all, read_counts, runnable
from papers.shots import with_example
from papers.writing import markdown, plot

from conf import reported
from data_prep.text.chat import render_prompt
from data_prep.text.prompts import Prompt, read_prompts
from draft_models.checkpoint import provenance
from draft_models.target.open_target import open_target
from inference.decode import autoregressive
from inference.drafters.ngrams import open_table
from inference.drafters.registry import KINDS
from inference.evaluate.arms import prepare
from inference.evaluate.replay import load_vocabulary, read_transcripts, recordings
from inference.evaluate.report import describe_machine
from inference.evaluate.subject import Subject, find_subject, load_drafters, load_stack
from inference.method_settings import MethodConfig
from inference.runtime import make_runtime
from inference.settings import EvaluateConfig
from outrider.errors import UserError, require
from outrider.files import read_json, require_writable, write_json

PAPERS = ("eesd", "aded", "gsd", "opt_tree", "mcsd")
RESULTS = Path(__file__).parent / "results"
PLAIN = MethodConfig(source="prompt_lookup")  # which needs no model
OPTIONS = {"small_lm": "--small-lm", "early_exit": "--checkpoint", "eagle3": "--eagle3", "ngrams": "--table"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paper", choices=PAPERS)
    parser.add_argument("--target", help="the model that decodes")
    parser.add_argument("--small-lm", help="a small LM for it")
    parser.add_argument("--checkpoint", help="an early exit for it")
    parser.add_argument("--eagle3", help="an EAGLE-3 head for it")
    parser.add_argument("--table", action="append", help="an n-gram table; aded: several, of growing corpora")
    parser.add_argument("--ablation", help="eesd: --out of ablate_eesd.py, for its no_layer and open_data")
    parser.add_argument("--exits", nargs="+", help="eesd: early exits at several layers")
    parser.add_argument(
        "--skip", type=int, nargs="+", help="eesd: layers that self-speculation leaves out; else chosen"
    )
    parser.add_argument("--shot", action="store_true", help="one solved example before every prompt")
    parser.add_argument("--code-table", help="aded: a table of source code, for prompts named code")
    parser.add_argument("--frequent-table", help="aded: a table of n-grams that occur 12 times at least")
    parser.add_argument("--transcripts", help="aded: recorded greedy answers instead of --target")
    parser.add_argument("--tokenizer", help="of --transcripts")
    parser.add_argument("--prompts", action="append", metavar="NAME=FILE", help="a category and its prompts; several")
    parser.add_argument("--num-prompts", type=int, default=12, help="of each category, evenly spread")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer at most")
    parser.add_argument("--ignore-eos", action="store_true", help="always so many tokens")
    parser.add_argument("--tables", nargs="+", metavar="KEY", help="only these, e.g. table_1 figure_5")
    parser.add_argument("--minutes", type=float, help="begin no prompt later; the same command goes on")
    parser.add_argument("--timed", action="store_true", help="take times too, on a quiet machine")
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
    require(not recorded or options.paper == "aded", "transcripts", options.transcripts, "a target; they are for aded")
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
    free = ("work", "out", "tables", "minutes", "timed", "num_prompts", "label")
    asked = {key: value for key, value in vars(options).items() if key not in free}
    path = options.work / "options.json"
    if not path.exists():
        write_json(path, asked)
    before = read_json(path, "options", "remove it and the counts beside it")
    changed = sorted(key for key in asked if before.get(key) != asked[key])
    if changed:
        raise UserError(f"--work {options.work}: has counts of another --{', --'.join(changed)}; choose another --work")


# -------------------------------------------------------------------------------------------------------------- loading


def load(options: argparse.Namespace, tables: Mapping[str, Table]) -> tuple[Bench, list[Asked]]:
    """The models and the prompts. Raises `UserError` for bad input, before a model is read where that shows."""
    prompts = read_prompts_of(options, options.num_prompts)
    if options.transcripts is not None:
        return load_recorded(options)
    rows = runnable(list(tables.values()))
    methods = {key_of(row): row.method for row in rows if row.method and not row.other}
    known = ("eagle", "binary")  # Sequoia's trees are made once their drafter is there
    methods = {key: method for key, method in methods.items() if method.structure.shape in known}
    config = EvaluateConfig(
        target=options.target, small_lm=options.small_lm, checkpoint=options.checkpoint, eagle3=options.eagle3,
        table=options.table[0] if options.table else None, methods=methods or {"plain": PLAIN}, dtype=options.dtype,
        device=options.device, ignore_eos=options.ignore_eos, generation_config="none",
    )  # fmt: skip
    subject = find_subject(config)
    placed: dict[str, Any] = {"dtype": subject.dtype, "device": subject.device}
    others = further_tables(options, subject.target)
    drafters = dict(load_drafters(config, subject.target, **placed))
    drafters |= {"ngrams": others[options.table[0]]} if options.table else {}
    stack = load_stack(subject.target, None, **placed, by_layers=True, int8=subject.int8)
    prepare(stack, drafters)
    for where in further_exits(options):
        own = {"plain": PLAIN, **{key_of(row): row.method for row in rows if row.method and row.other == where}}
        loaded = load_drafters(replace(config, checkpoint=where, small_lm=None, methods=own), subject.target, **placed)
        prepare(stack, {"early_exit": loaded["early_exit"]})
        others[where] = loaded["early_exit"]
    runtime = make_runtime("auto", subject.device)
    bench = Bench(stack, drafters, subject.config.vocab_size, options.tokens, subject.eos, runtime, others)
    asked = [answered(bench, subject, prompt, options.work) for prompt in prompts]

    def more() -> list[Asked]:
        """As many other prompts of the same files, where there are others."""
        taken = {prompt.id for prompt in prompts}
        found = read_prompts_of(options, 2 * options.num_prompts)
        return [answered(bench, subject, each, options.work) for each in found if each.id not in taken] or asked

    if (prepares := getattr(paper_of(options), "prepare_rows", None)) is not None:
        prepares(bench, more, options, tables)
    return bench, asked


def answered(bench: Bench, subject: Subject, prompt: Prompt, work: Path) -> Asked:
    """A prompt with the target's greedy answer, which is decoded once and kept."""
    ids = tuple(render_prompt(prompt.turns, subject.tokenizer, "auto" if prompt.chat else "none"))
    path = work / "answers.json"
    kept = read_json(path, "answers", "remove it") if path.exists() else {}
    if prompt.id not in kept:
        assert bench.stack is not None
        rounds = autoregressive(bench.stack, ids, max_new_tokens=bench.tokens, eos=bench.eos)
        kept[prompt.id] = [token for r in rounds for token in r.tokens]
        write_json(path, kept)
    return Asked(prompt.id, prompt.category, ids, tuple(kept[prompt.id]))


def load_recorded(options: argparse.Namespace) -> tuple[Bench, list[Asked]]:
    """n-gram tables and recorded answers to --prompts, which are one file."""
    require(len(options.prompts) == 1, "prompts", options.prompts, "one file, that of --transcripts")
    vocabulary = load_vocabulary(options.tokenizer)
    require(bool(options.table), "table", None, "an n-gram table")
    others = further_tables(options, vocabulary)
    prompts = read_prompts(options.prompts[0].partition("=")[2], limit=options.num_prompts)
    turns = recordings(prompts, read_transcripts(options.transcripts), vocabulary)
    asked = [Asked(turn.id, turn.category, turn.prompt, turn.answer) for turn in turns]
    drafters = {"ngrams": others[options.table[0]]}
    vocabulary_size = 1 + max(max(turn.answer) for turn in turns)
    return Bench(None, drafters, vocabulary_size, options.tokens, others=others), asked


def read_prompts_of(options: argparse.Namespace, count: int) -> list[Prompt]:
    """So many of every category, with --shot each after an example."""
    found = read_categories(options.prompts, count)
    for one in options.prompts if options.shot else ():
        name, _, file = one.partition("=")
        own = [prompt for prompt in found if prompt.category == name]
        solved = dict(zip((prompt.id for prompt in own), with_example(own, file), strict=True))
        found = [solved.get(prompt.id, prompt) for prompt in found]
    return found


def further_exits(options: argparse.Namespace) -> list[str]:
    """Early exits besides --checkpoint."""
    trained = [str(Path(options.ablation) / name) for name in ("no_layer", "open_data")] if options.ablation else []
    return [*trained, *(options.exits or ())]


def further_tables(options: argparse.Namespace, target: Any) -> dict[str, Any]:
    """The n-gram tables by where they lie. Raises `UserError` for one of another tokenizer."""
    given = [*(options.table or ()), options.code_table, options.frequent_table]
    return {where: open_table(where, target.vocabulary_digest, target.vocabulary_size) for where in given if where}


# ------------------------------------------------------------------------------------------------------------- choosing


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
            lacking = f"needs {OPTIONS.get(source, source)}" if source and not given.get(source) else ""
            if not lacking and not options.transcripts and row.category and row.category not in categories:
                lacking = f"needs --prompts {row.category}=FILE"
            if options.transcripts and (row.sampling.temperature or not row.method):
                lacking = lacking or "needs --target: recordings are greedy"
            rows.append(replace(row, never=row.never or lacking))
        return replace(table, rows=tuple(rows))

    return {key: settled(found[key]) for key in keys}


def entry_of(
    options: argparse.Namespace, tables: Mapping[str, Any], prompts: Sequence[Asked], dtype: str, measured: set[str]
) -> dict[str, Any]:
    models = {"target": options.target, "small LM": options.small_lm, "early exit": options.checkpoint,
              "EAGLE-3": options.eagle3, "table": options.table and options.table[0],
              "recorded answers": options.transcripts}  # fmt: skip
    kinds = {"small_lm": options.small_lm, "early_exit": options.checkpoint, "eagle3": options.eagle3}
    known = {kind: KINDS[kind].load_maker().identity(where) for kind, where in kinds.items() if where}
    return {
        "models": {name: where and Path(where).name for name, where in models.items()},
        "digests": {**known, "target": options.target and fingerprint_of(options.target)},
        "categories": sorted({asked.category for asked in prompts}),
        "prompts": len(measured & {asked.id for asked in prompts}),
        "tokens": options.tokens,
        "dtype": dtype,
        "timed": options.timed,
        "machine": describe_machine(),
        "made_with": provenance(),
        "tables": dict(tables),
    }


def fingerprint_of(target: str) -> dict[str, Any]:
    """What knows a target wherever it lies."""
    return {key: value for key, value in asdict(open_target(target).fingerprint).items()
            if key not in ("target", "revision")}  # fmt: skip


def main() -> None:
    options = parse()
    with reported():
        options = read_options(options)
        require_same(options)
        tables = chosen(options)
        bench, prompts = load(options, tables)
        measure_all(bench, list(tables.values()), prompts, options.work, minutes=options.minutes, times=options.timed)
    found = {key: judged(table, by_row(table, prompts, options.work)) for key, table in tables.items()}
    dtype = "replayed" if bench.stack is None else str(bench.stack.dtype).removeprefix("torch.")
    record = {"paper": options.paper, "entries": {}}
    if options.out.exists():
        record = read_json(options.out, "results of a paper", "give another --out")
    before = record["entries"].get(options.label, {"tables": {}})["tables"]
    found = {key: found.get(key) or before[key] for key in every_table(options) if key in found or key in before}
    record["entries"][options.label] = entry_of(
        options, found, prompts, dtype, {prompt for _, prompt in read_counts(options.work)}
    )
    write_json(options.out, record)
    picture = plot(record)
    if picture is not None:
        picture.savefig(options.out.with_suffix(".png"), format="png", dpi=100)
    print(markdown({"entries": {options.label: record["entries"][options.label]}}))


if __name__ == "__main__":
    with torch.no_grad():
        main()
