"""A record of a prompt file of any layout → a prompt: user turns, or a text to continue.

A raw record is a mapping of columns to values. Its layout is what `records.find_layout` knows: text, messages, ….
`Counts` notes, for a warning, which columns and fields were not read.
"""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.base.errors import UserError
from outrider.data_prep.text import messages, records
from outrider.data_prep.text.messages import Message, Raw, SkipRecordError
from outrider.data_prep.text.records import Counts, FileLayout, Record, require_encodable, unread_columns

_IDS = ("question_id", "task_id", "prompt_id", "id")  # columns, the first that is there counts
_LANGUAGES = {"cs": "Czech", "de": "German", "fr": "French", "hi": "Hindi", "ru": "Russian"}  # WMT 2014's
_REQUESTS = {  # column → category, and how the user's turn begins
    "question": ("question", ""),
    "instruction": ("instruction", ""),
    "document": ("summary", "Summarize this article in one sentence.\n\n"),
    "article": ("summary", "Summarize: "),  # as in Spec-Bench
    "translation": ("translation", "Translate the input English sentence into "),
}
_REFERENCES = "answer answers output response reference highlights summary canonical_solution entry_point test"
_ANSWERS = {*_REFERENCES.split()}  # columns of answers and of what judges them
NOT_THERE = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # SPEED-Bench's placeholder for third-party texts


@dataclass(frozen=True)
class Prompt:
    """One prompt: the user's turns, whether they are chat (to be rendered by a template) or bare text, and what the
    system says before them."""

    id: str
    category: str
    turns: tuple[str, ...]
    chat: bool
    system: str = ""

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """The ids of its turns, which key the results: the prompt's id for one turn, else "id/turn1" and so on."""
        if len(self.turns) == 1:
            return (self.id,)
        return tuple(f"{self.id}/turn{number}" for number in range(1, len(self.turns) + 1))

    def messages(self, texts: Sequence[str]) -> list[Message]:
        """The conversation of `texts`, user and assistant in turn, after the system's text."""
        return [{"role": "system", "content": self.system}] * bool(self.system) + [*map(dict, messages.turns_of(texts))]


def as_record(prompt: Prompt) -> dict[str, object]:
    """A record that `to_prompt` reads as `prompt`."""
    turn_fields: dict[str, object] = {"turns": prompt.turns} if prompt.chat else {"prompt": prompt.turns[0]}
    turn_fields |= {"system": prompt.system} if prompt.system else {}
    return {"id": prompt.id, "category": prompt.category, **turn_fields}


def to_prompt(raw: object, where: str, number: int, counts: Counts | None = None) -> Prompt:
    """The prompt in a record or text, by the record's columns; `where` (file:line) is named in errors. `counts` notes
    what is not read. number: the id of a record that has none.

    Of a conversation, and of the column `history`, the user's turns are asked: the target gives its own answers.

    Raises `UserError` for a record without a known column, and for a prompt that is not text, or is blank, and
    `SkipRecordError` for a conversation that cannot be asked.
    """
    if isinstance(raw, str):
        return Prompt(str(number), "text", (prompt_text(raw, where),), chat=False)
    if not isinstance(raw, dict):
        raise UserError(f"{where}: expected a record or a text, found {type(raw).__name__}")
    raw, counts = {key: raw[key] for key in raw if raw[key] is not None}, Counts() if counts is None else counts
    prompt_id = require_encodable(str(next((raw[key] for key in _IDS if key in raw), number)), where)
    category = require_encodable(str(raw.get("category") or ""), where)
    column, column_kind, turns = _column_of(raw, where)  # turns: () for a conversation
    if column_kind in ("code", "text"):
        counts.note(unread_columns(raw, {column, *_ANSWERS}, ()), where)
        if extras := [name for name in (*messages.SYSTEM, "history", "tools") if not messages.is_empty(raw.get(name))]:
            why = f"{extras[0]!r} stands beside a text to continue; call the column 'question' if it is one"
            raise SkipRecordError("malformed", why)
        return Prompt(prompt_id, category or column_kind, turns, chat=False)
    if turns:
        chat = messages.to_messages(raw, messages.turns_of(turns[:1]))  # adds system and history; turns[1:] come later
        read_columns = {column, *(("input", "context") if column == "instruction" else ()), "history", "tools"}
        counts.note(unread_columns(raw, {*read_columns, *_ANSWERS, *messages.SYSTEM}, turns), where)
    else:
        record = records.to_record(raw, FileLayout(column_kind, column), where, counts)
        assert "messages" in record
        chat = record["messages"]
    if messages.uses_tools(chat):
        raise SkipRecordError("malformed", "it has tools, whose results the target does not write")
    system_turns, questions = messages.system_and_questions(chat)
    if not questions:
        raise SkipRecordError("empty", "it has no question")
    fields = {key for message in [*system_turns, *questions] for key in message} - {"role", "content", *messages.ABOUT}
    counts.note([f"field {key!r} of a turn" for key in sorted(fields)], where)
    texts = [message["content"] for message in questions]  # below, True: they are chat
    system_text = "".join(message["content"] for message in system_turns)
    return Prompt(prompt_id, category or (column_kind if turns else "chat"), (*texts, *turns[1:]), True, system_text)


