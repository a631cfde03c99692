"""Long texts: in pieces they have the tokens of the whole, n-grams over the cuts included, in bounded memory."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from outrider.data_prep.ngrams.building import build_table
from outrider.data_prep.settings import TrigramConfig
from outrider.data_prep.text import documents
from outrider.data_prep.text.documents import encode, encode_all, spans
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.ngrams.table import TrigramTable
from tests.data_prep.ngrams.corpora import require_same_counts
from tests.tiny import byte_tokenizer

WORDS = ["def", "add", "first,", "second.", "return", "(hello)", "how", "don't", "12", "ä", "漢字", "</s>", "x"]
SEPARATORS = ["\n", "  ", " ", "\n\n", "\n", "\t", " \n    "]


def text_of(words: int, seed: int = 0) -> str:
    """Words with single spaces between them, and every kind of other space after every second one."""
    rng = np.random.default_rng(seed)
    between = [SEPARATORS[int(rng.integers(len(SEPARATORS)))] if i % 2 else " " for i in range(words)]
    return "".join(word + gap for word, gap in zip(rng.choice(WORDS, words), between, strict=True))


def llama_like() -> PreTrainedTokenizerFast:
    """Merges run over the whole text, a space is part of the word after it, and one is put in front of every text."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")  # merges are learnt within words
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False, max_token_length=8)
    backend.train_from_iterator([text_of(60, seed) for seed in range(20)], trainer)
    backend.pre_tokenizer = None
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def rows_of(tokenizer: PreTrainedTokenizerFast) -> Callable[[list[str]], list[list[int]]]:
    return lambda texts: [*tokenizer(texts, add_special_tokens=False)["input_ids"]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A SentencePiece model file."""
    prefix = tmp_path_factory.mktemp("model") / "pieces"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text_of(40, seed).replace("\n", " ") for seed in range(100)), model_prefix=str(prefix),
        vocab_size=200, model_type="bpe", hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return f"{prefix}.model"


@pytest.fixture
def tokenizers(tokenizer: PreTrainedTokenizerFast) -> dict[str, PreTrainedTokenizerFast]:
    return {"byte-level": tokenizer, "bytes": byte_tokenizer(), "llama-like": llama_like()}


@pytest.mark.slow
def test_pieces_have_the_tokens_of_the_whole(
    tokenizers: dict[str, PreTrainedTokenizerFast],
) -> None:
    texts = [text_of(400, seed) for seed in range(8)] + ["", "short"]
    for tokenizer in tokenizers.values():
        rows = rows_of(tokenizer)
        cut = [spans(text, rows, 240) for text in texts]
        assert all(len(found) > 8 for found in cut[:8])
        assert all(stop - start <= 240 for found in cut for start, stop in found)
        for pieced, whole in zip(encode_all(texts, rows, 240), rows(texts), strict=True):
            assert pieced == whole


def test_a_place_that_would_change_the_tokens_is_passed_over(
    tokenizers: dict[str, PreTrainedTokenizerFast],
) -> None:
    """A piece of a Llama tokenizer begins like a word: after a line end that would be another token."""
    text = "\n".join(["how add"] * 100)
    for name, before, left_out in (("byte-level", "\n", ""), ("llama-like", "w", " ")):
        cuts = pairwise(spans(text, rows_of(tokenizers[name]), 240))
        assert {(text[stop - 1], text[stop:start]) for (_, stop), (start, _) in cuts} == {(before, left_out)}


def test_training_text_is_the_same_in_pieces(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = [{"role": "user", "content": text_of(30)}, {"role": "assistant", "content": text_of(300, 1)}]
    for records in (
        [{"id": str(i), "text": text_of(300, i)} for i in range(3)] + [{"id": "s", "text": "short"}],
        [{"id": "c", "messages": talk}, {"id": "d", "messages": talk * 2}],
    ):
        whole = encode(records, tokenizer, "tokenizer")
        with monkeypatch.context() as patch:
            patch.setattr(documents, "encode_all", partial(encode_all, limit=300))
            pieced = encode(records, tokenizer, "tokenizer")
        for one, other in zip(pieced, whole, strict=True):
            np.testing.assert_array_equal(one.ids, other.ids)
            np.testing.assert_array_equal(one.supervised, other.supervised)


@pytest.mark.parametrize("kind", ["sentencepiece", "byte-level", "bytes", "llama-like"])
@pytest.mark.slow
def test_a_table_of_long_texts_is_the_table_of_the_whole(
    tmp_path: Path, kind: str, model: str, tokenizers: dict[str, PreTrainedTokenizerFast]
) -> None:
    """Cut within a shard and over shards: the same bytes."""
    source = model
    if kind != "sentencepiece":
        source = str(tmp_path / "tokenizer")
        tokenizers[kind].save_pretrained(source)
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": text_of(300, 9)}]
    records: Sequence[object] = [{"messages": said}] + [
        {"messages": [said[0], {"role": "assistant", "content": text_of(200, seed)}]} for seed in range(6)
    ]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = TrigramConfig(
        tokenizer=source, data=DataConfig(source="local", path=str(corpus), heldout_fraction=0.0), orders=(2, 3, 4),
        min_count=1, workers=1, out_dir=str(tmp_path / "whole"),
    )  # fmt: skip
    build_table(config)
    for shard in (10**6, 500):
        cut = replace(config, out_dir=str(tmp_path / f"cut-{shard}"))
        build_table(cut, shard=shard, piece=240)
        require_same_counts(TrigramTable.open(cut.out_dir), TrigramTable.open(config.out_dir))
