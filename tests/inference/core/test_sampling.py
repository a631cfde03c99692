"""Logits to probabilities: what `generate` does, row by row of a tree."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    EncoderRepetitionPenaltyLogitsProcessor,
    EtaLogitsWarper,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from outrider.inference.core.sampling import Sampler, branches, top_tokens
from outrider.inference.core.tree import ROOT
from outrider.inference.loading.generation_config import generate_options
from outrider.inference.settings.sampling import SamplingConfig
from tests.tiers import as_many
from tests.tiny import open_stack, random_prompt, save_target

VOCABULARY = 40
PARENTS = (ROOT, ROOT, 0, 0, 1, 2, 5)
TOKENS = (3, 5, 3, 9, 3, 11, 9)
TEXT = (1, 2, 3, 2)
PATHS = ((), (3,), (5,), (3, 3), (3, 9), (5, 3), (3, 3, 11), (3, 3, 11, 9))
EVERYTHING = SamplingConfig(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.3)


def logits_of(seed: int = 0) -> Tensor:
    return 3 * torch.randn(len(PATHS), VOCABULARY, generator=torch.Generator().manual_seed(seed))


def contexts() -> list[Tensor]:
    return branches(torch.tensor(TEXT), torch.tensor(TOKENS), PARENTS)


def one_by_one(steps: list[LogitsProcessor], logits: Tensor) -> Tensor:
    """Plain decoding along every branch: one sequence, one row at a time."""
    chain = LogitsProcessorList(steps)
    rows = [chain(torch.tensor([[*TEXT, *path]]), row[None].clone()) for path, row in zip(PATHS, logits, strict=True)]
    return torch.cat(rows).softmax(-1)


class Recorder(LogitsProcessor):
    """Forbids the last token, in place, and remembers the texts it was shown."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen += input_ids.tolist()
        return scores.scatter_(1, input_ids[:, -1:], -math.inf)


def test_branches_are_the_texts_before_each_row() -> None:
    assert [text.tolist() for text in contexts()] == [[*TEXT, *path] for path in PATHS]
    assert [text.tolist() for text in branches(torch.tensor([7]), torch.tensor([], dtype=torch.long), ())] == [[7]]


@given(
    seed=st.integers(0, 999),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 7, 10**6]),
    top_p=st.sampled_from([1.0, 0.8, 0.01]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    penalty=st.sampled_from([1.0, 1.5, 0.5]),
)
@settings(deadline=None, max_examples=as_many(60))
def test_equals_transformers_token_by_token(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    sampler = Sampler(SamplingConfig(temperature, top_k, top_p, min_p, penalty))
    steps: list[LogitsProcessor] = [RepetitionPenaltyLogitsProcessor(penalty), TemperatureLogitsWarper(temperature)]
    steps += [TopKLogitsWarper(top_k)] if top_k else []
    steps += [TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)]
    found = sampler.probabilities(logits_of(seed), contexts() if sampler.reads_context else None)
    expected = one_by_one(steps, logits_of(seed))
    assert sampler.reads_context == (penalty != 1)
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.sum(-1), torch.ones(len(PATHS)))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize(("config", "generate"), [
    (SamplingConfig(repetition_penalty=1.8), {"do_sample": False, "repetition_penalty": 1.8}),
    (
        EVERYTHING,
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
    ),
])  # fmt: skip
def test_equals_generate(config: SamplingConfig, generate: dict, target: Path) -> None:
    """The processed scores of `generate` itself, also with the options by which the evaluation calls it."""
    model, _ = open_stack(target)
    sampler = Sampler(config)
    model.generation_config.pad_token_id = 0
    for seed, options in enumerate(({"do_sample": True, "top_k": 0, **generate}, generate_options(config))):
        ids = torch.tensor([random_prompt(30, seed)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=4,
            output_scores=True,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
        before = [out.sequences[0, :length] for length in range(30, 34)]
        scores = sampler.scores(torch.cat(out.logits), before)
        torch.testing.assert_close(scores, torch.cat(out.scores), rtol=1e-6, atol=0)
        if sampler.greedy:
            choices = sampler.probabilities(torch.cat(out.logits), before).argmax(-1)
            assert torch.equal(choices, out.sequences[0, 30:])


def test_processors_see_exactly_their_branch() -> None:
    recorder = Recorder()
    logits = logits_of()
    found = Sampler(EVERYTHING, [recorder]).probabilities(logits, contexts())
    assert recorder.seen == [[*TEXT, *path] for path in PATHS]
    assert torch.equal(logits, logits_of())  # theirs may write to its input, but not to ours
    for row, path in zip(found, PATHS, strict=True):
        assert row[(*TEXT, *path)[-1]] == 0


@pytest.mark.parametrize(
    "processor",
    [
        EncoderRepetitionPenaltyLogitsProcessor(2.0, torch.tensor([TEXT])),
        EtaLogitsWarper(1e-3),
        NoBadWordsLogitsProcessor([[3, 3], [9]], eos_token_id=None),
        NoRepeatNGramLogitsProcessor(2),
        RepetitionPenaltyLogitsProcessor(2.0, prompt_ignore_length=len(TEXT)),
        TypicalLogitsWarper(0.8),
    ],
    ids=lambda processor: type(processor).__name__,
)
def test_any_processor_of_transformers(processor: LogitsProcessor) -> None:
    """Of the target's own config; of some versions one sees the first of several rows alone."""
    expected = one_by_one([processor, TemperatureLogitsWarper(0.8)], logits_of())
    found = Sampler(SamplingConfig(temperature=0.8), [processor]).probabilities(logits_of(), contexts())
    torch.testing.assert_close(found, expected)


def test_temperature_zero_is_a_point_mass() -> None:
    """On the best token after the penalty; the warpers have no say, as in greedy `generate`."""
    logits = torch.tensor([[5.0, 4.0, 1.0], [5.0, 4.0, 1.0]])
    sampler = Sampler(SamplingConfig(temperature=0, top_k=1, top_p=0.1, min_p=1.0, repetition_penalty=2.0))
    assert sampler.greedy
    found = sampler.probabilities(logits, [torch.tensor([2, 2]), torch.tensor([2, 0])])
    assert found.tolist() == [[1, 0, 0], [0, 1, 0]]
    tied = Sampler(SamplingConfig()).probabilities(torch.zeros(1, 4))
    assert tied.sum() == 1
    assert tied.argmax() == torch.zeros(1, 4).argmax()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_probabilities_are_float32_from_the_start(dtype: torch.dtype) -> None:
    logits = logits_of().to(dtype)
    found = Sampler(EVERYTHING).probabilities(logits, contexts())
    assert found.dtype == torch.float32
    assert torch.equal(found, Sampler(EVERYTHING).probabilities(logits.float(), contexts()))
    assert logits.dtype == dtype


@pytest.mark.parametrize("size", [5, 64 * 40, 49_999])
def test_successors_are_the_likeliest_of_any_vocabulary(size: int) -> None:
    """Also where the last tokens fill no chunk, and the likeliest is among them."""
    logits = torch.randn(3, size, generator=torch.Generator().manual_seed(0))
    logits[1, -1] = 9.0
    values, tokens = logits.softmax(-1).topk(min(8, size))
    found = top_tokens(logits, 8)
    assert torch.equal(found[:, : values.shape[1]].long(), tokens)
    torch.testing.assert_close(found[:, values.shape[1] :], values)
