"""Text → token ids in shards on disk, by several processes. These shards survive a killed build of a table.

A shard holds about `SHARD_CHARACTERS` of text; a long document continues in the next one. A shard's name is its index
in the corpus and a hash of its input, and appears by a rename. Shard boundaries depend on text and tokenizer alone. So
an existing shard is valid whoever wrote it, and the bytes do not depend on the number of processes.
"""

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import numpy as np

from data_prep.text.pieces import PIECE, batches, spans
from data_prep.text.records import Record, warn_of_text
from draft_models.targets.encoder import Encoder, open_encoder
from outrider.errors import UserError
from outrider.files import write_atomically
from outrider.progress import Stage

SHARD_CHARACTERS = 4_000_000  # about a million tokens
_FORMAT = "1"  # part of every shard's name: raise it when the same text would give other bytes
_WAITING = 2  # queued shards per process, so that none is idle


class Passage(NamedTuple):
    """A document as text, or a piece of a long one.

    ends: the EOS token follows it, as it follows a target's answer. continues: it belongs to the same document as the
    previous passage. ids: of an answer that its target has written in tokens of this tokenizer, instead of a text.
    """

    text: str
    ends: bool
    continues: bool = False
    ids: tuple[int, ...] = ()


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


def passages(records: Iterable[Record], text: str, encoder: Encoder | None = None) -> Iterator[Passage]:
    """The documents of records: plain texts, and the messages of conversations, each message by itself.

    text: assistant (only the assistant's messages of a conversation) or all (all messages). Answers that are `Written`
    in tokens of `encoder` are given as these.
    """
    size = 0 if encoder is None else encoder.vocabulary
    for record in records:
        written, whole = _written(record, encoder, size), not record.get("truncated")
        if "text" in record:
            yield next(written, Passage(record["text"], ends=whole))
            continue
        last = len(record["messages"]) - 1
        for place, message in enumerate(record["messages"]):
            if message["role"] == "assistant":
                said = next(written, Passage(message["content"], ends=whole or place < last))
                if said.ids or said.text:  # a call of tools may have no text
                    yield said
            elif text == "all" and message["content"]:
                yield Passage(message["content"], ends=False)


def _written(record: Record, encoder: Encoder | None, size: int) -> Iterator[Passage]:
    """The answers of a record, or its plain text, in the `size` tokens of `encoder`; nothing if they are not known."""
    written = record.get("written")
    if written is None or encoder is None:
        return
    known = all(max(read.ids) < size for read in written.documents)
    if not (known and encoder.digest.startswith(written.tokenizer)):
        warn_of_text(record["id"], "their tokens are of another tokenizer")
        return
    for read in written.documents:
        for begin, end in read.answers if "messages" in record else [(read.ids[0] == encoder.bos, len(read.ids))]:
            yield Passage("", ends=False, ids=tuple(read.ids[begin:end]))


def tokenise(
    documents: Iterable[Passage], source: str, revision: str | None, encoder: Encoder, folder: Path, workers: int
) -> Shards:
    """Write the missing shards of `documents` to `folder`, with `workers` processes.

    source, revision: the origin of `encoder`, which the processes open again. Other files in `folder` are removed.
    Raises `UserError`.
    """
    dtype = np.dtype(np.uint16 if encoder.vocabulary <= 2**16 else np.uint32)
    identity = f"{_FORMAT} {encoder.digest} {encoder.eos}"
    paths, continued, digest, tokens, count = [], [], hashlib.sha256(), 0, 0
    with _Pool(workers, source, revision, encoder, dtype) as pool, Stage("tokenising", unit="tokens") as stage:
        pieces = _pieces(documents, encoder)
        for number, batch in enumerate(
            batches(pieces, lambda one: len(one.text) or 4 * len(one.ids), SHARD_CHARACTERS)
        ):
            name = _digest(identity, batch)
            digest.update(name.encode())
            paths.append(folder / f"{number:06d}-{name[:32]}.tokens")
            continued.append(batch[0].continues)
            count += sum(not passage.continues for passage in batch)
            if paths[-1].exists():
                finished: Iterable[int] = [_header(paths[-1])[1]]
            else:
                finished = pool.submit(paths[-1], batch)
            for found in finished:
                tokens += found
                stage.advance(found)
        for found in pool.drain():
            tokens += found
            stage.advance(found)
    for stale in set(folder.iterdir()) - set(paths):
        stale.unlink()
    return Shards(paths, continued, dtype, tokens, count, digest.hexdigest())


