"""A record of a prompt file of any layout → a prompt: user turns, or a text to continue."""

import reprlib
from dataclasses import dataclass

from outrider.base.errors import UserError
from outrider.data_prep.text.records import Raw, Record, alpaca_instruction, is_conversation, require_encodable

_IDS = ("question_id", "task_id", "prompt_id", "id")  # columns, the first that is there counts
_LANGUAGES = {"cs": "Czech", "de": "German", "fr": "French", "hi": "Hindi", "ru": "Russian"}  # WMT 2014's
_ASKED = {  # column → category, and how the user's turn begins
    "question": ("question", ""),
    "instruction": ("instruction", ""),
    "document": ("summary", "Summarize this article in one sentence.\n\n"),
    "article": ("summary", "Summarize: "),  # as in Spec-Bench
    "translation": ("translation", "Translate the input English sentence into "),
}
NOT_THERE = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # SPEED-Bench's placeholder for third-party texts


@dataclass(frozen=True)
class Prompt:
    """One prompt: the user's turns, and whether they are chat (to be rendered by a template) or bare text."""

    id: str
    category: str
    turns: tuple[str, ...]
    chat: bool

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """The ids of its turns, which key the results: the prompt's id for one turn, else "id/turn1" and so on."""
        if len(self.turns) == 1:
            return (self.id,)
        return tuple(f"{self.id}/turn{number}" for number in range(1, len(self.turns) + 1))


def as_record(prompt: Prompt) -> dict[str, object]:
    """A record that `to_prompt` reads as `prompt`."""
    said = {"turns": prompt.turns} if prompt.chat else {"prompt": prompt.turns[0]}
    return {"id": prompt.id, "category": prompt.category, **said}


def to_prompt(raw: object, where: str, number: int) -> Prompt:
    """The prompt in a record or text, by the record's columns; `where` (file:line) is named in errors.

    Raises `UserError` for a record without a known column, and for a prompt that is not text, or is blank.
    """
    if isinstance(raw, str):
        return Prompt(str(number), "text", (prompt_text(raw, where),), False)
    if not isinstance(raw, dict):
        raise UserError(f"{where}: expected a record or a text, found {type(raw).__name__}")
    identity = require_encodable(str(next((raw[key] for key in _IDS if key in raw), number)), where)
    category = require_encodable(str(raw.get("category") or ""), where)
    turns = raw["turns"] if "turns" in raw else raw.get("prompt")
    if "turns" in raw or isinstance(turns, list):
        return Prompt(identity, category or "question", _turns(turns, where), True)
    for column, (kind, request) in _ASKED.items():
        if column in raw:
            return Prompt(identity, category or kind, (request + _asked(raw, column, where),), True)
    for column in ("prompt", "text"):
        if column in raw:
            kind = "code" if column == "prompt" and "task_id" in raw else "text"
            return Prompt(identity, category or kind, (prompt_text(raw[column], where),), False)
    raise UserError(
        f"{where}: expected one of the columns turns, {', '.join(_ASKED)}, prompt, text; "
        f"columns present: {', '.join(map(str, raw)) or '(none)'}"
    )


def _turns(turns: object, where: str) -> tuple[str, ...]:
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where}: turns={turns!r}: expected a list of texts")
    said = tuple(prompt_text(turn, where) for turn in turns)
    if any(turn.startswith(NOT_THERE) for turn in said):
        raise UserError(f"{where}: a place-holder of SPEED-Bench; fill the copy by the benchmark's own preparation")
    return said


def _asked(raw: Raw, column: str, where: str) -> str:
    value = raw[column]
    if column != "translation":
        text = prompt_text(value, where)
        return prompt_text(alpaca_instruction(raw), where) if column == "instruction" else text
    other = next((code for code in value if code in _LANGUAGES), "") if isinstance(value, dict) else ""
    if not isinstance(value, dict) or value.keys() != {"en", other}:
        raise UserError(f"{where}: translation={reprlib.repr(value)}: expected en and one of {', '.join(_LANGUAGES)}")
    return f"{_LANGUAGES[other]}.\nInput: {prompt_text(value['en'], where)}\nOutput: "


def prompt_text(value: object, where: str) -> str:
    """`value`, if it is a text that is not blank. Raises `UserError` naming `where` for anything else."""
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: prompt is {reprlib.repr(value)}: expected a text that is not empty")
    return require_encodable(value, where)


def asks(raw: object) -> bool:
    """Whether a record's columns are those of a prompt, not of a conversation or a training text."""
    if not isinstance(raw, dict) or is_conversation(raw):
        return False
    return bool({"turns", *_ASKED} & raw.keys()) or ("prompt" in raw and "text" not in raw)


def asked_record(prompt: Prompt, identity: str) -> Record:
    """A prompt in the normal form of records: consecutive user turns, or a text marked `asked`."""
    if prompt.chat:
        return {"id": identity, "messages": [{"role": "user", "content": turn} for turn in prompt.turns]}
    return {"id": identity, "text": prompt.turns[0], "asked": True}
