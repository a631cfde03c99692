"""Records of any layout → one normal form → token ids and supervised mask; prompts → token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NotRequired, TypedDict, final

import numpy as np

from draft_models.errors import UserError, require_choice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
PROMPT_TEMPLATES = ("auto", "tokenizer", "vicuna", "none")
OTHER_TEMPLATE = "use template=vicuna, or a tokenizer whose chat template reproduces the history"

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
_MARK = "\ue000"  # a private character, which templates leave alone


Message = dict[str, str]  # {"role": system, user or assistant; "content": text}


@final
class TextRecord(TypedDict):
    id: str
    text: str
    truncated: NotRequired[bool]  # it breaks off: what it ends with is no end


@final
class ChatRecord(TypedDict):
    id: str
    messages: list[Message]
    truncated: NotRequired[bool]  # the last answer breaks off


Record = TextRecord | ChatRecord


class Document(NamedTuple):
    """A tokenised record: ids int64 [n], supervised bool [n]; `whole`: it must not be cut over two rows."""

    ids: np.ndarray
    supervised: np.ndarray
    whole: bool


class Layout(NamedTuple):
    """How the records of one file are laid out, and the column that is read."""

    name: str
    column: str


class SkipRecordError(Exception):
    """A record that cannot be used and is counted under `reason`: empty or malformed."""

    def __init__(self, reason: Literal["empty", "malformed"]) -> None:
        super().__init__(reason)
        self.reason = reason


# ---------------------------------------------------------------------------------------------- layouts


def find_layout(raw: Any, layout: str, column: str | None, where: str) -> Layout:
    """The layout of a file, from its first record's columns and values when `layout` is auto.

    Raises `UserError` naming `where` and the columns present if none fits.
    """
    if layout != "auto":
        return Layout(layout, column or _COLUMNS[layout])
    _require_mapping(raw, where)
    if column is not None:
        _require_column(raw, column, where)
    elif "instruction" in raw and (answer := _first(raw, _ANSWER_COLUMNS)):
        return Layout("alpaca", answer)
    column = column or _first(raw, _CHAT_COLUMNS) or _first(raw, tuple(_TEXT_COLUMNS))
    found = column and _layout_of_value(raw[column], column)
    if not column or not found:
        raise UserError(
            f"{where}: cannot tell the layout from columns {_columns(raw)}; name it with layout= and column="
        )
    return Layout(found, column)


def to_record(raw: Any, layout: Layout, identity: str) -> Record:
    """Bring a raw record into normal form. `identity` (file:line) becomes its id and is named in errors.

    A raw record with "finish": "length", as generate-responses writes them, is `truncated`.

    Raises `UserError` if the column is missing or of another kind, `SkipRecordError` if it
    or one of its turns is blank, or if its turns do not alternate between user and assistant.
    """
    _require_mapping(raw, identity)
    _require_column(raw, layout.column, identity)
    value = raw[layout.column]
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
    """A plain-text record; raises `SkipRecordError` if it is blank."""
    if not text.strip():
        raise SkipRecordError("empty")
    return {"id": identity, "text": text}


def alpaca_instruction(raw: dict[str, Any]) -> str:
    """The user's side of an Alpaca record: the instruction, and below it the input if there is one."""
    return "\n\n".join(str(raw[name]) for name in ("instruction", "input") if raw.get(name))


def content_key(record: Record) -> str:
    """What a record says, apart from where it was found: equal records have equal keys."""
    return record["text"] if "text" in record else json.dumps(record["messages"])


def _truncated(raw: dict[str, Any], record: Record) -> Record:
    if raw.get("finish") == "length":
        record["truncated"] = True
    return record


def _messages(turns: Sequence[tuple[Any, Any]]) -> list[Message]:
    """[(role, content)] → messages: an optional system message, then user and assistant in turn."""
    if any(not isinstance(content, str | None) for _, content in turns):
        raise SkipRecordError("malformed")
    if not any(content and content.strip() for _, content in turns):
        raise SkipRecordError("empty")
    head = [turn for turn in turns[:1] if turn[0] == "system" and turn[1]]
    rest = list(turns[1:] if turns[0][0] == "system" else turns)
    if rest and rest[0][0] == "assistant":  # exports that begin in the middle of a conversation
        rest = rest[1:]
    for i, (role, content) in enumerate(rest):
        if role != ("assistant" if i % 2 else "user"):
            raise SkipRecordError("malformed")
        if not (content and content.strip()):
            raise SkipRecordError("empty")
    return [{"role": role, "content": content} for role, content in head + rest]


