"""Records in normal form → documents: token ids and supervised mask. Long texts are tokenised in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from outrider.base.errors import UserError
from outrider.base.files import digest_of
from outrider.data_prep.text.chat import MARK, adds_bos, apply_template, name_of, render_answers, tokenize
from outrider.data_prep.text.records import Counts, Record, warn_of_text
from outrider.draft_models.targets.vocabulary import UnusableTextError, require_rows, tokenizer_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE = 2**18  # characters tokenised at once
_AROUND = 256  # characters on either side of a cut that are tokenised to test it
_TRIED = 8  # candidate cuts of each kind
# A cut is (end of a piece, begin of the next). A space between words may belong to neither piece, because some
# tokenizers prepend one to every text.
_LINE, _SPACE = re.compile(r"(?<=\S)\n(?=\S)"), re.compile(r"(?<=\S) (?=\S)")
_PLACES = ((_LINE, 1, 1), (_SPACE, 0, 0), (_SPACE, 0, 1))
_Rendered = tuple[str, list[tuple[int, int]] | None]  # a text, and the spans of the assistant's turns; None for text
Encode = Callable[[list[str]], Sequence[np.ndarray]]  # texts → arrays [n, columns]: ids without special tokens, offsets
Item = TypeVar("Item")


class Document(NamedTuple):
    """A tokenised record: ids int64 [n], supervised bool [n]; `whole`: it must not be split across rows."""

    ids: np.ndarray
    supervised: np.ndarray
    whole: bool


def encode(
    records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, template: str, counts: Counts | None = None
) -> list[Document]:
    """The documents of records, in order.

    A record that holds the target's own tokens (`Written`) has a document for each recorded text; only the answers are
    supervised. If the tokens are of another tokenizer or template, a warning says so, and the text is tokenised. Any
    other record is one document of its full text, tokenised in pieces if it is long (see `encode_all`).

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
    """The documents of the recorded tokens; none if there are none, or none of this tokenizer and template."""
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
    """Digests of the tokenizer and the template, which determine the ids of a record's prompts (see `Written`)."""
    named = template if "messages" in record else "none"
    rendered = digest_of([named, named == "tokenizer" and tokenizer.chat_template])[:16]
    return _digest_of(tokenizer, len(tokenizer)), rendered


@lru_cache(maxsize=2)
def _digest_of(tokenizer: PreTrainedTokenizerBase, _: int) -> str:
    return tokenizer_digest(tokenizer)[:16]


def _tokenised(
    records: Sequence[Record], rendered: Sequence[_Rendered], tokenizer: PreTrainedTokenizerBase, template: str
) -> list[Document]:
    chat = any(spans is not None for _, spans in rendered)
    if chat and not tokenizer.is_fast:
        raise UserError(
            f"{name_of(tokenizer)}: conversations need a fast tokenizer (tokenizer.json), which reports where "
            "in the text each token begins; convert this one with AutoTokenizer and save_pretrained"
        )

    def rows_of(texts: list[str]) -> list[np.ndarray]:
        """For each text, its tokens' ids (and their begin and end in the text): int64 [n, 1 or 3]."""
        found = tokenize(tokenizer, texts, return_offsets_mapping=chat)
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
            end = None if records[i].get("truncated") else tokenizer.eos_token_id
            if bos and ids[:1].tolist() != [tokenizer.bos_token_id]:
                ids = np.r_[tokenizer.bos_token_id, ids]
            if end is not None and ids[-1:].tolist() != [end]:
                ids = np.r_[ids, end]
            documents.append(Document(ids, np.ones(len(ids), bool), whole=False))
        else:
            supervised = _inside(encoded[i][:, 1:], spans)
            own = template == "tokenizer" or ids[:1].tolist() == [tokenizer.bos_token_id]  # a chat template writes it
            if bos and not own:
                ids, supervised = np.r_[tokenizer.bos_token_id, ids], np.r_[False, supervised]
            documents.append(Document(ids, supervised, whole=True))
    return documents


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
    text = apply_template(tokenizer, messages, record["id"]) if calls and template == "tokenizer" else ""
    if left_out := [name for name in calls if name not in text]:
        said = f"it calls tools ({left_out[0]!r}), which its chat template does not render"
        raise UnusableTextError(f"{record['id']}: {said}")
    text, spans = render_answers(messages, tokenizer, template, record["id"])
    if record.get("truncated"):  # the last span ends where a mark appended to its text is rendered
        last = messages[-1] | {"content": messages[-1]["content"].rstrip() + MARK}
        marked, _ = render_answers([*messages[:-1], last], tokenizer, template, record["id"])
        spans[-1] = (spans[-1][0], marked.rfind(MARK))
    return text, spans


