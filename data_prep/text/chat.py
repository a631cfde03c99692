"""Records in normal form → token ids and supervised mask; prompts → token ids."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from data_prep.text.pieces import encode_all
from data_prep.text.records import Counts, Message, Record, require_encodable, warn_of_text
from data_prep.text.settings import DataConfig, PromptTemplate
from data_prep.text.sources import RUN_FILE, resolve_paths
from draft_models.targets.vocabulary import UnusableTextError, require_rows
from outrider.errors import UserError, reason, require_choice, warn
from outrider.files import read_mapping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
PROMPT_TEMPLATES = get_args(PromptTemplate)
TEMPLATE = "data.template"  # the option of most commands that train
_MOST_TEXT, _MOST_TIMES = 2**20, 16  # limits: characters a template adds, and repetitions of each message
_CHARS_A_TOKEN = 16  # of a beginning that is tokenised first, for each token of the context
_MARK = "\ue000"  # a private-use character, which templates leave unchanged
_Rendered = tuple[str, list[tuple[int, int]] | None]  # a text, and the spans of the assistant's turns; None for text


class Document(NamedTuple):
    """A tokenised record: ids int64 [n], supervised bool [n]; `whole`: it must not be split across rows."""

    ids: np.ndarray
    supervised: np.ndarray
    whole: bool


# ------------------------------------------------------------------------------------- records → tokens


def encode(
    records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, template: str, counts: Counts | None = None
) -> list[Document]:
    """The documents of records, in order: one each, or of a record with the target's own tokens one for each text that
    the target has read. Only its answers are supervised, token for token. Where they are of another tokenizer or
    template the text is tokenised as that of any record, and a warning says so.

    Each other record is tokenised over its full text; a long one in pieces (see `pieces`).

    Plain text begins with the BOS token if the tokenizer adds one, and ends with the EOS token if it has one, unless
    the text is truncated. Every token is supervised.

    A conversation is rendered by `template` (see `ChatTemplate`). User turns after the last answer are dropped. A
    token is supervised if it begins inside an assistant turn. The end-of-turn token counts as inside, unless the answer
    is truncated. The whole rendering is tokenised at once, which needs a fast tokenizer that reports text offsets.

    A record that the template refuses, with calls of tools that it leaves out, or with a token that the model has no
    row for, is left out and counted in `counts`; None: it raises `UnusableTextError`.

    Raises `UserError` for a tokenizer without chat template or offsets, and for a chat template that does not
    reproduce the history.
    """
    counted = nullcontext if counts is None else counts.refusing
    found = [_own_documents(record, tokenizer, template) for record in records]
    rendered: dict[int, _Rendered] = {}
    for number, record in enumerate(records):
        if not found[number]:
            with counted():
                rendered[number] = _render_record(record, tokenizer, template)
    texts = [records[number] for number in rendered]
    for number, document in zip(rendered, _tokenised(texts, [*rendered.values()], tokenizer, template), strict=True):
        found[number] = [document]
        if counts is not None and not document.supervised.any():
            counts.first = counts.first or f"{records[number]['id']}: no answer of the assistant"
    usable: list[Document] = []
    for record, documents in zip(records, found, strict=True):
        with counted():
            for document in documents:
                require_rows(document.ids, tokenizer, record["id"])
            usable += documents
    return usable


def _own_documents(record: Record, tokenizer: PreTrainedTokenizerBase, template: str) -> list[Document]:
    """The documents of the target's own tokens; none if there are none of this tokenizer and template."""
    written, documents = record.get("written"), list[Document]()
    if written is None:
        return []
    if (written.tokenizer, written.template) != written_by(record, tokenizer, template):
        warn_of_text(record["id"], "their tokens are of another tokenizer or chat template")
        return []
    for read in written.documents:
        ids, supervised = np.array(read.ids, np.int64), np.zeros(len(read.ids), bool)
        documents.append(Document(ids, supervised, whole="messages" in record))
        for begin, end in read.answers:
            supervised[begin:end] = True
    return documents


