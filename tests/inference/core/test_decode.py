"""Losslessness: every way of decoding emits exactly what the target alone would."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from draft_models.calibration_head import CalibrationHead
from draft_models.early_exit.model import EarlyExit
from draft_models.targets.open_target import load_tokenizer
from draft_models.targets.stack import LayerStack
from inference.core.decode import autoregressive, cut, speculative, until
from inference.core.rounds import Round
from inference.core.stop_strings import StopStrings
from inference.drafters.early_exit import EarlyExitSource
from inference.drafters.shaped import Calibrated, ModelDrafter
from inference.measure.arms import make_arms
from inference.settings.method import MethodConfig
from inference.shapes.factory import Chain
from inference.stopping.interface import StopRule
from inference.stopping.plain import Confidence, FixedLength
from inference.stopping.thompson import BetaThompson, CalibratedThompson, Posterior
from outrider.errors import UserError
from outrider.streams import Streams
from tests.pairwise import all_pairs, each_value
from tests.tiers import quick_where, typical_where
from tests.tiny import ARCHITECTURES, LAYERS, make_drafter, open_stack, random_prompt, reference_generate, save_target

RULES = {
    "fixed-1": lambda: FixedLength(1),
    "fixed-4": lambda: FixedLength(4),
    "fixed-8": lambda: FixedLength(8),
    "beta": lambda: BetaThompson(8, 2.0, 1.0, "natural", random.Random(0)),
    "confidence": lambda: Confidence(8, 0.3),
    "calibrated": lambda: CalibratedThompson(
        8, Posterior(CalibrationHead(64, 64).requires_grad_(False), 0.3, 0.5, 0.6, "sample"), random.Random(0)
    ),
    "beta-printed": lambda: BetaThompson(8, 2.0, 1.0, "printed", random.Random(0)),
}


def decode(
    stack: LayerStack, drafter: EarlyExit, rule: StopRule, prompt: Sequence[int], **options: object
) -> list[Round]:
    return list(speculative(stack, ModelDrafter(EarlyExitSource(drafter), Chain(rule)), prompt, **options))


def tokens_of(rounds: Sequence[Round]) -> list[int]:
    return [token for r in rounds for token in r.tokens]


# (architecture, tied, kv_heads, exit_layer, rule, prompt's length)
MATRIX = all_pairs(ARCHITECTURES, (False, True), (4, 2), (1, 2, LAYERS - 1), RULES, (20, 1))


@dataclass(frozen=True)
class Known:
    """A saved target, and what `generate` makes of prompts."""

    path: Path
    model: PreTrainedModel
    stack: LayerStack

    def text_after(self, prompt: Sequence[int]) -> list[int]:
        return reference_generate(self.model, prompt, 32)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool, int], Known]:
    """The target of an architecture, tied or not, with so many heads of keys; made when it is asked for first."""

    @cache
    def make(architecture: str, tied: bool, kv_heads: int) -> Known:
        path = save_target(tmp_path_factory.mktemp("t"), architecture, tied=tied, kv_heads=kv_heads)
        return Known(path, *open_stack(path))

    return make


@pytest.mark.parametrize(
    ("architecture", "tied", "kv_heads", "exit_layer", "rule", "length"),
    typical_where(each_value(MATRIX).__contains__, quick_where(lambda row: row[0] == "llama", MATRIX)),
)
def test_greedy_equals_generate(
    known: Callable[..., Known], architecture: str, tied: bool, kv_heads: int, exit_layer: int, rule: str, length: int
) -> None:
    target, prompt = known(architecture, tied, kv_heads), random_prompt(length)
    expected = target.text_after(prompt)
    assert tokens_of(list(autoregressive(target.stack, prompt, max_new_tokens=32))) == expected
    drafter = make_drafter(target.path, exit_layer, noise=0.1)
    assert tokens_of(decode(target.stack, drafter, RULES[rule](), prompt, max_new_tokens=32)) == expected


@pytest.mark.slow
def test_the_matrix_above_accepts_and_rejects(known: Callable[..., Known]) -> None:
    """The equality is worth something only if drafts are accepted, partly accepted and rejected in it."""
    rounds = []
    for architecture, exit_layer in itertools.product(("llama", "mistral", "opt"), (1, LAYERS - 1)):
        target = known(architecture, False, 2)
        drafter = make_drafter(target.path, exit_layer, noise=0.1)
        rounds += decode(target.stack, drafter, FixedLength(4), random_prompt(20), max_new_tokens=48)[1:]
    accepted = [r.accepted for r in rounds if r.drafted == 4]
    assert all(accepted.count(n) >= 3 for n in range(5))


@pytest.mark.slow
def test_the_references_are_not_one_token_repeated(known: Callable[..., Known]) -> None:
    variants = {row[:3] for row in MATRIX}
    variety = [len(set(known(*variant).text_after(random_prompt(20)))) for variant in variants]
    assert min(variety) > 2
    assert sum(variety) / len(variety) > 8


@pytest.mark.parametrize(("own_head", "depth"), [(True, 1), (False, 1), (True, 2)])
def test_the_target_as_its_own_drafter_is_always_right(tmp_path: Path, own_head: bool, depth: int) -> None:
    path = save_target(tmp_path)
    _, stack = open_stack(path)
    drafter = make_drafter(path, LAYERS - depth, own_head=own_head, depth=depth)
    rounds = decode(stack, drafter, FixedLength(4), random_prompt(9), max_new_tokens=41)[1:]
    assert [r.accepted for r in rounds] == [4] * 8
    assert [len(r.tokens) for r in rounds] == [5] * 8


@pytest.mark.slow
def test_eos_at_every_position(tmp_path: Path) -> None:
    """Text ends with the first EOS wherever in a round it falls: first token, inside a draft, the bonus."""
    path = save_target(tmp_path)
    model, stack = open_stack(path)
    drafter = make_drafter(path, LAYERS - 1, noise=0.05)
    prompt = random_prompt(12, seed=3)
    full = reference_generate(model, prompt, 40)
    firsts = {token: full.index(token) for token in full}
    places = set()
    for eos, place in firsts.items():
        expected = full[: place + 1]
        assert reference_generate(model, prompt, 40, eos=[eos]) == expected
        assert tokens_of(list(autoregressive(stack, prompt, max_new_tokens=40, eos=[eos]))) == expected
        rounds = decode(stack, drafter, FixedLength(4), prompt, max_new_tokens=40, eos=[eos])
        assert tokens_of(rounds) == expected
        assert sum(r.accepted for r in rounds) <= len(expected)
        places.add((len(rounds[-1].tokens), rounds[-1].accepted))
    assert len(places) >= 5  # EOS fell on several positions of a draft
    eos_list = [full[5], full[9]]
    expected = full[: min(firsts[t] for t in eos_list) + 1]
    assert tokens_of(decode(stack, drafter, FixedLength(8), prompt, max_new_tokens=40, eos=eos_list)) == expected


@pytest.mark.parametrize("rule", quick_where(lambda rule: rule == "fixed-4", RULES))
def test_max_new_tokens_at_every_offset(tmp_path: Path, rule: str) -> None:
    path = save_target(tmp_path)
    model, stack = open_stack(path)
    drafter = make_drafter(path, LAYERS - 1, noise=0.05)
    prompt = random_prompt(7)
    full = reference_generate(model, prompt, 14)
    for count in range(1, 15):
        rounds = decode(stack, drafter, RULES[rule](), prompt, max_new_tokens=count)
        assert tokens_of(rounds) == full[:count]
        assert all(r.drafted <= count for r in rounds)


def test_plain_decoding_ends_at_every_offset(tmp_path: Path) -> None:
    path = save_target(tmp_path)
    model, stack = open_stack(path)
    full = reference_generate(model, random_prompt(7), 24)
    for count in range(1, 25):
        assert tokens_of(list(autoregressive(stack, random_prompt(7), max_new_tokens=count))) == full[:count]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float64(tmp_path: Path, architecture: str) -> None:
    path = save_target(tmp_path, architecture, kv_heads=2)
    model, stack = open_stack(path, torch.float64)
    drafter = make_drafter(path, 2, noise=0.1, dtype=torch.float64)
    prompt = random_prompt(30)
    expected = reference_generate(model, prompt, 40)
    assert tokens_of(decode(stack, drafter, FixedLength(4), prompt, max_new_tokens=40)) == expected


def test_accounting(tmp_path: Path) -> None:
    """A round's tokens are its accepted ones and the bonus; parts of its time add up to less than the whole."""
    path = save_target(tmp_path)
    _, stack = open_stack(path)
    drafter = make_drafter(path, LAYERS - 1, noise=0.1)
    prefill, *rounds = decode(stack, drafter, FixedLength(4), random_prompt(5), max_new_tokens=50)
    assert (len(prefill.tokens), prefill.drafted) == (1, 0)
    assert 1 + sum(len(r.tokens) for r in rounds) == 50
    budget = 49
    for r in rounds:
        assert r.accepted <= r.drafted == min(4, budget - 1)
        assert len(r.tokens) == r.accepted + 1
        budget -= len(r.tokens)
        assert (r.draft_seconds > 0) == (r.drafted > 0)
        assert min(r.structure_seconds, r.verify_seconds) > 0
        assert r.draft_seconds + r.structure_seconds + r.verify_seconds <= r.seconds


