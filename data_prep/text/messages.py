"""Turns of a conversation, as files hold them → messages, as chat templates take them.

A turn has "role" and "content": `role_turns` makes turns from those with other names of the two, `turns_of` from bare
texts. `to_messages` makes the messages of a record from its turns and its other columns (system, history, tools).
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from outrider.base.errors import UserError
from outrider.base.files import parse_json

Raw = Mapping[str, object]  # a record as it stands in a file
# {"role": system, user, assistant or tool; "content": text}, and all other fields of the turn for the template to read.
# The first message of a conversation may have `TOOLS`; an answer that is read but not learned has `UNLEARNED`.
Message = dict[str, Any]
TOOLS, UNLEARNED = "tools of the conversation", "not learned"  # fields that no template sees
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought")  # texts that an answer has before its content
SYSTEM = ("system", "system_prompt", "system_message")  # columns of the text before the first turn
_LEARNED = ("weight", "train", "training", "trainable", "loss")  # fields of an answer: 0 or false, it is not learned
_UNCLEAR = ("mask", "masked", "loss_mask", "loss_scale", "train_detail")  # of an answer: these may mean anything
_ROLES = {
    "system": "system", "tool": "tool", **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "model", "assistant"), "assistant"),
}  # fmt: skip
# The roles that may follow a message, by its role; "calls": an answer that calls tools.
_FOLLOWS = {"assistant": ("user",), "user": ("assistant",), "calls": ("tool",), "tool": ("tool", "assistant")}
_FACTS = """id ids uuid idx index question_id prompt_id task_id conversation_id conversation_hash dataset source src_id
origin category sub_category lang language license url date timestamp created split score model turn num_turns tags
topic meta metadata finish finish_reason greedy written tokens prompt_tokens unanswered_turns retokenised
text_differs"""
ABOUT = {*_FACTS.split()}  # columns and fields about a record or a turn, which no target reads


def is_empty(value: object) -> bool:
    """Whether a value of a column says nothing, in any spelling of tables."""
    return "".join(str(value).split()) in ("", "null", "None", "[]", "{}")


class SkipRecordError(Exception):
    """A record that cannot be used and is counted under `reason`: empty or malformed. why: what is wrong with it."""

    def __init__(self, reason: Literal["empty", "malformed"], why: str) -> None:
        super().__init__(why)
        self.reason = reason


def malformed_record(where: str, value: object, expected: str) -> SkipRecordError:
    """The error for a `value` at `where` that is not what was expected."""
    return SkipRecordError("malformed", f"{where}={reprlib.repr(value)}: expected {expected}")


def to_messages(raw: Raw, turns: Sequence[Raw]) -> list[Message]:
    """The messages of a record: its system column, its history, and then `turns` without an answer that opens them.

    An optional system message is first. Then user and assistant alternate; the assistant may call tools, whose results
    follow, and then its answer. Raises `SkipRecordError` for anything else.
    """
    pairs = require_list(raw.get("history"), "history")
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise malformed_record("history", pairs, "pairs of a question and its answer")
    history = turns_of([text for pair in cast("list[list[object]]", pairs) for text in pair])
    messages = [_to_message(turn, number) for number, turn in enumerate([*history, *turns], 1)]
    if not any(message["content"].strip() for message in messages):
        raise SkipRecordError("empty", "no turn has a text")
    has_system = messages[0]["role"] == "system"
    dialogue = messages[has_system:]  # without the system message
    if dialogue and dialogue[0]["role"] == "assistant":  # the file begins in the middle of a conversation
        dialogue = dialogue[1:]
    _require_order(dialogue, len(messages) - len(dialogue) + 1)
    system_text = system_of(raw)
    if system_text and has_system and messages[0]["content"].strip() not in ("", system_text.strip()):
        raise malformed_record("system column", system_text, "the text of the system turn, or only one of them")
    system_messages = [{"role": "system", "content": system_text}] if system_text else messages[:has_system]
    if dialogue and (tools := require_list(raw.get("tools"), "tools")):
        [*system_messages, *dialogue][0][TOOLS] = tools
    return [*system_messages, *dialogue]


def system_of(raw: Raw) -> str:
    """The text in the system column of a record; "" if there is none."""
    system_texts = [raw[column] for column in SYSTEM if raw.get(column)]
    if not all(isinstance(text, str) and text == system_texts[0] for text in system_texts):
        raise malformed_record(" and ".join(column for column in SYSTEM if raw.get(column)), system_texts, "one text")
    return replace_surrogates(str(system_texts[0])) if system_texts and str(system_texts[0]).strip() else ""


def system_and_questions(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """The system's message, if there is one, and the user's."""
    system, questions = ([message for message in messages if message["role"] == role] for role in ("system", "user"))
    return system, questions


def uses_tools(messages: Sequence[Message]) -> bool:
    """Whether a conversation has tools, whose results the target does not write."""
    return any(TOOLS in message or message["role"] == "tool" for message in messages)


def turns_of(texts: Sequence[object]) -> list[Raw]:
    """Turns of user and assistant."""
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]


def role_turns(turns: Sequence[object], role_key: str, content_key: str) -> list[Raw]:
    """Turns that have their role and content under these names."""
    renamed_turns = list[Raw]()
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            raise SkipRecordError("malformed", "a turn is no mapping")
        if str(turn.get(role_key)) not in _ROLES:
            raise malformed_record(f"turn {number}: {role_key}", turn.get(role_key), ", ".join(_ROLES))
        extra_fields = {key: value for key, value in turn.items() if key not in (role_key, content_key)}
        renamed_turns.append({**extra_fields, "role": _ROLES[str(turn[role_key])], "content": turn.get(content_key)})
    return renamed_turns


def _require_order(dialogue: Sequence[Message], first_number: int) -> None:
    """Raise `SkipRecordError` unless each message may follow the one before; first_number: of the first turn."""
    before = "assistant"  # so the user is first
    for number, message in enumerate(dialogue, first_number):
        role = message["role"]
        if role not in _FOLLOWS[before]:
            raise SkipRecordError("malformed", f"turn {number} is of {role}: expected {' or '.join(_FOLLOWS[before])}")
        if not (message["content"].strip() or message.get("tool_calls") or any(map(message.get, THOUGHTS))):
            raise SkipRecordError("empty", f"turn {number}, of {role}, is blank")
        before = "calls" if message.get("tool_calls") else role


def _to_message(turn: Raw, number: int) -> Message:
    """The message of turn `number`, with all fields but marks of what is learned. Raises `SkipRecordError`."""
    fields = {key: value for key, value in turn.items() if value is not None and key not in ("content", "tool_calls")}
    message: Message = {"role": turn["role"], "content": _join_content(turn.get("content"), number)}
    is_answer = turn["role"] == "assistant"
    # An answer's marks are read below. Of other turns, which are never learned, only a true mark stays.
    message |= {key: fields[key] for key in fields if key not in _LEARNED or (fields[key] and not is_answer)}
    for key, value in fields.items() if is_answer else ():
        if key in _UNCLEAR or (key in _LEARNED and value not in (0, 1)):
            raise malformed_record(f"turn {number}: {key}", value, "train, true or false: whether the turn is learned")
        if key in THOUGHTS and not isinstance(value, str):
            raise malformed_record(f"turn {number}: {key}", value, "a text")
        if key in _LEARNED and not value:
            message[UNLEARNED] = True
    try:
        if calls := require_list(turn.get("tool_calls"), "tool_calls"):
            message["tool_calls"] = [_parse_call(call) for call in cast("list[dict[str, dict[str, object]]]", calls)]
    except (TypeError, KeyError, UserError, SkipRecordError) as error:
        raise SkipRecordError("malformed", f"turn {number}: no calls of tools ({error})") from None
    return {key: replace_surrogates(value) if isinstance(value, str) else value for key, value in message.items()}


def _join_content(content: object, number: int) -> str:
    """A content as one text; it may be a list of parts {"type": "text", "text": …}."""
    content_parts, texts = unpack_list(content, "content") if isinstance(content, dict) else content, list[str]()
    for part in content_parts if isinstance(content_parts, list) else [content or ""]:
        kind = str(part.get("type") or "text") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) and kind in ("text", "input_text", "output_text") else part
        if not isinstance(text, str):
            raise SkipRecordError("malformed", f"turn {number} holds {kind}: expected a text")
        texts.append(text)
    return "".join(texts)


def _parse_call(call: Mapping[str, dict[str, object]]) -> Raw:
    """A call with its arguments as a mapping, as chat templates take them."""
    function = {**call["function"], "name": str(call["function"]["name"])}
    if isinstance(function.get("arguments"), str):
        function["arguments"] = parse_json(str(function["arguments"]) or "{}")
    return {**call, "function": function}


def unpack_list(value: object, column: str) -> object:
    """A list that a table stores as JSON text, or as a mapping of lists, one per field; others unchanged."""
    if isinstance(value, str) and value.strip()[:1] == "[" and value.strip()[1:].strip()[:1] in ("{", '"', "'"):
        try:
            return parse_json(value)
        except UserError as error:
            raise SkipRecordError("malformed", f"column {column!r} begins like a JSON list, but is {error}") from None
    if isinstance(value, dict) and value and all(isinstance(inner, list) for inner in value.values()):
        if len({len(inner) for inner in value.values()}) > 1:
            raise malformed_record(f"column {column!r}", value, "lists of one length, one per field")
        return [dict(zip(value, inner, strict=True)) for inner in zip(*value.values(), strict=True)]
    return value


def require_list(value: object, column: str) -> list[object]:
    """A list in any spelling; [] also for none. Raises `SkipRecordError` for another value."""
    if not value or is_empty(value):
        return []
    try:
        unpacked = parse_json(value) if isinstance(value, str) else unpack_list(value, column)
    except UserError:
        unpacked = None
    if not isinstance(unpacked, list):
        raise malformed_record(f"column {column!r}", value, "a list")
    return unpacked


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, valid in JSON but not in UTF-8 or a tokenizer, by question marks."""
    return text.encode(errors="replace").decode()
