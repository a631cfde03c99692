"""Packed rows with the target's cached top-k, for distillation from responses of data_prep/generate_responses.py.

`load_top_k_rows` reads the responses of a split, `_read_examples` pairs the text of each with the top-k of its answers,
and `TopKRows` packs them.
"""

import hashlib
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider.base.errors import UserError
from outrider.base.processes import join_processes
from outrider.data_prep.text import records
from outrider.data_prep.text.data_files import resolve_paths
from outrider.data_prep.text.documents import Document
from outrider.data_prep.text.messages import SkipRecordError
from outrider.data_prep.text.prompts import spread_evenly
from outrider.data_prep.text.rows import pack
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import Split, is_in_split
from outrider.draft_models.losses import IGNORE
from outrider.draft_models.targets.vocabulary import KWARGS, bind_arguments, require_rows
from outrider.inference.batch.directory import Response, read_shard, top_k_documents
from outrider.inference.batch.tasks import TopK

# A text, the positions [n] of tokens in it, and the target's distribution at each: `TopK` has the written tokens [n],
# the k most likely tokens ids [n, k] and their logprobs [n, k], and the tail [n], the probability of all others.
TopKExample = tuple[Document, np.ndarray, TopK]


class TopKRows:
    """Rows like those of `data_prep.text.rows`, in memory (about 6·k bytes a token), with a distribution per label.

    An item has input_ids, labels, positions and documents, int64 [T] each. In addition, it has the target's k most
    likely next tokens and the probability of all others (see `linear_topk_divergence`): top_ids int64 [T, k],
    top_logprobs float32 [T, k], tail float32 [T]. Only tokens with these have labels. `key` identifies the content.
    """

    def __init__(self, examples: list[TopKExample], seq_len: int, max_rows: int | None = None):
        self.seq_len = seq_len
        documents = [document for document, _, _ in examples]
        self._tokens = torch.from_numpy(np.concatenate([document.ids for document in documents])).int()
        self._labels = torch.full((len(self._tokens),), IGNORE, dtype=torch.int32)
        # Of the tokens of all documents, N: ids and labels [N], the top-k of what each position predicts [N, k].
        k = examples[0][2].ids.shape[1]  # [2]: the `TopK`
        self._ids = torch.zeros(len(self._tokens), k, dtype=torch.int32)
        self._logprobs = torch.zeros(len(self._tokens), k, dtype=torch.float16)
        self._tail = torch.zeros(len(self._tokens), dtype=torch.float16)
        doc_starts = np.cumsum([0, *(len(document.ids) for document in documents)])
        for start, (_, positions, top) in zip(doc_starts, examples, strict=False):  # one start more: the end of all
            flat_positions = torch.from_numpy(start + positions - 1)  # the position before each token with a top-k
            self._labels[flat_positions], self._ids[flat_positions] = top.tokens.int(), top.ids.int()
            self._logprobs[flat_positions], self._tail[flat_positions] = top.logprobs.half(), top.tail.half()
        # `pack` gets the indices of the documents' tokens in these arrays instead of token ids.
        ranges = pairwise(doc_starts.tolist())
        index_documents = (Document(np.arange(a, b), np.ones(b - a, bool), indivisible=True) for a, b in ranges)
        packed = [*pack(index_documents, seq_len)]
        packed = spread_evenly(packed, len(packed) if max_rows is None else max_rows)
        self._rows = [[segment.ids for segment in row] for row in packed]  # of indices: [n] for each document in a row
        hasher = hashlib.sha256(str([list(map(len, row)) for row in self._rows]).encode())
        for row in self._rows:
            hasher.update(np.concatenate(row).data)
        for tensor in (self._tokens, self._labels, self._ids, self._logprobs, self._tail):
            hasher.update(tensor.numpy().data)
        self.key = hasher.hexdigest()

    @property
    def largest_id(self) -> int:
        """The largest token id, of the texts or of the target's likely tokens."""
        return int(max(self._tokens.max(), self._ids.max()))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        segments = self._rows[index]
        indices = torch.from_numpy(np.concatenate(segments))
        pad_length = self.seq_len - len(indices)
        lengths, document_ids = [*map(len, segments), pad_length], [*range(len(segments)), -1]

        def pad(values: Tensor, fill: int = 0) -> Tensor:
            return torch.cat([values, values.new_full((pad_length, *values.shape[1:]), fill)])

        return {
            "input_ids": pad(self._tokens[indices].long()),
            "labels": pad(self._labels[indices].long(), IGNORE),
            "positions": torch.cat([torch.arange(length) for length in lengths]),
            "documents": torch.tensor(document_ids).repeat_interleave(torch.tensor(lengths)),
            "top_ids": pad(self._ids[indices].long()),
            "top_logprobs": pad(self._logprobs[indices].float()),
            "tail": pad(self._tail[indices].float()),
        }


