"""Text in pieces: joined it is the decoding of all tokens, whatever the tokenizer does at their ends."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.text.chat import StreamedText
from tests.cases.chat_families import FAMILIES, byte_fallback, cleaning, tokenizer_of
from tests.tiers import as_many

TOKENIZERS = {"bytes": byte_fallback(), "cleans": cleaning(), "merges": tokenizer_of(FAMILIES["qwen3"])}


def streamed(name: str, tokens: list[int], sizes: list[int]) -> tuple[list[str], str]:
    """The pieces of tokens that come so many at a time, and what was held back."""
    text, start, pieces = StreamedText(TOKENIZERS[name]), 0, []
    while start < len(tokens):
        size = sizes[start % len(sizes)]
        pieces.append(text.add(tokens[start : start + size]))
        start += size
    return pieces, text.rest()


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, max_examples=as_many(150))
@given(data=st.data())
def test_pieces_are_the_decoding_of_all_tokens(name, data):
    tokens = data.draw(st.lists(st.integers(0, len(TOKENIZERS[name]) - 1), max_size=40))
    pieces, rest = streamed(name, tokens, data.draw(st.lists(st.integers(1, 4), min_size=1)))
    assert "".join(pieces) + rest == TOKENIZERS[name].decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_words_come_as_they_are_decoded(name):
    """No more is held back than may change: of whole characters nothing, of cleaned-up ones the last few."""
    tokens = TOKENIZERS[name]("the cat is on the mat and the cat is on the mat", add_special_tokens=False)["input_ids"]
    pieces, rest = streamed(name, tokens, [1])
    assert len(rest) == (19 if name == "cleans" else 0)
    assert sum(map(bool, pieces)) > len(pieces) // 3


def test_bytes_that_never_make_a_character_come_at_the_end():
    """A byte that was one by itself is none beside those: shown too early it could not be taken back."""
    tokenizer = TOKENIZERS["bytes"]
    letter, first, second = (tokenizer.convert_tokens_to_ids(f"<0x{value:02X}>") for value in (0x41, 0xE5, 0x8C))
    pieces, rest = streamed("bytes", [letter, first, second], [1])
    assert (pieces, rest) == (["", "", ""], "\ufffd" * 3)


def test_a_space_that_is_cleaned_up_is_not_shown():
    tokenizer = TOKENIZERS["cleans"]
    tokens = tokenizer("do n't the cat 's . ' the ' 's mat !", add_special_tokens=False)["input_ids"]
    text = tokenizer.decode(tokens)
    assert text == tokenizer.clean_up_tokenization("do n't the cat 's . ' the ' 's mat !")
    pieces, rest = streamed("cleans", tokens, [1])
    assert "".join(pieces) + rest == text
