"""Records of any layout → a common normal form."""

import re
import reprlib
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict, TypeVar, cast, final

from outrider.base.errors import UserError, require, warn, warn_once
from outrider.base.files import digest_of, parse_json
from outrider.base.settings import construct
from outrider.draft_models.targets.vocabulary import UnusableTextError

_ROLES = {
    "system": "system", "tool": "tool", **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "model", "assistant"), "assistant"),
}  # fmt: skip
_COLUMNS = {
    "text": "text",
    "code": "content",
    "sharegpt": "conversations",
    "messages": "messages",
    "turns": "data",
    "alpaca": "output",
}
_TEXT_COLUMNS = {"text": "text", "content": "code"}
_LIST = re.compile(r"\s*\[\s*[{\"']")  # the begin of a list in a text
# Not "turns": in benchmarks all of them are questions.
_CHAT_COLUMNS = ("messages", "conversations", "data", "dialogue")
_ANSWER_COLUMNS = ("output", "response")


Raw = Mapping[str, object]  # a record as it stands in a file
# {"role": system, user, assistant or tool; "content": text}; of tools also "tool_calls" and what a result refers to, as
# chat templates take them. The first message of a conversation has its "tools", if it has some.
Message = dict[str, Any]
Typed = TypeVar("Typed")


@dataclass(frozen=True)
class Read:
    """A text as its target has read and written it: token ids, and the [begin, end) of each of its answers in them."""

    ids: list[int]
    answers: list[tuple[int, int]]

    def __post_init__(self) -> None:
        inside = all(0 < begin < end <= len(self.ids) for begin, end in self.answers)
        require(inside and min(self.ids) >= 0, "answers", self.answers, f"places in {len(self.ids)} token ids")


@dataclass(frozen=True)
class Written:
    """The answers of a record as token ids, in order; digests of the tokenizer and the template of their prompts, and
    of the record's text."""

    tokenizer: str
    template: str
    text: str
    documents: list[Read]


@final
class TextRecord(TypedDict):
    id: str
    text: str
    written: NotRequired[Written]
    truncated: NotRequired[bool]  # no EOS token follows it
    asked: NotRequired[bool]  # a prompt: to be continued from its end


@final
class ChatRecord(TypedDict):
    id: str
    messages: list[Message]
    written: NotRequired[Written]
    truncated: NotRequired[bool]  # the last answer is cut off


Record = TextRecord | ChatRecord


class FileLayout(NamedTuple):
    """The layout of a file's records, and the column that is read."""

    name: str
    column: str


class SkipRecordError(Exception):
    """A record that cannot be used and is counted under `reason`: empty or malformed. why: what is wrong with it."""

    def __init__(self, reason: Literal["empty", "malformed"], why: str) -> None:
        super().__init__(why)
        self.reason = reason


class Counts(Counter[str]):
    """Counts of records by outcome. first: the place of the first unusable record, and the reason."""

    first = ""

    def refuse(self, kind: str, why: str) -> None:
        """Count an unusable record; `why` begins with its place."""
        self[kind] += 1
        self.first = self.first or why

    @contextmanager
    def refusing(self, among: str = "records") -> Iterator[None]:
        """Count an `UnusableTextError` as "refused" instead of raising it; the count `among` loses its record."""
        try:
            yield
        except UnusableTextError as error:
            self[among] -= 1
            self.refuse("refused", str(error))


