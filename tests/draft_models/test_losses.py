"""The losses against their formulas written out, and cross-entropy against PyTorch's: values and gradients."""

import math
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.draft_models.draft_vocabulary import draft_indices
from outrider.draft_models.losses import (
    DIVERGENCES,
    IGNORE,
    PLAIN,
    head_product,
    linear_cross_entropy,
    linear_divergence,
    linear_topk_divergence,
)
from outrider.draft_models.targets.model_spec import LogitRule

WIDTH, VOCABULARY, K = 6, 17, 4
ROWS_AT_ONCE = "outrider.draft_models.losses.rows_at_once"


def forward_kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum()


def reverse_kl(p: Tensor, q: Tensor) -> Tensor:
    return forward_kl(q, p)


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    m = (p + q) / 2
    return (forward_kl(p, m) + forward_kl(q, m)) / 2


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    return (1 - torch.minimum(p, q).sum(-1)).sum()


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    return -torch.minimum(p, q).sum(-1).log().sum()


def kl_tv(p: Tensor, q: Tensor) -> Tensor:
    alpha = torch.minimum(p, q).sum(-1)
    share = (-3 * alpha.detach()).exp()
    return (share * (p * (p / q).log()).sum(-1) + (1 - share) * (1 - alpha)).sum()


TWINS = {
    "forward_kl": forward_kl, "reverse_kl": reverse_kl, "jensen_shannon": jensen_shannon,
    "total_variation": total_variation, "acceptance": acceptance, "kl_tv": kl_tv,
}  # fmt: skip


def problem(dtype: torch.dtype = torch.float64, *shape: int) -> dict[str, Tensor]:
    """A drafter's and a target's hidden states and heads, of different widths, and labels with holes."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    shape = shape or (3, 7)
    labels = torch.randint(0, VOCABULARY, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.3] = IGNORE
    return {
        "hidden": normal(*shape, WIDTH),
        "weight": normal(VOCABULARY, WIDTH),
        "target_hidden": normal(*shape, WIDTH + 3),
        "target_weight": normal(VOCABULARY, WIDTH + 3),
        "labels": labels,
    }


def drafters_side(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: given[name] for name in ("hidden", "weight", "labels")}


def values(loss: Callable[..., Tensor], given: dict[str, Tensor], chunk: int = 1024, **options: object) -> list[Tensor]:
    """The loss and its gradients by hidden and weight, scaled as an optimizer step scales it."""
    given = {name: tensor.clone() for name, tensor in given.items()}
    trained = [given["hidden"].requires_grad_(), given["weight"].requires_grad_()]
    with patch(ROWS_AT_ONCE, lambda *_: chunk), patch("outrider.draft_models.losses.PIECE", 3 * VOCABULARY):
        value = loss(**given, **options)
    by_hidden, by_weight = torch.autograd.grad(value * 0.37, trained)
    assert not by_hidden[given["labels"] == IGNORE].any()  # exactly 0
    return [value.detach(), by_hidden, by_weight]


def distributions(given: dict[str, Tensor], rule: LogitRule = PLAIN) -> tuple[Tensor, Tensor]:
    keep = given["labels"] != IGNORE
    p = rule(given["target_hidden"] @ given["target_weight"].T)[keep].softmax(-1)
    q = rule(given["hidden"] @ given["weight"].T)[keep].softmax(-1)
    return p, q


def top_k(given: dict[str, Tensor], k: int) -> dict[str, Tensor]:
    """`given` with the target's side reduced to its k likeliest tokens and the rest."""
    top = (given["target_hidden"] @ given["target_weight"].T).log_softmax(-1).topk(k)
    known = {"top_ids": top.indices, "top_logprobs": top.values, "tail": 1 - top.values.exp().sum(-1)}
    return {**drafters_side(given), **known}


def buckets(p: Tensor, ids: Tensor) -> Tensor:
    rest = torch.ones_like(p).scatter(-1, ids, 0.0)
    return torch.cat([p.gather(-1, ids), (p * rest).sum(-1, keepdim=True)], -1)


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_every_divergence_has_a_twin() -> None:
    assert set(TWINS) == set(DIVERGENCES)
    with pytest.raises(ValueError, match="kind='kl': expected one of forward_kl"):
        linear_divergence(**problem(), kind="kl")


