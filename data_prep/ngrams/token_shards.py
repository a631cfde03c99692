"""Text → token ids in shards on disk, by several processes. These shards survive a killed build of a table.

`passages` makes the texts to count of records, `tokenise` writes their shards, `read_token_shard` reads one back. A
shard holds about `SHARD_CHARACTERS` of text; a long document continues in the next one. A shard's name is its index
in the corpus and a hash of its input, and appears by a rename. Shard boundaries depend on text and tokenizer alone. So
an existing shard is valid whoever wrote it, and the bytes do not depend on the number of processes. An `Encoder` is a
tokenizer: `encode` makes ids of texts, `vocabulary` is the number of ids, `rows` that of a smaller embedding, or None.
"""

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save

from outrider.base.errors import UserError
from outrider.base.files import write_atomically
from outrider.base.progress import Stage
from outrider.data_prep.text.documents import PIECE, batches, spans
from outrider.data_prep.text.messages import THOUGHTS, UNLEARNED
from outrider.data_prep.text.records import Record, warn_of_text
from outrider.draft_models.ngrams.kernels import token_type
from outrider.draft_models.targets.encoder import Encoder, open_encoder

SHARD_CHARACTERS = 4_000_000  # about a million tokens
_FORMAT = "1"  # part of every shard's name: raise it when the same text would give other bytes
_QUEUED = 2  # shards that wait for each process, so that no process is idle


class Passage(NamedTuple):
    """A document as text, or a piece of a long one. ends: the EOS token follows it, as it follows a target's answer.

    continues_doc: it belongs to the document of the previous passage. ids: an answer's own tokens, if the target wrote
    it in this vocabulary; `text` is then "".
    """

    text: str
    ends: bool
    continues_doc: bool = False
    ids: tuple[int, ...] = ()


_ShardInput = tuple[Path, list[Passage], np.dtype]  # a shard to write, and the type of its ids


class Shards(NamedTuple):
    """Finished shards in the order of the corpus; `digest` identifies the tokenised corpus.

    continued: for each shard, whether its first document continues the last one of the previous shard.
    """

    paths: list[Path]
    continued: list[bool]
    dtype: np.dtype
    tokens: int
    documents: int
    digest: str


def passages(records: Iterable[Record], text_scope: str, encoder: Encoder) -> Iterator[Passage]:
    """The documents of records: plain texts, and the messages of conversations, each message by itself.

    text_scope: assistant (only the assistant's messages of a conversation) or all (all messages). An answer that
    is recorded in tokens of `encoder`, as the target wrote it, becomes a passage of these tokens.
    """
    for record in records:
        recorded_answers, is_complete = _recorded_passages(record, encoder), not record.get("truncated")
        if "text" in record:
            yield next(recorded_answers, Passage(record["text"], ends=is_complete))
            continue
        last_index = len(record["messages"]) - 1
        for number, message in enumerate(record["messages"]):
            if UNLEARNED in message:
                continue
            if message["role"] == "assistant":  # a thought under several keys counts once
                text_parts = [*dict.fromkeys(message[key] for key in THOUGHTS if message.get(key)), message["content"]]
                text_answer = Passage("\n".join(filter(None, text_parts)), ends=is_complete or number < last_index)
                answer = next(recorded_answers, text_answer)
                if answer.ids or answer.text:  # a call of tools may have no text
                    yield answer
            elif text_scope == "all" and message["content"]:
                yield Passage(message["content"], ends=False)


def _recorded_passages(record: Record, encoder: Encoder) -> Iterator[Passage]:
    """The recorded tokens of a record's answers, or of its plain text, if their vocabulary is that of `encoder`."""
    written = record.get("written")
    if written is None:
        return
    in_range = all(max(document.ids) < encoder.vocabulary for document in written.documents)
    if not (in_range and encoder.digest.startswith(written.tokenizer)):  # `tokenizer` is the beginning of a digest
        warn_of_text(record["id"], "their tokens are of another tokenizer")  # so the caller takes their text
        return
    for document in written.documents:
        text_span = (int(document.ids[0] == encoder.bos), len(document.ids))  # without the BOS token
        for begin, end in document.answers if "messages" in record else [text_span]:
            yield Passage("", ends=False, ids=tuple(document.ids[begin:end]))  # `ends` is not read beside ids


def tokenise(
    corpus: Iterable[Passage],
    encoder_source: str,
    revision: str | None,
    encoder: Encoder,
    folder: Path,
    workers: int,
    shard: int = SHARD_CHARACTERS,
    piece: int = PIECE,
) -> Shards:
    """Write the missing shards of `corpus` to `folder`, with `workers` processes.

    encoder_source, revision: the origin of `encoder`, which the processes open again. shard, piece: characters of a
    shard, and of what is tokenised at once. Other files in `folder` are removed. Raises `UserError`.
    """
    dtype, hasher = token_type(encoder.vocabulary), hashlib.sha256()
    identity = f"{_FORMAT} {encoder.digest} {encoder.eos}" + ("" if encoder.rows is None else f" {encoder.rows}")
    paths, continued, count = list[Path](), list[bool](), 0

    def missing_shards() -> Iterator[_ShardInput]:
        """The shards to write; it also fills `paths` and `continued` for all shards."""
        nonlocal count
        pieces = _split_long(corpus, encoder, piece)  # below, a recorded token counts as 4 characters
        for batch in batches(pieces, lambda passage: len(passage.text) or 4 * len(passage.ids), shard):
            batch_digest = _digest_batch(identity, batch)
            hasher.update(batch_digest.encode())
            paths.append(folder / f"{len(paths):06d}-{batch_digest[:32]}.safetensors")
            continued.append(batch[0].continues_doc)
            count += sum(not passage.continues_doc for passage in batch)
            if not paths[-1].exists():
                yield paths[-1], batch, dtype

    with Stage("tokenising", unit="tokens") as stage:
        for token_count in _write_all(missing_shards(), encoder_source, revision, encoder, workers):
            stage.advance(token_count)
    for stale_file in set(folder.iterdir()) - set(paths):
        stale_file.unlink()
    return Shards(paths, continued, dtype, sum(map(_count_tokens, paths)), count, hasher.hexdigest())