def warn_of_unused(counts: Mapping[str, int], first: str) -> None:
    """Warn of unusable records, if `first` names one."""
    if first:
        kinds = ("empty", "malformed", "unreadable", "unsupervised", "refused", "skipped")
        found = " ".join(f"{kind}={counts[kind]}" for kind in kinds if counts.get(kind))
        warn(f"data: left out {found}; one of them: {first}")


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
    found = column and _layout_of_value(_items(raw[column], column), column)
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

    A raw record of generate-responses is `truncated` with "finish": "length", and keeps what is `Written`. Texts become
    `encodable`.

    Raises `UserError` if the column is missing or of another kind. Raises `SkipRecordError` if it or one of its turns
    is blank, or if user and assistant do not alternate; tool calls and their results may stand between.
    """
    raw = _mapping(record, identity)
    _require_column(raw, layout.column, identity)
    value = raw[layout.column]
    if layout.name in ("turns", "sharegpt", "messages"):
        value = _items(value, layout.column)
    turns: list[Raw]
    match layout.name:
        case "text" | "code":
            return _truncated(raw, text_record(_typed(value, str, layout, identity), identity))
        case "alpaca":
            _require_column(raw, "instruction", identity)
            turns = _said(("user", alpaca_instruction(raw)), ("assistant", value))
        case "turns":
            items = _typed(value, list, layout, identity)
            turns = _said(*(("assistant" if i % 2 else "user", item) for i, item in enumerate(items)))
        case "sharegpt":
            turns = _role_turns(_typed(value, list, layout, identity), "from", "value")
        case _:
            turns = _role_turns(_typed(value, list, layout, identity), "role", "content")
    messages = _messages(turns)
    if messages and raw.get("tools"):
        messages[0]["tools"] = _items(raw["tools"], "tools")
    return _truncated(raw, {"id": identity, "messages": messages})


def text_record(text: str, identity: str) -> TextRecord:
    """A plain-text record, `encodable`; raises `SkipRecordError` if it is blank."""
    if not text.strip():
        raise SkipRecordError("empty", "its text is blank")
    return {"id": identity, "text": encodable(text)}


def encodable(text: str) -> str:
    """Replace lone surrogates, valid in JSON but not in UTF-8 or a tokenizer, by question marks."""
    return text.encode(errors="replace").decode()


def require_encodable(text: str, where: str) -> str:
    """`text`, unchanged. Raises `UserError` if UTF-8 cannot encode it."""
    if encodable(text) != text:
        raise UserError(f"{where}: {reprlib.repr(text)} has a lone surrogate, which no text has; remove it")
    return text


def text_digest(record: Mapping[str, object]) -> str:
    """A digest of the texts in a record of generate-responses: its tokens are used only if the texts are unchanged."""
    messages = record.get("messages")
    texts = [one["content"] for one in messages] if isinstance(messages, list) else []
    return digest_of(texts or record["text"])[:16]


def warn_of_text(identity: str, why: str) -> None:
    """Warn, once per file and reason, that the text of answers is tokenised although their tokens are stored."""
    warn_once(f"{identity.rpartition(':')[0]}: the answers' text is tokenised anew, as {why}")


def alpaca_instruction(raw: Raw) -> str:
    """The user turn of an Alpaca record: the instruction, followed by the input if there is one."""
    return "\n\n".join(str(raw[name]) for name in ("instruction", "input") if raw.get(name))


HELDOUT_BY = "first turn"  # recorded with a run, since `split_key` decides its held-out records


def split_key(record: Record) -> str:
    """The text whose hash decides the split: records with the same first user turn are in the same split."""
    if "text" in record:
        return turn_key(record["text"])
    return turn_key(next((message["content"] for message in record["messages"] if message["role"] == "user"), ""))


def turn_key(text: str) -> str:
    """A turn or a text, normalised: white space, capitals, and Unicode's composed characters make no difference."""
    return " ".join(unicodedata.normalize("NFKC", text).split()).casefold()


def _truncated(raw: Raw, record: Record) -> Record:
    if raw.get("finish") == "length":
        record["truncated"] = True
    written = raw.get("written")
    if isinstance(written, dict) and "documents" in written:  # not a column of somebody else's
        own = construct(Written, written, f"{record['id']}: written")
        count = sum(message["role"] == "assistant" for message in record["messages"]) if "messages" in record else 1
        found = sum(len(read.answers) for read in own.documents)
        require(found == count, f"{record['id']}: written answers", found, f"{count}, as the record has")
        if own.text == text_digest(record):
            record["written"] = own
        else:
            warn_of_text(record["id"], "it is not the one that was written")
    return record