@pytest.mark.parametrize("chunk", [1, 5, 1024])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_equals_the_formula(kind: str, chunk: int) -> None:
    """Also where rows share one of the target, several chunks and pieces long, and have weights."""
    given = problem()
    expected = values(lambda **now: TWINS[kind](*distributions(now)), given)
    assert_same(values(linear_divergence, given, kind=kind, chunk=chunk), expected)
    assert expected[0] > 0.1  # the two do differ
    owners, shares = torch.tensor([0] * 4 + [1, 2, 2, 3] + [4] * 6), torch.rand(14, dtype=torch.float64)
    few = {**(given := problem(torch.float64, 14)), "target_hidden": given["target_hidden"][:5], "labels": owners}

    def each(**now: Tensor) -> Tensor:
        p, q = distributions({**now, "target_hidden": now["target_hidden"][owners]})
        return shares @ torch.stack([TWINS[kind](p[[row]], q[[row]]) for row in range(14)])

    def shared(**now: object) -> Tensor:
        return linear_divergence(**{**now, "labels": None}, kind=kind, owners=owners, shares=shares)

    assert_same(values(shared, few, chunk), values(each, few))


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_what_models_make_of_their_logits(kind: str) -> None:
    """Scaled and capped on both sides; from the target's top-k, on the drafter's."""
    given, rule = problem(), LogitRule(factor=0.6, cap=1.5)
    expected = values(lambda **now: TWINS[kind](*distributions(now, rule)), given)
    assert_same(values(linear_divergence, given, kind=kind, chunk=4, rule=rule, target_rule=rule), expected)
    capped = {**given, "target_hidden": rule(given["target_hidden"] @ given["target_weight"].T)}
    cached = top_k({**capped, "target_weight": torch.eye(VOCABULARY, dtype=torch.float64)}, VOCABULARY - 1)
    assert_same(values(linear_topk_divergence, cached, kind=kind, chunk=4, rule=rule), expected)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_is_zero_for_the_target_itself_and_only_there(kind: str) -> None:
    given = problem()
    itself = {**given, "hidden": given["target_hidden"], "weight": given["target_weight"]}
    got = values(linear_divergence, itself, kind=kind)
    assert_same(got, [torch.zeros_like(tensor) for tensor in got])


@pytest.mark.parametrize("extra", [3, -3])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_padded_embeddings_are_compared_over_the_ids_they_share(kind: str, extra: int) -> None:
    given = problem()
    longer = torch.randn(VOCABULARY + 3, WIDTH if extra > 0 else WIDTH + 3, dtype=torch.float64)
    name = "weight" if extra > 0 else "target_weight"
    longer[:VOCABULARY] = given[name]
    expected = values(linear_divergence, given, kind=kind)
    value, by_hidden, by_weight = values(linear_divergence, {**given, name: longer}, kind=kind)
    assert_same([value, by_hidden, by_weight[:VOCABULARY]], expected)
    assert not by_weight[VOCABULARY:].any()