def written_by(record: Mapping[str, object], tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str, str]:
    """Digests of what decides the ids of a record's prompts: see `Written`."""
    named = template if "messages" in record else "none"
    rendered = json.dumps([named, named == "tokenizer" and tokenizer.chat_template], sort_keys=True)
    return _digest_of(tokenizer, len(tokenizer)), hashlib.sha256(rendered.encode()).hexdigest()[:16]


@lru_cache(maxsize=2)
def _digest_of(tokenizer: PreTrainedTokenizerBase, _: int) -> str:
    from draft_models.targets.fingerprint import tokenizer_digest  # imports torch

    return tokenizer_digest(tokenizer)[:16]


def _tokenised(
    records: Sequence[Record], rendered: Sequence[_Rendered], tokenizer: PreTrainedTokenizerBase, template: str
) -> list[Document]:
    chat = any(spans is not None for _, spans in rendered)
    if chat and not tokenizer.is_fast:
        raise UserError(
            f"{_name(tokenizer)}: conversations need a fast tokenizer (tokenizer.json), which reports where "
            "in the text each token begins; convert this one with AutoTokenizer and save_pretrained"
        )

    def rows_of(texts: list[str]) -> list[np.ndarray]:
        """For each text, its tokens' ids (and their begin and end in the text): int64 [n, 1 or 3]."""
        found = _tokenize(tokenizer, texts, return_offsets_mapping=chat)
        rows = [np.array(ids, np.int64).reshape(-1, 1) for ids in found["input_ids"]]
        if not chat:
            return rows
        places = (np.array(offsets, np.int64).reshape(-1, 2) for offsets in found["offset_mapping"])
        return [np.concatenate(pair, axis=1) for pair in zip(rows, places, strict=True)]

    encoded = encode_all([text for text, _ in rendered], rows_of)
    bos, documents = adds_bos(tokenizer), []
    for i, (_, spans) in enumerate(rendered):
        ids = encoded[i][:, 0]
        if spans is None:
            ids = _with_ends(ids, tokenizer, bos, eos=not records[i].get("truncated"))
            documents.append(Document(ids, np.ones(len(ids), bool), whole=False))
        else:
            supervised = _inside(encoded[i][:, 1:], spans)
            own = template == "tokenizer" or ids[:1].tolist() == [tokenizer.bos_token_id]  # a chat template writes it
            if bos and not own:
                ids, supervised = np.r_[tokenizer.bos_token_id, ids], np.r_[False, supervised]
            documents.append(Document(ids, supervised, whole=True))
    return documents


def render_prompt(
    turns: Sequence[str | Message],
    tokenizer: PreTrainedTokenizerBase,
    template: str = "auto",
    option: str = "template",
    said: Sequence[Sequence[int]] = (),
    most: int | None = None,
    where: str = "prompt",
) -> list[int]:
    """Token ids to decode from: the conversation so far and the opening of the assistant's next turn.

    turns: messages, or their texts with user and assistant in turn. The last is the user's.
    template: tokenizer (its chat template) or auto, which is the same here; vicuna; or none (the bare text, for
    completion). option: the one that gives it. BOS is prepended exactly once if the tokenizer adds one; a chat template
    writes its own.
    said: the ids of the answers in `turns`, in order, as they were written; empty where they are not known. They stand
    in the prompt as far as the template gives their text again after the same prompt. most: the context, see
    `ids_within`.

    Raises `UserError` if the tokenizer has no chat template although one is needed, and for a lone surrogate, and
    `UnusableTextError`, naming `where`, if the template refuses the turns or a token has no row in the model.
    """
    require_choice("template", template, PROMPT_TEMPLATES)
    messages = [
        {"role": "assistant" if i % 2 else "user", "content": turn} if isinstance(turn, str) else turn
        for i, turn in enumerate(turns)
    ]
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("a prompt ends with a user turn")
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    known: list[list[int]] = []
    for place, ids in zip(answers, said, strict=False):
        if ids and place:
            before = _render(messages[:place], tokenizer, template, option, most, where)
            known.append([*_with_known(before, known, tokenizer), *ids])
    rendered = _with_known(_render(messages, tokenizer, template, option, most, where), known, tokenizer)
    require_rows(rendered, tokenizer, where)
    return rendered


