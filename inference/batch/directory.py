"""A directory of responses: shards are written atomically, and read back for resuming and for training.

    run.json                      the identity of the run: everything that determines the responses
    responses-00000.jsonl         records that all readers of this project train on, {"id", "messages" or "text", …}
    responses-00000.safetensors   with top_k_logits, for each response: ID.tokens [n], ID.top_ids and ID.top_logprobs
                                  [n, k], ID.tail [n] (see `TopK`)
    skipped-00000.jsonl           prompts without a response, {"id", "source", "reason", "detail"}
    seconds.json                  the answering time of all runs so far, {"seconds"}
    summary.json                  counts over all shards, written at the end of a run
    .lock                         held by the run that is writing

A shard is the files of one number, complete when its JSONL exists: that file is written last. Each prompt is in one
shard. The directory may also have a `responses-*.jsonl` of a serving engine. Its prompts count as answered.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from transformers import PreTrainedTokenizerBase

from outrider.base.errors import UserError
from outrider.base.files import as_json_lines, read_mapping, write_atomically, write_json
from outrider.base.run_dirs import check_identity, require_free
from outrider.base.settings import read_as
from outrider.data_prep.text.data_files import RESPONSES, RUN_FILE, read_file
from outrider.data_prep.text.documents import Document, encode, origin_digests
from outrider.data_prep.text.messages import SYSTEM
from outrider.data_prep.text.records import Counts, find_layout, to_record
from outrider.inference.batch.tasks import TopK, prompt_id

SUMMARY_FILE = "summary.json"
SECONDS_FILE = "seconds.json"
Facts = dict[str, Any]  # JSON-able values by name
_TENSOR_KEYS = ("tokens", "top_ids", "top_logprobs", "tail")  # of a `TopK`
_SHARD_NAME = re.compile(r"(responses|skipped)-(\d{5,})\.(jsonl|safetensors)")


class Response(NamedTuple):
    """A record of a shard, and the target's distributions at its answers' tokens (`top`), if they were stored."""

    record: Facts
    top: TopK | None


@dataclass
class Shard:
    """The responses and skipped prompts that one process has collected for its next file."""

    responses: list[Response] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.responses) + len(self.skipped)

    def save(self, folder: Path, number: int) -> None:
        """Write it as shard `number`, in the order of the ids, which are hashes: a part of it is a fair sample. Raises
        `UserError` if it cannot be written; the shard then does not exist."""
        tensors: dict[str, torch.Tensor] = {}
        for record, top in self.responses:
            if top is not None:
                parts = (top.tokens.int(), top.ids.int(), top.logprobs.half(), top.tail.half())
                tensors |= {f"{record['id']}.{name}": tensor for name, tensor in zip(_TENSOR_KEYS, parts, strict=True)}
        if tensors:
            write_atomically(_shard_file(folder, "responses", number, "safetensors"), save(tensors))
        if self.skipped:
            write_atomically(_shard_file(folder, "skipped", number, "jsonl"), as_json_lines(self.skipped))
        records = sorted((response.record for response in self.responses), key=lambda record: str(record["id"]))
        write_atomically(_shard_file(folder, "responses", number, "jsonl"), as_json_lines(records))


def read_shard(shard_path: Path) -> Iterator[Response]:
    """The responses of one JSONL file, with the distributions stored next to it. Raises `UserError` if unreadable."""
    top_k_path = shard_path.with_suffix(".safetensors")
    top_k_by_id = _read_top_k(top_k_path) if top_k_path.exists() else {}
    for record, record_id in _read_records(shard_path):
        yield Response({**record, "id": record_id}, top_k_by_id.get(record_id))


def top_k_documents(
    response: Response, tokenizer: PreTrainedTokenizerBase, template: str
) -> list[tuple[Document, np.ndarray, TopK]]:
    """(document, indices, top) of each document of a response that has `top`: the tokens that the target has read and
    generated, and int64 [n] the indices of the generated tokens for which `top` has the target's predictions.

    If the tokens were not stored (shards from elsewhere), the record is tokenised. Returns an empty list if this gives
    other tokens than were generated, as often happens with sampled text. Raises `UserError` for tokens of another
    tokenizer or template.
    """
    assert response.top is not None
    raw, tokens = response.record, response.top.tokens.numpy()
    record = to_record(raw, find_layout(raw, layout="auto", column=None, where=raw["id"]), f"top-k:{raw['id']}")
    origin = record.get("written")  # the ids that the target wrote (`Written`)
    if origin and (origin.tokenizer, origin.template) != origin_digests(record, tokenizer, template):
        raise UserError(f"{raw['id']}: its top-k is of another tokenizer or template; give these, or make it again")
    # Every token of a plain text is supervised, the prompt's too; else only those of answers.
    prompt_length = 0 if origin or "messages" in record else _require_count(raw, "prompt_tokens", raw["id"])
    documents_with_top, top_start = [], 0
    for document in encode([record], tokenizer, template):
        indices = np.flatnonzero(document.supervised)[prompt_length:][: len(tokens) - top_start]
        documents_with_top.append((document, indices, response.top.at(slice(top_start, top_start + len(indices)))))
        top_start += len(indices)
    document_tokens = np.concatenate([document.ids[indices] for document, indices, _ in documents_with_top])
    return documents_with_top if np.array_equal(document_tokens, tokens) else []


def list_shards(folder: Path) -> list[Path]:
    """The complete shards of a directory, in order of name."""
    return sorted(folder.glob(RESPONSES))


def answered_ids(folder: Path) -> set[str]:
    """The ids of all prompts that have a response, or were skipped, in complete shards."""
    ids = set()
    for shard_path in list_shards(folder):
        skipped_path = shard_path.with_name(shard_path.name.replace("responses-", "skipped-", 1))
        for path in (shard_path, skipped_path) if skipped_path.exists() else (shard_path,):
            for record, record_id in _read_records(path):
                ids.add(record_id)
                if "messages" in record and "unanswered_turns" not in record:  # from elsewhere: its id may differ
                    ids.add(_prompt_id_of(record, str(path)))
    return ids


def next_number(folder: Path) -> int:
    """The first unused shard number of the directory."""
    matches = [_SHARD_NAME.fullmatch(path.name) for path in folder.glob("*")]
    return 1 + max((int(match[2]) for match in matches if match), default=-1)


def seconds_spent(folder: Path) -> float:
    """The answering time, in seconds, of all runs in a directory so far. Raises `UserError` if it cannot be read."""
    path = folder / SECONDS_FILE
    if not path.exists():
        return 0.0
    spent: dict[str, float] = read_as(dict[str, float], path, "record of time", "remove it, and it counts from 0 again")
    return spent.get("seconds", 0.0)


def open_run(folder: Path, identity: Mapping[str, object]) -> None:
    """Prepare a directory for more shards: remove the remains of a killed process, and write the run's identity."""
    for path in folder.iterdir():
        match = _SHARD_NAME.fullmatch(path.name)
        is_incomplete = match and not _shard_file(folder, "responses", int(match[2]), "jsonl").exists()
        if is_incomplete or path.name.startswith((".responses-", ".skipped-")):
            path.unlink()
    write_json(folder / RUN_FILE, identity)


