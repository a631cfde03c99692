"""Records of any layout → a common normal form."""

import json
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, NotRequired, TypedDict, TypeVar, final

from outrider.errors import UserError
from outrider.files import is_text

_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "assistant": "assistant",
}
_COLUMNS = {
    "text": "text",
    "code": "content",
    "sharegpt": "conversations",
    "messages": "messages",
    "turns": "data",
    "alpaca": "output",
}
_TEXT_COLUMNS = {"text": "text", "content": "code"}
# Not "turns": in benchmarks all of them are questions.
_CHAT_COLUMNS = ("messages", "conversations", "data", "dialogue")
_ANSWER_COLUMNS = ("output", "response")


Raw = Mapping[str, object]  # a record as it stands in a file
Message = dict[str, str]  # {"role": system, user or assistant; "content": text}
Typed = TypeVar("Typed")


@final
class TextRecord(TypedDict):
    id: str
    text: str
    truncated: NotRequired[bool]  # no EOS token follows it
    asked: NotRequired[bool]  # a prompt: to be continued from its end


@final
class ChatRecord(TypedDict):
    id: str
    messages: list[Message]
    truncated: NotRequired[bool]  # the last answer is cut off


Record = TextRecord | ChatRecord


class FileLayout(NamedTuple):
    """The layout of a file's records, and the column that is read."""

    name: str
    column: str


class SkipRecordError(Exception):
    """A record that cannot be used and is counted under `reason`: empty or malformed."""

    def __init__(self, reason: Literal["empty", "malformed"]) -> None:
        super().__init__(reason)
        self.reason = reason


def find_layout(record: object, layout: str, column: str | None, where: str) -> FileLayout:
    """The layout of a file; `layout` auto: by the columns and values of its first record.

    Raises `UserError` naming `where` and the columns present if none fits.
    """
    if layout != "auto":
        return FileLayout(layout, column or _COLUMNS[layout])
    raw = _mapping(record, where)
    if column is not None:
        _require_column(raw, column, where)
    elif "instruction" in raw and (answer := _first(raw, _ANSWER_COLUMNS)):
        return FileLayout("alpaca", answer)
    column = column or _first(raw, _CHAT_COLUMNS) or _first(raw, tuple(_TEXT_COLUMNS))
    found = column and _layout_of_value(raw[column], column)
    if not column or not found:
        raise UserError(
            f"{where}: cannot tell the layout from columns {_columns(raw)}; name it with layout= and column="
        )
    return FileLayout(found, column)


def is_conversation(raw: Raw) -> bool:
    """Whether a record's columns are those of a conversation with answers."""
    return bool(_first(raw, _CHAT_COLUMNS)) or ("instruction" in raw and bool(_first(raw, _ANSWER_COLUMNS)))


def to_record(record: object, layout: FileLayout, identity: str) -> Record:
    """Convert a raw record to normal form. `identity` (file:line) becomes its id and is named in errors.

    A raw record with "finish": "length", from generate-responses, is `truncated`. Texts become `encodable`.

    Raises `UserError` if the column is missing or of another kind. Raises `SkipRecordError` if it or one of its turns
    is blank, or if its turns do not alternate between user and assistant.
    """
    raw = _mapping(record, identity)
    _require_column(raw, layout.column, identity)
    value = raw[layout.column]
    turns: list[tuple[object, object]]
    match layout.name:
        case "text" | "code":
            return _truncated(raw, text_record(_typed(value, str, layout, identity), identity))
        case "alpaca":
            _require_column(raw, "instruction", identity)
            turns = [("user", alpaca_instruction(raw)), ("assistant", value)]
        case "turns":
            items = _typed(value, list, layout, identity)
            turns = [("assistant" if i % 2 else "user", item) for i, item in enumerate(items)]
        case "sharegpt":
            turns = _role_turns(_typed(value, list, layout, identity), "from", "value")
        case _:
            turns = _role_turns(_typed(value, list, layout, identity), "role", "content")
    return _truncated(raw, {"id": identity, "messages": _messages(turns)})


def text_record(text: str, identity: str) -> TextRecord:
    """A plain-text record, `encodable`; raises `SkipRecordError` if it is blank."""
    if not text.strip():
        raise SkipRecordError("empty")
    return {"id": identity, "text": encodable(text)}


def encodable(text: str) -> str:
    """Replace lone surrogates, valid in JSON but not in UTF-8 or a tokenizer, by question marks."""
    return text if is_text(text) else text.encode(errors="replace").decode()


def alpaca_instruction(raw: Raw) -> str:
    """The user turn of an Alpaca record: the instruction, followed by the input if there is one."""
    return "\n\n".join(str(raw[name]) for name in ("instruction", "input") if raw.get(name))


def content_key(record: Record) -> str:
    """A record's content without its origin: equal records have equal keys."""
    return record["text"] if "text" in record else json.dumps(record["messages"])


def _truncated(raw: Raw, record: Record) -> Record:
    if raw.get("finish") == "length":
        record["truncated"] = True
    return record


def _messages(turns: Sequence[tuple[object, object]]) -> list[Message]:
    """[(role, content)] → messages: an optional system message, then user and assistant in turn."""
    said = [(role, content or "") for role, content in turns if isinstance(content, str | None)]
    if len(said) < len(turns):
        raise SkipRecordError("malformed")
    if not any(content.strip() for _, content in said):
        raise SkipRecordError("empty")
    head = [turn for turn in said[:1] if turn[0] == "system" and turn[1]]
    rest = said[1:] if said[0][0] == "system" else said
    if rest and rest[0][0] == "assistant":  # some exports begin in the middle of a conversation
        rest = rest[1:]
    for i, (role, content) in enumerate(rest):
        if role != ("assistant" if i % 2 else "user"):
            raise SkipRecordError("malformed")
        if not content.strip():
            raise SkipRecordError("empty")
    return [{"role": str(role), "content": encodable(content)} for role, content in head + rest]


def _role_turns(items: list[object], role: str, content: str) -> list[tuple[object, object]]:
    turns = [item for item in items if isinstance(item, dict)]
    if len(turns) < len(items):
        raise SkipRecordError("malformed")
    return [
        (_ROLES.get(said) if isinstance(said := turn.get(role), str) else None, turn.get(content)) for turn in turns
    ]


def _layout_of_value(value: object, column: str) -> str | None:
    if isinstance(value, str):
        return _TEXT_COLUMNS.get(column, "text")
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, str):
        return "turns"
    if isinstance(first, dict) and "from" in first:
        return "sharegpt"
    return "messages" if isinstance(first, dict) and "role" in first else None


def _first(raw: Raw, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in raw), None)


def _columns(raw: Raw) -> str:
    return ", ".join(map(str, raw)) or "(none)"


def _mapping(record: object, where: str) -> Raw:
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected a record with named columns, found {type(record).__name__}")
    return record


def _require_column(raw: Raw, column: str, where: str) -> None:
    if column not in raw:
        raise UserError(f"{where}: no column {column!r}; columns present: {_columns(raw)}")


def _typed(value: object, kind: type[Typed], layout: FileLayout, where: str) -> Typed:
    if value is None:
        raise SkipRecordError("empty")
    if not isinstance(value, kind):
        raise UserError(
            f"{where}: column {layout.column!r} holds {type(value).__name__}, "
            f"layout={layout.name} needs {kind.__name__}"
        )
    return value
