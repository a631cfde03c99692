"""Recorded answers of a target, as token ids.

Recordings are files of generate-responses, which have token ids (`read_responses`), or answer files in the layout of
MT-Bench and Spec-Bench: one JSON object a line, {"question_id", "choices": [{"turns": [answer, …]}]}. These hold text,
so the ids that the target emitted are recovered by tokenising (`recordings`).

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
from outrider.data_prep.text.chat import VICUNA_SYSTEM, is_greedy_run, run_beside
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
    bos: int | None
    eos: int
    vocabulary_digest: str
    tokenizer_digest: str = ""
    vocabulary_size: int | None = None  # of the model that recorded


@dataclass(frozen=True)
class RecordedTurn:
    """One turn: the ids of the target's prompt and of its answer, end token included.

    ended: by its end token, not cut. greedy: whether the answer is known to be greedy.
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


def load_vocabulary(source: str) -> Vocabulary:
    """The tokenizer in `source` (see `open_encoder`). Raises `UserError`."""
    encoder = open_encoder(source)
    if encoder.eos is None:
        raise UserError(f"tokenizer={source}: has no end token, which ends every recorded answer")
    digest = vocabulary_digest(encoder.pieces)
    return Vocabulary(lambda text: list(encoder.encode([text])[0]), encoder.bos, encoder.eos, digest, encoder.digest)


def read_transcripts(name: str) -> dict[str, tuple[str, ...]]:
    """Answers by question id, one per turn. Raises `UserError` naming file and line for invalid records."""
    path = Path(os.path.expanduser(name))
    if not path.is_file():
        raise UserError(f"transcripts={name}: no such file; expected MT-Bench or Spec-Bench answers (JSONL)")
    answers = dict(_parse_answer(record, f"{path}:{number}") for number, record in read_file(path))
    if not answers:
        raise UserError(f"transcripts={name}: no answer in it")
    return answers


def _parse_answer(record: object, where: str) -> tuple[str, tuple[str, ...]]:
    match record:
        case {"question_id": question, "choices": [{"turns": [*turns]}, *_]}:
            if all(isinstance(turn, str) and replace_surrogates(turn) == turn for turn in turns):
                return str(question), tuple(turns)
    raise UserError(f"{where}: not an answer record: expected question_id and choices, the first with turns of text")


def recordings(
    prompts: Sequence[Prompt], answers: Mapping[str, Sequence[str]], vocabulary: Vocabulary
) -> list[RecordedTurn]:
    """Every turn of every prompt with its recorded answer. Earlier turns are the later ones' context.

    Every answer is assumed to end with the end token. This is wrong for an answer that the recorder truncated, which
    its text does not show.

    Raises `UserError` for a prompt without an answer to each of its turns.
    """
    turns = []
    for prompt in prompts:
        if prompt.id not in answers:
            raise UserError(f"prompt {prompt.id}: no answer to it in the transcripts; give the prompts they belong to")
        if len(prompt.turns) != len(answers[prompt.id]):
            raise UserError(
                f"prompt {prompt.id}: {len(prompt.turns)} turns, but {len(answers[prompt.id])} answers in the "
                "transcripts; give the prompts they belong to"
            )
        ids, system = ([] if vocabulary.bos is None else [vocabulary.bos]), f"{prompt.system or VICUNA_SYSTEM} "
        for name, question, answer in zip(prompt.turn_ids, prompt.turns, answers[prompt.id], strict=True):
            opening = f"{system}USER: {question} ASSISTANT:"
            head, system = vocabulary.encode(opening), ""
            joined = vocabulary.encode(f"{opening} {answer}")
            tail = joined[len(head) :] if joined[: len(head)] == head else vocabulary.encode(answer)
            turns.append(RecordedTurn(name, prompt.category, (*ids, *head), (*tail, vocabulary.eos)))
            ids += [*head, *tail, vocabulary.eos]
    return turns


def read_responses(source: str, vocabulary: Vocabulary) -> list[RecordedTurn]:
    """The turns of all records with token ids in `source`, a file or the directory of generate-responses.

    An answer is known to be greedy if its record or its run says so. Raises `UserError` naming the record without
    token ids, or with those of another tokenizer.
    """
    path = Path(os.path.expanduser(source))
    files = sorted(path.glob(RESPONSES)) if path.is_dir() else [path]
    return [turn for file in files for turn in _read_turns(file, vocabulary)]


def _read_turns(file: Path, vocabulary: Vocabulary) -> Iterator[RecordedTurn]:
    greedy = (run := run_beside(file)) is not None and is_greedy_run(run)
    for line, raw in read_file(file):
        where = f"{file}:{line}"
        try:
            record = to_record(raw, find_layout(raw, "auto", None, where), where)
        except SkipRecordError as error:
            raise UserError(f"{where}: {error}; remove this record") from None
        facts, written = raw if isinstance(raw, dict) else {}, record.get("written")
        if written is None:
            raise UserError(f"{where}: no token ids of the target in it; give prompts= with a file of answers as text")
        if not vocabulary.tokenizer_digest.startswith(written.tokenizer):
            raise UserError(f"{where}: its tokens are of another tokenizer; give the target's")
        spans = [(text.ids, begin, end) for text in written.documents for begin, end in text.answers]
        for number, (ids, begin, end) in enumerate(spans, 1):
            ended = number < len(spans) or not record.get("truncated")
            name = f"{facts.get('id', line)}" + ("" if number == 1 else f"/turn{number}")
            category, is_greedy = "chat" if "messages" in record else "text", bool(facts.get("greedy", greedy))
            yield RecordedTurn(name, category, tuple(ids[:begin]), tuple(ids[begin:end]), ended, is_greedy)