def check_run(folder: Path, identity: Mapping[str, object], resume: bool) -> None:
    """Raise `UserError` if the directory holds responses and resume is off, or responses with another identity."""
    require_free(folder, (RESPONSES,), resume)
    path = folder / RUN_FILE
    if resume and path.exists():
        check_identity(read_mapping(path, "record of a run", "give another out_dir"), identity, folder)


def summarise(folder: Path) -> dict[str, object]:
    """Counts over all shards: responses, tokens, truncated, skipped, and skipped by reason."""
    counts: Counter[str] = Counter(responses=0, tokens=0, truncated=0, skipped=0)
    for shard in list_shards(folder):
        for record, record_id in _read_records(shard):
            counts["responses"] += 1
            counts["tokens"] += _require_count(record, "tokens", f"{shard}: {record_id}") if "tokens" in record else 0
            counts["truncated"] += record.get("finish") == "length"
            for flag in ("retokenised", "text_differs"):
                counts[flag] += record.get(flag) is True
    skip_records = (record for path in folder.glob("skipped-*.jsonl") for record, _ in _read_records(path))
    reason_counts = Counter(str(record.get("reason")) for record in skip_records)
    counts["skipped"] = reason_counts.total()
    return {**counts, "skipped_by_reason": dict(reason_counts)}


def _shard_file(folder: Path, kind: str, shard_number: int, suffix: str) -> Path:
    return folder / f"{kind}-{shard_number:05d}.{suffix}"


def _read_records(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """The records of a JSONL file, and the ids of their prompts. Raises `UserError` naming file and line."""
    for line_number, record in read_file(path, Counts()):  # with counts, a file that is not text is skipped
        location = f"{path}:{line_number}"
        if not isinstance(record, dict) or not ("id" in record or "messages" in record):
            raise UserError(f"{location}: expected a record with id and text, or with messages (role, content)")
        yield record, str(record["id"]) if "id" in record else _prompt_id_of(record, location)


def _prompt_id_of(record: Mapping[str, object], location: str) -> str:
    messages, required = record["messages"], {"role", "content"}
    if not isinstance(messages, list) or any(not isinstance(m, dict) or required - m.keys() for m in messages):
        raise UserError(f"{location}: messages: expected a list of mappings with role and content")
    system_texts = [record[key] for key in SYSTEM if record.get(key)][:1]  # before the messages
    return prompt_id([*({"role": "system", "content": text} for text in system_texts), *messages])


def _require_count(record: Mapping[str, object], key: str, location: str) -> int:
    value = record.get(key)
    if type(value) is not int or value < 0:
        raise UserError(f"{location}: {key}={value!r}: expected an integer ≥ 0")
    return value


def _read_top_k(path: Path) -> dict[str, TopK]:
    """The distributions in a shard's safetensors file, by response id. Raises `UserError`."""
    try:
        with safe_open(path, framework="pt") as file:
            tensor_by_name = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error}); make this shard again") from None
    top_k_by_id = {}
    for name in (name.removesuffix(".tokens") for name in tensor_by_name if name.endswith(".tokens")):
        top_tensors = (tensor_by_name[f"{name}.{part}"] for part in _TENSOR_KEYS)
        top_k_by_id[name] = TopK(*(part.float() if part.is_floating_point() else part.long() for part in top_tensors))
    return top_k_by_id