# --------------------------------------------------------------------------------------------------- pieces


def encode_all(texts: Sequence[str], encode: Encode, most: int = PIECE) -> list[np.ndarray]:
    """`encode(texts)` in calls of at most `most` characters, since a tokenizer takes a few hundred bytes for each.

    A longer text is cut where tokenising the text around the cut in two parts gives the same tokens as in one. Example:
    "…the cat | sat…" if the two halves give the tokens of "…the cat sat…". Then the whole text has the same tokens,
    provided that a token depends on at most `_AROUND` characters around it, as in every tokenizer that splits words
    first. If no cut near the limit is valid (a text without spaces or line ends), the text is cut at the limit, and its
    tokens there may differ.
    """
    cuts = [(number, start, stop) for number, text in enumerate(texts) for start, stop in spans(text, encode, most)]
    parts: list[list[np.ndarray]] = [[] for _ in texts]
    ended = [0] * len(texts)
    for batch in batches(cuts, lambda cut: cut[2] - cut[1], most):
        encoded = encode([texts[number][start:stop] for number, start, stop in batch])
        for (number, start, stop), rows in zip(batch, encoded, strict=True):
            parts[number].append(_moved(rows, start, start - ended[number]))
            ended[number] = stop
    return [own[0] if len(own) == 1 else np.concatenate(own) for own in parts]


def spans(text: str, encode: Encode, most: int = PIECE) -> list[tuple[int, int]]:
    """(begin, end) of the pieces of `text`, each of at most `most` characters; a short text is one piece."""
    found, start = [], 0
    while len(text) - start > most:
        stop, after = _cut(text, start, encode, most)
        found.append((start, stop))
        start = after
    return [*found, (start, len(text))]


def _cut(text: str, start: int, encode: Encode, most: int) -> tuple[int, int]:
    """(end of the piece that begins at `start`, begin of the next piece)."""
    limit = start + most
    first = limit - most // 4
    for pattern, end, begin in _PLACES:
        places = [first + match.start() for match in pattern.finditer(text[first:limit])]
        for place in reversed(places[-_TRIED:]):
            if _keeps_tokens(text, start, place + end, place + begin, encode):
                return place + end, place + begin
    return limit, limit


def _keeps_tokens(text: str, start: int, stop: int, after: int, encode: Encode) -> bool:
    begin, end = max(start, stop - _AROUND), after + _AROUND
    whole, left, right = encode([text[begin:end], text[begin:stop], text[after:end]])
    return np.array_equal(whole, np.concatenate([left, _moved(right, after - begin, after - stop)]))


def _moved(rows: np.ndarray, by: int, left_out: int) -> np.ndarray:
    """The rows of the piece from `by` on, with offsets into the whole text; `left_out` belongs to its first token."""
    moved = np.concatenate([rows[:, :1], rows[:, 1:] + by], axis=1)
    moved[:1, 1:2] -= left_out
    return moved


def batches(
    items: Iterable[Item], size_of: Callable[[Item], int], most: int, count: int | None = None
) -> Iterator[list[Item]]:
    """Lists of up to `count` consecutive items with total size at most `most`; a larger item is a list by itself."""
    batch: list[Item] = []
    size = 0
    for item in items:
        own = size_of(item)
        if batch and (size + own > most or len(batch) == count):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += own
    if batch:
        yield batch