def _render(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    option: str = TEMPLATE,
    most: int | None = None,
    where: str = "prompt",
) -> list[int]:
    """Token ids of messages, and of the opening of an answer if the last is the user's."""
    opening = messages[-1]["role"] == "user"
    if template in ("auto", "tokenizer"):
        return ids_within(_apply(tokenizer, messages, where, option, opening=opening), tokenizer, most)
    text = _vicuna(messages, tokenizer)[0] + "ASSISTANT:" * opening if template == "vicuna" else _bare(messages)[0]
    ids = ids_within(text, tokenizer, most)
    if adds_bos(tokenizer) and ids[:1] != [tokenizer.bos_token_id]:
        ids.insert(0, tokenizer.bos_token_id)
    return ids


def ids_within(text: str, tokenizer: PreTrainedTokenizerBase, most: int | None) -> list[int]:
    """The token ids of `text`. If they are more than `most`, those of a beginning, which are more than `most` too.

    So the work for a text that no context holds is bounded. A beginning with twice as many tokens is enough: where it
    was cut, few tokens are others. A longer one is tried as long as it has less, as a token may be any text.
    Raises `UserError` for a lone surrogate.
    """
    require_encodable(text, "the prompt or text")
    size = len(text) if most is None else _CHARS_A_TOKEN * most
    while True:
        ids: list[int] = list(_tokenize(tokenizer, [text[:size]])["input_ids"][0])
        if size >= len(text) or (most is not None and len(ids) > 2 * most):
            return ids
        size *= 4


