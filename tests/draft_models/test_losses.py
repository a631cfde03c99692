"""linear_cross_entropy against the obvious F.cross_entropy: values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from draft_models.losses import IGNORE, head_product, linear_cross_entropy
from draft_models.targets.model_spec import LogitRule

WIDTH, VOCABULARY = 8, 13


def _problem(dtype=torch.float64, shape=(3, 7)):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*shape, WIDTH, generator=generator, dtype=dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=dtype)
    labels = torch.randint(0, VOCABULARY, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.3] = IGNORE
    return hidden, weight, labels


def _reference(hidden, weight, labels):
    logits = (hidden @ weight.T).flatten(0, -2)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")


def _value_and_gradients(loss_function, hidden, weight, labels, scale=0.37):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = loss_function(hidden, weight, labels)
    (loss * scale).backward()
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk", [1, 4, 5, 1024])
def test_equals_cross_entropy(chunk):
    problem = _problem()
    expected = _value_and_gradients(_reference, *problem)
    got = _value_and_gradients(lambda *args: linear_cross_entropy(*args, chunk=chunk), *problem)
    for value, reference in zip(got, expected, strict=True):
        # the sum over positions and the softmax are float32 by contract
        torch.testing.assert_close(value.double(), reference, rtol=2e-6, atol=2e-6)


RULES = [LogitRule(factor=0.4), LogitRule(divisor=3.0), LogitRule(cap=1.5), LogitRule(factor=2.0, cap=0.7)]


@pytest.mark.parametrize("rule", RULES)
def test_what_a_model_makes_of_its_logits(rule):
    """Scaled and capped, values and gradients."""

    def reference(hidden, weight, labels):
        logits = rule(hidden @ weight.T).flatten(0, -2)
        return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")

    expected = _value_and_gradients(reference, *_problem())
    got = _value_and_gradients(lambda *args: linear_cross_entropy(*args, chunk=4, rule=rule), *_problem())
    for value, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_bias_of_the_head_is_one_more_column():
    hidden, _, _ = _problem()
    head = torch.nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
    wider, weight = head_product(head, hidden)
    torch.testing.assert_close(wider @ weight.T, head(hidden))


def test_ignored_positions_get_no_gradient():
    hidden, weight, labels = _problem()
    _, gradient, _ = _value_and_gradients(linear_cross_entropy, hidden, weight, labels)
    assert (gradient[labels == IGNORE] == 0).all()
    assert (gradient[labels != IGNORE] != 0).any(-1).all()


def test_no_supervised_position_is_zero_loss_with_zero_gradients():
    hidden, weight, labels = _problem()
    loss, hidden_gradient, weight_gradient = _value_and_gradients(
        linear_cross_entropy, hidden, weight, torch.full_like(labels, IGNORE)
    )
    assert loss == 0
    assert (hidden_gradient == 0).all()
    assert (weight_gradient == 0).all()


def test_evaluation_spends_nothing_on_gradients(monkeypatch):
    hidden, weight, labels = (tensor.requires_grad_(tensor.is_floating_point()) for tensor in _problem())
    expected = linear_cross_entropy(hidden, weight, labels).detach()

    def forbidden(*_args, **_kwargs):
        raise AssertionError("a gradient was computed")

    monkeypatch.setattr(torch.Tensor, "scatter_add_", forbidden)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels)
    assert loss == expected


@pytest.mark.parametrize("frozen", ["weight", "hidden", "both"])
def test_frozen_inputs_get_no_gradient(frozen):
    hidden, weight, labels = _problem()
    _, hidden_reference, weight_reference = _value_and_gradients(_reference, hidden, weight, labels, scale=1)
    hidden.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "hidden")
    loss = linear_cross_entropy(hidden, weight, labels)
    assert loss.requires_grad == (frozen != "both")
    if frozen != "both":
        loss.backward()
    for tensor, reference in ((hidden, hidden_reference), (weight, weight_reference)):
        if tensor.requires_grad:
            torch.testing.assert_close(tensor.grad, reference, rtol=2e-6, atol=2e-6)
        else:
            assert tensor.grad is None


def test_autocast_keeps_float32_masters():
    hidden, weight, labels = _problem(torch.float32, (4, 16))
    expected = _value_and_gradients(_reference, hidden, weight, labels)
    with torch.autocast("cpu", torch.bfloat16):
        got = _value_and_gradients(linear_cross_entropy, hidden, weight, labels)
    assert [value.dtype for value in got] == [torch.float32] * 3
    for value, reference in zip(got, expected, strict=True):
        # bfloat16 has 8 bits; sums of a few dozen terms stay within a few of its steps
        torch.testing.assert_close(value, reference, rtol=0.02, atol=0.02 * reference.abs().max().item())
    keep = labels != IGNORE
    products = (hidden[keep].bfloat16() @ weight.bfloat16().T).float()  # these are rounded, what is made of them is not
    torch.testing.assert_close(got[0], F.cross_entropy(products, labels[keep], reduction="sum"), rtol=1e-5, atol=0)


def test_the_weights_gradient_is_summed_in_float32():
    """A thousand equal positions, one at a time: a bfloat16 sum of their gradients stops growing at 256 of them."""
    hidden, weight, _ = _problem(torch.float32, (1,))
    labels = torch.tensor([3])
    for stored, rounding in ((weight, 1e-3), (weight.bfloat16(), 2**-7)):  # the sum is rounded once, at its end
        with torch.autocast("cpu", torch.bfloat16):
            _, _, one = _value_and_gradients(linear_cross_entropy, hidden, stored, labels)
            many = (hidden.expand(1000, -1), stored, labels.expand(1000))
            _, _, all_of_them = _value_and_gradients(lambda *args: linear_cross_entropy(*args, chunk=1), *many)
        torch.testing.assert_close(all_of_them, 1000 * one, rtol=rounding, atol=0)


def test_bfloat16_weight_gets_a_bfloat16_gradient():
    hidden, weight, labels = _problem(torch.float32)
    weight = weight.bfloat16().requires_grad_()
    linear_cross_entropy(hidden, weight, labels).backward()
    assert weight.grad.dtype == torch.bfloat16