def test_a_generation_can_be_abandoned_and_another_started(tmp_path: Path) -> None:
    path = save_target(tmp_path)
    model, stack = open_stack(path)
    source = EarlyExitSource(make_drafter(path, LAYERS - 1, noise=0.1))
    prompt = random_prompt(11)
    half = speculative(stack, ModelDrafter(source, Chain(FixedLength(4))), random_prompt(30, seed=2), max_new_tokens=30)
    next(half), next(half)
    half.close()
    rounds = list(speculative(stack, ModelDrafter(source, Chain(FixedLength(4))), prompt, max_new_tokens=30))
    assert tokens_of(rounds) == reference_generate(model, prompt, 30)


def test_impossible_lengths_are_refused(tmp_path: Path) -> None:
    _, stack = open_stack(save_target(tmp_path))
    for prompt, count, message in (
        ([], 5, "empty prompt"),
        ([1], 0, "max_new_tokens=0"),
        ([1] * 250, 7, "context of 256"),
    ):
        with pytest.raises(UserError, match=message):
            list(autoregressive(stack, prompt, max_new_tokens=count))
    assert len(tokens_of(list(autoregressive(stack, [1] * 250, max_new_tokens=6)))) == 6


def test_up_to_the_last_position_of_the_context(tmp_path: Path) -> None:
    path = save_target(tmp_path)
    model, stack = open_stack(path)
    prompt = random_prompt(216)
    rounds = decode(stack, make_drafter(path, LAYERS - 1), FixedLength(8), prompt, max_new_tokens=40)
    assert tokens_of(rounds) == reference_generate(model, prompt, 40)


