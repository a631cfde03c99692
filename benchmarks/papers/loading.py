"""The models and prompts of the command line, with which a paper's tables are measured."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from categories import read_categories

from outrider.base.errors import UserError, require
from outrider.data_prep.text.data_files import read_file
from outrider.data_prep.text.prompt_records import to_prompt
from outrider.data_prep.text.prompts import Prompt, read_prompts
from outrider.inference.drafters.ngrams.drafter import open_table
from outrider.inference.loading.drafters import load_drafters
from outrider.inference.loading.models import load_stack, make_runtime, prepare_models
from outrider.inference.loading.target_setup import TargetSetup, find_setup
from outrider.inference.measure.prepared import render
from outrider.inference.measure.recordings import load_vocabulary, read_transcripts, recordings
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig
from papers.claims import Table
from papers.measuring import Asked, Bench, answer_of, key_of, runnable

ANSWERS = ("answer", "summary", "canonical_solution", "output")  # of GSM8K, XSum, HumanEval, Alpaca
PLAIN = MethodConfig(source="prompt_lookup")  # which needs no model


def load(options: argparse.Namespace, tables: Mapping[str, Table], paper: ModuleType) -> tuple[Bench, list[Asked]]:
    """The models and the prompts. Raises `UserError` for bad input, before a model is read where that shows.

    paper: its module, which may have rows to prepare once the models are there.
    """
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
        template=options.template,
    )  # fmt: skip
    setup = find_setup(config)
    _ = [render(setup, prompt, prompt.turns) for prompt in prompts]  # raises if no template is known
    placed: dict[str, Any] = {"dtype": setup.dtype, "device": setup.device}
    others = further_tables(options, setup.target)
    drafters = dict(load_drafters(config, setup.target, **placed))
    drafters |= {"ngrams": others[options.table[0]]} if options.table else {}
    stack = load_stack(setup.target, None, **placed, by_layers=True)
    prepare_models(stack, drafters)
    trained = sorted(Path(options.ablation).glob("*/drafter.json")) if options.ablation else []
    for where in (str(path.parent) for path in trained):  # early exits besides --checkpoint
        own = {"plain": PLAIN, **{key_of(row): row.method for row in rows if row.method and row.other == where}}
        loaded = load_drafters(replace(config, checkpoint=where, small_lm=None, methods=own), setup.target, **placed)
        prepare_models(stack, {"early_exit": loaded["early_exit"]})
        others[where] = loaded["early_exit"]
    runtime = make_runtime("auto", setup.device)
    answers = options.work / "answers.json"
    bench = Bench(stack, drafters, setup.config.vocab_size, options.tokens, setup.eos, runtime, others, answers)
    asked = [answered(bench, setup, prompt) for prompt in prompts]

    def more() -> list[Asked]:
        """As many other prompts of the same files, where there are others."""
        taken = {prompt.id for prompt in prompts}
        found = read_prompts_of(options, 2 * options.num_prompts)
        return [answered(bench, setup, each) for each in found if each.id not in taken] or asked

    if (prepares := getattr(paper, "prepare_rows", None)) is not None:
        prepares(bench, more, options, tables)
    return replace(bench, timed_tokens=options.timed_tokens), asked


def answered(bench: Bench, setup: TargetSetup, prompt: Prompt) -> Asked:
    """A prompt with the target's greedy answer, which is decoded once and kept."""
    asked = Asked(prompt.id, prompt.category, tuple(render(setup, prompt, prompt.turns)))
    return replace(asked, answer=answer_of(bench, asked))


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
    """`count` of every category; with --shot, each after an example."""
    found = read_categories(options.prompts, count)
    for one in options.prompts if options.shot else ():
        name, _, file = one.partition("=")
        own = [prompt for prompt in found if prompt.category == name]
        solved = dict(zip((prompt.id for prompt in own), with_example(own, file), strict=True))
        found = [solved.get(prompt.id, prompt) for prompt in found]
    return found


def with_example(prompts: Sequence[Prompt], file: str) -> list[Prompt]:
    """`prompts` of `file`, each after the file's last answered record that is not among them.

    A chat gets the example as an earlier turn; any other text gets it in front. If the file has no answers (such as
    MT-Bench's), the prompts stay as they are, and a line says so. Raises `UserError` if `file` is no such file.
    """
    if not Path(file).expanduser().is_file():
        raise UserError(f"--shot: {file} is no file of records with answers; give --prompts NAME=FILE")
    asked = {prompt.turns[0] for prompt in prompts}
    example: tuple[str, str] | None = None
    for number, raw in read_file(Path(file).expanduser()):
        answers = [raw[key] for key in ANSWERS if raw.get(key)] if isinstance(raw, dict) else []
        if answers and (turn := to_prompt(raw, f"{file}:{number}", number).turns[0]) not in asked:
            example = (turn, str(answers[0]))
    if example is None:
        print(f"--shot: no record of {file} has an answer to show ({', '.join(ANSWERS)}): its prompts stay without one")
        return list(prompts)
    return [
        replace(prompt, turns=(*example, *prompt.turns) if prompt.chat else ("\n\n".join((*example, prompt.turns[0])),))
        for prompt in prompts
    ]


def further_tables(options: argparse.Namespace, target: Any) -> dict[str, Any]:
    """The n-gram tables by where they lie. Raises `UserError` for one of another tokenizer."""
    given = [*(options.table or ()), options.code_table]
    return {where: open_table(where, target.vocabulary_digest, target.vocabulary_size) for where in given if where}