@pytest.mark.parametrize("chunk", [1, 5, 1024])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_top_k_is_the_formula_over_buckets(kind: str, chunk: int) -> None:
    given = problem()
    cached = top_k(given, K)
    ids = cached["top_ids"][given["labels"] != IGNORE]
    target, _ = distributions(given)

    def twin(hidden: Tensor, weight: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
        q = (hidden @ weight.T)[labels != IGNORE].softmax(-1)
        return TWINS[kind](buckets(target, ids), buckets(q, ids))

    got = values(linear_topk_divergence, cached, kind=kind, chunk=chunk)
    assert_same(got, values(twin, cached))
    if kind != "kl_tv":  # whose weights change with the buckets
        assert got[0] <= values(linear_divergence, given, kind=kind)[0]  # merging buckets never adds divergence
    inexact = {"top_logprobs": cached["top_logprobs"] + 0.1, "tail": cached["tail"] * math.exp(0.1)}  # as if rounded
    assert_same(values(linear_topk_divergence, {**cached, **inexact}, kind=kind, chunk=chunk), got)


def of_some(kind: str, p: Tensor, q: Tensor) -> Tensor:
    """The divergence where q is of some tokens only, of which p [n, k] does not add up to 1."""
    given, alpha = p / p.sum(-1, keepdim=True), torch.minimum(p, q).sum(-1)
    if kind == "kl_tv":
        share = (-3 * alpha.detach()).exp()
        return (share * (given * (given / q).log()).sum(-1) + (1 - share) * (1 - alpha)).sum()
    return TWINS[kind](p if kind in ("acceptance", "total_variation") else given, q)


SOME = torch.tensor([1, 4, 5, 9, 16])


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_over_some_tokens_the_others_are_lost(kind: str) -> None:
    given = problem()
    p, _ = distributions(given)

    def twin(hidden: Tensor, weight: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
        return of_some(kind, p[:, SOME], (hidden @ weight.T)[labels != IGNORE].softmax(-1))

    some = {**given, "weight": given["weight"][SOME]}
    assert_same(values(linear_divergence, some, kind=kind, chunk=4, tokens=SOME), values(twin, some))
    every = torch.arange(VOCABULARY)
    assert_same(values(linear_divergence, given, kind=kind, tokens=every), values(linear_divergence, given, kind=kind))


@pytest.mark.parametrize(("own", "k"), [(SOME, K), (SOME[:2], VOCABULARY - 1)])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_top_k_over_some_tokens_bucket_by_bucket(kind: str, own: Tensor, k: int) -> None:
    """Known tokens that it has not are lost; the tail is its own other tokens, where it has any."""
    given = problem()
    cached = top_k(given, k)
    keep = given["labels"] != IGNORE
    known = zip(*(cached[name][keep] for name in ("top_ids", "top_logprobs", "tail")), strict=True)
    targets = [(ids.tolist(), logprobs.exp(), tail) for ids, logprobs, tail in known]
    assert {sum(token in own for token in ids) for ids, *_ in targets} >= ({2} if k > K else {0, 1, 2})

    def twin(hidden: Tensor, weight: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for (ids, ps, tail), row in zip(targets, (hidden @ weight.T)[labels != IGNORE].softmax(-1), strict=True):
            q_of = dict(zip(own.tolist(), row, strict=True))
            p = [one for token, one in zip(ids, ps, strict=True) if token in q_of]
            q = [q_of.pop(token) for token in ids if token in q_of]
            if q_of:
                p, q = [*p, tail], [*q, torch.stack([*q_of.values()]).sum()]
            total = total + of_some(kind, torch.stack(p)[None], torch.stack(q)[None])
        return total

    some = {**cached, "weight": given["weight"][own], "top_ids": draft_indices(cached["top_ids"], own, VOCABULARY)}
    assert_same(values(linear_topk_divergence, some, kind=kind, chunk=4), values(twin, some))


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_tail_lost_to_half_precision_stays_finite(kind: str) -> None:
    given = problem(torch.float32)
    given["target_hidden"] *= 30  # sure of its token
    cached = top_k(given, K)
    cached |= {name: cached[name].half() for name in ("top_logprobs", "tail")}
    cached["tail"].clamp_min_(0)
    assert not cached["tail"].all()
    assert all(tensor.isfinite().all() for tensor in values(linear_topk_divergence, cached, kind=kind))


@pytest.mark.parametrize("sure_of", ["a known token", "another"])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_drafter_that_is_sure_has_the_loss_of_exact_arithmetic(kind: str, sure_of: str) -> None:
    """Its probabilities of all but one bucket are below what float32 holds; their logarithms are not."""
    given = problem()
    cached = top_k(given, K)
    every = torch.eye(VOCABULARY, dtype=torch.float64)
    known = cached["top_ids"]
    place = known[..., 0] if sure_of == "a known token" else every[known].sum(-2).argmin(-1)
    cached |= {"hidden": 150 * every[place], "weight": every}
    single = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in cached.items()}
    exact, got = (values(linear_topk_divergence, one, kind=kind) for one in (cached, single))
    for one, other in zip(got, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_softmaxes_are_float32_whatever_the_products_are(kind: str) -> None:
    given = problem(torch.bfloat16)
    keep = given["labels"] != IGNORE
    p = (given["target_hidden"][keep] @ given["target_weight"].T).float().softmax(-1)
    q = (given["hidden"][keep] @ given["weight"].T).float().softmax(-1)
    torch.testing.assert_close(linear_divergence(**given, kind=kind), TWINS[kind](p, q), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_sure_sides_stay_finite(kind: str) -> None:
    """Logits so far apart that probabilities are exactly 0 in float32, on either side."""
    given = problem(torch.float32)
    given["target_hidden"] *= 300
    given["hidden"] *= 300
    value, by_hidden, by_weight = values(linear_divergence, given, kind=kind)
    assert value > 0
    assert all(tensor.isfinite().all() for tensor in (value, by_hidden, by_weight))


@pytest.mark.parametrize("sure", [1e3, 40.0, 1e6])
def test_without_acceptance_its_gradient_is_bounded_and_towards_the_target(sure: float) -> None:
    """Two distributions that are sure of different tokens: in float32 no e^−sure is left of α from 104 on."""
    p = torch.full((1, VOCABULARY), -sure)
    q = p.clone()
    p[:, 0] = q[:, 1] = 0.0
    own = torch.eye(VOCABULARY)
    given = {"hidden": q, "weight": own, "target_hidden": p, "target_weight": own, "labels": torch.zeros(1).long()}
    value, by_hidden, _ = values(linear_divergence, given, kind="acceptance")
    assert value.isfinite()
    assert value > 30
    slope = by_hidden[0] / 0.37
    assert slope.sum().abs() < 1e-5
    assert 0.01 < slope.clamp_min(0).sum() <= 1
    assert slope[0] < 0 < slope[1]  # what q lacks most, and what it has too much of


def test_the_target_gets_no_gradient_and_evaluation_none() -> None:
    given = {name: tensor.requires_grad_(tensor.is_floating_point()) for name, tensor in problem().items()}
    linear_divergence(**given, kind="reverse_kl").backward()
    assert given["target_hidden"].grad is None
    assert given["target_weight"].grad is None
    assert given["hidden"].grad is not None
    with torch.no_grad():
        assert not linear_divergence(**given, kind="reverse_kl").requires_grad


def reference(hidden: Tensor, weight: Tensor, labels: Tensor, rule: LogitRule = PLAIN) -> Tensor:
    logits = rule(hidden @ weight.T).flatten(0, -2)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")


RULES = [LogitRule(factor=0.4), LogitRule(divisor=3.0), LogitRule(cap=1.5), LogitRule(factor=2.0, cap=0.7)]


@pytest.mark.parametrize("rule", [PLAIN, *RULES])
@pytest.mark.parametrize("chunk", [1, 4, 5, 1024])
def test_equals_cross_entropy(chunk: int, rule: LogitRule) -> None:
    """Of logits as they are, and of what a model makes of them: scaled and capped."""
    given = drafters_side(problem())
    expected = values(reference, given, rule=rule)
    for value, wanted in zip(values(linear_cross_entropy, given, chunk, rule=rule), expected, strict=True):
        # the sum over positions and the softmax are float32 by contract
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_bias_of_the_head_is_one_more_column() -> None:
    hidden = problem()["hidden"]
    head = torch.nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
    wider, weight = head_product(head, hidden)
    torch.testing.assert_close(wider @ weight.T, head(hidden))


def test_no_supervised_position_is_zero_loss_with_zero_gradients() -> None:
    given = drafters_side(problem())
    found = values(linear_cross_entropy, {**given, "labels": torch.full_like(given["labels"], IGNORE)})
    assert not any(value.any() for value in found)


@pytest.mark.parametrize("frozen", ["weight", "hidden", "both"])
def test_frozen_inputs_get_no_gradient(frozen: str) -> None:
    given = drafters_side(problem())
    expected = dict(zip(("hidden", "weight"), values(reference, given)[1:], strict=True))
    for name in expected:
        given[name].requires_grad_(frozen not in (name, "both"))
    loss = linear_cross_entropy(**given)
    assert loss.requires_grad == (frozen != "both")
    if frozen != "both":
        (loss * 0.37).backward()
    for name, wanted in expected.items():
        if given[name].requires_grad:
            torch.testing.assert_close(given[name].grad, wanted, rtol=2e-6, atol=2e-6)
        else:
            assert given[name].grad is None


def test_autocast_keeps_float32_masters() -> None:
    given = drafters_side(problem(torch.float32, 4, 16))
    hidden, weight, labels = given.values()
    expected = values(reference, given)
    with torch.autocast("cpu", torch.bfloat16):
        got = values(linear_cross_entropy, given)
    assert [value.dtype for value in got] == [torch.float32] * 3
    for value, wanted in zip(got, expected, strict=True):
        # bfloat16 has 8 bits; sums of a few dozen terms stay within a few of its steps
        torch.testing.assert_close(value, wanted, rtol=0.02, atol=0.02 * wanted.abs().max().item())
    keep = labels != IGNORE
    products = (hidden[keep].bfloat16() @ weight.bfloat16().T).float()  # these are rounded, what is made of them is not
    torch.testing.assert_close(got[0], F.cross_entropy(products, labels[keep], reduction="sum"), rtol=1e-5, atol=0)


def test_the_weights_gradient_is_summed_in_float32() -> None:
    """A thousand equal positions, one at a time: a bfloat16 sum of their gradients stops growing at 256 of them."""
    given = problem(torch.float32, 1)
    hidden, weight, labels = given["hidden"], given["weight"], torch.tensor([3])
    for stored, rounding in ((weight, 1e-3), (weight.bfloat16(), 2**-7)):  # the sum is rounded once, at its end
        one = {"hidden": hidden, "weight": stored, "labels": labels}
        many = {"hidden": hidden.expand(1000, -1), "weight": stored, "labels": labels.expand(1000)}
        with torch.autocast("cpu", torch.bfloat16):
            expected = values(linear_cross_entropy, one)[2]
            found = values(linear_cross_entropy, many, chunk=1)[2]
        torch.testing.assert_close(found, 1000 * expected, rtol=rounding, atol=0)
