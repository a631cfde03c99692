"""Records of any layout → a common normal form (`Record`): a text, or the messages of a conversation.

`find_layout` chooses the layout of a file by its first record, and `to_record` converts each record. Example, a record
of the layout sharegpt and its normal form:

    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    {"id": "file.jsonl:1", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
"""

import reprlib
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, NotRequired, TypedDict, TypeVar, final

from outrider.base.errors import UserError, require, warn, warn_once
from outrider.base.files import digest_of
from outrider.base.settings import construct
from outrider.data_prep.text.messages import (
    ABOUT,
    SYSTEM,
    UNLEARNED,
    Message,
    Raw,
    SkipRecordError,
    is_empty,
    replace_surrogates,
    role_turns,
    to_messages,
    turns_of,
    unpack_list,
)  # fmt: skip
from outrider.draft_models.targets.vocabulary import UnusableTextError

# Layout → the column that is read if the user names none. text, code: a text; sharegpt: turns with "from" and "value";
# messages: turns with "role" and "content"; turns: texts of user and assistant in turn; alpaca: the answer.
_COLUMNS = {
    "text": "text", "code": "content", "sharegpt": "conversations", "messages": "messages", "turns": "data",
    "alpaca": "output",
}  # fmt: skip
_TEXT_COLUMNS = {"text": "text", "content": "code"}
# Not "turns": in benchmarks all of them are questions.
_CHAT_COLUMNS = ("messages", "conversations", "data", "dialogue")
_ANSWER_COLUMNS = ("output", "response")
_ALPACA = ("instruction", "input", "context")  # columns that make the user's turn
_OF_TURNS = {*SYSTEM, "history", "tools"}  # columns of a conversation beside its turns
# A text record with one of these columns may be a conversation in another layout: it is noted that they are not read.
_OF_OTHERS = {*_OF_TURNS, *_ALPACA, *_CHAT_COLUMNS, *_ANSWER_COLUMNS, "prompt", "question", "text"}
_UNREAD = "not read: "  # the begin of the keys of `Counts` for columns and fields
_KEY_LENGTH = 2**20  # characters that tell texts apart: a normalised text takes 16 times its memory
HELDOUT_BY = "first turn"  # recorded with a run, since `split_key` decides its held-out records
Typed = TypeVar("Typed")


@dataclass(frozen=True)
class TokenisedText:
    """A text as its target has read and written it: token ids, and the [begin, end) of each of its answers in them."""

    ids: list[int]
    answers: list[tuple[int, int]]

    def __post_init__(self) -> None:
        spans_fit = all(0 < begin < end <= len(self.ids) for begin, end in self.answers)
        require(spans_fit and min(self.ids) >= 0, "answers", self.answers, f"places in {len(self.ids)} token ids")


def append_answer(
    documents: Sequence[TokenisedText], prompt_ids: list[int], ids: Sequence[int], learned: bool = True
) -> list[TokenisedText]:
    """`documents` with the answer `ids` to a prompt: added to the last document if the prompt begins with it, else in a
    new one. learned: false for an answer that is not counted among the answers of its document."""
    text_ids, answer_spans = [*prompt_ids, *ids], [(len(prompt_ids), len(prompt_ids) + len(ids))] * learned
    if documents and text_ids[: len(documents[-1].ids)] == documents[-1].ids:
        return [*documents[:-1], TokenisedText(text_ids, [*documents[-1].answers, *answer_spans])]
    return [*documents, TokenisedText(text_ids, answer_spans)]


@dataclass(frozen=True)
class Written:
    """The learned answers of a record as the token ids that the target wrote, in order.

    tokenizer, template: digests of those of the prompts. text: a digest of the record's text. Example, two turns whose
    second prompt begins with the first document: documents = [TokenisedText([5, 6, 7, 8, 9], [(1, 2), (4, 5)])].
    """

    tokenizer: str
    template: str
    text: str
    documents: list[TokenisedText]