def read_shard(path: Path, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """(ids `dtype` [tokens], lengths uint32 [documents]) of a shard."""
    documents, _ = _header(path)
    content = np.fromfile(path, np.uint8, offset=16)
    return content[4 * documents :].view(dtype), content[: 4 * documents].view(np.uint32)


def whole_documents(shards: Shards) -> Iterator[np.ndarray]:
    """The token ids of every document, whole."""
    begun = np.empty(0, shards.dtype)
    for path, continues in zip(shards.paths, [*shards.continued[1:], False], strict=True):
        ids, lengths = read_shard(path, shards.dtype)
        parts = np.split(ids, np.cumsum(lengths[:-1], dtype=np.int64))
        parts[0] = np.concatenate([begun, parts[0]])
        begun = parts.pop() if continues else begun[:0]
        yield from parts


# -------------------------------------------------------------------------------------------------- processes


class _Pool:
    """Worker processes that write shards, or this process if `workers` is 1; a bounded number of shards is queued."""

    def __init__(self, workers: int, source: str, revision: str | None, encoder: Encoder, dtype: np.dtype) -> None:
        self._encoder, self._dtype, self._source = encoder, dtype, source
        self._limit = _WAITING * workers
        self._waiting: deque[Future[int]] = deque()
        self._pool = None
        if workers > 1:
            self._pool = ProcessPoolExecutor(workers, get_context("spawn"), _open_process, (source, revision))

    def __enter__(self) -> "_Pool":
        return self

    def submit(self, path: Path, batch: list[Passage]) -> Iterator[int]:
        """Queue a shard; yields the token counts of shards finished while waiting for a free slot."""
        if self._pool is None:
            yield _write_shard(path, batch, self._encoder, self._dtype)
            return
        while len(self._waiting) >= self._limit:
            yield self._result(self._waiting.popleft())
        with self._alive():
            self._waiting.append(self._pool.submit(_write_in_process, path, batch, self._dtype))

    def drain(self) -> Iterator[int]:
        """Wait for all shards; yields their token counts."""
        while self._waiting:
            yield self._result(self._waiting.popleft())

    def _result(self, future: Future[int]) -> int:
        with self._alive():
            return future.result()

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Raises `UserError` if a worker has died, when waiting for a result or queueing a shard."""
        try:
            yield
        except BrokenProcessPool:
            raise UserError(
                f"tokenizer={self._source}: a tokenising process was killed, or ran out of memory; continue with "
                "resume=true, with fewer workers if it happens again"
            ) from None

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


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
    return _write_shard(path, batch, _process_encoder, dtype)


# ----------------------------------------------------------------------------------------------------- shards


def _write_shard(path: Path, batch: list[Passage], encoder: Encoder, dtype: np.dtype) -> int:
    """Layout: documents and tokens (int64), length of each document (uint32), the ids of all (dtype)."""
    end = () if encoder.eos is None else (encoder.eos,)
    lengths: list[int] = []
    parts: list[np.ndarray] = []
    for part in batches(batch, lambda passage: len(passage.text), PIECE):
        for ids, passage in zip(encoder.encode([passage.text for passage in part]), part, strict=True):
            parts.append(np.array(passage.ids or ([*ids, *end] if passage.ends else ids), dtype))
            if passage.continues and lengths:
                lengths[-1] += len(parts[-1])
            else:
                lengths.append(len(parts[-1]))
    tokens = sum(lengths)
    header, sizes = np.array([len(lengths), tokens], np.int64), np.array(lengths, np.uint32)
    write_atomically(path, b"".join([header.tobytes(), sizes.tobytes(), *(ids.tobytes() for ids in parts)]))
    return tokens


def _header(path: Path) -> tuple[int, int]:
    documents, tokens = np.fromfile(path, np.int64, 2)
    return int(documents), int(tokens)


def _pieces(documents: Iterable[Passage], encoder: Encoder) -> Iterator[Passage]:
    """The documents, with long ones split (see `data_prep.text.pieces`)."""

    def encode(texts: list[str]) -> list[np.ndarray]:
        return [np.array(ids, np.int64).reshape(-1, 1) for ids in encoder.encode(texts)]

    for document in documents:
        text = document.text
        for start, stop in spans(text, encode):
            last = stop == len(text)
            yield document if start == 0 and last else Passage(text[start:stop], document.ends and last, start > 0)


def _digest(identity: str, batch: list[Passage]) -> str:
    digest = hashlib.sha256(identity.encode())
    for text, ends, continues, ids in batch:
        content = np.array(ids, np.int64).tobytes() if ids else text.encode()
        digest.update(f"{len(content)} {'ids' if ids else ends} {'continues ' if continues else ''}".encode())
        digest.update(content)
    return digest.hexdigest()
