"""The log of what a server answers: a line of JSON for each text, as generate-responses writes its records.

Trainings read such a file with data=responses. Besides the fields of a record a line has "created", in seconds since
1970, and "greedy". An answer that no end token ended is cut ("finish": "length"): it was long enough, a stop string
ended it, its client left, or the server failed. "written" has the answer's tokens, and digests of all that decides the
prompt's tokens: trainings use these tokens if their digests are the same.
"""

import json
import mmap
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from filelock import Timeout

from outrider.base.errors import UserError, warn, warn_once
from outrider.base.files import REMEDY, lock, parse_json
from outrider.data_prep.text.chat import answer_text
from outrider.data_prep.text.documents import origin_digests
from outrider.data_prep.text.messages import SkipRecordError
from outrider.data_prep.text.records import Record, TokenisedText, Written, find_layout, text_digest, to_record
from outrider.draft_models.targets.vocabulary import bind_arguments
from outrider.server.records import ChatRequest, CompletionRequest, Json
from outrider.server.workers import TextJob

if TYPE_CHECKING:
    from outrider.inference.loading.target_setup import TargetSetup


class TrafficLog:
    """A file to which `write` appends records. Threads share it.

    A record is written at once, so that a killed process leaves at most one unfinished line, which the next server
    removes. The file holds users' texts: nobody but its owner may read it.
    """

    def __init__(self, path: str):
        """Raises `UserError` if the file cannot be written, another server writes it, or it is no such log."""
        self._path, self._lock = Path(path), Lock()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            self._process_lock = lock(self._path.with_name(f".{self._path.name}.lock"))
            self._process_lock.acquire(timeout=0)
        except Timeout:
            raise UserError(f"log={path}: another server writes it; give another file") from None
        except OSError as error:
            raise UserError(f"log={path}: cannot be written ({error.strerror}); {REMEDY}") from None
        if os.fstat(self._file).st_size:
            with mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) as content:
                tail_start = content.rfind(b"\n") + 1
                first_line, last_line = content[: max(content.find(b"\n"), 1)], content[tail_start:]
            with suppress(UserError):
                # A file that lost power begins with zeros; a torn first record has no end of line.
                is_log = first_line[:1] == b"\0" or (not tail_start and first_line == b"{")
                is_log = is_log or isinstance(parse_json(first_line), dict)
            if not is_log:
                self.close()
                raise UserError(f"log={path}: holds something else than records; give another file")
            try:
                parse_json(last_line)
            except UserError:  # empty, or an unfinished line
                os.truncate(self._file, tail_start)
            else:  # a record of another program, which wrote no end of line
                os.write(self._file, b"\n")
        if os.fstat(self._file).st_mode & 0o077:
            warn(f"log={path}: others than its owner may read users' texts in it; chmod 600 ends that")

    def write(self, record: Json) -> None:
        """Append a record. If the disk is full, warn and leave the record out."""
        line_bytes = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        with self._lock:
            old_size = os.fstat(self._file).st_size
            try:
                if os.write(self._file, line_bytes) < len(line_bytes):
                    raise OSError(None, "no space left")
            except OSError as error:
                os.truncate(self._file, old_size)
                warn_once(f"log={self._path}: answers are missing from it ({error.strerror})")

    def close(self) -> None:
        os.close(self._file)
        self._process_lock.release()


def _read(content: Json, record_id: str) -> tuple[Json, Record] | None:
    """`content` and its record as trainings read it; None if they do not."""
    try:
        return content, to_record(content, find_layout(content, layout="auto", column=None, where=record_id), record_id)
    except SkipRecordError:
        return None


class TrafficRecords:
    """Makes records of answered texts. setup: of the target that wrote them."""

    def __init__(self, setup: "TargetSetup"):
        tokenizer, template = setup.target.tokenizer, setup.chat_template
        self._setup, self._template = setup, "tokenizer" if template == "auto" else template  # trainings know no auto
        # By arguments as JSON. The digest of a tokenizer takes a while, and is kept with the object.
        self._bind = lru_cache(64)(lambda arguments: bind_arguments(tokenizer, json.loads(arguments), template))

    def make_record(
        self, request: CompletionRequest, job: TextJob, record_id: str, tokens: Sequence[int]
    ) -> Json | None:
        """The record of the text of `job` with the answer `tokens`; None if the answer is blank.

        Only this answer of a conversation is learned: the others were logged when they were written. A conversation
        that trainings do not read, such as one with two system turns, is a plain text.
        """
        arguments_json = json.dumps({**self._setup.arguments, **(request.chat_template_kwargs or {})})
        tokenizer, ids, answer_start = self._bind(arguments_json), [*job.ids, *tokens], len(job.ids)
        has_end_token = tokens[-1] in self._setup.eos
        visible_ids = ids[: len(ids) - has_end_token]
        text_content: Json = {"text": tokenizer.decode(visible_ids, skip_special_tokens=True)}
        chat_and_record = None
        if isinstance(request, ChatRequest):
            earlier_turns = [m | ({"weight": 0} if m["role"] == "assistant" else {}) for m in request.plain_messages]
            answer = {"role": "assistant", "content": answer_text(visible_ids[answer_start:], tokenizer)}
            if not answer["content"].strip():
                return None
            chat_and_record = _read({"messages": [*earlier_turns, answer]}, record_id)
        content, record = chat_and_record or _read(text_content, record_id) or (None, None)
        if content is None or record is None:
            return None
        digests = *origin_digests(content, tokenizer, self._template), text_digest(record)  # tokenizer, template, text
        written = Written(*digests, [TokenisedText(ids, [(answer_start, len(ids))])])  # the span of the answer
        facts = {"prompt_tokens": answer_start, "tokens": len(tokens), "finish": "end" if has_end_token else "length"}
        facts |= {"created": int(time.time()), "greedy": job.sampling.temperature == 0}
        return {"id": record_id, **content, **facts, "written": asdict(written)}
