"""When another reading is called better: seldom by chance, and whenever it plainly is."""

import itertools

import numpy as np
import torch

from outrider.inference.doctor.scores import (
    BLOCK,
    MAX_P_VALUE,
    MIN_BLOCKS,
    AgreementScores,
    Recording,
    is_better,
    lead_chance,
    score_logits,
)


def scores_of(agree: np.ndarray) -> AgreementScores:
    return AgreementScores(agree[None].astype(bool), agree[None] > -1, np.arange(len(agree)) // BLOCK)


def test_a_place_without_numbers_does_not_agree() -> None:
    logits = torch.zeros(2, 3, 5)
    logits[..., 2] = 1.0
    logits[1, 1, 2] = torch.nan  # which argmax takes for the largest
    recording = Recording(torch.tensor([4, 2, 2, 2]), 1, {})
    one, other = (score_logits(logits, recording, text) for text in range(2))
    assert one.agrees.tolist() == one.finite.tolist() == [[True] * 3, [True, False, True]]
    assert not {*one.blocks} & {*other.blocks}  # no observation is of two texts


def test_the_chance_of_a_lead_is_counted_over_all_signs() -> None:
    signs = np.array(list(itertools.product((-1, 1), repeat=MIN_BLOCKS)))
    for seed in range(3):
        leads = np.random.default_rng(seed).integers(-1, 3, MIN_BLOCKS * BLOCK)
        sums = leads.reshape(MIN_BLOCKS, BLOCK).sum(1)
        assert lead_chance(leads, np.arange(len(leads)) // BLOCK) == (signs @ sums >= sums.sum()).mean()


def test_readings_that_are_as_good_are_seldom_called_better() -> None:
    """Also where neighbouring places are right or wrong together, which a test of single places takes for evidence."""
    draw, wrong, single = np.random.default_rng(1), 0, 0
    for _ in range(100):
        runs = draw.random((2, 2 * MIN_BLOCKS)) < 0.5  # whole blocks agree or do not
        one, other = (scores_of(np.repeat(run, BLOCK)) for run in runs)
        wrong += lead_chance(one.agrees[0].astype(int) - other.agrees[0], one.blocks) < 0.05
        single += lead_chance(one.agrees[0].astype(int) - other.agrees[0], np.arange(len(one.blocks))) < 0.05
        assert not is_better(one, other, tried=15)[0]
    assert wrong / 100 < 0.12 < single / 100


def test_a_lead_must_be_worth_it_and_have_been_seen_often() -> None:
    count = 4 * MIN_BLOCKS * BLOCK
    half = np.arange(count) % 2 == 0
    ahead = half | (np.arange(count) % BLOCK == 1)  # one more in every block
    assert is_better(scores_of(ahead), scores_of(half))[0]
    assert not is_better(scores_of(half), scores_of(ahead))[0]
    few = BLOCK * (MIN_BLOCKS - 1)
    assert not is_better(scores_of(np.ones(few)), scores_of(np.zeros(few)))[0]
    short = scores_of(np.ones(few))  # as many places, in texts of few tokens each
    short = short._replace(blocks=np.arange(few) // 2)
    assert not is_better(short, short._replace(agrees=~short.agrees))[0]
    places = np.arange(4 * count)
    slightly = (places % 2 == 0) | (places % (8 * BLOCK) == 1)  # surely better, by 1/64
    better, chance = is_better(scores_of(slightly), scores_of(places % 2 == 0))
    assert chance < MAX_P_VALUE
    assert not better


def test_the_more_ways_are_tried_the_likelier_one_leads_by_chance() -> None:
    draw = np.random.default_rng(5)
    one, other = (scores_of(draw.random(2 * MIN_BLOCKS * BLOCK) < share) for share in (0.52, 0.5))
    chance = is_better(one, other)[1]
    assert 0 < chance < 1
    assert [is_better(one, other, tried)[1] for tried in (3, 10**6)] == [min(1.0, 3 * chance), 1.0]
