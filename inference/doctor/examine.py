"""The doctor: scores all possible readings of each drafter on the target's own texts, and compares them."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from data_prep.text.chat import render_prompt
from data_prep.text.prompts import Prompt
from data_prep.text.settings import PromptTemplate
from draft_models.early_exit.checkpoint import read_meta
from draft_models.early_exit.model import EarlyExit
from draft_models.small_lm.model import TRAINING_FILE
from draft_models.targets.architectures import read_config
from draft_models.targets.open_target import OpenTarget, load_tokenizer
from draft_models.targets.target import Target, require_layers
from inference.doctor.drafting import draft_by_exit, draft_by_lm
from inference.doctor.examinee import Examinee, Fact, Recording, Variant, numbers
from inference.doctor.head_variants import examine_head
from inference.doctor.recording import answer_of, record
from inference.doctor.scores import Scores, is_apart, is_better, join, relabelled, score
from inference.doctor.training_data import UNSEEN, made_for, recorded_settings, training_facts
from inference.drafters.shaped import Calibrated
from inference.drafters.small_lm import Model, small_lm_of
from inference.loading.targets import Models, TargetSetup
from inference.measure.statistics import coverage
from inference.settings.evaluate import EvaluateConfig
from inference.settings.kinds import KINDS, DrafterPlugin, read_record
from outrider.errors import UserError

DECLARED = "as declared"


def examine_exit(
    plugin: DrafterPlugin[Calibrated[EarlyExit]],
    model: Calibrated[EarlyExit],
    where: str,
    target: OpenTarget,
    stack: Target,
) -> Examinee:
    """An early exit that is prepared to decode on `stack`."""
    drafter = model.drafter
    meta = read_meta(where)
    return Examinee(
        Variant(DECLARED, partial(draft_by_exit, drafter, require_layers(stack)), boundaries=(drafter.exit_layer,)),
        known_tokens=plugin.known_tokens(where),
        facts=[
            Fact("made for", f"{meta.fingerprint.target}, whose digests are this target's"),
            numbers(meta.dtype, stack.dtype),
        ],
        data=meta.training.get("data"),
    )


def examine_lm(plugin: DrafterPlugin[Model], model: Model, where: str, target: OpenTarget, stack: Target) -> Examinee:
    """A small LM for `target`."""
    lm = small_lm_of(model)
    record = read_record(where, TRAINING_FILE)
    stored = read_config(where, role="small_lm").dtype  # that of a model that is loaded says what it runs in
    return Examinee(
        Variant(DECLARED, partial(draft_by_lm, lm)),
        known_tokens=plugin.known_tokens(where),
        facts=[made_for(record, target), numbers(stored, lm.dtype)],
        data=recorded_settings(record).get("data"),
        tokenizer=load_tokenizer(where, role="small_lm"),
    )


ANSWER = 48  # maximum tokens of an answer
FEW, MANY = 240, 1200  # places to judge: by default, and if the doctor was requested
AT_LENGTH = 2  # texts per length
TEMPLATED = 4  # prompts to render with other templates
SYSTEM = "You are a helpful assistant."
Findings = dict[str, Any]
# By kind, the function that makes its `Examinee` from (maker, `prepare`d model, the model's path, target, stack).
EXAMINERS: dict[str, Callable[..., Examinee]] = {
    "early_exit": examine_exit,
    "small_lm": examine_lm,
    "eagle3": examine_head,
}


@dataclass(frozen=True)
class Texts:
    """The source of recordings: the target, which answers prompts. new: maximum tokens of an answer."""

    config: EvaluateConfig
    setup: TargetSetup
    models: Models
    boundaries: tuple[int, ...]
    new: int

    def recorded(self, prompts: Iterable[tuple[Sequence[int], str]]) -> Iterator[Recording]:
        """Recordings of prompts (ids, category), yielded one at a time as the hidden states take much memory."""
        for ids, category in prompts:
            answer = answer_of(self.models.stack, ids, self.new, self.setup.eos)
            found = record(self.models.stack, ids, answer, self.boundaries, category)
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
    texts = Texts(config, setup, models, boundaries_of(examinees), min(ANSWER, config.max_new_tokens))
    wanted = -(-(MANY if config.doctor else FEW) // texts.new)
    count = min(wanted, len(prompts))
    chosen = [number * len(prompts) // count for number in range(count)]
    asked = [(rendered[number], prompts[number].category) for number in chosen]
    scores, said = judge(texts.recorded(asked), examinees)
    findings = {name: compare(examinee, scores[name]) for name, examinee in examinees.items()}
    template = setup.chat_template if any(prompt.chat for prompt in prompts) else None
    for name, examinee in examinees.items():
        facts = [*examinee.facts, *training_facts(examinee.data, setup.tokenizer, template), UNSEEN]
        findings[name]["facts"] = [fact._asdict() for fact in facts]
        known = examinee.known_tokens
        findings[name]["coverage"] = None if known is None else coverage(known, said)
    if config.doctor:
        only = {name: replace(examinee, others=()) for name, examinee in examinees.items()}
        texts = replace(texts, boundaries=boundaries_of(only))
        chat = [prompts[number] for number in chosen if prompts[number].chat][:TEMPLATED]
        _add_templates(findings, texts, only, chat)
        _add_lengths(findings, texts, only, [ids for ids, _ in asked])
    return findings


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
    """The layer boundaries at which any variant of any patient needs the target's hidden states."""
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
    """The scores of a drafter's variants, the best winner, and the agreement if relabelled (see `_other_names`)."""
    if not scores:
        return {"places": 0, "texts": 0, "ways": [], "better": None, "relabelled": None}
    declared = scores[examinee.declared.name]
    rows = [_row(examinee.declared, declared)]
    for variant in examinee.others:
        wins, chance = is_better(scores[variant.name], declared, len(examinee.others))
        rows.append(_row(variant, scores[variant.name]) | {"chance": chance, "wins": wins})
    winners = [row for row in rows if row["wins"]]
    return {
        "places": len(declared.said),
        "texts": len({block >> 32 for block in declared.blocks.tolist()}),
        "ways": rows,
        "better": max(winners, key=lambda row: row["agreement"], default=None),
        "relabelled": _other_names(declared),
    }