def _messages(turns: Sequence[Raw]) -> list[Message]:
    """Turns → messages: an optional system message, then user and assistant in turn.

    The assistant may call tools, whose results follow, and then its answer. Calls have their arguments as a mapping.
    """
    said = [_message(turn, number) for number, turn in enumerate(turns, 1)]
    if not any(message["content"].strip() for message in said):
        raise SkipRecordError("empty", "no turn has a text")
    head = [message for message in said[:1] if message["role"] == "system" and message["content"]]
    rest = said[1:] if said[0]["role"] == "system" else said
    if rest and rest[0]["role"] == "assistant":  # some exports begin in the middle of a conversation
        rest = rest[1:]
    before = "assistant"
    for number, message in enumerate(rest, 1 + len(said) - len(rest)):
        role = message["role"]
        if role not in _FOLLOWS[before]:
            raise SkipRecordError("malformed", f"turn {number} is of {role}: expected {' or '.join(_FOLLOWS[before])}")
        if not (message["content"].strip() or message.get("tool_calls")):
            raise SkipRecordError("empty", f"turn {number}, of {role}, is blank")
        before = "calls" if message.get("tool_calls") else role
    return head + rest


_FOLLOWS = {"assistant": ("user",), "user": ("assistant",), "calls": ("tool",), "tool": ("tool", "assistant")}
_OF_TOOLS = {"assistant": ("tool_calls",), "tool": ("tool_call_id", "name")}  # of a message, as templates read them


def _message(turn: Raw, number: int) -> Message:
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(content, str | None):
        raise SkipRecordError("malformed", f"turn {number} holds {type(content).__name__}: expected a text")
    message: Message = {"role": str(role), "content": encodable(content or "")}
    message |= {key: turn[key] for key in _OF_TOOLS.get(str(role), ()) if turn.get(key)}
    try:
        if calls := _items(message.get("tool_calls"), "tool_calls"):
            message["tool_calls"] = [_call(call) for call in cast("list[dict[str, dict[str, object]]]", calls)]
    except (TypeError, KeyError, UserError) as error:
        raise SkipRecordError("malformed", f"turn {number}: no calls of tools ({error})") from None
    return message


def _call(call: Mapping[str, dict[str, object]]) -> Raw:
    """A call with its arguments as a mapping, as chat templates take them."""
    function = {**call["function"], "name": str(call["function"]["name"])}
    if isinstance(function.get("arguments"), str):
        function["arguments"] = parse_json(str(function["arguments"]) or "{}")
    return {**call, "function": function}


def _said(*turns: tuple[str, object]) -> list[Raw]:
    return [{"role": role, "content": content} for role, content in turns]


def _role_turns(items: list[object], role: str, content: str) -> list[Raw]:
    turns: list[Raw] = [item for item in items if isinstance(item, dict)]
    if len(turns) < len(items):
        raise SkipRecordError("malformed", "a turn is no mapping")
    for number, turn in enumerate(turns, 1):
        if str(turn.get(role)) not in _ROLES:
            given = reprlib.repr(turn.get(role))
            raise SkipRecordError("malformed", f"turn {number}: {role}={given}: expected {', '.join(_ROLES)}")
    return [{**turn, "role": _ROLES[str(turn[role])], "content": turn.get(content)} for turn in turns]


def _items(value: object, column: str) -> object:
    """A list that a table stores as JSON text, or as a mapping of lists, one per field; others unchanged."""
    if isinstance(value, str) and column not in _TEXT_COLUMNS and _LIST.match(value):
        try:
            return parse_json(value)
        except UserError as error:
            raise SkipRecordError("malformed", f"column {column!r} begins like a JSON list, but is {error}") from None
    if isinstance(value, dict) and value and all(isinstance(inner, list) for inner in value.values()):
        return [dict(zip(value, inner, strict=False)) for inner in zip(*value.values(), strict=False)]
    return value


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
        raise SkipRecordError("empty", f"column {layout.column!r} is null")
    if not isinstance(value, kind):
        raise UserError(
            f"{where}: column {layout.column!r} holds {type(value).__name__}, "
            f"layout={layout.name} needs {kind.__name__}"
        )
    return value