def _column_of(raw: Raw, where: str) -> tuple[str, str, tuple[str, ...]]:
    """The column of a prompt, its kind and texts; of a conversation the layout as kind, and no texts."""
    if layout := records.layout_of_turns(raw, more=("prompt",)):
        return layout.column, layout.name, ()
    turns = raw["turns"] if "turns" in raw else raw.get("prompt")
    if "turns" in raw or isinstance(turns, list):
        return "turns" if "turns" in raw else "prompt", "question", _require_turns(turns, where)
    for column, (kind, turn_prefix) in _REQUESTS.items():
        if column in raw:
            return column, kind, (turn_prefix + _request_text(raw, column, where),)
    for column in ("prompt", "text"):
        if column in raw:
            kind = "code" if column == "prompt" and "task_id" in raw else "text"
            return column, kind, (prompt_text(raw[column], where),)
    expected = f"turns, {', '.join(_REQUESTS)}, messages, conversations, prompt, text"
    present = ", ".join(map(str, raw)) or "(none)"
    raise UserError(f"{where}: expected one of the columns {expected}; columns present: {present}")


def _require_turns(turns: object, where: str) -> tuple[str, ...]:
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where}: turns={turns!r}: expected a list of texts")
    texts = tuple(prompt_text(turn, where) for turn in turns)
    if any(text.startswith(NOT_THERE) for text in texts):
        raise UserError(f"{where}: a place-holder of SPEED-Bench; fill the copy by the benchmark's own preparation")
    return texts


def _request_text(raw: Raw, column: str, where: str) -> str:
    value = raw[column]
    if column != "translation":
        text = prompt_text(value, where)
        return prompt_text(records.alpaca_instruction(raw), where) if column == "instruction" else text
    lang = next((lang for lang in value if lang in _LANGUAGES), "") if isinstance(value, dict) else ""
    if not isinstance(value, dict) or value.keys() != {"en", lang}:
        raise UserError(f"{where}: translation={reprlib.repr(value)}: expected en and one of {', '.join(_LANGUAGES)}")
    return f"{_LANGUAGES[lang]}.\nInput: {prompt_text(value['en'], where)}\nOutput: "


def prompt_text(value: object, where: str) -> str:
    """`value`, if it is a text that is not blank. Raises `UserError` naming `where` for anything else."""
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: prompt is {reprlib.repr(value)}: expected a text that is not empty")
    return require_encodable(value, where)


def is_prompt_record(raw: object) -> bool:
    """Whether a record's columns are those of a prompt, not of a conversation or a training text."""
    if not isinstance(raw, dict) or records.is_conversation(raw):
        return False
    return bool({"turns", *_REQUESTS} & raw.keys()) or ("prompt" in raw and "text" not in raw)


def prompt_as_record(prompt: Prompt, record_id: str) -> Record:
    """A prompt in the normal form of records: consecutive user turns, or a text marked `asked`."""
    if prompt.chat:
        questions: list[Message] = [{"role": "user", "content": turn} for turn in prompt.turns]
        return {"id": record_id, "messages": [*prompt.messages(()), *questions]}
    return {"id": record_id, "text": prompt.turns[0], "asked": True}


def asks_answer(record: Record) -> bool:
    """Whether the record is a conversation, or a text to be continued from its end."""
    return "messages" in record or "asked" in record
