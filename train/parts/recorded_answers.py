"""A target's recorded answers: held-out ones to replay, and whether they are its greedy ones."""

from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from outrider.base.errors import UserError
from outrider.data_prep.text.chat import is_greedy_run, records_of_runs, run_beside, templates_of_run
from outrider.data_prep.text.data_files import read_file, resolve_paths
from outrider.data_prep.text.documents import Document, encode, origin_digests
from outrider.data_prep.text.records import Counts
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import read_records
from outrider.draft_models.targets.fingerprint import model_differences
from outrider.draft_models.targets.open_target import OpenTarget
from outrider.draft_models.targets.vocabulary import KWARGS, bind_arguments, tokenizer_digest
from outrider.train.parts.capture import TextToContinue

_REMEDY = "make others with outrider generate-responses temperature=0 top_k_logits=2"
_PROMPT = 128  # most tokens of a plain text after which the rest counts as the answer


def recorded_texts(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, count: int
) -> tuple[list[TextToContinue], bool]:
    """The first answers of the first held-out records, each after its whole prompt; and whether all are tokens that a
    target wrote. Each source of a mix has an equal share of the `count` texts."""
    parts, texts, written = [part for _, _, part in data.parts()] or [data], list[TextToContinue](), True
    for number, part in enumerate(parts, 1):
        most = count * number // len(parts)
        bound = bind_arguments(tokenizer, part.chat_template_kwargs, part.template, f"data.{KWARGS}")
        for record in read_records(part, "heldout"):
            if len(texts) >= most:
                break
            answers = [first_answer(document) for document in encode([record], bound, part.template, Counts())]
            answers = [text for text in answers if text.answer and len(text.answer) > 1][:1]
            texts += answers
            origin = (ids.tokenizer, ids.template) if (ids := record.get("written")) else None
            written &= not answers or origin == origin_digests(record, bound, part.template)
    return texts, written


def first_answer(document: Document) -> TextToContinue:
    """The first answer in a document. Of a plain text it begins after `_PROMPT` tokens, or half of them."""
    ids, supervised = document.ids, document.supervised
    first = min(_PROMPT, len(ids) // 2) if supervised.all() else int(supervised.argmax())
    first = max(1, first)
    count = int(np.logical_and.accumulate(supervised[first:]).sum())
    return TextToContinue(ids[:first].tolist(), ids[first : first + count].tolist())


def are_greedy(data: DataConfig) -> bool:
    """Whether the records of runs, or else of the answers, say that all answers in the files of `data` are greedy."""
    parts = [part for _, _, part in data.parts()] or [data]
    paths = [path for part in parts for path in resolve_paths(part.path if part.source == "local" else ())]
    return all(part.source == "local" for part in parts) and all(map(_is_greedy_file, paths))


def _is_greedy_file(path: Path) -> bool:
    run = run_beside(path)
    flags = (isinstance(record, dict) and record.get("greedy") is True for _, record in read_file(path, Counts()))
    return all(flags) if run is None else is_greedy_run(run)


def require_answers_of(target: OpenTarget, data: DataConfig) -> None:
    """Raise `UserError` where the responses that `data` names are not greedy or are of another target or template,
    according to the records of the runs that made them."""
    for folder, run in records_of_runs(data).items():
        model = run.get("model")
        differs = target.is_seen and isinstance(model, dict) and bool(model_differences(model, target.identity))
        digest = tokenizer_digest(target.tokenizer)[:16]
        differs |= run.get("tokenizer", digest) != digest
        tokenizer = bind_arguments(target.tokenizer, data.chat_template_kwargs, data.template, f"data.{KWARGS}")
        right = {data.template} if tokenizer.chat_template else {data.template, "absent"}
        wrong = {
            "sampled, but for the first tokens": not is_greedy_run(run),
            f"of another target than {target.source}": differs,
            f"of another template than {data.template}": bool(templates_of_run(run, tokenizer) - right),
        }
        faults = " and ".join(what for what, is_so in wrong.items() if is_so)
        if faults:
            raise UserError(f"data.path={folder}: these answers are {faults}; {_REMEDY}")
