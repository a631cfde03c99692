"""A target's recorded answers: held-out answers to replay, and whether they are the target's greedy answers.

A run is one of generate-responses: a folder of files of responses, with a record of the target and the sampling.
"""

from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from outrider.base.errors import UserError
from outrider.data_prep.text.chat import is_greedy_run, read_run_record, records_of_runs, templates_of_run
from outrider.data_prep.text.data_files import read_file, resolve_paths
from outrider.data_prep.text.documents import Document, encode, origin_digests
from outrider.data_prep.text.records import Counts
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import read_records
from outrider.draft_models.targets.fingerprint import model_differences
from outrider.draft_models.targets.open_target import OpenTarget
from outrider.draft_models.targets.vocabulary import KWARGS, bind_arguments, tokenizer_digest
from outrider.train.parts.capture import TextToContinue

# Calibration checks that each token is the likeliest by the recorded top k; two of them show a tie.
_REMEDY = "make others with outrider generate-responses temperature=0 top_k_logits=2"
_PROMPT = 128  # most tokens of a plain text after which the rest counts as the answer


def recorded_texts(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, text_count: int
) -> tuple[list[TextToContinue], bool]:
    """The first answers of the first held-out records, each after its whole prompt; and whether all are tokens that a
    target wrote. Each source of a mix of data has an equal share of the `text_count` texts."""
    configs, texts, is_by_target = [config for _, _, config in data.parts()] or [data], list[TextToContinue](), True
    for source_number, config in enumerate(configs, 1):
        max_texts = text_count * source_number // len(configs)
        bound = bind_arguments(tokenizer, config.chat_template_kwargs, config.template, f"data.{KWARGS}")
        for record in read_records(config, "heldout"):
            if len(texts) >= max_texts:
                break
            answers = [first_answer(document) for document in encode([record], bound, config.template, Counts())]
            answers = [text for text in answers if text.answer and len(text.answer) > 1][:1]  # one token is no draft
            texts += answers
            # A response says by which tokenizer and template its tokens were written; they hold if both are today's.
            origin = (digests.tokenizer, digests.template) if (digests := record.get("written")) else None
            is_by_target &= not answers or origin == origin_digests(record, bound, config.template)
    return texts, is_by_target


def first_answer(document: Document) -> TextToContinue:
    """The first answer in a document. Of a plain text it begins after `_PROMPT` tokens, or half of them."""
    ids, supervised = document.ids, document.supervised
    answer_start = max(1, min(_PROMPT, len(ids) // 2) if supervised.all() else int(supervised.argmax()))
    answer_length = int(np.logical_and.accumulate(supervised[answer_start:]).sum())
    return TextToContinue(ids[:answer_start].tolist(), ids[answer_start : answer_start + answer_length].tolist())


def are_greedy(data: DataConfig) -> bool:
    """Whether the records of runs, or else of the answers, say that all answers in the files of `data` are greedy."""
    configs = [config for _, _, config in data.parts()] or [data]
    paths = [path for config in configs for path in resolve_paths(config.path if config.source == "local" else ())]
    return all(config.source == "local" for config in configs) and all(map(_is_greedy_file, paths))


def _is_greedy_file(path: Path) -> bool:
    """By the record of its run, or else by the flags of its answers."""
    run_record = read_run_record(path)
    flags = (isinstance(record, dict) and record.get("greedy") is True for _, record in read_file(path, Counts()))
    return all(flags) if run_record is None else is_greedy_run(run_record)


def require_answers_of(target: OpenTarget, data: DataConfig) -> None:
    """Raise `UserError` where the responses that `data` names are not greedy or are of another target or template,
    according to the records of the runs that made them."""
    for folder, run_record in records_of_runs(data).items():
        model = run_record.get("model")
        # Of a target that is not seen only the tokenizer is here.
        differs = target.is_seen and isinstance(model, dict) and bool(model_differences(model, target.identity))
        digest = tokenizer_digest(target.tokenizer)[:16]  # as many digits as a run records
        differs |= run_record.get("tokenizer", digest) != digest
        tokenizer = bind_arguments(target.tokenizer, data.chat_template_kwargs, data.template, f"data.{KWARGS}")
        allowed = {data.template} if tokenizer.chat_template else {data.template, "absent"}  # absent: the run had none
        fault_checks = {
            "sampled, but for the first tokens": not is_greedy_run(run_record),  # the first: its greedy_tokens
            f"of another target than {target.source}": differs,
            f"of another template than {data.template}": bool(templates_of_run(run_record, tokenizer) - allowed),
        }
        fault_text = " and ".join(fault for fault, applies in fault_checks.items() if applies)
        if fault_text:
            raise UserError(f"data.path={folder}: these answers are {fault_text}; {_REMEDY}")