def _row(variant: Variant, scores: Scores) -> Findings:
    about = {"name": variant.name, "option": variant.option, "meaning": variant.meaning, "agreement": scores.agreement}
    return about | scores.means | {"chance": None, "wins": False}


def _other_names(scores: Scores) -> float | None:
    """The agreement with relabelled tokens if it is so much better that the vocabulary map seems wrong; else None.

    A smaller gain proves nothing: a drafter's outputs carry some information on the next token under any labels.
    """
    first = replace(scores, agree=scores.agree[:1])
    other = relabelled(first)
    [(_, commonest)] = Counter(scores.said.tolist()).most_common(1)
    blind = commonest / len(scores.said)  # the agreement of always predicting the most frequent token
    wins, _ = is_better(other, first)
    return other.agreement if wins and other.agreement > max(2 * first.agreement, blind + 0.2, 0.4) else None


def _add_templates(
    findings: Mapping[str, Findings], texts: Texts, examinees: Mapping[str, Examinee], chat: Sequence[Prompt]
) -> None:
    """Add the agreement on the same questions rendered with other templates; marks those that are clearly better."""
    usual: dict[str, Scores] = {}
    for variant, prompts in renderings(texts, examinees, chat).items():
        scores, _ = judge(texts.recorded((ids, "chat") for ids in prompts), examinees)
        for name, examinee in examinees.items():
            if scores[name]:
                found = scores[name][examinee.declared.name]
                first = usual.setdefault(name, found)
                about = {"agreement": found.agreement, "better": is_apart(found, first)}
                findings[name].setdefault("templates", {})[variant] = about


def renderings(texts: Texts, examinees: Mapping[str, Examinee], chat: Sequence[Prompt]) -> dict[str, list[list[int]]]:
    """The ids of chat prompts by rendering, the evaluated one first; renderings with equal ids are left out."""
    tokenizer, template = texts.setup.tokenizer, texts.setup.chat_template
    asked = [{"role": "user", "content": prompt.turns[0]} for prompt in chat]
    ways: dict[str, list[tuple[list[dict[str, str]], PreTrainedTokenizerBase, PromptTemplate]]] = {
        "as evaluated": [([question], tokenizer, template) for question in asked],
        "with a system prompt": [([_system(SYSTEM), question], tokenizer, template) for question in asked],
        "with an empty system prompt": [([_system(""), question], tokenizer, template) for question in asked],
        "as bare text (template=none)": [([question], tokenizer, "none") for question in asked],
        "in Vicuna's format (template=vicuna)": [([question], tokenizer, "vicuna") for question in asked],
    }
    for name, examinee in examinees.items():
        own = examinee.tokenizer
        if own is not None and own.chat_template:
            ways[f"by the template of {name}"] = [([question], own, "tokenizer") for question in asked]
    found: dict[str, list[list[int]]] = {}
    for name, given in ways.items():
        try:
            ids = [render_prompt(*one) for one in given]
        except UserError:  # a template without support for such messages
            continue
        if ids and ids not in found.values():
            found[name] = ids
    return found


def _system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def _add_lengths(
    findings: Mapping[str, Findings], texts: Texts, examinees: Mapping[str, Examinee], prompts: Sequence[Sequence[int]]
) -> None:
    """Add the agreement on texts of given lengths: prompts concatenated in turn, each text starting with another."""
    for length in texts.config.doctor_lengths:
        joined = []
        for start in range(min(AT_LENGTH, len(prompts))):
            order = itertools.cycle([*prompts[start:], *prompts[:start]])
            ids = list(itertools.islice(itertools.chain.from_iterable(order), length - texts.new))
            joined.append((ids, "long"))
        scores, _ = judge(texts.recorded(joined), examinees)
        for name, examinee in examinees.items():
            if scores[name]:
                found = scores[name][examinee.declared.name].agreement
                findings[name].setdefault("lengths", {})[str(length)] = found
