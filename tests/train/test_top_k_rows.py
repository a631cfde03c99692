"""Rows with the target's cached top-k: what they say, where they come from, and training on them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.base.errors import UserError
from outrider.data_prep.text.documents import encode
from outrider.data_prep.text.rows import load_rows
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.losses import IGNORE
from outrider.inference.batch.directory import Response, Shard
from outrider.inference.batch.tasks import TopK
from outrider.train.parts.top_k_rows import TopKRows, load_top_k_rows
from tests.tiny import byte_tokenizer, open_stack
from tests.train.jobs import CHAT, TEXT, save_responses


@pytest.mark.parametrize("chat", [False, True])
@torch.no_grad()
def test_cached_rows_say_what_the_target_says(tmp_path: Path, target: Path, chat: bool) -> None:
    """At every label of every row: the distribution is the target's after exactly the tokens before it in its
    document."""
    data = save_responses(target, tmp_path / "responses", chat)
    rows = load_top_k_rows(data, byte_tokenizer(CHAT), 120)
    plain = load_rows(data, byte_tokenizer(CHAT), 120, "train")
    model, _ = open_stack(target)
    labels = 0
    for row in (rows[i] for i in range(len(rows))):
        assert all(len(value) == 120 for value in row.values())
        for document in set(row["documents"].tolist()) - {-1}:
            part = row["documents"] == document
            ids, wanted = row["input_ids"][part], row["labels"][part]
            assert row["positions"][part].tolist() == list(range(len(ids)))
            keep = wanted != IGNORE
            assert wanted[:-1][keep[:-1]].tolist() == ids[1:][keep[:-1]].tolist()
            logprobs = model(ids[None]).logits[0].log_softmax(-1)[keep]
            top = row["top_logprobs"][part][keep]
            torch.testing.assert_close(logprobs.gather(-1, row["top_ids"][part][keep]), top, rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(1 - top.exp().sum(-1), row["tail"][part][keep], rtol=2e-2, atol=5e-3)
            labels += int(keep.sum())
        assert (row["labels"][row["documents"] < 0] == IGNORE).all()
    # all that is supervised, but the end token that each response was cut off from (and a text's prompt)
    records = plain.counts["records"]
    if chat:
        assert labels == plain.counts["supervised"] - records
    else:
        assert plain.counts["supervised"] - 9 * records < labels < plain.counts["supervised"] - 6 * records
    assert load_top_k_rows(data, byte_tokenizer(CHAT), 120).key == rows.key
    shorter = load_top_k_rows(data, byte_tokenizer(CHAT), 30)
    assert max(int((shorter[i]["documents"] >= 0).sum()) for i in range(len(shorter))) <= 30


def texts_of(rows: TopKRows) -> set[str]:
    """The documents in all rows."""
    parts = [(rows[i]["input_ids"], rows[i]["documents"]) for i in range(len(rows))]
    return {str(ids[own == n].tolist()) for ids, own in parts for n in set(own.tolist()) - {-1}}


def test_cached_rows_are_of_the_files_and_records_asked_for(tmp_path: Path, target: Path) -> None:
    data = replace(save_responses(target, tmp_path / "responses"), heldout_fraction=0.5)

    def texts(**changes: Any) -> set[str]:
        return texts_of(load_top_k_rows(replace(data, **changes), byte_tokenizer(CHAT), 120))

    every = texts()
    first = texts(path=str(tmp_path / "responses" / "responses-00000.jsonl"))
    second = texts(path=str(tmp_path / "responses" / "responses-00001.jsonl"))
    assert first
    assert second
    assert first | second == every
    assert not first & second
    assert texts(max_records=12) == first  # of which those to be held out count too
    assert texts(max_records=6) < first


def save_top_k(folder: Path, k: int, logprob: float = -1.0) -> DataConfig:
    """Three texts from elsewhere, each with a distribution of `k` at all its tokens, the first one included."""
    responses = []
    for i in range(3):
        record = {"id": f"r{i}", "text": f"{i}: {TEXT}", "prompt_tokens": 0}
        tokens = torch.tensor(encode([record], byte_tokenizer(), "tokenizer")[0].ids)
        logprobs = torch.full((len(tokens), k), logprob)
        responses.append(Response(record, TopK(tokens, logprobs.long(), logprobs, torch.zeros(len(tokens)))))
    folder.mkdir(exist_ok=True)
    Shard(responses).save(folder, k)
    return DataConfig(source="local", path=f"{folder}/responses-*.jsonl", heldout_fraction=0.0)


def test_a_distribution_is_at_the_token_before_its_own_and_in_its_document(tmp_path: Path) -> None:
    rows = load_top_k_rows(save_top_k(tmp_path / "one", 2), byte_tokenizer(), 300)
    for row in (rows[i] for i in range(len(rows))):
        for document in set(row["documents"].tolist()) - {-1}:
            part = row["documents"] == document
            assert row["labels"][part].tolist() == [*row["input_ids"][part].tolist()[1:], IGNORE]
    other = load_top_k_rows(save_top_k(tmp_path / "other", 2, logprob=-2.0), byte_tokenizer(), 300)
    assert other.key != rows.key  # of equal texts, another distribution
    with pytest.raises(UserError, match=r"top-k of several k \(\[2, 3\]\); give one run's"):
        load_top_k_rows(save_top_k(tmp_path / "one", 3), byte_tokenizer(), 300)


def test_cached_needs_responses_with_top_k(tmp_path: Path, target: Path, corpus: DataConfig) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    Shard([Response({"id": "a", "text": f"{TEXT}.", "prompt_tokens": 3}, None)]).save(plain, 0)
    data = replace(corpus, path=str(plain / "responses-00000.jsonl"))
    with pytest.raises(UserError, match=r"no response with the target's top-k .*without_top_k=1.*top_k_logits=K"):
        load_top_k_rows(data, byte_tokenizer(), 64)


def test_heldout_distributions_are_not_trained_on(tmp_path: Path, target: Path) -> None:
    data = replace(save_responses(target, tmp_path / "responses"), heldout_fraction=0.5)
    train, heldout = (load_top_k_rows(data, byte_tokenizer(), 120, split) for split in ("train", "heldout"))
    assert texts_of(train)
    assert texts_of(heldout)
    assert not texts_of(train) & texts_of(heldout)
    few = load_top_k_rows(data, byte_tokenizer(), 120, "heldout", max_rows=2)
    assert len(heldout) > len(few) == 2
    assert torch.equal(heldout[1]["top_logprobs"], few[1]["top_logprobs"])