@final
class TextRecord(TypedDict):
    """A plain text, or a prompt of one text."""

    id: str
    text: str
    written: NotRequired[Written]
    truncated: NotRequired[bool]  # no EOS token follows it
    asked: NotRequired[bool]  # a prompt: to be continued from its end


@final
class ChatRecord(TypedDict):
    """A conversation."""

    id: str
    messages: list[Message]
    written: NotRequired[Written]
    truncated: NotRequired[bool]  # the last answer is cut off


Record = TextRecord | ChatRecord


class FileLayout(NamedTuple):
    """The layout of a file's records, and the column that is read."""

    name: str
    column: str


class Counts(Counter[str]):
    """Counts of records by outcome, and of what is not read. first: the first unusable record, and the reason."""

    first = ""

    def note(self, unread_names: Iterable[str], where: str) -> None:
        """Count what is not read in a record, under its name and the first record: "not read: column 'x', file:3"."""
        for name in unread_names:
            key_prefix = f"{_UNREAD}{name}, "
            self[next((key for key in self if key.startswith(key_prefix)), key_prefix + where)] += 1

    def refuse(self, outcome: str, why: str) -> None:
        """Count an unusable record; `why` begins with its place."""
        self[outcome] += 1
        self.first = self.first or why

    @contextmanager
    def count_refused(self, count_key: str = "records") -> Iterator[None]:
        """Count an `UnusableTextError` as "refused" instead of raising it; the count `count_key` loses its record."""
        try:
            yield
        except UnusableTextError as error:
            self[count_key] -= 1
            self.refuse("refused", str(error))


def warn_of_unused(counts: Mapping[str, int], first_fault: str) -> None:
    """Warn of unusable records, if `first_fault` names one, and of what is not read."""
    if first_fault:
        kinds = ("empty", "malformed", "unreadable", "unsupervised", "refused", "skipped")  # why a record was left out
        outcomes = " ".join(f"{kind}={counts[kind]}" for kind in kinds if counts.get(kind))
        warn(f"data: left out {outcomes}; one of them: {first_fault}")
    for key in counts:
        if key.startswith(_UNREAD):
            warn_once(f"data: {key} and {counts[key] - 1} other records; what is read: docs/data.md")


def find_layout(record: object, layout: str, column: str | None, where: str) -> FileLayout:
    """The layout of a file; `layout` auto: by the columns and values of its first record that has some.

    Raises `UserError` naming `where` and the columns present if none fits, `SkipRecordError` for an empty record.
    """
    if layout != "auto":
        return FileLayout(layout, column or _COLUMNS[layout])
    raw = _require_mapping(record, where)
    if column is not None:
        _require_column(raw, column, where)
    elif "instruction" in raw and (answer_column := _first_column(raw, _ANSWER_COLUMNS)):
        return FileLayout("alpaca", answer_column)
    elif turns_layout := layout_of_turns(raw):
        return turns_layout
    column = column or _first_column(raw, tuple(_TEXT_COLUMNS))
    layout_name = column and _layout_of_value(_value_of(raw, column), column)
    candidate = column or _first_column(raw, _CHAT_COLUMNS)
    value = raw.get(candidate) if candidate else None
    is_blank = value in (None, "") if candidate in _TEXT_COLUMNS else is_empty(value)  # a text may be "null" or "[]"
    if candidate and is_blank:
        raise SkipRecordError("empty", f"column {candidate!r} is empty")
    if not column or not layout_name:
        remedy = "name it with layout= and column="
        raise UserError(f"{where}: cannot tell the layout from columns {_columns(raw)}; {remedy}")
    return FileLayout(layout_name, column)


def layout_of_turns(raw: Raw, more: Sequence[str] = ()) -> FileLayout | None:
    """The layout of the first column that holds turns; of `more` columns only with roles, as texts are questions."""
    for column in (*_CHAT_COLUMNS, *(name for name in more if isinstance(raw.get(name), list))):
        layout_name = _layout_of_value(_value_of(raw, column), column) if column in raw else None
        if layout_name in ("sharegpt", "messages") or (layout_name == "turns" and column not in more):
            return FileLayout(layout_name, column)
    return None


