"""The target's distribution beside its responses: at the right tokens, whatever the turns and wherever they come
from."""

import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import torch

from outrider.data_prep.text.documents import encode
from outrider.data_prep.text.records import TokenisedText
from outrider.inference.batch.directory import Response, top_k_documents
from outrider.inference.batch.generate import generate_responses
from outrider.inference.batch.tasks import Answer, Task, TopK
from tests.inference.batch.responding import letter_tokenizer, read_responses, talk
from tests.refusals import refusal


@torch.inference_mode()
def test_cached_distributions_are_the_targets(make, model):
    """Of every response, also of several turns: what the target says after exactly the tokens before each place."""
    config = make(max_new_tokens=9, top_k_logits=4)
    generate_responses(config)
    turns = Counter()
    for response in read_responses(config.out_dir):
        for document, places, top in (found := top_k_documents(response, letter_tokenizer(), "tokenizer")):
            assert document.ids[places].tolist() == top.tokens.tolist()
            assert np.flatnonzero(document.supervised).tolist() == places.tolist()
            logits = model(torch.tensor(document.ids)[None]).logits[0, places - 1]
            expected = logits.log_softmax(-1).topk(4)
            torch.testing.assert_close(top.logprobs, expected.values, atol=0.01, rtol=0)
            torch.testing.assert_close(top.tail, 1 - expected.values.exp().sum(-1), atol=0.001, rtol=0)
        turns[len(response.record["messages"]) // 2] += 1
        assert sum(len(places) for _, places, _ in found) == response.record["tokens"]
    assert set(turns) == {1, 2}


def test_turns_share_a_document_where_the_next_prompt_repeats_the_one_before():
    def answer(*tokens):
        return Answer(tokens, True, TopK(torch.tensor(tokens), *(torch.tensor(tokens)[:, None] for _ in range(3))))

    task = Task("a", "", "tokenizer", [1, 2])
    task.keep(answer(3, 4, 5))
    task.prompt = [1, 2, 3, 4, 5, 6]
    task.keep(answer(7))
    assert task.documents == [TokenisedText([1, 2, 3, 4, 5, 6, 7], [(2, 5), (6, 7)])]
    task.prompt = [1, 2, 3, 9, 5, 6, 7, 8]  # rendered otherwise from the second token of the first answer on
    task.keep(answer(4))
    assert task.documents[1:] == [TokenisedText([1, 2, 3, 9, 5, 6, 7, 8, 4], [(8, 9)])]
    assert task.top.tokens.tolist() == task.top.ids[:, 0].tolist() == [3, 4, 5, 7, 4]


def test_distributions_from_elsewhere_are_found_where_the_record_has_their_tokens():
    tokenizer = letter_tokenizer()

    def find(record, tokens):
        n = len(tokens)
        top = TopK(torch.as_tensor(tokens), torch.zeros(n, 2).long(), torch.zeros(n, 2), torch.zeros(n))
        return top_k_documents(Response(record, top), tokenizer, "tokenizer")

    chat = {"id": "a", **talk("one?", "first", "two?", "second")}
    (document,) = encode([chat], tokenizer, "tokenizer")
    said = document.ids[document.supervised]
    assert tokenizer.decode(said) == "first</s>second</s>"
    for tokens in (said, said[:-1]):  # with and without an end
        ((found, places, _),) = find(chat, tokens)
        assert np.array_equal(found.ids, document.ids)
        assert np.array_equal(found.ids[places], tokens)
        assert found.supervised[places].all()
    assert find(chat, [*said[:-1], 5]) == []
    assert find(chat, [*said, 5]) == []
    text = {"id": "b", "text": "prefix and more", "prompt_tokens": 6}
    (document,) = encode([text], tokenizer, "tokenizer")
    assert find(text, document.ids[6:])[0][1].tolist() == list(range(6, len(document.ids)))
    assert find(text, [*document.ids[6:], 1]) == []


@torch.inference_mode()
def test_each_turn_has_its_distributions_where_the_template_rewrites_history(make, model, target, tmp_path):
    """As templates of thinking models do: then a prompt does not begin with the turn before it."""
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ m.content }}", "{{ m.content[:loop.index0 + 7] }}")
    tokenizer.save_pretrained(other := shutil.copytree(target, tmp_path / "other"))
    config = replace(make(max_new_tokens=20, top_k_logits=4), target=str(other))
    generate_responses(config)
    found = [top_k_documents(one, tokenizer, "tokenizer") for one in read_responses(config.out_dir)]
    assert max(len(documents) for documents in found) == 2
    for document, places, top in (one for documents in found for one in documents):
        expected = model(torch.tensor(document.ids)[None]).logits[0, places - 1].log_softmax(-1).topk(4)
        torch.testing.assert_close(top.logprobs, expected.values, atol=0.01, rtol=0)
    tokenizer.add_tokens(["more"])
    changed = letter_tokenizer()
    for response in read_responses(config.out_dir):
        for other in (tokenizer, changed):  # of another template the prompts are others
            refusal("another tokenizer or template", top_k_documents, response, other, "tokenizer")
