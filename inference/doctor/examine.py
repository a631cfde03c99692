"""The doctor: scores all possible readings of each drafter on the target's own texts, and compares them.

A reading is a way to run a checkpoint: which layers of the target it reads, whether it has an embedding of its own,
and more, which its config may declare wrongly. A variant is a reading with its function `draft`. `examine`: the target
answers prompts (`record_answer`), each variant of each drafter drafts along the answers (`score_variants`), and the
scores become findings (`compare_variants`).
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from outrider.base.errors import warn
from outrider.draft_models.mtp.checkpoint import lost_head
from outrider.inference.doctor import scores as scoring
from outrider.inference.doctor.examinees import EXAMINERS, Examinee
from outrider.inference.doctor.scores import AgreementScores, Findings, ReadingScores, Recording, is_better
from outrider.inference.loading.models import Models
from outrider.inference.loading.target_setup import TargetSetup
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kinds import KINDS

MAX_ANSWER = 48  # maximum tokens of an answer
FEW, MANY = 240, 1200  # tokens of answers to judge: by default, and if the doctor was requested
AT_LENGTH = 2  # texts for each of `doctor_lengths`, lengths of texts in tokens
Examinees = Mapping[str, Examinee]  # by kind of drafter


def examine(
    config: EvaluateConfig, setup: TargetSetup, models: Models, prompt_ids: Sequence[list[int]]
) -> dict[str, Findings]:
    """The findings on each kind of drafter; kinds that are not examined are left out.

    prompt_ids: the ids of every prompt's first turn, of which evenly spread ones are answered.
    """
    if config.doctor and (lost_warning := lost_head(setup.target.source, setup.target.config)):
        warn(f"target={setup.target.source}: {lost_warning}")  # of an MTP head that the config declares
    examinees = find_examinees(config, setup, models)
    if not examinees:
        return {}
    max_tokens = min(MAX_ANSWER, config.max_new_tokens)
    question_count = min(-(-(MANY if config.doctor else FEW) // max_tokens), len(prompt_ids))
    questions = [prompt_ids[number * len(prompt_ids) // question_count] for number in range(question_count)]

    def scores_of(prompts: Iterable[Sequence[int]], examinees: Examinees) -> dict[str, list[AgreementScores]]:
        variants = [variant for examinee in examinees.values() for variant in examinee.variants]
        boundaries = sorted({boundary for variant in variants for boundary in variant.boundaries})
        # An iterator: one recording exists at a time, as its hidden states take much memory.
        recordings = (scoring.record_answer(models.stack, ids, boundaries, max_tokens, setup.eos) for ids in prompts)
        return score_variants(filter(None, recordings), examinees)

    scores = scores_of(questions, examinees)
    findings = {name: compare_variants(examinee, scores[name]) for name, examinee in examinees.items()}
    # How agreement depends on the length of the text: for the declared reading, which is the first variant.
    declared_only = {name: examinee._replace(variants=examinee.variants[:1]) for name, examinee in examinees.items()}
    for length in config.doctor_lengths:  # of prompt and answer together
        for name, variant_scores in scores_of(texts_of_length(length - max_tokens, questions), declared_only).items():
            if variant_scores:
                agreement_by_length = {**(findings[name].lengths or {}), str(length): variant_scores[0].agreement}
                findings[name] = replace(findings[name], lengths=agreement_by_length)
    return findings


def texts_of_length(text_length: int, prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Prompts joined in turn up to `text_length` tokens, each text starting with another prompt."""
    for start in range(min(AT_LENGTH, len(prompts))):
        cycled_prompts = itertools.cycle([*prompts[start:], *prompts[:start]])
        yield list(itertools.islice(itertools.chain.from_iterable(cycled_prompts), text_length))


def find_examinees(config: EvaluateConfig, setup: TargetSetup, models: Models) -> dict[str, Examinee]:
    examinees = {}
    for name, model in models.drafters.items():
        path, plugin = config.where(KINDS[name]), config.plugin(KINDS[name])
        if path is None or name not in EXAMINERS:
            continue
        # By default only drafters that another trainer wrote are examined.
        if config.doctor or (config.doctor is None and plugin.is_foreign(path, setup.target)):
            examinees[name] = EXAMINERS[name](model, path, setup.target, models.stack, config.reading)
    return examinees


def score_variants(recordings: Iterable[Recording], examinees: Examinees) -> dict[str, list[AgreementScores]]:
    """By kind, the scores of each of its variants over all recordings; none of them if there are no recordings."""
    by_kind: dict[str, list[list[AgreementScores]]] = {name: [] for name in examinees}
    for text_id, recording in enumerate(recordings):
        for name, examinee in examinees.items():
            draft_logits = (variant.draft(recording) for variant in examinee.variants)
            by_kind[name].append([scoring.score_logits(logits, recording, text_id) for logits in draft_logits])
    return {name: [scoring.join_scores(scores) for scores in zip(*rows, strict=True)] for name, rows in by_kind.items()}


def compare_variants(examinee: Examinee, scores: Sequence[AgreementScores]) -> Findings:
    """The scores of a drafter's variants, and the best one that is significantly better than the declared reading."""
    readings: list[ReadingScores] = []
    for variant, variant_scores in zip(examinee.variants, scores, strict=False):  # without recordings no scores
        is_winner, p_value = is_better(variant_scores, scores[0], len(scores) - 1) if readings else (False, None)
        agree, finite = (tuple(shares.mean(1).tolist()) for shares in (variant_scores.agrees, variant_scores.finite))
        row = ReadingScores(
            variant.name, variant.option, variant.meaning, variant_scores.agreement, agree, finite, p_value, is_winner
        )
        readings.append(row)
    block_ids = scores[0].blocks.tolist() if scores else []
    return Findings(
        positions=len(block_ids),
        texts=len({block >> 32 for block in block_ids}),  # the upper bits of a block's number are its text's
        ways=tuple(readings),
        better=max((row for row in readings if row.is_better), key=lambda row: row.agreement, default=None),
        facts=tuple(examinee.facts),
    )
