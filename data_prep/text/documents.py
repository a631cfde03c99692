"""Records in normal form → documents: token ids, and a mask of the supervised ones, from which a drafter learns.

A record has an id, a text or messages, and perhaps `written`: its answers as token ids, as a target has written them.
`encode` makes the documents of a batch of records. A record that has the target's own tokens keeps them. Of any other
conversation `_render_answers` makes texts, `encode_all` tokenises the texts of all records together, and
`_encode_answers` joins the ids of each record. Example, the answer "Hello" to "Hi" by a template of two marks:

    prompt  "<user>Hi<end><answer>"     text  "Hello<end>", supervised     after  "\n"

`encode_all` also cuts long texts into pieces, so that tokenising needs little memory.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from outrider.base.files import digest_of
from outrider.data_prep.text import chat
from outrider.data_prep.text.messages import ABOUT, THOUGHTS, TOOLS, UNLEARNED, Message
from outrider.data_prep.text.records import Counts, Record, TokenisedText, append_answer, warn_of_text
from outrider.draft_models.targets.vocabulary import UnusableTextError, require_rows, tokenizer_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE = 2**18  # characters tokenised at once
_AROUND_LEN = 256  # characters on either side of a cut that are tokenised to test it
_MOST_CUTS = 8  # candidate cuts of each kind
# Kinds of cuts: a character, and from it the offsets of the end of a piece and of the begin of the next one. A space
# between words may belong to neither piece, because some tokenizers prepend one to every text.
_LINE, _SPACE = re.compile(r"(?<=\S)\n(?=\S)"), re.compile(r"(?<=\S) (?=\S)")
_CUTS = ((_LINE, 1, 1), (_SPACE, 0, 0), (_SPACE, 0, 1))
_TAG = re.compile(r"</?\w+>")  # <think>
_COMMON_FIELDS = {"role", "content", UNLEARNED, *ABOUT}  # ABOUT: fields about a record or a turn, which no target reads
# Fields, by a message's role, of which `_unread_fields` gives no notice: `_require_rendered` and `_require_arguments`
# test those of answers, and a template may leave out those of a tool's result.
_EXEMPT_FIELDS = {"assistant": {*THOUGHTS, "tool_calls"}, "tool": {"tool_call_id", "name"}}
Encode = Callable[[list[str]], Sequence[Sequence[int]]]  # texts → ids without special tokens
Render = Callable[[list[Message]], str]  # messages → their text by a template
Item = TypeVar("Item")


class Document(NamedTuple):
    """A tokenised record: ids int64 [n], supervised bool [n]; `indivisible`: one row of the training holds it whole."""

    ids: np.ndarray
    supervised: np.ndarray
    indivisible: bool


class _RenderedAnswer(NamedTuple):
    """The text of an answer, of the prompt before it, and of what a template writes after it. A plain text has the
    prompt "". learned: whether the answer's tokens are supervised."""

    prompt: str
    text: str
    after: str = ""
    learned: bool = True


def encode(
    records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, template: str, counts: Counts | None = None
) -> list[Document]:
    """The documents of records, in order.

    A record that holds the target's own tokens (`Written`) has a document for each recorded text; only the answers are
    supervised. If the tokens are of another tokenizer or template, a warning says so, and the text is tokenised.

    Plain text begins with the BOS token if the tokenizer adds one, and ends with the EOS token if it has one, unless
    the text is truncated. Every token is supervised.

    A conversation is rendered by `template`: tokenizer (its chat template), vicuna, or none (bare texts). User turns
    after the last answer are dropped. Each prompt is tokenised as decoding does, and then its answer. The tokens of the
    answer are supervised, and the token that ends the turn, unless the answer is truncated. If a prompt renders the
    earlier turns in another way than the document so far, its answer begins a document.

    A record is left out and counted in `counts` if the template refuses the record or leaves out a part of an answer
    (see `_require_rendered`), or if the model has no row for a token. With counts=None it raises `UnusableTextError`.
    A conversation without an answer to learn from becomes a document of one unsupervised token, which callers drop; it
    may become `counts.first`, the example in the warning of unusable records.
    Raises `UserError` for a tokenizer without chat template.
    """
    catch_refusals = nullcontext if counts is None else counts.count_refused
    docs_by_record = [_recorded_documents(record, tokenizer, template) for record in records]
    answers: dict[int, list[_RenderedAnswer]] = {}
    for number, record in enumerate(records):
        if not docs_by_record[number]:
            with catch_refusals():
                answers[number] = _render_answers(record, tokenizer, template, counts)
    texts = [text for rendered in answers.values() for answer in rendered for text in (answer.prompt, answer.text)]
    ids_of_texts = iter(encode_all(texts, lambda batch: list(chat.tokenize(tokenizer, batch)["input_ids"])))
    for number, rendered in answers.items():
        id_pairs = [(next(ids_of_texts), next(ids_of_texts)) for _ in rendered]  # of each prompt and of its answer
        with catch_refusals():
            docs_by_record[number] = _encode_answers(records[number], rendered, id_pairs, tokenizer, template)
            if counts is not None and not any(document.supervised.any() for document in docs_by_record[number]):
                counts.first = counts.first or f"{records[number]['id']}: no answer of the assistant to learn from"
    usable_documents: list[Document] = []
    for record, record_documents in zip(records, docs_by_record, strict=True):
        with catch_refusals():
            for document in record_documents:
                require_rows(document.ids, tokenizer, record["id"])
            usable_documents += record_documents
    return usable_documents


