"""int8 states: as exact as 254 steps between the largest of 32 values and its negative can be."""

import pytest
import torch

from train.parts.target_states import GROUP, pack, packed_width, unpack


def in_turn(values):
    """One vector, slowly."""
    found = []
    for start in range(0, len(values), GROUP):
        group = values[start : start + GROUP]
        scale = torch.tensor(max(abs(value) for value in group) / 127).half().item()
        found += [scale * max(-127, min(127, round(value / scale))) if scale else 0.0 for value in group]
    return found


@pytest.mark.parametrize("width", [1, 32, 33, 576])
def test_every_value_is_a_step_of_its_groups_scale(width):
    made = torch.randn(3, 2, width, generator=torch.Generator().manual_seed(width))
    made[0, 0] = 0.0
    made[1, 1, 0] = 900.0  # as the states' few large values are
    packed = pack(made)
    assert packed.dtype == torch.int8
    assert packed.shape == (3, 2, packed_width(width))
    found = unpack(packed, width)
    for row, kept in zip(made.view(-1, width).tolist(), found.view(-1, width).tolist(), strict=True):
        assert kept == pytest.approx(in_turn(row), abs=1e-6)
    largest = torch.nn.functional.pad(made.abs(), (0, -width % GROUP)).unflatten(-1, (-1, GROUP)).amax(-1)
    room = largest.repeat_interleave(GROUP, -1)[..., :width] * (1 / 254 + 2**-11) + 1e-7
    assert bool(((found - made).abs() <= room).all())


def test_it_takes_little_more_than_half_of_float16():
    assert packed_width(576) / (2 * 576) == pytest.approx(34 / 64)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e7 * 127])
def test_what_no_scale_can_hold_is_refused(value):
    with pytest.raises(OverflowError):
        pack(torch.tensor([[1.0, value]]))
