"""What drafting may lose against plain decoding, and that it loses no more."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from inference.drafters.shaped import Calibrated
from inference.settings.kinds import KINDS
from inference.settings.method import MethodConfig, StopConfig
from inference.sizing.costs import LOSS, MEMORY, WIDEST, Allowance, Costs
from inference.sizing.policy import Tuning
from outrider.streams import Streams
from tests.tiny import make_drafter, open_stack, save_target

CHEAP, DEAR = 0.05, 0.6  # of a pass over one row


def costs(step: float, row: float = 0.05) -> Costs:
    return Costs((step,) * (WIDEST + 1), tuple(1 + row * (width - 1) for width in range(WIDEST + 1)), 0.01, 1.0)


def decode(allowance: Allowance, right: Callable[[int], bool], step: float, rounds: int = 2000) -> tuple[float, float]:
    """Chains of two, right or wrong as a whole: tokens per second of it all, and the share of rounds with a draft."""
    emitted, seconds, drafts = 0, 0.0, 0
    for number in range(rounds):
        if allowance.spent():
            allowance.observe([], 0, 1)
            emitted, seconds = emitted + 1, seconds + 1.0
            continue
        new = 3 if right(number) else 1
        allowance.observe([1, 1], 2, new)
        emitted, seconds, drafts = emitted + new, seconds + 2 * step + 1.1 + 0.01, drafts + 1
    return emitted / seconds, drafts / rounds


@pytest.mark.parametrize("step", [CHEAP, DEAR])
@pytest.mark.parametrize("chance", [0.0, 0.05])
def test_a_drafter_that_does_not_pay_costs_no_more_than_allowed(step: float, chance: float) -> None:
    luck = random.Random(0)
    given = 2 * step + 1.11
    assert (1 + 2 * chance) / given < 1 - LOSS  # it does not pay
    rate, share = decode(Allowance(costs(step)), lambda _: luck.random() < chance, step)
    assert rate > 1 - LOSS - given / MEMORY  # the last draft may go beyond the allowance
    assert 0 < share < 0.5


def test_one_that_pays_is_asked_in_every_round() -> None:
    luck = random.Random(0)
    rate, share = decode(Allowance(costs(CHEAP)), lambda _: luck.random() < 0.5, CHEAP)
    assert share == 1.0
    assert rate > 1.5


def test_a_few_wrong_drafts_on_end_are_no_reason_to_give_up() -> None:
    """Rounds of a tree's price, a third of them right: they pay, and are made nearly always, from the first one on."""
    shares = []
    for seed in range(100):
        luck = random.Random(seed)
        shares.append(decode(Allowance(costs(0.12)), lambda _, luck=luck: luck.random() < 0.35, 0.12, 80)[1])
    assert sum(shares) / len(shares) > 0.9


def test_an_easy_stretch_is_found_and_used() -> None:
    """Hard text, then easy text, where the share of rounds with drafts rises from little to all."""
    allowance = Allowance(costs(DEAR))
    _, hard = decode(allowance, lambda _: False, DEAR, 300)
    decode(allowance, lambda _: True, DEAR, 100)
    _, easy = decode(allowance, lambda _: True, DEAR, 50)
    assert hard < 0.1
    assert easy == 1.0


def test_seconds_are_those_of_the_passes() -> None:
    """Against the sum written out; a pass wider than any measured counts as the widest."""
    prices = Costs(
        tuple(0.1 * width for width in range(WIDEST + 1)), tuple(1.0 + width for width in range(WIDEST + 1)), 0.5, 2.0
    )
    allowance = Allowance(prices)
    allowance.observe([1, 3, WIDEST + 9], 4, 2)
    seconds = 0.99 * MEMORY * 2.0 + (0.1 + 0.3 + 0.1 * WIDEST) + 6.0 + 0.5
    assert allowance.rate == pytest.approx((0.99 * MEMORY + 2) / seconds)
    allowance.observe([], 0, 1)
    assert allowance.rate == pytest.approx((0.99 * (0.99 * MEMORY + 2) + 1) / (0.99 * seconds + 2.0))


SURVIVAL = StopConfig(rule="survival")


@pytest.mark.parametrize("kind", ["early_exit", "small_lm"])
def test_methods_by_measured_costs_have_an_allowance(tmp_path: Path, kind: str) -> None:
    """Those that were told what to draft draft it in every round."""
    path = save_target(tmp_path, kv_heads=2)
    model = Calibrated(make_drafter(path, 1)) if kind == "early_exit" else open_stack(path)[1]
    plugin, tuning = KINDS[kind].load_plugin(), Tuning(costs(CHEAP))
    for stop, given in ((SURVIVAL, tuning), (StopConfig(max_draft="auto"), tuning), (StopConfig(max_draft=3), None)):
        drafter = plugin.make(model, MethodConfig(source=kind, stop=stop), Streams(0), drawn=False, tuning=given)
        assert (drafter.allowance is None) == (given is None)
