"""What rounds emit on average, of MCSD's trees and of chains verified as a block, is what decoding emits."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from outrider.inference.core.decode import autoregressive
from outrider.inference.core.verify import Matching, Rejection
from outrider.inference.settings.sampling import SamplingConfig
from tests.tiers import typical_where
from tests.tiny import open_stack, random_prompt, save_target

RULES = {"without": (False, False), "with": (True, False), "naive": (False, True), "naive, with": (True, True)}
SAMPLED = SamplingConfig(temperature=1.0)


def law(size: int, seed: int) -> torch.Tensor:
    return (2 * torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).softmax(-1)


def enumerated(p: torch.Tensor, q: torch.Tensor, count: int, *, replace: bool, naive: bool) -> np.ndarray:
    """P(rank i is accepted and is token t) [t, i], by the product's rule over every sequence of candidates."""
    rule: Any = Matching() if naive else Rejection(replace=replace)
    found = np.zeros((len(p), count))

    def visit(drawn: list[int], left: torch.Tensor, chance: float) -> None:
        if len(drawn) == count:
            alone = 1.0
            for rank, probability in enumerate(rule.acceptance([(-1, drawn)], {-1: q}, p[None])[-1]):
                found[drawn[rank], rank] += chance * alone * min(1.0, probability)
                alone *= 1 - min(1.0, probability)
            return
        for token in range(len(p)):
            if left[token] > 0:
                rest = left.clone()
                rest[token] *= replace
                visit([*drawn, token], rest / rest.sum(), chance * float(left[token]))

    visit([], q, 1.0)
    return found


@pytest.mark.parametrize("rule", RULES)
def test_acceptance_given_a_token_is_what_every_branch_of_the_rule_adds_up_to(rule: str) -> None:
    from papers.expected import by_rank

    replace, naive = RULES[rule]
    p, q, draws = law(5, 0), law(5, 1), 1 if replace else 4000
    wanted = enumerated(p, q, 3, replace=replace, naive=naive) / p.numpy()[:, None]
    said = torch.arange(5).repeat(draws)
    numbers = torch.rand(len(said), 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    known = by_rank(p.expand(len(said), 5), q.expand(len(said), 5), said, numbers, replace=replace, naive=naive)
    each = known.view(draws, 5, 3)
    spread = each.std(0, correction=0).numpy() / math.sqrt(draws)
    assert (np.abs(each.mean(0).numpy() - wanted) <= 5 * spread + 1e-9).all()
    assert (wanted.sum(1) <= 1 + 1e-9).all()  # the rest is said by the target
    outside = by_rank(p[None], q[None], torch.tensor([-1]), numbers[:1], replace=replace, naive=naive)
    assert not outside.any()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A target and a small LM that is somewhat like it."""
    folder = tmp_path_factory.mktemp("pair")
    _, stack = open_stack(save_target(folder, peak=2.0))
    _, small = open_stack(folder)
    for weight in small.parameters():
        weight.data += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))

    def make(eos: set[int]) -> Any:
        from papers.measuring import Bench

        return Bench(stack, {"small_lm": small}, stack.config.vocab_size, 14, eos)

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "eos"), typical_where(("without", False).__eq__, [("without", False), ("with", False), ("naive", True)])
)
def test_expected_rounds_are_those_of_decoding(
    bench: Callable[..., Any], rule: str, eos: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the very texts that live decoding said, the mean difference is 0: each count within 5 standard errors.

    A rule that forgets the residual, in which r stays p, is found out. After the end of a text live decoding counts
    what it drafted there; so only the rounds, and what was accepted, are alike with an end.
    """
    from papers import expected
    from papers.claims import Row
    from papers.mcsd import tree
    from papers.measuring import Asked, continued, counts_of

    monkeypatch.setattr(expected, "MOST", 3)
    replace, naive = RULES[rule]
    draw, verify = "with_replacement" if replace else "without_replacement", "naive" if naive else "exact"
    here, row = bench(set(range(20) if eos else ())), Row("a", tree("3x2x2", draw, verify), SAMPLED)
    apart, forgetful = [], []
    for seed in range(80):
        asked = Asked(f"p{seed}", "c", tuple(random_prompt(4, seed)))
        live = continued(here, row, asked)
        monkeypatch.setattr(expected, "answer_of", lambda *_, text=live.tokens: text)
        known, lived = expected.Expected()(here, row, asked), counts_of(live)
        apart.append({name: lived.get(name, 0.0) - known[name] for name in known})
        p, q, said = expected.outputs(here, asked, live.tokens)
        wrong = np.stack([independent(p.softmax(-1), q.softmax(-1), said, rank) for rank in range(3)], -1)
        forgetful.append(lived["rounds"] - expected.rounds_of(wrong, (3, 2, 2), here.tokens)["rounds"])
    assert {"rounds", "tokens", "accepted", "rank_1", "rank_2", "tried"} <= set(apart[0])
    assert replace or {"drafted", "verified", "verified_apart"} <= set(apart[0])
    for name in ("rounds", "tokens", "accepted", "drafted", "verified") if eos else apart[0]:
        assert near([each.get(name, 0.0) for each in apart]), name
    assert naive or not near(forgetful)


@pytest.mark.parametrize("widths", ["1x1x1", "4x2", "16", "3x2x2x1"])
def test_greedy_counts_are_those_of_the_replay(bench: Callable[..., Any], widths: str) -> None:
    from papers.claims import Row
    from papers.expected import Expected
    from papers.mcsd import tree
    from papers.measuring import Asked, continued, counts_of

    here, ids = bench(set()), tuple(random_prompt(9))
    answer = [token for r in autoregressive(here.stack, ids, max_new_tokens=here.tokens) for token in r.tokens]
    row, asked = Row("a", tree(widths)), Asked("p", "c", ids, tuple(answer))
    known, replayed = Expected()(here, row, asked), counts_of(continued(here, row, asked))
    assert known == {name: replayed.get(name, 0.0) for name in known}
    assert known["accepted"] > 0
    early = Asked("q", "c", ids, asked.answer[:6])  # the text ends there
    ended = Expected()(bench({answer[5]}), row, early)
    again = counts_of(continued(bench({answer[5]}), row, early))
    assert all(ended[name] == again[name] for name in ("rounds", "tokens", "accepted", "drafted", "depth", "verified"))


def independent(p: torch.Tensor, q: torch.Tensor, said: torch.Tensor, rank: int) -> np.ndarray:
    """As if r stayed p: every candidate is accepted as the first is."""
    rows = torch.arange(len(said))
    missed = (q - p).clamp(min=0).sum(-1)
    return (missed**rank * torch.minimum(p, q)[rows, said] / p[rows, said]).numpy()


def near(differences: list[float]) -> bool:
    values = np.array(differences)
    return bool(abs(values.mean()) <= 5 * values.std() / math.sqrt(len(values)) + 1e-9)
