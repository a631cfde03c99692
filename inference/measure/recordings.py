"""Recorded answers of a target, as token ids.

Recordings are files of the command generate-responses, which have token ids (`read_responses`), or answer files in the
layout of MT-Bench and Spec-Bench: one JSON object a line, {"question_id", "choices": [{"turns": [answer, …]}]}. Answer
files hold text, so the ids that the target emitted are recovered by tokenising (`recordings`).

The prompt format of such a text is Vicuna's. The system's text (the prompt's, if it has one) and the question up to
"ASSISTANT:" are tokenised as one text, which the answer continues after a space. The end token follows, and the next
question is a new text, as Hugging Face tokenizers split at special tokens. An answer is tokenised alone if its space
would merge with the text before.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.base.errors import UserError
from outrider.data_prep.text.chat import VICUNA_SYSTEM, is_greedy_run, read_run_record
from outrider.data_prep.text.data_files import RESPONSES, read_file
from outrider.data_prep.text.messages import SkipRecordError, replace_surrogates
from outrider.data_prep.text.prompts import Prompt
from outrider.data_prep.text.records import find_layout, to_record
from outrider.draft_models.targets.encoder import open_encoder
from outrider.draft_models.targets.vocabulary import vocabulary_digest


@dataclass(frozen=True)
class Vocabulary:
    """The parts of a tokenizer that replay needs."""

    encode: Callable[[str], list[int]]  # without special tokens
    bos: int | None  # before the first prompt of a conversation; None: nothing is
    eos: int
    vocabulary_digest: str  # of the texts of all tokens, by id
    tokenizer_digest: str = ""  # of everything that determines the ids of a text
    vocabulary_size: int | None = None  # of the model that recorded


@dataclass(frozen=True)
class RecordedTurn:
    """One turn of a conversation: the ids of the target's prompt and of its answer, end token included.

    ended: whether the answer has its end token, and was not cut. greedy: whether the answer is known to be greedy.
    """

    id: str
    category: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    ended: bool = True
    greedy: bool = True

    @property
    def conversation(self) -> str:
        return self.id.partition("/turn")[0]


def load_vocabulary(tokenizer_source: str) -> Vocabulary:
    """The tokenizer in `tokenizer_source` (see `open_encoder`). Raises `UserError`."""
    encoder = open_encoder(tokenizer_source)
    if encoder.eos is None:
        raise UserError(f"tokenizer={tokenizer_source}: has no end token, which ends every recorded answer")
    digest = vocabulary_digest(encoder.pieces)
    return Vocabulary(lambda text: list(encoder.encode([text])[0]), encoder.bos, encoder.eos, digest, encoder.digest)


def read_transcripts(file_name: str) -> dict[str, tuple[str, ...]]:
    """Answers by question id, one per turn. Raises `UserError` naming file and line for invalid records."""
    path = Path(os.path.expanduser(file_name))
    if not path.is_file():
        raise UserError(f"transcripts={file_name}: no such file; expected MT-Bench or Spec-Bench answers (JSONL)")
    answers_by_id = dict(_parse_answer(record, f"{path}:{line_number}") for line_number, record in read_file(path))
    if not answers_by_id:
        raise UserError(f"transcripts={file_name}: no answer in it")
    return answers_by_id


def _parse_answer(record: object, where: str) -> tuple[str, tuple[str, ...]]:
    match record:
        case {"question_id": question, "choices": [{"turns": [*turns]}, *_]}:
            if all(isinstance(turn, str) and replace_surrogates(turn) == turn for turn in turns):
                return str(question), tuple(turns)
    raise UserError(f"{where}: not an answer record: expected question_id and choices, the first with turns of text")


def recordings(
    prompts: Sequence[Prompt], answers_by_id: Mapping[str, Sequence[str]], vocabulary: Vocabulary
) -> list[RecordedTurn]:
    """Every turn of every prompt with its recorded answer. The context of a turn has all earlier turns.

    Every answer is assumed to end with the end token. This is wrong for an answer that the recorder truncated, which
    its text does not show. Raises `UserError` for a prompt without an answer to each of its turns.
    """
    turns = []
    for prompt in prompts:
        answers, remedy = answers_by_id.get(prompt.id), "give the prompts they belong to"
        if answers is None:
            raise UserError(f"prompt {prompt.id}: no answer to it in the transcripts; {remedy}")
        if len(prompt.turns) != len(answers):
            counts = f"{len(prompt.turns)} turns, but {len(answers)} answers in the transcripts"
            raise UserError(f"prompt {prompt.id}: {counts}; {remedy}")
        past_ids = [] if vocabulary.bos is None else [vocabulary.bos]
        system = f"{prompt.system or VICUNA_SYSTEM} "  # before the first question only
        for turn_id, question, answer in zip(prompt.turn_ids, prompt.turns, answers, strict=True):
            opening = f"{system}USER: {question} ASSISTANT:"
            head_ids, system = vocabulary.encode(opening), ""
            all_ids = vocabulary.encode(f"{opening} {answer}")
            answer_ids = all_ids[len(head_ids) :] if all_ids[: len(head_ids)] == head_ids else vocabulary.encode(answer)
            turns.append(RecordedTurn(turn_id, prompt.category, (*past_ids, *head_ids), (*answer_ids, vocabulary.eos)))
            past_ids += [*head_ids, *answer_ids, vocabulary.eos]
    return turns


def read_responses(source_path: str, vocabulary: Vocabulary) -> list[RecordedTurn]:
    """The turns of all records with token ids in `source_path`, a file or the directory of generate-responses.

    An answer is known to be greedy if its record or its run says so. Raises `UserError` naming the record without
    token ids, or with those of another tokenizer.
    """
    path = Path(os.path.expanduser(source_path))
    files = sorted(path.glob(RESPONSES)) if path.is_dir() else [path]
    return [turn for file in files for turn in _read_turns(file, vocabulary)]


def _read_turns(file: Path, vocabulary: Vocabulary) -> Iterator[RecordedTurn]:
    run_is_greedy = (run := read_run_record(file)) is not None and is_greedy_run(run)
    for line_number, raw_record in read_file(file):
        where = f"{file}:{line_number}"
        try:
            record = to_record(raw_record, find_layout(raw_record, layout="auto", column=None, where=where), where)
        except SkipRecordError as error:
            raise UserError(f"{where}: {error}; remove this record") from None
        fields = raw_record if isinstance(raw_record, dict) else {}
        tokenized = record.get("written")  # the ids of the record's texts, and which spans of ids are answers
        if tokenized is None:
            raise UserError(f"{where}: no token ids of the target in it; give prompts= with a file of answers as text")
        if not vocabulary.tokenizer_digest.startswith(tokenized.tokenizer):  # the record has its first 16 digits
            raise UserError(f"{where}: its tokens are of another tokenizer; give the target's")
        spans = [(document.ids, begin, end) for document in tokenized.documents for begin, end in document.answers]
        for turn_number, (ids, begin, end) in enumerate(spans, 1):
            is_ended = turn_number < len(spans) or not record.get("truncated")
            turn_id = f"{fields.get('id', line_number)}" + ("" if turn_number == 1 else f"/turn{turn_number}")
            category, is_greedy = "chat" if "messages" in record else "text", bool(fields.get("greedy", run_is_greedy))
            yield RecordedTurn(turn_id, category, tuple(ids[:begin]), tuple(ids[begin:end]), is_ended, is_greedy)