def test_cut() -> None:
    assert cut([1, 2, 3], {2}, 9) == (1, 2)
    assert cut([1, 2, 3], {3}, 2) == (1, 2)
    assert cut([1, 2, 3], (), 5) == (1, 2, 3)
    assert cut([2], {2}, 1) == (2,)


@pytest.mark.slow
def test_stop_strings_anywhere_in_a_block(tmp_path: Path) -> None:
    """Text ends with the token that completes the string, as with transformers' own `stop_strings`."""
    path = save_target(tmp_path)
    model, stack = open_stack(path)
    tokenizer = load_tokenizer(str(path))
    drafter = make_drafter(path, LAYERS - 1, noise=0.05)
    prompt = random_prompt(12, seed=3)
    full = reference_generate(model, prompt, 40)
    ids = torch.tensor([prompt])
    places, ended = set(), {}
    for start in range(0, 36, 2):
        text = tokenizer.decode(full[start : start + 2])
        if "\ufffd" in text:
            continue  # not text: half of a character
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, stop_strings=[text],
            tokenizer=tokenizer,
        )  # fmt: skip
        expected = out[0, len(prompt) :].tolist()
        first_end = StopStrings([text], tokenizer).first_end
        rounds = list(until(iter(decode(stack, drafter, FixedLength(4), prompt, max_new_tokens=40)), prompt, first_end))
        assert tokens_of(rounds) == expected
        assert rounds[-1].accepted <= len(rounds[-1].tokens)
        places.add(len(rounds[-1].tokens))
        ended[text] = expected
    assert len(places) > 1
    text, expected = max(ended.items(), key=lambda item: len(item[1]))
    arms = make_arms(
        stack, {"early_exit": Calibrated(drafter)}, {"m": MethodConfig()}, model, max_new_tokens=40, eos=(),
        stops=["no such text", text], tokenizer=tokenizer,
    )  # fmt: skip
    assert {name: list(arm(prompt, Streams(0)).tokens) for name, arm in arms.items()} == dict.fromkeys(arms, expected)
    assert len(expected) < 40
    untouched = decode(stack, drafter, FixedLength(4), prompt, max_new_tokens=40)
    first_end = StopStrings(["no such text"], tokenizer).first_end
    assert tokens_of(list(until(iter(untouched), prompt, first_end))) == full