def _recorded_documents(record: Record, tokenizer: PreTrainedTokenizerBase, template: str) -> list[Document]:
    """The documents of the recorded tokens; none if there are none, or none of this tokenizer and template."""
    written = record.get("written")
    if written is None:
        return []
    if (written.tokenizer, written.template) != origin_digests(record, tokenizer, template):
        warn_of_text(record["id"], "their tokens are of another tokenizer or chat template, or of its other arguments")
        return []
    return [_to_document(tokenised, indivisible="messages" in record) for tokenised in written.documents]


def _to_document(tokenised: TokenisedText, indivisible: bool) -> Document:
    supervised = np.zeros(len(tokenised.ids), bool)
    for begin, end in tokenised.answers:
        supervised[begin:end] = True
    return Document(np.array(tokenised.ids, np.int64), supervised, indivisible)


def origin_digests(record: Mapping[str, object], tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str, str]:
    """Digests of the tokenizer and the template, which determine the ids of a record's prompts (see `Written`)."""
    template_name = template if "messages" in record else "none"
    template_digest = digest_of([template_name, template_name == "tokenizer" and tokenizer.chat_template])[:16]
    return _tokenizer_digest(tokenizer, len(tokenizer)), template_digest


@lru_cache(maxsize=2)  # also by the number of tokens, since tokens may be added
def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase, _: int) -> str:
    return tokenizer_digest(tokenizer)[:16]


@lru_cache(maxsize=2)  # by the number of tokens too
def _added_tokens(tokenizer: PreTrainedTokenizerBase, _: int) -> tuple[str, ...]:
    """The tokens at which a text is split before anything else, such as <|im_end|>."""
    return tuple(token.content for token in tokenizer.added_tokens_decoder.values())


def _encode_answers(
    record: Record, answers: Sequence[_RenderedAnswer], encoded_pairs: Sequence[tuple[list[int], list[int]]],
    tokenizer: PreTrainedTokenizerBase, template: str,
) -> list[Document]:  # fmt: skip
    """The documents of a record; encoded_pairs: the ids of the prompts and, by themselves, of the answers."""
    if "text" in record:
        ids, eos = chat.prepend_bos(encoded_pairs[0][1], tokenizer), tokenizer.eos_token_id
        ids = ids if record.get("truncated") or eos is None or ids[-1:] == [eos] else [*ids, eos]
        return [Document(np.array(ids, np.int64), np.ones(len(ids), bool), indivisible=False)]
    tokenised = list[TokenisedText]()
    for answer, (prompt, separate_ids) in zip(answers, encoded_pairs, strict=True):
        if template != "tokenizer":  # a chat template writes BOS itself
            prompt = chat.prepend_bos(prompt, tokenizer)
        prompt = chat.replace_prefix(prompt, [text.ids for text in tokenised], tokenizer)  # earlier answers keep ids
        ids = _answer_ids(prompt, answer.text, separate_ids, tokenizer)
        if not ids:
            name = chat.tokenizer_name(tokenizer)
            raise UnusableTextError(f"{record['id']}: {name} writes no such answer after its prompt")
        tokenised = append_answer(tokenised, prompt, ids, answer.learned)
    if tokenised:
        tokenised[-1].ids.extend(chat.tokenize(tokenizer, [answers[-1].after])["input_ids"][0])
    documents = [_to_document(text, indivisible=True) for text in tokenised if text.answers]
    unsupervised = Document(np.zeros(1, np.int64), np.zeros(1, bool), indivisible=True)  # counted, dropped in `rows`
    return documents or [unsupervised]


