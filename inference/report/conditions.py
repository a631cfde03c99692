"""The conditions of a report: models and settings, the load of the machine, the drafters' vocabularies and training
times, and whether their training text contains the prompts.

Contamination, prompts that occur in a drafter's training text, makes its figures unrepresentative. A kind is a kind of
drafter, by its name, as small_lm.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from outrider.base.errors import UserError
from outrider.base.files import digest_of
from outrider.base.settings import construct
from outrider.data_prep.text.prompts import Prompt
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import read_records
from outrider.draft_models.formats.model_name import model_name
from outrider.inference.loading.models import make_runtime
from outrider.inference.loading.target_setup import TargetSetup
from outrider.inference.measure.prepared import Prepared
from outrider.inference.measure.results import MeasuredPrompt, PromptResult
from outrider.inference.measure.statistics import coverage_by_category
from outrider.inference.measure.threads import judge_load
from outrider.inference.report.types import RUN, Conditions, DraftVocabulary, Overlap
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kinds import KINDS

CHARACTERS = 8_000_000  # limit on the training text searched, for a search of seconds

Run = tuple[str, ...]  # `RUN` consecutive words
TrainingText = Mapping[str, object] | None  # the settings that name a training text; None: no record


def describe_conditions(
    config: EvaluateConfig,
    setup: TargetSetup,
    prepared: Prepared,
    prompts: Sequence[Prompt],
    measured: Sequence[MeasuredPrompt],
    identity: Mapping[str, object],
) -> Conditions:
    """The conditions of a run. prepared: what was decided before the first prompt, for all. prompts: of the command.

    measured: the prompts with results, in order. identity: what determines the results, by name.
    """
    results = [result for prompt in measured for result in prompt.turns]
    records = config.training_records()
    training_texts = {kind: record.data for kind, record in records.items()}
    prompts_by_threads = Counter(prompt.threads for prompt in measured if prompt.threads)
    return Conditions(
        target=setup.target.source,
        model=model_name(setup.target.source),
        drafter=" + ".join(config.paths.values()) or "none",
        dtype=setup.numbers,  # of the weights
        computes_in=setup.floats,
        device=str(setup.device),
        runtime=make_runtime(config.runtime, setup.device).name,
        kernels=prepared.chosen(),
        processes=max(prompt.processes for prompt in measured),
        threads={str(number): count for number, count in sorted(prompts_by_threads.items())},
        prompts_given=len(prompts),
        template=setup.chat_template if any(prompt.chat for prompt in prompts) else None,
        peak_memory_bytes=max((prompt.peak_bytes for prompt in measured), default=0),
        load=judge_load((m.cpu_share for m in measured), (m.load for m in measured), os.cpu_count() or 1),
        minutes=config.minutes,  # the time limit
        trained_seconds={kind: record.seconds for kind, record in records.items() if record.seconds is not None},
        max_new_tokens=config.max_new_tokens,
        temperature=config.sampling.temperature,
        sampling=asdict(config.sampling),
        generation_config={
            "from": config.generation_config,
            "taken_over": dict(setup.inherited.fields),
            "ignored": dict(setup.inherited.ignored),
        },
        cudnn_attention=torch.backends.cuda.cudnn_sdp_enabled() if setup.device.type == "cuda" else None,
        skipped=tuple(turn for prompt in measured for turn in prompt.skipped),
        overlap=find_overlaps(training_texts, prompts),
        origin=origin_of(config, training_texts, prompts),
        doctor=prepared.doctor,
        digests=digests(identity),
        draft_vocabularies=draft_vocabularies(config, results),
        texts_at_once=config.batch if config.batch > 1 else None,
    )


def draft_vocabularies(config: EvaluateConfig, results: Sequence[PromptResult]) -> dict[str, DraftVocabulary]:
    """By kind, the tokens that a drafter with a vocabulary of its own predicts, and their share of the answers."""
    vocabulary_by_kind = {}
    for kind, drafter_path in config.paths.items():
        tokens = config.plugin(KINDS[kind]).draft_vocabulary(drafter_path)
        if tokens is not None:
            shares = coverage_by_category(tokens, ((result.category, result.answer) for result in results))
            vocabulary_by_kind[kind] = DraftVocabulary(len(tokens), shares)
    return vocabulary_by_kind


def digests(identity: Mapping[str, object]) -> dict[str, str]:
    """Digests of the target and the drafters, from the identity of a run; of other values 16 digits of a sha256."""
    target = identity["target"]
    assert isinstance(target, Mapping)
    parts = {"target": target["weights"], "tokenizer": target["tokenizer"], "chat template": target["chat_template"]}
    for kind in KINDS.values():  # identity(None) has the keys by which a kind identifies its model
        parts |= {f"{kind.name} {name}": identity[name] for name in kind.load_plugin().identity(None)}
    parts = {name: value for name, value in parts.items() if value is not None}
    return {name: value if isinstance(value, str) else digest_of(value)[:16] for name, value in parts.items()}


def find_overlaps(training_texts: Mapping[str, TrainingText], prompts: Sequence[Prompt]) -> dict[str, Overlap]:
    """By kind of drafter, the overlap of prompts and training text. training_texts: by kind."""
    overlap_by_kind: dict[str, Overlap] = {}
    overlap_by_text: dict[str, Overlap] = {}
    for kind, training_text in training_texts.items():
        key = json.dumps(training_text, sort_keys=True)  # drafters of the same target often share their training text
        overlap_by_text[key] = overlap_by_text.get(key) or find_overlap(training_text, prompts)
        overlap_by_kind[kind] = overlap_by_text[key]
    return overlap_by_kind


def origin_of(config: EvaluateConfig, training_texts: Mapping[str, TrainingText], prompts: Sequence[Prompt]) -> str:
    """A sentence on prompts like those that drafters are trained on; "" for other prompts. training_texts: by kind."""
    # Of `inference.batch.own_prompts`: heldout.jsonl and the category "own". Of prompts=python_stdlib: held-out files.
    categories, path = {prompt.category for prompt in prompts}, Path(str(config.prompts))
    is_heldout = path.name == "heldout.jsonl" and path.with_name("prompts.json").exists()
    is_heldout |= categories == {"python_stdlib"} and "python_stdlib" in str(training_texts)
    origin = "held out from those that drafters learn from" if is_heldout else ""
    origin = "written by the target itself" if categories == {"own"} else origin
    sentence = f"The prompts are {origin}, of the kind that drafters are trained on, and gain more than fresh ones"
    return f"{sentence} (docs/results.md)." if origin and config.paths else ""


def find_overlap(data: TrainingText, prompts: Sequence[Prompt]) -> Overlap:
    """The overlap of `prompts` with the training text that the settings `data` name, in runs of `RUN` words.

    The text is read as it exists now. Nothing is downloaded. If the text is not on this machine, `why` says so.
    """
    if data is None:
        return Overlap(why="there is no record of what it learned from")
    try:
        config: DataConfig = construct(DataConfig, data)
        sources = {config.source} if config.source != "mix" else {part.source for _, _, part in config.parts()}
        if "hub" in sources:
            return Overlap(why="its training text lies on the Hub, and nothing is fetched for this")
        runs_by_prompt = [{word_run for turn in prompt.turns for word_run in word_runs(turn)} for prompt in prompts]
        seen_runs, char_count, is_complete = _find_runs(set().union(*runs_by_prompt), config)
    except UserError as error:
        return Overlap(why=f"its training text cannot be read here ({error})")
    return Overlap(
        prompts=len(prompts),
        prompts_seen=sum(not seen_runs.isdisjoint(prompt_runs) for prompt_runs in runs_by_prompt),
        runs=len(set().union(*runs_by_prompt)),
        runs_seen=len(seen_runs),
        characters=char_count,
        complete=is_complete,
    )


def word_runs(text: str) -> list[Run]:
    """All runs of `RUN` words, separated by whitespace, in a text."""
    words = text.split()
    return list(zip(*(words[start:] for start in range(RUN)), strict=False))


def _find_runs(prompt_runs: set[Run], config: DataConfig) -> tuple[set[Run], int, bool]:
    """Which of the `prompt_runs` the training text has, the characters searched, and whether that was all of it."""
    seen_runs, char_count = set[Run](), 0
    for record in read_records(config, "train"):
        texts = [record["text"]] if "text" in record else [message["content"] for message in record["messages"]]
        for text in texts:
            seen_runs |= prompt_runs.intersection(word_runs(text))
            char_count += len(text)
        if char_count >= CHARACTERS:
            return seen_runs, char_count, False
    return seen_runs, char_count, True