def load_top_k_rows(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    split: Split = "train",
    *,
    max_rows: int | None = None,
) -> TopKRows:
    """All rows, or `max_rows` evenly spread, of a split of the first `config.max_records` responses in `config.path`.

    Skips responses without a top-k, and responses whose text is tokenised differently from their generation. Prints
    the counts. Raises `UserError` if no response is left, or if they have different k.
    """
    tokenizer = bind_arguments(tokenizer, config.chat_template_kwargs, config.template, f"data.{KWARGS}")
    counts = records.Counts(dict.fromkeys(("responses", "without_top_k", "retokenised", "unsupervised", "refused"), 0))
    examples = list(_read_examples(config, tokenizer, seq_len, split, counts))
    counts_text = " ".join(f"{name}={count}" for name, count in counts.items())
    if join_processes().is_main_process:
        print(f"data top-k split={split} {counts_text}", flush=True)
        records.warn_of_unused(counts, counts.first)
    if not examples:
        remedy = counts.first or "make more of them with outrider generate-responses top_k_logits=K"
        raise UserError(
            f"data path={', '.join(config.path)}: no response with the target's top-k for the {split} "
            f"split (found {counts_text}); {remedy}"
        )
    k_values = {top.ids.shape[1] for _, _, top in examples}
    if len(k_values) > 1:
        raise UserError(f"data path={', '.join(config.path)}: top-k of several k ({sorted(k_values)}); give one run's")
    return TopKRows(examples, seq_len, max_rows)


def _read_examples(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, seq_len: int, split: Split, counts: records.Counts
) -> Iterator[TopKExample]:
    """The texts of the split's responses, cut to `seq_len`. Responses that cannot be used are counted, by reason."""
    responses = ((response, file) for file in resolve_paths(config.path) for response in read_shard(file))
    for response, file in islice(responses, config.max_records):
        record = _to_record(response, file, counts)
        if record is None:
            continue
        if not is_in_split(records.split_key(record), split, config.heldout_fraction, config.share):
            continue
        counts["responses"] += 1
        if response.top is None:
            counts["without_top_k"] += 1
            continue
        examples = []
        with counts.count_refused("responses"):
            require_rows(response.top.ids.numpy(), tokenizer, f"{file}: {response.record['id']}")
            examples = top_k_documents(response, tokenizer, config.template)
            counts["retokenised"] += not examples
        for document, positions, top in examples:
            is_within = (positions > 0) & (positions < seq_len)
            if not is_within.any():
                counts["unsupervised"] += 1
                continue
            cut_document = Document(document.ids[:seq_len], document.supervised[:seq_len], indivisible=True)
            top = top.at(torch.from_numpy(np.flatnonzero(is_within)))
            top = TopK(top.tokens.int(), top.ids.int(), top.logprobs.half(), top.tail.half())  # as rows have them
            yield cut_document, positions[is_within], top


def _to_record(response: Response, file: Path, counts: records.Counts) -> records.Record | None:
    """The record in the normal form of `read_records`, so that the held-out split is the same; None if unusable."""
    where = f"{file}: {response.record['id']}"  # below, auto and None: any layout, any column
    try:
        return records.to_record(response.record, records.find_layout(response.record, "auto", None, where), where)
    except SkipRecordError as error:
        counts.refuse(error.reason, f"{where}: {error}")
        return None