def _answer_ids(
    prompt: list[int], answer: str, separate_ids: list[int], tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """The ids of `answer` after those of its prompt; [] if there are none. separate_ids: its ids as a text of its own.

    Some tokenizers put a space before every text, so the answer is also tokenised after a character of its own.
    """
    prompt_end, options = prompt[-8:], {"clean_up_tokenization_spaces": False}  # a text may depend on a few before it
    expected_text = str(tokenizer.decode(prompt_end, **options)) + answer
    for prefix in ("", "\n", "."):
        texts = [prefix, prefix + answer]
        lead_ids, ids = chat.tokenize(tokenizer, texts)["input_ids"] if prefix else ([], separate_ids)
        ids = ids[len(lead_ids) :] if ids[: len(lead_ids)] == lead_ids else []
        if tokenizer.decode([*prompt_end, *ids], **options) == expected_text:
            return list(ids)
    return []


def _render_answers(
    record: Record, tokenizer: PreTrainedTokenizerBase, template: str, counts: Counts | None
) -> list[_RenderedAnswer]:
    """The answers of a conversation, rendered; `counts` notes what is not read.

    An answer is what its conversation adds to its prompt, up to the token that ends the turn (see `_cut_at_end`). The
    continuation, in which another turn follows, shows where that is. Example, with the text Hello<end>:

        prompt        <user>Hi<end><answer>
        conversation  <user>Hi<end><answer>Hello<end><eos>
        continuation  <user>Hi<end><answer>Hello<end><user>?<end><answer>
    """
    if "text" in record:
        return [_RenderedAnswer("", record["text"])]

    def render(messages: list[Message]) -> str:
        return chat.render_text(messages, tokenizer, template, record["id"])

    indices = [i for i, message in enumerate(record["messages"]) if message["role"] == "assistant"]
    if not indices:
        return []
    messages, added_tokens = record["messages"][: indices[-1] + 1], _added_tokens(tokenizer, len(tokenizer))
    closes_answers = _closes_answers(render, messages[: indices[0]], added_tokens)
    prompts = [render(messages[:i]) for i in indices]
    continuations = [*prompts[1:], _render_or_empty(render, [*messages, {"role": "user", "content": "?"}])]
    conversations = [render(messages[: i + 1]) for i in indices]
    conversations[-1] += (tokenizer.eos_token or "") if template == "none" else ""
    answers = list[_RenderedAnswer]()
    for i, prompt, conversation, continuation in zip(indices, prompts, conversations, continuations, strict=True):
        if not conversation.startswith(prompt):
            why = f"does not render message {i + 1} after the opening that decoding has"
            raise UnusableTextError(f"{record['id']}: the chat template {why}; {chat.template_remedy()}")
        rendered_answer, is_learned = conversation.removeprefix(prompt), UNLEARNED not in messages[i]
        answer_text = _cut_at_end(rendered_answer, continuation.removeprefix(prompt), added_tokens, closes_answers)
        if is_learned:
            _require_rendered(messages[i], answer_text, record["id"])
            _require_arguments(messages[: i + 1], render, record["id"])
        answers.append(_RenderedAnswer(prompt, answer_text, rendered_answer[len(answer_text) :], is_learned))
    if record.get("truncated"):
        answers[-1] = _remove_end(answers[-1], messages, conversations[-1], render)
    if counts is not None:
        counts.note(_unread_fields(messages, render), record["id"])
    return answers


def _closes_answers(render: Render, history: list[Message], added_tokens: tuple[str, ...]) -> bool:
    """Whether the template writes an added token after an answer to `history`, as in "Hello<end>".

    If not, an added token at an answer's end belongs to its own text, such as <b> in "In HTML, bold is <b>". True for
    a template that refuses the answer.
    """
    answer: Message = {"role": "assistant", "content": chat.MARK}  # a character that templates leave unchanged
    _, mark, ending = _render_or_empty(render, [*history, answer]).rpartition(chat.MARK)
    return not mark or ending.rstrip().endswith(added_tokens)


def _remove_end(answer: _RenderedAnswer, messages: list[Message], conversation: str, render: Render) -> _RenderedAnswer:
    """The last answer of `conversation`, which is truncated: it ends where a mark after its text is rendered."""
    text_keys = ["content"] if messages[-1]["content"].strip() else [key for key in THOUGHTS if key in messages[-1]]
    marked_message = messages[-1] | {key: messages[-1][key].rstrip() + chat.MARK for key in text_keys}
    marked_text = render([*messages[:-1], marked_message])
    text = marked_text[len(answer.prompt) : max(0, marked_text.find(chat.MARK, len(answer.prompt)))]
    return answer._replace(text=text, after=conversation[len(answer.prompt + text) :])


def _render_or_empty(render: Render, messages: list[Message]) -> str:
    """The rendered text; "" if the template refuses the messages."""
    try:
        return render(messages)
    except UnusableTextError:
        return ""


def _cut_at_end(answer: str, continuation: str, added: tuple[str, ...], closes_answers: bool) -> str:
    """An answer up to the added token that ends it: the last that stays where the conversation goes on, else all.

    continuation: the same text where another turn follows. closes_answers: see `_closes_answers`; if false, the mark of
    the next turn ends the answer. Two examples, whose added tokens are <end>, <eos> and <user>:

        answer                continuation          closes     result
        Hello<end><eos>       Hello<end><user>?     True       Hello<end>
        Hello                 Hello<user>?          False      Hello<user>
    """
    candidates, cut_text = list[str](), answer.rstrip()  # line breaks after an end-of-turn token are never generated
    while closes_answers and cut_text.endswith(added):
        candidates.append(cut_text)
        cut_text = cut_text.removesuffix(max((mark for mark in added if cut_text.endswith(mark)), key=len)).rstrip()
    if not candidates:
        return answer + max((mark for mark in added if continuation.startswith(answer + mark)), key=len, default="")
    return next((cut_text for cut_text in candidates if continuation.startswith(cut_text)), candidates[0])


def _require_rendered(message: Message, answer: str, where: str) -> None:
    """Raise `UnusableTextError` unless each different text to be learned of a message occurs in `answer` by itself.

    White space, and the tags around a thought, may differ. The longest text is found first, and removed. So the "4" of
    a content is not found in the thought "2 + 2 = 4".
    """
    call_names, haystack = [call["function"]["name"] for call in message.get("tool_calls", ())], "".join(answer.split())
    texts = {key: _TAG.split(message.get(key) or "") for key in ("content", *THOUGHTS)} | {"tool_calls": call_names}
    pieces = {"".join(text.split()): (text, key) for key in texts for text in texts[key]}
    for squeezed_text, (text, key) in sorted(pieces.items(), key=lambda piece: -len(piece[0])):
        if squeezed_text not in haystack:
            why = f"the template leaves {reprlib.repr(text)} of {key} out"
            raise UnusableTextError(f"{where}: {why}; write it where the template reads it, or take another")
        haystack = haystack.replace(squeezed_text, chat.MARK, 1)
    for tag in _TAG.findall(message["content"]):  # such as a <think> that the content does not close
        if (end_tag := tag.replace("<", "</")) in answer and end_tag not in message["content"]:
            raise UnusableTextError(f"{where}: the template writes {end_tag} around another thought than the content's")


def _require_arguments(messages: list[Message], render: Render, where: str) -> None:
    """Raise `UnusableTextError` if the last message is rendered alike without the arguments of its calls."""
    calls = messages[-1].get("tool_calls", ())
    bare_calls = [{**call, "function": {**call["function"], "arguments": {}}} for call in calls]
    bare_messages = [*messages[:-1], messages[-1] | {"tool_calls": bare_calls}]
    has_arguments = any(call["function"].get("arguments") for call in calls)
    if has_arguments and _render_or_empty(render, bare_messages) == render(messages):
        raise UnusableTextError(f"{where}: it calls tools, whose arguments its chat template leaves out; take another")


def _unread_fields(messages: list[Message], render: Render) -> Iterator[str]:
    """The fields, and the texts of the system and of tools, without which the messages are rendered alike."""

    def is_unread(changed_messages: list[Message]) -> bool:
        return _render_or_empty(render, changed_messages) == render(messages)

    fields = {key for message in messages for key in message.keys() - _EXEMPT_FIELDS.get(message["role"], set())
              if message[key] not in ("", [], {})}  # fmt: skip
    for field_name in sorted(fields - _COMMON_FIELDS):
        if is_unread([{key: message[key] for key in message if key != field_name} for message in messages]):
            yield "column 'tools'" if field_name == TOOLS else f"field {field_name!r} of a turn"
    for role in sorted({"system", "tool"} & {message["role"] for message in messages}):
        mark = {"content": chat.MARK}
        if is_unread([message | mark if message["role"] == role else message for message in messages]):
            yield f"field 'content' of a {role} turn"


def encode_all(texts: Sequence[str], encode: Encode, limit: int = PIECE) -> list[list[int]]:
    """`encode(texts)` in calls of at most `limit` characters, since a tokenizer takes a few hundred bytes for each.

    A longer text is cut where tokenising the text around the cut in two parts gives the same tokens as in one. Example:
    "…the cat | sat…" if the two halves give the tokens of "…the cat sat…". Then the whole text has the same tokens,
    provided that a token depends on at most `_AROUND_LEN` characters around it, as in every tokenizer that splits words
    first. If no cut near the limit is valid (a text without spaces or line ends), the text is cut at the limit, and its
    tokens there may differ.
    """
    pieces = [(number, start, stop) for number, text in enumerate(texts) for start, stop in spans(text, encode, limit)]
    ids_of_text: list[list[int]] = [[] for _ in texts]
    for batch in batches(pieces, lambda piece: piece[2] - piece[1], limit):
        encoded = encode([texts[number][start:stop] for number, start, stop in batch])
        for (number, _, _), ids in zip(batch, encoded, strict=True):
            ids_of_text[number] += ids
    return ids_of_text


def spans(text: str, encode: Encode, max_chars: int = PIECE) -> list[tuple[int, int]]:
    """(begin, end) of the pieces of `text`, each of at most `max_chars` characters; a short text is one piece."""
    piece_spans, start = [], 0
    while len(text) - start > max_chars:
        stop, next_start = _find_cut(text, start, encode, max_chars)
        piece_spans.append((start, stop))
        start = next_start
    return [*piece_spans, (start, len(text))]


def _find_cut(text: str, start: int, encode: Encode, max_chars: int) -> tuple[int, int]:
    """(end of the piece that begins at `start`, begin of the next piece): a cut in the last quarter of the limit."""
    latest_cut = start + max_chars
    earliest_cut = latest_cut - max_chars // 4
    for pattern, end_offset, begin_offset in _CUTS:
        cuts = [earliest_cut + match.start() for match in pattern.finditer(text[earliest_cut:latest_cut])]
        for cut in reversed(cuts[-_MOST_CUTS:]):
            if _keeps_tokens(text, start, cut + end_offset, cut + begin_offset, encode):
                return cut + end_offset, cut + begin_offset
    return latest_cut, latest_cut


def _keeps_tokens(text: str, start: int, stop: int, after: int, encode: Encode) -> bool:
    """Whether text[start:stop] and the text from `after` have, near the cut, the tokens that they have together."""
    begin, end = max(start, stop - _AROUND_LEN), after + _AROUND_LEN
    ids, head_ids, tail_ids = encode([text[begin:end], text[begin:stop], text[after:end]])
    return [*ids] == [*head_ids, *tail_ids]


def batches(
    items: Iterable[Item], size_of: Callable[[Item], int], max_size: int, max_items: int | None = None
) -> Iterator[list[Item]]:
    """Lists of up to `max_items` items in order, of total size up to `max_size`; a larger item is a list by itself."""
    batch, total_size = list[Item](), 0
    for item in items:
        item_size = size_of(item)
        if batch and (total_size + item_size > max_size or len(batch) == max_items):
            yield batch
            batch, total_size = [], 0
        batch.append(item)
        total_size += item_size
    if batch:
        yield batch