def is_conversation(raw: Raw) -> bool:
    """Whether a record's columns are those of a conversation with answers."""
    return bool(_first_column(raw, _CHAT_COLUMNS)) or (
        "instruction" in raw and bool(_first_column(raw, _ANSWER_COLUMNS))
    )


def to_record(record: object, layout: FileLayout, record_id: str, counts: Counts | None = None) -> Record:
    """Convert a raw record to normal form. `record_id` (file:line) becomes its id and is named in errors. `counts`
    notes what is not read.

    A raw record of generate-responses is `truncated` with "finish": "length", and keeps what is `Written`. Texts become
    `replace_surrogates`.

    Raises `UserError` if the column is missing or of another kind. Raises `SkipRecordError` if it or one of its turns
    is blank, or if user and assistant do not alternate; tool calls and their results may stand between.
    """
    raw = _require_mapping(record, record_id)
    _require_column(raw, layout.column, record_id)
    if layout.name in ("text", "code"):
        plain_record = text_record(_require_type(raw[layout.column], str, layout, record_id), record_id)
        unread_names = unread_columns({name: raw[name] for name in raw if name in _OF_OTHERS}, {layout.column}, ())
        return _complete_record(raw, plain_record, counts, unread_names)
    turns = _read_turns(raw, layout, record_id)
    messages = to_messages(raw, turns)
    read_columns = {layout.column, *_OF_TURNS, *(_ALPACA if layout.name == "alpaca" else ())}
    unread_names = unread_columns(raw, read_columns, [message["content"] for message in messages])
    if "assistant" in [turn["role"] for turn in turns if turn["role"] != "system"][:1] and not raw.get("history"):
        unread_names.append("an answer before the first question")
    return _complete_record(raw, {"id": record_id, "messages": messages}, counts, unread_names)


def _read_turns(raw: Raw, layout: FileLayout, record_id: str) -> list[Raw]:
    """The turns of a conversation, each with its role and content."""
    if layout.name == "alpaca":
        _require_column(raw, "instruction", record_id)
        return turns_of([alpaca_instruction(raw), raw[layout.column]])
    turn_values: list[object] = _require_type(_value_of(raw, layout.column), list, layout, record_id)
    turn_keys = ("from", "value") if layout.name == "sharegpt" else ("role", "content")
    return turns_of(turn_values) if layout.name == "turns" else role_turns(turn_values, *turn_keys)


def unread_columns(raw: Raw, columns: Collection[str], texts: Sequence[str]) -> list[str]:
    """The columns of a record, in words, that nobody reads: not those of `columns`, which are read, nor of `ABOUT`.

    A copy of one of the record's `texts` is left out, and so is Alpaca's column `text`, which has all of them.
    """
    paragraphs = [paragraph for text in texts for paragraph in text.split("\n\n")]
    copies: list[object] = [*texts]
    if paragraphs and all(paragraph in str(raw.get("text")) for paragraph in paragraphs):
        copies.append(raw.get("text"))
    unread = [name for name in raw if name not in columns and name not in ABOUT and not is_empty(raw[name])]
    return [f"column {str(name)!r}" for name in unread if raw[name] not in copies]


def text_record(text: str, record_id: str) -> TextRecord:
    """A plain-text record, `replace_surrogates`; raises `SkipRecordError` if it is blank."""
    if not text.strip():
        raise SkipRecordError("empty", "its text is blank")
    return {"id": record_id, "text": replace_surrogates(text)}


def require_encodable(text: str, where: str) -> str:
    """`text`, unchanged. Raises `UserError` if UTF-8 cannot encode it."""
    if replace_surrogates(text) != text:
        raise UserError(f"{where}: {reprlib.repr(text)} has a lone surrogate, which no text has; remove it")
    return text


def text_digest(record: Mapping[str, object]) -> str:
    """A digest of the texts in a record of generate-responses: its tokens are used only if the texts are unchanged."""
    messages = record.get("messages")
    texts = [
        message["content"] if message.keys() <= {"role", "content"} else message
        for message in (messages if isinstance(messages, list) else ())
    ]
    return digest_of(texts or record["text"])[:16]


