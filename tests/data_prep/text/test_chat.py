"""Layouts of records, conversations by a template, prompts, and text that comes a few tokens at a time."""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

from outrider.base.errors import UserError
from outrider.data_prep.text.chat import (
    VICUNA_SYSTEM,
    StreamedText,
    adds_bos,
    render_prompt,
    token_ids_up_to,
)
from outrider.data_prep.text.documents import encode, origin_digests
from outrider.data_prep.text.records import Counts, FileLayout, TokenisedText, Written, find_layout, to_record
from outrider.draft_models.targets.vocabulary import limit_rows
from tests.inference.core.test_stop_strings import BASE, KINDS
from tests.pairwise import all_pairs, each_value
from tests.refusals import refusal
from tests.support.chat_families import FAMILIES, byte_fallback, cleaning, tokenizer_of
from tests.tiers import as_many

QUESTION, ANSWER = {"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "How are you?"}
TALK = [QUESTION, ANSWER, {"role": "user", "content": "Well."}, {"role": "assistant", "content": "Good, é ☃"}]


NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


def chat(*messages):
    return {"id": "talk.jsonl:1", "messages": list(messages)}


SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
LAYOUTS = [
    ("text", "text", {"text": "once"}, "once"),
    ("code", "content", {"content": "x = 1", "lang": "Python"}, "x = 1"),
    ("sharegpt", "conversations", {"id": "q", "conversations": SHAREGPT}, ["a", "b"]),
    ("messages", "messages", {"prompt": "a", "messages": [QUESTION, ANSWER]}, ["Hello there", "How are you?"]),
    ("messages", "conversations", {"conversations": [QUESTION, ANSWER]}, ["Hello there", "How are you?"]),
    ("turns", "data", {"id": "0", "data": ["a", "b", "c", "d"]}, ["a", "b", "c", "d"]),
    ("alpaca", "output", {"instruction": "a", "input": "", "output": "b"}, ["a", "b"]),
    ("alpaca", "response", {"instruction": "a", "input": "i", "response": "b"}, ["a\n\ni", "b"]),
]


@pytest.mark.parametrize(("name", "column", "raw", "expected"), LAYOUTS)
def test_layouts_are_told_by_their_columns_and_normalised(name, column, raw, expected):
    layout = find_layout(raw, "auto", None, "f:1")
    assert layout == FileLayout(name, column)
    record = to_record(raw, layout, "f:1")
    assert record["id"] == "f:1"
    if isinstance(expected, str):
        assert record["text"] == expected
    else:
        assert [m["content"] for m in record["messages"]] == expected
        assert [m["role"] for m in record["messages"]] == ["user", "assistant"] * (len(expected) // 2)


def sharegpt(*turns):
    raw = {"conversations": [{"from": role, "value": value} for role, value in turns]}
    return to_record(raw, FileLayout("sharegpt", "conversations"), "f:1")["messages"]


def test_text_has_one_bos_where_the_tokenizer_adds_it_and_one_eos(make_tokenizer):
    for bos in (False, True):
        for text in ("return first", "<s>return first</s>"):
            tokenizer = make_tokenizer(bos=bos)
            assert adds_bos(tokenizer) == bos
            (document,) = encode([{"id": "t", "text": text}], tokenizer, "tokenizer")
            ids = document.ids.tolist()
            assert ids.count(tokenizer.bos_token_id) == (bos or text.startswith("<s>"))
            assert ids.count(tokenizer.eos_token_id) == 1
            assert ids[-1] == tokenizer.eos_token_id
            assert document.supervised.all()
            assert not document.indivisible
    (document,) = encode([{"id": "t", "text": "return"}], make_tokenizer(eos=False), "tokenizer")
    assert tokenizer.decode(document.ids) == "return"


def spoken(document, tokenizer):
    return tokenizer.decode(document.ids[document.supervised])


def test_the_chat_template_gives_transformers_own_ids_and_supervises_the_answers(tokenizer):
    (document,) = encode([chat(*TALK)], tokenizer, "tokenizer")
    assert document.ids.tolist() == tokenizer.apply_chat_template(TALK, return_dict=False)
    assert spoken(document, tokenizer) == "How are you?<|im_end|>Good, é ☃<|im_end|>"
    assert document.indivisible


def test_vicuna_is_fastchats_format(make_tokenizer):
    for bos in (False, True):
        tokenizer = make_tokenizer(bos=bos, chat_template=None)
        (document,) = encode([chat(*TALK)], tokenizer, "vicuna")
        assert tokenizer.decode(document.ids) == "<s>" * bos + (
            f"{VICUNA_SYSTEM} USER: Hello there ASSISTANT: How are you?</s>USER: Well. ASSISTANT: Good, é ☃</s>"
        )
        assert spoken(document, tokenizer) == " How are you?</s> Good, é ☃</s>"
        assert (document.ids == tokenizer.bos_token_id).sum() == bos
    system = {"role": "system", "content": "Be brief."}
    (document,) = encode([chat(system, QUESTION, ANSWER)], tokenizer, "vicuna")
    assert tokenizer.decode(document.ids) == "<s>Be brief. USER: Hello there ASSISTANT: How are you?</s>"


@pytest.mark.parametrize("template", ["tokenizer", "vicuna", "none"])
@pytest.mark.parametrize("bos", [False, True])
def test_a_training_conversation_begins_with_the_prompt_it_is_decoded_from(make_tokenizer, template, bos):
    tokenizer = make_tokenizer(bos=bos)
    (document,) = encode([chat(*TALK)], tokenizer, template)
    for turns in (1, 3):
        prompt = render_prompt(TALK[:turns], tokenizer, template)
        assert document.ids[: len(prompt)].tolist() == prompt
        assert document.supervised[len(prompt)]  # the first thing decoded is the first thing supervised
        assert not document.supervised[len(prompt) - 1]


words = st.text(st.characters(codec="utf-8", exclude_characters="<>|"), min_size=1, max_size=12).filter(
    lambda text: text.strip() and not text[0].isspace()
)


@settings(max_examples=as_many(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(st.tuples(words, words), min_size=1, max_size=3), trim=st.booleans())
@pytest.mark.slow
def test_the_supervised_tokens_spell_the_answers(make_tokenizer, turns, trim):
    tokenizer = make_tokenizer(trim_offsets=trim)
    messages = [
        {"role": role, "content": text}
        for pair in turns
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    (document,) = encode([chat(*messages)], tokenizer, "tokenizer")
    assert spoken(document, tokenizer) == "".join(f"{answer}<|im_end|>" for _, answer in turns)
    (document,) = encode([chat(*messages)], tokenizer, "vicuna")
    assert spoken(document, tokenizer) == "".join(f" {answer}</s>" for _, answer in turns)
    (document,) = encode([chat(*messages)], tokenizer, "none")
    assert spoken(document, tokenizer) == "".join(f"\n{answer}" for _, answer in turns) + "</s>"


TRIMS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("answer", ["Good, é ☃", "e", "Well. \n"])
@pytest.mark.parametrize("options", [{}, {"chat_template": TRIMS}])
@pytest.mark.parametrize("template", ["tokenizer", "vicuna", "none"])
def test_a_truncated_answer_is_supervised_without_its_end(make_tokenizer, answer, options, template):
    messages = [*TALK[:3], {"role": "assistant", "content": answer}]
    record = to_record({"messages": messages, "finish": "length"}, FileLayout("messages", "messages"), "f:1")
    tokenizer = make_tokenizer(**options)
    whole, cut = encode([chat(*messages), record], tokenizer, template)
    assert whole.ids.tolist() == cut.ids.tolist()
    forms = {
        "tokenizer": ("How are you?<|im_end|>", ""),
        "vicuna": (" How are you?</s>", " "),
        "none": ("\nHow are you?", "\n"),
    }
    first, space = forms[template]
    assert spoken(cut, tokenizer) == first + space + answer.rstrip()


def test_turns_after_the_last_answer_are_left_out(tokenizer, make_tokenizer):
    with_tail, without = encode([chat(*TALK[:3]), chat(*TALK[:2])], tokenizer, "tokenizer")
    assert with_tail.ids.tolist() == without.ids.tolist()
    for template in ("tokenizer", "vicuna", "none"):
        (silent,) = encode([chat(QUESTION)], make_tokenizer(bos=True), template)
        assert not silent.supervised.any()


def test_of_a_template_that_rewrites_the_history_each_answer_is_learned_after_its_own_prompt(make_tokenizer):
    forgetful = make_tokenizer(
        chat_template="{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    talk = [QUESTION, {"role": "assistant", "content": "<think>hm</think>Yes."}, *TALK[2:]]
    first, second = encode([chat(*talk)], forgetful, "tokenizer")
    assert spoken(first, forgetful) == "<think>hm</think>Yes.<|im_end|>"
    for document, turns in ((first, 1), (second, 3)):
        prompt = render_prompt(talk[:turns], forgetful)
        assert document.ids[: len(prompt)].tolist() == prompt
        assert np.flatnonzero(document.supervised)[0] == len(prompt)
    opened = make_tokenizer(
        chat_template=forgetful.chat_template.replace("assistant\n{% endif", "assistant\n<think>{% endif")
    )
    with pytest.raises(
        UserError, match=r"talk.jsonl:1: .*does not render message 2 after the opening .*template=vicuna"
    ):
        encode([chat(*TALK)], opened, "tokenizer")


def test_what_is_refused_is_counted_and_the_others_are_as_without_it(make_tokenizer):
    """By the template, and for a token beyond the rows of the model, also where the ids themselves are kept."""
    tokenizer = make_tokenizer(chat_template=NO_SYSTEM)
    tokenizer.add_tokens([token := "<more>"])
    last = tokenizer.convert_tokens_to_ids(token)
    limit_rows(tokenizer, last)
    bad = [chat({"role": "system", "content": "x"}, QUESTION, ANSWER), {"id": "t:2", "text": f"a {token}"}]
    good = [chat(QUESTION, ANSWER), {"id": "t:3", "text": "a text"}]
    for kind, ids in ((bad, [1, last + 1]), (good, [1, last - 1])):
        text = {"id": "t:4", "text": "a"}
        written = Written(*origin_digests(text, tokenizer, "tokenizer"), "", [TokenisedText(ids, [(1, 2)])])
        kind.append({**text, "written": written})
    counts = Counts(records=6)
    found = encode([record for pair in zip(bad, good, strict=True) for record in pair], tokenizer, "tokenizer", counts)
    assert [one.ids.tolist() for one in found] == [one.ids.tolist() for one in encode(good, tokenizer, "tokenizer")]
    assert found[-1].ids.tolist() == [1, last - 1]
    assert counts == {"records": 3, "refused": 3}
    assert "no system" in counts.first
    places = "talk.jsonl:1: .*refuses .*no system", rf"t:2 holds the token .*id {last}", rf"t:4 holds .*id {last + 1}"
    for record, said in zip(bad, places, strict=True):
        refusal(said, encode, [record], tokenizer, "tokenizer")


def test_prompts_by_template(make_tokenizer):
    tokenizer = make_tokenizer(bos=True)
    plain = render_prompt(["return first"], tokenizer, "none")
    assert tokenizer.decode(plain) == "<s>return first"
    assert render_prompt(["<s>return first"], tokenizer, "none") == plain
    chatml = "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(render_prompt(["Hello there"], tokenizer)) == chatml
    assert tokenizer.decode(render_prompt([QUESTION], tokenizer, "tokenizer")) == chatml
    three = render_prompt(["a", "b", "c"], tokenizer, "vicuna")
    assert tokenizer.decode(three) == f"<s>{VICUNA_SYSTEM} USER: a ASSISTANT: b</s>USER: c ASSISTANT:"
    tokenizer.chat_template = None
    for template in ("auto", "tokenizer"):
        with pytest.raises(UserError, match=r"has no chat template, .*template=vicuna.*template=none"):
            render_prompt(["return first"], tokenizer, template)


def _wide_tokenizer(normalizer: normalizers.Normalizer | None = None) -> PreTrainedTokenizerFast:
    """One token a letter, one of 4,000 spaces and one of any run of other characters."""
    vocabulary = {"a": 0, "b": 1, "?": 2, **{" " * 2**k: 3 + k for k in range(13)}}
    merges = [(" " * 2**k, " " * 2**k) for k in range(12)]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="?", fuse_unk=True))
    if normalizer is not None:
        backend.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")


NORMALIZERS = {"none": None, "joined": normalizers.Replace(Regex(" {2,}"), " "), "stripped": normalizers.Strip(),
               "NFC": normalizers.NFC()}  # fmt: skip


@pytest.mark.parametrize(("name", "most"), each_value(all_pairs(NORMALIZERS, [1, 8, 64])))
def test_a_text_is_tokenised_as_far_as_shows_that_it_does_not_fit(name: str, most: int) -> None:
    """No text that fits is cut, whatever a token covers; none that does not passes as one that does."""
    tokenizer, chances = _wide_tokenizer(NORMALIZERS[name]), random.Random(most)
    parts = ("a", "ab", " " * 5000, "\u4e00" * 3000, "e\u0301" * 40, " ", "aaaaaaaaaaaa")
    fitting = 0
    for _ in range(25):
        text = "".join(chances.choices(parts, k=chances.choice((1, 3, 20, 60))))
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        found = token_ids_up_to(text, tokenizer, most)
        assert found == whole if len(whole) <= most else len(found) > most
        fitting += len(whole) <= most
        assert token_ids_up_to(text, tokenizer, None) == whole
    assert fitting or most == 1


TOKENIZERS = {"bytes": byte_fallback(), "cleans": cleaning(), "merges": tokenizer_of(FAMILIES["qwen3"])}
TOKENIZERS |= {name: make([BASE, *pool]) for name, (make, pool) in KINDS.items()}


def streamed(name: str, tokens: list[int], sizes: list[int], ends: tuple[int, ...] = ()) -> tuple[list[str], str]:
    """The pieces of tokens that come so many at a time, and what was held back."""
    text, start, pieces = StreamedText(TOKENIZERS[name], ends), 0, []
    while start < len(tokens):
        size = sizes[start % len(sizes)]
        pieces.append(text.add(tokens[start : start + size]))
        start += size
    return pieces, text.flush()


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, max_examples=as_many(150))
@given(data=st.data())
def test_pieces_are_the_decoding_of_all_tokens(name, data):
    known = data.draw(st.lists(st.integers(0, len(TOKENIZERS[name]) - 1), min_size=1, max_size=8))  # often repeated
    one = st.one_of(st.sampled_from(known), st.integers(0, len(TOKENIZERS[name]) - 1))
    tokens, ends = data.draw(st.lists(one, max_size=60)), tuple(known[: data.draw(st.integers(0, 1))])
    pieces, rest = streamed(name, tokens, data.draw(st.lists(st.integers(1, 4), min_size=1)), ends)
    shown = tokens[:-1] if tokens and tokens[-1] in ends else tokens
    assert "".join(pieces) + rest == TOKENIZERS[name].decode(shown, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["bytes", "cleans", "merges"])
def test_words_come_as_they_are_decoded(name):
    """No more is held back than may change: of whole characters nothing, of cleaned-up ones the last few."""
    tokens = TOKENIZERS[name]("the cat is on the mat and the cat is on the mat", add_special_tokens=False)["input_ids"]
    pieces, rest = streamed(name, tokens, [1])
    assert rest == ("t" if name == "cleans" else "")  # as in " n't"
    assert sum(map(bool, pieces)) > len(pieces) // 3


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name != "spaced"])  # which has no decoder
def test_the_work_for_a_text_is_in_proportion_to_its_length(name, monkeypatch):
    tokenizer, sizes = TOKENIZERS[name], list[int]()
    decode = tokenizer.decode
    tokens = 60 * list(range(1, min(40, len(tokenizer))))
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: sizes.append(len(ids)) or decode(ids, **options))
    streamed(name, tokens, [1])
    assert len(tokens) < sum(sizes) < 10 * len(tokens)