def read_token_shard(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(ids [tokens], lengths uint32 [documents]) of a shard."""
    arrays = load_file(path)
    return arrays["ids"], arrays["lengths"]


def _count_tokens(path: Path) -> int:
    with safe_open(path, "np") as stored:
        return int(stored.get_slice("ids").get_shape()[0])


def whole_documents(shards: Shards) -> Iterator[np.ndarray]:
    """The token ids of every document, also of one that several shards hold."""
    unfinished_ids = np.empty(0, shards.dtype)  # of a document that goes on in the next shard
    for path, continues_next in zip(shards.paths, [*shards.continued[1:], False], strict=True):
        ids, lengths = read_token_shard(path)
        documents = np.split(ids, np.cumsum(lengths[:-1], dtype=np.int64))
        documents[0] = np.concatenate([unfinished_ids, documents[0]])
        unfinished_ids = documents.pop() if continues_next else unfinished_ids[:0]
        yield from documents


def _write_all(
    shard_inputs: Iterator[_ShardInput], source: str, revision: str | None, encoder: Encoder, workers: int
) -> Iterator[int]:
    """Write shards with `workers` processes, of which a bounded number wait; yields the tokens of each, in order."""
    if workers == 1:
        for shard_input in shard_inputs:
            yield _write_shard(*shard_input, encoder)
        return
    pending = deque[Future[int]]()
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _open_process, (source, revision))
    try:
        for shard_input in shard_inputs:
            if len(pending) == _QUEUED * workers:
                yield pending.popleft().result()
            pending.append(pool.submit(_write_in_process, *shard_input))
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        remedy = "continue with resume=true, with fewer workers if it happens again"
        fault = "a tokenising process was killed, or ran out of memory"
        raise UserError(f"tokenizer={source}: {fault}; {remedy}") from None
    finally:
        pool.shutdown(cancel_futures=True)


_process_encoder: Encoder


def _open_process(source: str, revision: str | None) -> None:
    global _process_encoder
    Thread(target=_end_with_parent, daemon=True).start()
    _process_encoder = open_encoder(source, revision)


def _end_with_parent() -> None:
    """End with the parent: otherwise workers of a killed parent would wait for work forever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _write_in_process(path: Path, batch: list[Passage], dtype: np.dtype) -> int:
    return _write_shard(path, batch, dtype, _process_encoder)


def _write_shard(path: Path, batch: list[Passage], dtype: np.dtype, encoder: Encoder) -> int:
    """Write the ids of all documents, and the length of each, as safetensors; returns the number of tokens."""
    eos_ids = () if encoder.eos is None else (encoder.eos,)
    lengths, id_segments = list[int](), [np.empty(0, dtype)]
    for sub_batch in batches(batch, lambda passage: len(passage.text), PIECE):
        for ids, passage in zip(encoder.encode([passage.text for passage in sub_batch]), sub_batch, strict=True):
            tokens = np.array(passage.ids or ([*ids, *eos_ids] if passage.ends else ids), dtype)
            for number, segment in enumerate(_split_at_unreadable(tokens, encoder)):
                id_segments.append(segment)
                if number == 0 and passage.continues_doc and lengths:
                    lengths[-1] += len(segment)
                else:
                    lengths.append(len(segment))
    write_atomically(path, save({"ids": np.concatenate(id_segments), "lengths": np.array(lengths, np.uint32)}))
    return sum(lengths)


def _split_at_unreadable(ids: np.ndarray, encoder: Encoder) -> list[np.ndarray]:
    """`ids`, split at ids for which the model's embedding has no row; these are left out, as no draft may have them."""
    if encoder.rows is None:
        return [ids]
    first, *tails = np.split(ids, np.flatnonzero(ids >= encoder.rows))
    return [first, *(tail[1:] for tail in tails)]


def _split_long(corpus: Iterable[Passage], encoder: Encoder, max_chars: int) -> Iterator[Passage]:
    """The documents, with long ones split (see `data_prep.text.documents`)."""
    for passage in corpus:
        text = passage.text
        for start, stop in spans(text, encoder.encode, max_chars):
            at_end = stop == len(text)  # below, start > 0: the piece continues the document
            yield passage if start == 0 and at_end else Passage(text[start:stop], passage.ends and at_end, start > 0)


def _digest_batch(identity: str, batch: list[Passage]) -> str:
    hasher = hashlib.sha256(identity.encode())
    for text, ends, continues, ids in batch:
        content = np.array(ids, np.int64).tobytes() if ids else text.encode()
        hasher.update(f"{len(content)} {'ids' if ids else ends} {'continues ' if continues else ''}".encode())
        hasher.update(content)
    return hasher.hexdigest()