def _role_turns(items: list[Any], role: str, content: str) -> list[tuple[Any, Any]]:
    if any(not isinstance(item, dict) for item in items):
        raise SkipRecordError("malformed")
    return [(_ROLES.get(item.get(role)), item.get(content)) for item in items]


def _layout_of_value(value: Any, column: str) -> str | None:
    if isinstance(value, str):
        return _TEXT_COLUMNS.get(column, "text")
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, str):
        return "turns"
    if isinstance(first, dict) and "from" in first:
        return "sharegpt"
    return "messages" if isinstance(first, dict) and "role" in first else None


def _first(raw: dict[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in raw), None)


def _columns(raw: dict[str, Any]) -> str:
    return ", ".join(map(str, raw)) or "(none)"


def _require_mapping(raw: Any, where: str) -> None:
    if not isinstance(raw, dict):
        raise UserError(f"{where}: expected a record with named columns, found {type(raw).__name__}")


def _require_column(raw: dict[str, Any], column: str, where: str) -> None:
    if column not in raw:
        raise UserError(f"{where}: no column {column!r}; columns present: {_columns(raw)}")


def _typed(value: Any, kind: type, layout: Layout, where: str) -> Any:
    if value is None:
        raise SkipRecordError("empty")
    if not isinstance(value, kind):
        raise UserError(
            f"{where}: column {layout.column!r} holds {type(value).__name__}, "
            f"layout={layout.name} needs {kind.__name__}"
        )
    return value


# ------------------------------------------------------------------------------------- records → tokens


def encode(records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, template: str) -> list[Document]:
    """Tokenise records, each in one call over its full text; order is kept.

    Plain text: begins with the BOS token where the tokenizer adds one, ends with the EOS token where there is
    one (a truncated text does not), and every token is supervised. A conversation is rendered by `template`
    (tokenizer or vicuna), user turns after the last answer left out; supervised are the tokens that begin inside
    an assistant's turn, its end-of-turn token included (of a truncated answer not). The ids of a conversation are
    those of the whole rendering, so they need a fast tokenizer (one that reports text offsets).

    Raises `UserError` for a tokenizer without chat template or offsets, and for a chat template that does not
    reproduce the history.
    """
    rendered: list[tuple[str, list[tuple[int, int]] | None]] = [
        (record["text"], None) if "text" in record else _render_conversation(record, tokenizer, template)
        for record in records
    ]
    chat = any(spans is not None for _, spans in rendered)
    if chat and not tokenizer.is_fast:
        raise UserError(
            f"{_name(tokenizer)}: conversations need a fast tokenizer (tokenizer.json), which reports where "
            "in the text each token begins; convert this one with AutoTokenizer and save_pretrained"
        )
    encoded = _tokenize(tokenizer, [text for text, _ in rendered], return_offsets_mapping=chat)
    bos, documents = adds_bos(tokenizer), []
    for i, (_, spans) in enumerate(rendered):
        ids = np.asarray(encoded["input_ids"][i], np.int64)
        if spans is None:
            ids = _with_ends(ids, tokenizer, bos, eos=not records[i].get("truncated"))
            documents.append(Document(ids, np.ones(len(ids), bool), whole=False))
        else:
            offsets = np.asarray(encoded["offset_mapping"][i], np.int64).reshape(-1, 2)
            supervised = _inside(offsets, spans)
            if template == "vicuna" and bos:  # a chat template writes its own BOS
                ids, supervised = np.r_[tokenizer.bos_token_id, ids], np.r_[False, supervised]
            documents.append(Document(ids, supervised, whole=True))
    return documents


