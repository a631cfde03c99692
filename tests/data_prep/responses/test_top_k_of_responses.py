"""The target's distribution beside its responses: at the right tokens, whatever the turns and wherever they come
from."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.responses.answers import Answer, TopK
from data_prep.responses.directory import Response, top_k_document
from data_prep.responses.generate import generate_responses
from data_prep.responses.tasks import Task
from data_prep.text.chat import encode
from outrider.errors import UserError
from tests.data_prep.responding import TALKS, letter_tokenizer, read_responses, talk


@torch.inference_mode()
def test_cached_distributions_are_the_targets(make, model):
    """Of every response, also of several turns: what the target says after exactly the tokens before each place."""
    config = make(max_new_tokens=9, top_k_logits=4)
    generate_responses(config)
    turns = Counter()
    for response in read_responses(config.out_dir):
        document, places = top_k_document(response, letter_tokenizer(), "tokenizer")
        assert document.ids[places].tolist() == response.top.tokens.tolist()
        assert np.flatnonzero(document.supervised).tolist() == places.tolist()
        logits = model(torch.tensor(document.ids)[None]).logits[0, places - 1]
        expected = logits.log_softmax(-1).topk(4)
        torch.testing.assert_close(response.top.logprobs, expected.values, atol=0.01, rtol=0)
        torch.testing.assert_close(response.top.tail, 1 - expected.values.exp().sum(-1), atol=0.001, rtol=0)
        turns[len(response.record["messages"]) // 2] += 1
        assert len(places) <= response.record["tokens"]
        assert (len(places) == response.record["tokens"]) or len(response.record["messages"]) > 2
    assert set(turns) == {1, 2}


def test_an_earlier_answer_keeps_its_distribution_as_far_as_the_next_prompt_repeats_it():
    def answer(*tokens):
        return Answer(tokens, True, TopK(torch.tensor(tokens), *(torch.tensor(tokens)[:, None] for _ in range(3))))

    task = Task("a", "", "tokenizer", [1, 2])
    task.keep(answer(3, 4, 5))
    task.prompt = [1, 2, 3, 4, 5, 6]
    task.keep(answer(7))
    assert (task.sequence, task.places, task.top.tokens.tolist()) == ([1, 2, 3, 4, 5, 6, 7], [2, 3, 4, 6], [3, 4, 5, 7])
    task.prompt = [1, 2, 3, 9, 5, 6, 7, 8]  # tokenised otherwise from the second token of the first answer on
    task.keep(answer(4))
    assert (task.sequence[-1], task.places, task.top.tokens.tolist()) == (4, [2, 8], [3, 4])
    assert task.top.ids[:, 0].tolist() == [3, 4]


def test_distributions_from_elsewhere_are_found_where_the_record_has_their_tokens():
    tokenizer = letter_tokenizer()

    def find(record, tokens):
        n = len(tokens)
        top = TopK(torch.as_tensor(tokens), torch.zeros(n, 2).long(), torch.zeros(n, 2), torch.zeros(n))
        return top_k_document(Response(record, top), tokenizer, "tokenizer")

    chat = {"id": "a", **talk("one?", "first", "two?", "second")}
    (document,) = encode([chat], tokenizer, "tokenizer")
    said = document.ids[document.supervised]
    assert tokenizer.decode(said) == "first</s>second</s>"
    for tokens in (said, said[:-1]):  # with and without an end
        found, places = find(chat, tokens)
        assert np.array_equal(found.ids, document.ids)
        assert np.array_equal(found.ids[places], tokens)
        assert found.supervised[places].all()
    assert find(chat, [*said[:-1], 5]) is None
    assert find(chat, [*said, 5]) is None
    text = {"id": "b", "text": "prefix and more", "prompt_tokens": 6}
    (document,) = encode([text], tokenizer, "tokenizer")
    assert find(text, document.ids[6:])[1].tolist() == list(range(6, len(document.ids)))
    assert find(text, [*document.ids[6:], 1]) is None


def test_a_damaged_distribution_is_named(make):
    config = make(TALKS[:2], top_k_logits=2)
    generate_responses(config)
    (file,) = Path(config.out_dir).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"responses-00000\.safetensors: not a readable safetensors file"):
        read_responses(config.out_dir)
