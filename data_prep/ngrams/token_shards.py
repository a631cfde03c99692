"""Text → token ids in shards on disk, by several processes. A kill does not undo this part of a table's build.

A shard holds about `SHARD_CHARACTERS` of text. A long document goes on in the next one. The name of a shard is its
place in the corpus and a hash of what it was made of, and appears by a rename. Where a shard begins depends on text
and tokenizer alone. So a shard that is there is right, whoever wrote it, and the bytes do not depend on the number of
processes.
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
from data_prep.text.records import Record
from draft_models.targets.encoder import Encoder, open_encoder
from outrider.errors import UserError
from outrider.files import write_atomically
from outrider.progress import Stage

SHARD_CHARACTERS = 4_000_000  # about a million tokens
_FORMAT = "1"  # part of every shard's name: raise it when the same text would give other bytes
_WAITING = 2  # shards handed out per process, so that none is ever idle


class Passage(NamedTuple):
    """A document as text, or a piece of a long one.

    ends: the EOS token follows it, as it follows what a target generates. continues: the document of the passage before
    it goes on.
    """

    text: str
    ends: bool
    continues: bool = False


class Shards(NamedTuple):
    """Finished shards in the order of the corpus; `digest` identifies the tokenised corpus.

    continued: for each shard, whether its first document goes on with the last one of the shard before.
    """

    paths: list[Path]
    continued: list[bool]
    dtype: np.dtype
    tokens: int
    documents: int
    digest: str


def passages(records: Iterable[Record], text: str) -> Iterator[Passage]:
    """The documents of records: a plain text, or the messages of a conversation, each on its own.

    text: assistant (of a conversation only what the assistant says) or all (what the others say too).
    """
    for record in records:
        if "text" in record:
            yield Passage(record["text"], ends=True)
            continue
        for message in record["messages"]:
            answer = message["role"] == "assistant"
            if answer or text == "all":
                yield Passage(message["content"], ends=answer)


def tokenise(
    documents: Iterable[Passage], source: str, revision: str | None, encoder: Encoder, folder: Path, workers: int
) -> Shards:
    """Write what is missing of the shards of `documents` to `folder`, with `workers` processes.

    source, revision: what `encoder` was opened from; the processes open it again. Files in `folder` that belong to
    none of the shards are removed. Raises `UserError`.
    """
    dtype = np.dtype(np.uint16 if encoder.vocabulary <= 2**16 else np.uint32)
    identity = f"{_FORMAT} {encoder.digest} {encoder.eos}"
    paths, continued, digest, tokens, count = [], [], hashlib.sha256(), 0, 0
    with _Pool(workers, source, revision, encoder, dtype) as pool, Stage("tokenising", unit="tokens") as stage:
        pieces = _pieces(documents, encoder)
        for number, batch in enumerate(batches(pieces, lambda passage: len(passage.text), SHARD_CHARACTERS)):
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
    """Processes that write shards, or this process where one is asked for; a bounded number of shards waits."""

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
        """Hand out a shard; yields the token counts of those that had to be waited for."""
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
        """Raises `UserError` where one of the processes has died: when a result is waited for, or work handed out."""
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
    """A pool's processes wait for work for ever when theirs was killed."""
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
            parts.append(np.array([*ids, *end] if passage.ends else ids, dtype))
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
    """The documents, long ones cut (see `data_prep.text.pieces`)."""

    def encode(texts: list[str]) -> list[np.ndarray]:
        return [np.array(ids, np.int64).reshape(-1, 1) for ids in encoder.encode(texts)]

    for document in documents:
        text = document.text
        for start, stop in spans(text, encode):
            last = stop == len(text)
            yield document if start == 0 and last else Passage(text[start:stop], document.ends and last, start > 0)


def _digest(identity: str, batch: list[Passage]) -> str:
    digest = hashlib.sha256(identity.encode())
    for text, ends, continues in batch:
        content = text.encode()
        digest.update(f"{len(content)} {ends} {'continues ' if continues else ''}".encode())
        digest.update(content)
    return digest.hexdigest()
