"""Logs of conversations: read, checked, and split by time.

A log is what `outrider serve log=` or generate-responses writes, or any file of conversations with answers. A line may
also be a request with its response, of OpenAI's API: {"request": {"messages": […]}, "response": {"choices": […]}}.
"""

from collections.abc import Sequence
from typing import NamedTuple

from outrider.base.errors import UserError
from outrider.data_prep.text.data_files import read_file, resolve_paths
from outrider.data_prep.text.messages import Raw, SkipRecordError
from outrider.data_prep.text.records import Counts, find_layout, learned_answers, split_key, to_record, warn_of_unused


class Conversation(NamedTuple):
    """A log's record as trainings read it: a conversation, or a text that a target continued.

    first_turn: the first user turn or the text, in the normal form by which equal turns are found (`split_key`).
    """

    first_turn: str
    raw: Raw


def read_traffic(paths: Sequence[str]) -> list[Conversation]:
    """The conversations in files and directories, the oldest first if all have "created", else in their order.

    Raises `UserError` naming the place of a line that is no JSON or no conversation. Warns of blank or malformed ones.
    """
    conversations, counts = list[Conversation](), Counts()
    for path in resolve_paths(paths):
        for number, raw in read_file(path):
            try:
                conversations.append(_to_conversation(raw, f"{path}:{number}"))
            except SkipRecordError as skipped:
                counts.refuse(skipped.reason, f"{path}:{number}: {skipped}")
    warn_of_unused(counts, counts.first)
    # "created": in seconds
    times = [time for conversation in conversations if isinstance(time := conversation.raw.get("created"), int | float)]
    if len(times) < len(conversations):
        return conversations
    return [conversations[index] for index in sorted(range(len(times)), key=times.__getitem__)]


def split_newest(conversations: Sequence[Conversation], share: float) -> tuple[list[Conversation], list[Conversation]]:
    """(older, newest) conversations; the newest are at least `share` of all.

    Conversations with the same first turn stay together, and are as old as the first of them.
    """
    turn_counts: dict[str, int] = {}  # by first turn, the oldest first
    for conversation in conversations:
        turn_counts[conversation.first_turn] = turn_counts.get(conversation.first_turn, 0) + 1
    newest_turns, newest_count = set[str](), 0
    while turn_counts and newest_count < share * len(conversations):
        first_turn, turn_count = turn_counts.popitem()
        newest_turns.add(first_turn)
        newest_count += turn_count
    older = [conversation for conversation in conversations if conversation.first_turn not in newest_turns]
    return older, [conversation for conversation in conversations if conversation.first_turn in newest_turns]


def _to_conversation(raw: object, where: str) -> Conversation:
    raw = _join_response(raw)
    record = to_record(raw, find_layout(raw, layout="auto", column=None, where=where), where)
    if not isinstance(raw, dict) or ("messages" in record and not learned_answers(record["messages"])):
        raise UserError(f"{where}: expected a conversation with an answer of the assistant")
    return Conversation(split_key(record), raw)


def _join_response(raw: object) -> object:
    """A request with its response as a conversation; earlier answers are not learned (weight 0); others unchanged."""
    match raw:
        case {"request": {"messages": [*turns], **options}, "response": {"choices": [choice, *_], **response}}:
            if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict):
                raise SkipRecordError("malformed", "its response has no message")
            is_answer = [isinstance(turn, dict) and turn.get("role") == "assistant" for turn in turns]
            history = [{**turn, "weight": 0} if answer else turn for turn, answer in zip(turns, is_answer, strict=True)]
            extra_fields = {"created": response.get("created"), "greedy": options.get("temperature") == 0}
            extra_fields |= {"tools": options["tools"]} if options.get("tools") else {}
            return {"messages": [*history, choice["message"]], "finish": choice.get("finish_reason"), **extra_fields}
    return raw