def warn_of_text(record_id: str, why: str) -> None:
    """Warn, once per file and reason, that the text of answers is tokenised although their tokens are stored."""
    warn_once(f"{record_id.rpartition(':')[0]}: the answers' text is tokenised anew, as {why}")


def alpaca_instruction(raw: Raw) -> str:
    """The user turn of an Alpaca record: the instruction, followed by the input or context if there is one."""
    return "\n\n".join(str(raw[name]) for name in _ALPACA if raw.get(name) not in (None, ""))


def split_key(record: Record) -> str:
    """The text whose hash decides the split: records with the same first user turn are in the same split."""
    if "text" in record:
        return turn_key(record["text"])
    return turn_key(next((message["content"] for message in record["messages"] if message["role"] == "user"), ""))


def turn_key(text: str) -> str:
    """A turn or a text, of which `_KEY_LENGTH` characters count, normalised: white space, capitals, and Unicode's
    composed characters make no difference."""
    return " ".join(unicodedata.normalize("NFKC", text[:_KEY_LENGTH]).split()).casefold()


def learned_answers(messages: Sequence[Message]) -> list[Message]:
    """The answers of a conversation that are learned."""
    return [message for message in messages if message["role"] == "assistant" and UNLEARNED not in message]


def _complete_record(raw: Raw, record: Record, counts: Counts | None, unread: list[str]) -> Record:
    """`record` with `truncated` and `written`, if the raw record has them; `counts` notes the columns `unread` it."""
    if counts is not None:
        counts.note(unread, record["id"])
    dicts = [raw, *(record["messages"][-2:] if "messages" in record else ())]  # a question may follow the last answer
    if any("length" in (entry.get("finish"), entry.get("finish_reason")) for entry in dicts):
        record["truncated"] = True
    written = raw.get("written")
    if isinstance(written, dict) and "documents" in written:  # not a column of somebody else's
        recording = construct(Written, written, f"{record['id']}: written")
        count = len(learned_answers(record["messages"])) if "messages" in record else 1
        span_count = sum(len(document.answers) for document in recording.documents)
        require(span_count == count, f"{record['id']}: written answers", span_count, f"{count}, as the record has")
        if recording.text == text_digest(record):
            record["written"] = recording
        else:
            warn_of_text(record["id"], "it is not the one that was written")
    return record


def _layout_of_value(value: object, column: str) -> str | None:
    """The layout of a column with this value in the first record of a file; None if it is none of them."""
    if isinstance(value, str):
        return _TEXT_COLUMNS.get(column, "text")
    first_item = value[0] if isinstance(value, list) and value else None
    if isinstance(first_item, str):
        return "turns"
    if isinstance(first_item, dict) and "from" in first_item:
        return "sharegpt"
    return "messages" if isinstance(first_item, dict) and "role" in first_item else None


def _value_of(raw: Raw, column: str) -> object:
    """The value of a column; a list that a table stores as a text or a mapping, as a list."""
    return raw[column] if column in _TEXT_COLUMNS else unpack_list(raw[column], column)


def _first_column(raw: Raw, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in raw), None)


def _columns(raw: Raw) -> str:
    return ", ".join(map(str, raw)) or "(none)"


def _require_mapping(record: object, where: str) -> Raw:
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected a record with named columns, found {type(record).__name__}")
    return record


def _require_column(raw: Raw, column: str, where: str) -> None:
    if column not in raw:
        raise UserError(f"{where}: no column {column!r}; columns present: {_columns(raw)}")


def _require_type(value: object, kind: type[Typed], layout: FileLayout, where: str) -> Typed:
    if value is None:
        raise SkipRecordError("empty", f"column {layout.column!r} is null")
    if not isinstance(value, kind):
        needed = f"layout={layout.name} needs {kind.__name__}"
        raise UserError(f"{where}: column {layout.column!r} holds {type(value).__name__}, {needed}")
    return value