def render_prompt(
    turns: Sequence[str | Message], tokenizer: PreTrainedTokenizerBase, template: str = "auto"
) -> list[int]:
    """Token ids to decode from: the conversation so far and the opening of the assistant's next turn.

    turns: messages, or their texts with user and assistant in turn; the last is the user's.
    template: tokenizer (its chat template), vicuna, none (the bare text, for completion), or auto: the
    tokenizer's where it has one, else none. A leading BOS token is there exactly once where the tokenizer
    adds one, or as the chat template writes it.
    """
    require_choice("template", template, PROMPT_TEMPLATES)
    messages = [
        {"role": "assistant" if i % 2 else "user", "content": turn} if isinstance(turn, str) else turn
        for i, turn in enumerate(turns)
    ]
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("a prompt ends with a user turn")
    if template == "auto":
        template = "tokenizer" if tokenizer.chat_template else "none"
    if template == "tokenizer":
        text = _apply(tokenizer, messages, "prompt", opening=True)
        return list(_tokenize(tokenizer, [text])["input_ids"][0])
    if template == "vicuna":
        text = _vicuna(messages, tokenizer)[0] + "ASSISTANT:"
    else:
        text = "\n".join(message["content"] for message in messages)
    ids = list(_tokenize(tokenizer, [text])["input_ids"][0])
    if adds_bos(tokenizer) and ids[:1] != [tokenizer.bos_token_id]:
        ids.insert(0, tokenizer.bos_token_id)
    return ids


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts its BOS token before plain text."""
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def _tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str], **options: bool) -> Any:
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False, **options)


def _with_ends(ids: np.ndarray, tokenizer: PreTrainedTokenizerBase, bos: bool, eos: bool) -> np.ndarray:
    if bos and ids[:1].tolist() != [tokenizer.bos_token_id]:
        ids = np.r_[tokenizer.bos_token_id, ids]
    if eos and tokenizer.eos_token_id is not None and ids[-1:].tolist() != [tokenizer.eos_token_id]:
        ids = np.r_[ids, tokenizer.eos_token_id]
    return ids


def _inside(offsets: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
    """bool [n]: which tokens begin inside one of the text spans; offsets int64 [n, 2]."""
    starts, ends = offsets[:, 0].copy(), offsets[:, 1]
    blank = np.flatnonzero(starts == ends)  # whitespace trimmed to zero width lies after its own text
    blank = blank[blank > 0]
    starts[blank] = ends[blank - 1]
    inside = np.zeros(len(starts), bool)
    for start, stop in spans:
        inside |= (start <= starts) & (starts < stop)
    return inside


# --------------------------------------------------------------------------------------------- templates


def _render_conversation(
    record: ChatRecord, tokenizer: PreTrainedTokenizerBase, template: str
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation up to its last answer, and the spans of the assistant's turns in it."""
    messages = record["messages"]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return "", []
    messages = messages[: answers[-1] + 1]
    text, spans = _render_answers(messages, tokenizer, template, record["id"])
    if record.get("truncated"):  # its last span ends where a mark behind its text comes out
        last = messages[-1] | {"content": messages[-1]["content"].rstrip() + _MARK}
        marked, _ = _render_answers([*messages[:-1], last], tokenizer, template, record["id"])
        spans[-1] = (spans[-1][0], marked.rfind(_MARK))
    return text, spans


def _render_answers(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, template: str, where: str
) -> tuple[str, list[tuple[int, int]]]:
    if template == "vicuna":
        return _vicuna(messages, tokenizer)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    text = _apply(tokenizer, messages, where)
    special = tuple(token.content for token in tokenizer.added_tokens_decoder.values())
    spans = []
    for i in answers:
        prompt = _apply(tokenizer, messages[:i], where, opening=True)
        through = _apply(tokenizer, messages[: i + 1], where) if i != answers[-1] else text
        if not (through.startswith(prompt) and text.startswith(through)):
            raise UserError(
                f"{where}: the chat template of {_name(tokenizer)} does not reproduce the history: message "
                f"{i + 1} is rendered differently once the conversation goes on, so training would not see "
                f"what decoding sees; {OTHER_TEMPLATE}"
            )
        spans.append((len(prompt), _end_of_turn(through, len(prompt), special)))
    return text, spans


def _end_of_turn(text: str, start: int, special: tuple[str, ...]) -> int:
    """Where the turn text[start:] ends: line breaks after its end-of-turn token are never generated."""
    trimmed = text[start:].rstrip()
    return start + len(trimmed) if trimmed.endswith(special) else len(text)


def _apply(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], where: str, opening: bool = False) -> str:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise UserError(
            f"{_name(tokenizer)} has no chat template, which conversations need; use template=vicuna, "
            "or the tokenizer of a chat model"
        )
    try:
        rendered = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=opening)
    except TemplateError as error:
        raise UserError(
            f"{where}: the chat template of {_name(tokenizer)} refuses this conversation ({error}); " + OTHER_TEMPLATE
        ) from error
    return str(rendered)


def _vicuna(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[tuple[int, int]]]:
    """Vicuna v1.1 and later: a space after system and user turns, the EOS token after answers."""
    end = tokenizer.eos_token or "</s>"
    given = messages[0]["role"] == "system"
    text = (messages[0]["content"] if given else VICUNA_SYSTEM) + " "
    spans = []
    for message in messages[given:]:
        if message["role"] == "user":
            text += f"USER: {message['content']} "
        else:
            text += "ASSISTANT:"
            start = len(text)
            text += f" {message['content']}{end}"
            spans.append((start, len(text)))
    return text, spans


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return f"tokenizer {tokenizer.name_or_path!r}" if tokenizer.name_or_path else "the tokenizer"
