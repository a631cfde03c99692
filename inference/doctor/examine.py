"""The doctor: scores all possible readings of each drafter on the target's own texts, and compares them."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from outrider.data_prep.text.prompt_records import Prompt
from outrider.draft_models.targets.target import Target
from outrider.inference.doctor.examinees import DECLARED, EXAMINERS, UNSEEN, Examinee, Variant, training_facts
from outrider.inference.doctor.scores import Recording, Scores, answer_of, is_better, join, record, score
from outrider.inference.loading.targets import Models, TargetSetup
from outrider.inference.measure.statistics import coverage
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kinds import KINDS

ANSWER = 48  # maximum tokens of an answer
FEW, MANY = 240, 1200  # places to judge: by default, and if the doctor was requested
AT_LENGTH = 2  # texts per length
Findings = dict[str, Any]


Asked = tuple[Sequence[int], str]  # a prompt's ids and its category


def recordings(
    target: Target, prompts: Iterable[Asked], boundaries: Sequence[int], new: int, eos: frozenset[int]
) -> Iterator[Recording]:
    """Answers of `target` to prompts, of up to `new` tokens, and its hidden states at `boundaries` of its layers.

    They are yielded one at a time, as the hidden states take much memory.
    """
    for ids, category in prompts:
        found = record(target, ids, answer_of(target, ids, new, eos), boundaries, category)
        if found is not None:
            yield found


def examine(
    config: EvaluateConfig, setup: TargetSetup, models: Models, prompts: Sequence[Prompt], rendered: Sequence[list[int]]
) -> dict[str, Findings]:
    """The findings on each kind of drafter, JSON-able; kinds that are not examined are left out.

    rendered: the ids of every prompt's first turn.
    """
    examinees = find_examinees(config, setup, models)
    if not examinees:
        return {}
    new = min(ANSWER, config.max_new_tokens)
    wanted = -(-(MANY if config.doctor else FEW) // new)
    count = min(wanted, len(prompts))
    chosen = [number * len(prompts) // count for number in range(count)]
    asked = [(rendered[number], prompts[number].category) for number in chosen]
    scores, said = judge(recordings(models.stack, asked, boundaries_of(examinees), new, setup.eos), examinees)
    findings = {name: compare(examinee, scores[name]) for name, examinee in examinees.items()}
    trained, template = config.trained(), setup.chat_template if any(prompt.chat for prompt in prompts) else None
    for name, examinee in examinees.items():
        facts = [*examinee.facts, *training_facts(trained[name].data, setup.tokenizer, template), UNSEEN]
        findings[name]["facts"] = [fact._asdict() for fact in facts]
        known = examinee.known_tokens
        findings[name]["coverage"] = None if known is None else coverage(known, said)
    only = {name: replace(examinee, others=()) for name, examinee in examinees.items()}
    for length in config.doctor_lengths:
        texts = texts_of_length(length - new, [ids for ids, _ in asked])
        scores, _ = judge(recordings(models.stack, texts, boundaries_of(only), new, setup.eos), only)
        for name, found in scores.items():
            if found:
                findings[name].setdefault("lengths", {})[str(length)] = found[DECLARED].agreement
    return findings


def texts_of_length(length: int, prompts: Sequence[Sequence[int]]) -> Iterator[Asked]:
    """Prompts joined in turn up to `length` tokens, each text starting with another prompt."""
    for start in range(min(AT_LENGTH, len(prompts))):
        order = itertools.cycle([*prompts[start:], *prompts[:start]])
        yield list(itertools.islice(itertools.chain.from_iterable(order), length)), "long"


def find_examinees(config: EvaluateConfig, setup: TargetSetup, models: Models) -> dict[str, Examinee]:
    """The drafters to examine, by kind."""
    found = {}
    for name, model in models.drafters.items():
        where, plugin = config.where(KINDS[name]), config.plugin(KINDS[name])
        if where is None or not (plugin.foreign(where, setup.target) if config.doctor is None else config.doctor):
            continue
        if name in EXAMINERS:
            found[name] = EXAMINERS[name](plugin, model, where, setup.target, models.stack)
    return found


def boundaries_of(examinees: Mapping[str, Examinee]) -> tuple[int, ...]:
    """The layer boundaries at which any variant of any examinee needs the target's hidden states."""
    return tuple(sorted({one for examinee in examinees.values() for one in examinee.boundaries}))


def judge(
    recordings: Iterable[Recording], examinees: Mapping[str, Examinee]
) -> tuple[dict[str, dict[str, Scores]], list[tuple[str, list[int]]]]:
    """The scores over all recordings, by kind and variant, and the category and target tokens of each recording."""
    parts: dict[str, dict[str, list[Scores]]] = {name: {} for name in examinees}
    said = []
    for number, recording in enumerate(recordings):
        said.append((recording.category, recording.choices.tolist()))
        for name, examinee in examinees.items():
            for variant in (examinee.declared, *examinee.others):
                found = score(variant.drafting(recording), recording, number)
                parts[name].setdefault(variant.name, []).append(found)
    return {name: {variant: join(found) for variant, found in ways.items()} for name, ways in parts.items()}, said


def compare(examinee: Examinee, scores: Mapping[str, Scores]) -> Findings:
    """The scores of a drafter's variants, and the best one that is significantly better than the declared reading."""
    if not scores:
        return {"places": 0, "texts": 0, "ways": [], "better": None}
    declared = scores[DECLARED]
    rows = [_row(examinee.declared, declared)]
    for variant in examinee.others:
        wins, chance = is_better(scores[variant.name], declared, len(examinee.others))
        rows.append(_row(variant, scores[variant.name]) | {"chance": chance, "wins": wins})
    winners = [row for row in rows if row["wins"]]
    return {
        "places": len(declared.blocks),
        "texts": len({block >> 32 for block in declared.blocks.tolist()}),
        "ways": rows,
        "better": max(winners, key=lambda row: row["agreement"], default=None),
    }


def _row(variant: Variant, scores: Scores) -> Findings:
    about = {"name": variant.name, "option": variant.option, "meaning": variant.meaning, "agreement": scores.agreement}
    return about | scores.means | {"chance": None, "wins": False}
