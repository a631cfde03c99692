"""Texts in a batch: each is bit for bit what it is alone, whatever the company, the order and the drafter."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.inference.core.batch import Batch, Text
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.core.rounds import Round
from outrider.inference.core.sampling import Sampler
from outrider.inference.core.target_session import Runtime
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.core.tree import DraftTree
from outrider.inference.engines.packing import lay_out
from outrider.inference.settings.method import StructureConfig
from outrider.inference.settings.sampling import SamplingConfig
from tests import known_targets
from tests.known_targets import SOURCES, Target
from tests.tiny import method_of, random_prompt

COUNT = 24
STRUCTURES = {"chain": StructureConfig(), "tree": StructureConfig(kind="opt_tree", nodes=8, delta=0.0, max_depth=4)}
SAMPLED = Sampler(SamplingConfig(temperature=0.8))


class Watched(TokenSelector):
    """A selector that keeps the bits of all logits that it decides on."""

    def __init__(self, sampler: Sampler | None = None, generator: random.Random | None = None) -> None:
        super().__init__(sampler, generator)
        self.seen: list[Tensor] = []

    def next_token(self, logits: Tensor) -> Tensor:
        self.seen.append(logits.clone())
        return super().next_token(logits)

    def verify(self, tree: DraftTree, logits: Tensor) -> tuple[list[int], list[int], Tensor, int]:
        self.seen.append(logits.clone())
        return super().verify(tree, logits)


@dataclass
class Asked:
    """A text that somebody wants: its own prompt, drafter, length and seed."""

    target: Target
    kind: str | None  # of the drafter; None: plain decoding
    structure: str
    number: int

    def start(self, runtime: Runtime) -> tuple[Iterator[Round], Watched]:
        prompt = random_prompt(3 + 5 * (self.number % 7), seed=self.number)
        drawn = self.number % 3 == 2
        selector = Watched(SAMPLED, random.Random(self.number)) if drawn else Watched()
        options: dict[str, Any] = {"max_new_tokens": COUNT - self.number % 5, "selector": selector, "runtime": runtime}
        if self.kind is None:
            return autoregressive(self.target.stack, prompt, **options), selector
        drafter = self.target.drafter(self.kind, method_of(STRUCTURES[self.structure]), self.number, drawn=drawn)
        return speculative(self.target.stack, drafter, prompt, **options), selector

    def alone(self) -> tuple[list[Round], list[Tensor]]:
        rounds, selector = self.start(Runtime())
        return list(rounds), selector.seen


def decode_together(asked: Sequence[Asked], most: int, order: random.Random) -> list[tuple[list[Round], list[Tensor]]]:
    """All texts with `most` of them in flight at once; they join in a random order."""
    batch, found, ended = Batch(), {}, []
    waiting = list(range(len(asked)))
    order.shuffle(waiting)
    while waiting or batch.texts:
        while waiting and len(batch.texts) < most and order.random() < 0.7:
            number = waiting.pop()
            rounds, selector = asked[number].start(batch)
            found[number] = ([], selector.seen)
            batch.add(Text(rounds, found[number][0].append, ended.append))
        batch.step()
    assert ended == [None] * len(asked)
    return [found[number] for number in range(len(asked))]


def same(one: tuple[list[Round], list[Tensor]], other: tuple[list[Round], list[Tensor]]) -> bool:
    tokens = [[r.tokens for r in rounds] for rounds, _ in (one, other)]
    bits = len(one[1]) == len(other[1]) and all(map(torch.equal, one[1], other[1]))
    return tokens[0] == tokens[1] and bits


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype], Target]:
    """A target in each dtype whose layers, and those of its drafters, run at once."""
    make = known_targets.targets(tmp_path_factory)

    @cache
    def prepared(dtype: torch.dtype) -> Target:
        target = make("llama", dtype, vocab_size=272)
        lay_out(target.stack, torch.device("cpu"))
        return target

    return prepared


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_text_has_the_same_bits_in_any_company(
    laid_out: Callable[[torch.dtype], Target], dtype: torch.dtype, structure: str
) -> None:
    target = laid_out(dtype)
    asked = [Asked(target, kind, structure, number) for number, kind in enumerate([None, *SOURCES, None, None])]
    together = decode_together(asked, 5, random.Random(0))
    different = [
        (one.kind, one.number) for one, found in zip(asked, together, strict=True) if not same(one.alone(), found)
    ]
    assert not different
