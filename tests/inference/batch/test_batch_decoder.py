"""Decoding many prompts at once: each says what it says alone, and its distribution is the target's own."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2Config

from outrider.inference.batch.batch_decoder import Generator, top_k_of
from outrider.inference.batch.tasks import Answer, uniforms
from outrider.inference.core.sampling import Sampler
from outrider.inference.settings.sampling import SamplingConfig
from tests.inference.batch.responding import ENDS, layers_of
from tests.pairwise import all_pairs
from tests.tiny import random_prompt, save_target

HYBRID = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


@torch.inference_mode()
def one_by_one(model, prompt, draws, greedy_tokens, sampling, ends):
    """Hybrid generation, slow and obvious: the whole text through the model for each token of one prompt."""
    text = list(prompt)
    while len(text) < len(prompt) + len(draws) and (len(text) == len(prompt) or text[-1] not in ends):
        logits = model(torch.tensor([text])).logits[:, -1]
        place = len(text) - len(prompt)
        if place < greedy_tokens:
            text.append(int(logits.argmax()))
            continue
        below = 0.0
        for token, probability in enumerate(Sampler(sampling).probabilities(logits)[0].double().tolist()):
            below += probability
            if below > draws[place]:
                text.append(token)
                break
    return tuple(text[len(prompt) :])


@pytest.mark.parametrize(
    ("architecture", "sampling", "layers"),
    all_pairs(
        ["llama", "mistral", "opt"],
        [SamplingConfig(temperature=1.0), SamplingConfig(temperature=1.3, top_k=9, top_p=0.8)],
        [True, False],
    ),
)
def test_a_batch_says_what_each_prompt_says_alone(tmp_path, architecture, sampling, layers):
    path = save_target(tmp_path, architecture, peak=0.5)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    prompts = [random_prompt(length, seed=length) for length in (3, 30, 11, 19, 5)]
    draws = [uniforms(0, str(i), 0, count) for i, count in enumerate((14, 6, 1, 14, 10))]
    ends = set(range(40))
    expected = [one_by_one(model, p, d, 3, sampling, ends) for p, d in zip(prompts, draws, strict=True)]
    run = layers_of(path, torch.float64) if layers else model
    generator = Generator(run, Sampler(sampling), ends, greedy_tokens=3)
    answers = generator.answer(prompts, draws)
    assert [answer.tokens for answer in answers] == expected
    assert [answer.ended for answer in answers] == [tokens[-1] in ends for tokens in expected]
    assert len({answer.ended for answer in answers}) == 2  # both ways of stopping were seen
    order = [3, 0, 4, 1, 2]
    again = generator.answer([prompts[i] for i in order], [draws[i] for i in order])
    assert again == [answers[i] for i in order]


def test_a_batch_shrinks_where_layers_keep_no_keys():
    kinds = ["conv", "full_attention"]
    model = AutoModelForCausalLM.from_config(Lfm2Config(**HYBRID, layer_types=kinds), dtype=torch.float64).eval()
    prompts, counts = [random_prompt(6, seed=seed) for seed in range(4)], (2, 9, 2, 9)
    draws = [uniforms(0, str(i), 0, count) for i, count in enumerate(counts)]
    sampling = SamplingConfig(temperature=1.0)
    expected = [one_by_one(model, p, d, 1, sampling, ()) for p, d in zip(prompts, draws, strict=True)]
    sizes = []
    model.register_forward_pre_hook(lambda _, __, given: sizes.append(len(given["input_ids"])), with_kwargs=True)
    answers = Generator(model, Sampler(sampling), (), greedy_tokens=1).answer(prompts, draws)
    assert [answer.tokens for answer in answers] == expected
    assert sizes == [4] * 2 + [2] * 7  # those that have ended are not decoded on


@pytest.mark.parametrize("layers", [True, False])
def test_the_kept_distribution_is_the_targets_own(model, target, layers):
    prompts = [random_prompt(5, seed=1), random_prompt(17, seed=2)]
    hot = Sampler(SamplingConfig(temperature=2.0, top_k=3))  # decides what is emitted, not what is kept
    run = layers_of(target) if layers else model
    generator = Generator(run, hot, ENDS, greedy_tokens=1, top_k_logits=6)
    answers = generator.answer(prompts, [uniforms(0, str(i), 0, 9) for i in range(2)])
    for prompt, answer in zip(prompts, answers, strict=True):
        top = answer.top
        assert top.tokens.tolist() == list(answer.tokens)
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer.tokens]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).topk(6)
        assert torch.equal(top.ids, expected.indices)
        torch.testing.assert_close(top.logprobs, expected.values, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(top.tail, 1 - expected.values.exp().sum(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("layers", [True, False])
def test_a_distribution_is_float32_and_whole_whatever_the_model_and_k(target, layers):
    half = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    half = layers_of(target, torch.bfloat16) if layers else half
    generator = Generator(half, Sampler(SamplingConfig(temperature=1.0)), ENDS, greedy_tokens=1, top_k_logits=5)
    (answer,) = generator.answer([random_prompt(5)], [uniforms(0, "", 0, 6)])
    assert answer.top.logprobs.dtype == answer.top.tail.dtype == torch.float32
    torch.testing.assert_close(answer.top.logprobs.exp().sum(-1) + answer.top.tail, torch.ones(len(answer.tokens)))
    ids, _, tail = top_k_of(torch.randn(500, 20, generator=torch.Generator().manual_seed(0)), 99)
    assert ids.shape == (500, 20)  # all there are
    assert 0 <= tail.min() <= tail.max() < 1e-5


def test_a_batch_too_large_for_memory_is_halved(model, monkeypatch):
    generator = Generator(model, Sampler(SamplingConfig(temperature=1.0)), ENDS, greedy_tokens=2)
    prompts = [random_prompt(length, seed=length) for length in (4, 6, 8, 40, 9)]
    draws = [uniforms(0, str(i), 0, 8) for i in range(5)]
    expected = generator.answer(prompts, draws)
    real, sizes = generator._answer_padded, []

    def limited(forward, prompts, draws):
        sizes.append(len(prompts))
        if len(prompts) > 2 or any(len(prompt) == 40 for prompt in prompts):
            raise torch.OutOfMemoryError
        return real(forward, prompts, draws)

    monkeypatch.setattr(generator, "_answer_padded", limited)
    answers = generator.answer(prompts, draws)
    assert answers == [*expected[:3], Answer(failure="memory"), expected[4]]
    sizes.clear()
    generator.answer(prompts[:2], draws[:2])
    assert max(sizes) == 1  # what did not fit once is not tried again


@pytest.mark.parametrize("layers", [True, False])
def test_logits_that_are_no_numbers_fail_their_prompt_alone(target, layers):
    broken = layers_of(target) if layers else AutoModelForCausalLM.from_pretrained(target).eval()
    (broken.embed_tokens if layers else broken.get_input_embeddings()).weight.data[7] = float("nan")
    generator = Generator(broken, Sampler(SamplingConfig(temperature=1.0)), ENDS, greedy_tokens=0)
    answers = generator.answer([[1, 2, 3], [4, 7, 5]], [uniforms(0, "a", 0, 5)] * 2)
    assert answers[1] == Answer(failure="not_a_number")
    assert answers[0] == generator.answer([[1, 2, 3]], [uniforms(0, "a", 0, 5)])[0]