def _with_known(rendered: list[int], known: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """`rendered`, which begins with the last of the `known` ids whose text it begins with."""

    def text_of(ids: list[int]) -> str:
        return str(tokenizer.decode(ids))

    for ids in reversed(known):
        if rendered[: len(ids)] == ids:
            break
        text = text_of(ids)
        end = bisect_left(range(len(rendered)), len(text), key=lambda end: len(text_of(rendered[:end])))
        if text_of(rendered[:end]) == text:
            return [*ids, *rendered[end:]]
    return rendered


def spoken(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of an answer as the content of a message: without special tokens, and without what comes before the last
    one of those after which the chat template puts a content, such as the marker of a channel."""
    try:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        opening = _apply(tokenizer, turns, "answer").partition(_MARK)[0]
    except UserError:
        opening = ""
    special = [number for number, token in tokenizer.added_tokens_decoder.items() if opening.endswith(token.content)]
    after = max((place + 1 for place, token in enumerate(ids) if token in special), default=0)
    return str(tokenizer.decode([*ids[after:]], skip_special_tokens=True, clean_up_tokenization_spaces=False))


def parting(
    written: Sequence[int], messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, template: str
) -> str:
    """Where `messages`, rendered and tokenised, are not what their target has read and written, in words; else ""."""
    try:
        ids = _render(messages, tokenizer, template)
    except UserError as error:
        return str(error)
    place = next((i for i, pair in enumerate(zip(written, ids, strict=False)) if pair[0] != pair[1]), len(ids))
    names = [tokenizer.convert_ids_to_tokens([*some[max(0, place - 2) : place + 4]]) for some in (written, ids)]
    said = f"token {place} of {len(written)}: the target has {names[0]}, the text gives {names[1]}"
    return said if place < len(written) else ""


def warn_of_template(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn where a part of `data` has another template than its answers were asked for with, as far as the run that
    made them has recorded it; or, where no run has, another than the tokenizer's own."""
    for key, _, part in [*data.parts()] or [("", 0.0, data)]:
        files = {path.parent / RUN_FILE for path in resolve_paths(part.path if part.source == "local" else ())}
        runs = [read_mapping(file, "record of a run", "remove it") for file in files if file.is_file()]
        said = [run.get("template") for run in runs]
        asked = [one for templates in said if isinstance(templates, list) for one in templates if one]
        expected = {
            one if one in ("vicuna", "none") else "tokenizer" for one in asked or [tokenizer.chat_template] if one
        }
        if expected and part.template not in expected:
            why = "its answers were asked for with another" if asked else f"{_name(tokenizer)} has one of its own"
            named = f"data.mix.{key}" if key else "data"
            warn(f"{named}.template={part.template}: {why}; give {named}.template={' or '.join(sorted(expected))}")


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts its BOS token before plain text."""
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def _tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str], **options: bool) -> Any:
    for text in texts:
        require_encodable(text, "text")
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


def _render_record(record: Record, tokenizer: PreTrainedTokenizerBase, template: str) -> _Rendered:
    """The text of a record; of a conversation up to its last answer."""
    if "text" in record:
        return record["text"], None
    messages = record["messages"]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return "", []
    messages = messages[: answers[-1] + 1]
    calls = [call["function"]["name"] for message in messages for call in message.get("tool_calls", ())]
    text = _apply(tokenizer, messages, record["id"]) if calls and template == "tokenizer" else ""
    if left_out := [name for name in calls if name not in text]:
        said = f"it calls tools ({left_out[0]!r}), which its chat template does not render"
        raise UnusableTextError(f"{record['id']}: {said}")
    text, spans = _render_answers(messages, tokenizer, template, record["id"])
    if record.get("truncated"):  # the last span ends where a mark appended to its text is rendered
        last = messages[-1] | {"content": messages[-1]["content"].rstrip() + _MARK}
        marked, _ = _render_answers([*messages[:-1], last], tokenizer, template, record["id"])
        spans[-1] = (spans[-1][0], marked.rfind(_MARK))
    return text, spans


def _render_answers(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, template: str, where: str
) -> tuple[str, list[tuple[int, int]]]:
    if template == "vicuna":
        return _vicuna(messages, tokenizer)
    if template == "none":
        text, spans = _bare(messages)
        return text + (tokenizer.eos_token or ""), [*spans[:-1], (spans[-1][0], len(text) + 1)]
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
                f"what decoding sees; {_other_template(TEMPLATE)}"
            )
        spans.append((len(prompt), _end_of_turn(through, len(prompt), special)))
    return text, spans


def _end_of_turn(text: str, start: int, special: tuple[str, ...]) -> int:
    """The end of the turn text[start:], without line breaks after its end-of-turn token, which are never generated."""
    trimmed = text[start:].rstrip()
    return start + len(trimmed) if trimmed.endswith(special) else len(text)


def _apply(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    where: str,
    option: str = TEMPLATE,
    opening: bool = False,
) -> str:
    if not tokenizer.chat_template:
        raise UserError(
            f"{_name(tokenizer)} has no chat template, which conversations need; use {option}=vicuna, Vicuna's own "
            f"format, {option}=none for a base model, which continues bare text, or the tokenizer of a chat model"
        )
    try:
        tools = messages[0].get("tools")
        rendered = tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=opening
        )
    except Exception as error:  # a template is code: it may raise any error, to refuse the turns or by a bug
        raise UnusableTextError(
            f"{where}: the chat template of {_name(tokenizer)} refuses this conversation ({reason(error)}); "
            "leave it out; what its system message says may begin the user's first turn"
        ) from error
    given = sum(len(message["content"]) for message in messages)
    if len(rendered) > _MOST_TEXT + _MOST_TIMES * given:
        raise UnusableTextError(
            f"{where}: the chat template of {_name(tokenizer)} makes {len(rendered)} characters of {given}; "
            + _other_template(option)
        )
    return str(rendered)


def _other_template(option: str) -> str:
    return f"use {option}=vicuna or {option}=none, or a tokenizer whose chat template reproduces the history"


def _bare(messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
    """The texts alone, a line break between them; an answer begins with the one before it."""
    text, spans = "", []
    for message in messages:
        start = len(text)
        text += ("\n" if text else "") + message["content"]
        spans += [(start, len(text))] if message["role"] == "assistant" else []
    return text, spans


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
