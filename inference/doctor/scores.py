"""The agreement of a drafter's reading with the target, and tests whether another reading is significantly better."""

import functools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draft_models.acceptance import acceptance
from inference.doctor.examinee import Recording
from inference.doctor.table import BLOCK, FEWEST

FLIPS = 50_000
DEALS = 5_000
CHANCE = 1e-3  # significance level: with a larger p-value no reading is called better
UNSAID = -50.0  # lower bound on log-probabilities, which are −∞ for tokens outside the draft vocabulary
MARGIN = 0.02  # in agreement; a smaller lead does not justify another reading


@dataclass(frozen=True)
class Scores:
    """Figures at all judged places of all texts, [steps, places] each but the last three, which are [places].

    agree: whether the drafter's most likely token is the target's. accepted: Σ min(p, q). log_q: of the target's most
    likely token. finite: whether all logits are finite. drafted, said: the most likely tokens of the first step and of
    the target. blocks: the observation that each place belongs to.
    """

    agree: np.ndarray
    accepted: np.ndarray
    log_q: np.ndarray
    finite: np.ndarray
    drafted: np.ndarray
    said: np.ndarray
    blocks: np.ndarray

    @property
    def means(self) -> dict[str, list[float]]:
        """The means over the places, by step."""
        return {name: getattr(self, name).mean(1).tolist() for name in ("agree", "accepted", "log_q", "finite")}

    @property
    def agreement(self) -> float:
        """The mean over steps and places: the criterion of comparisons, as only it matters in greedy decoding."""
        return float(self.agree.mean())


def score(logits: Tensor, recording: Recording, text: int) -> Scores:
    """The scores of a drafter's logits [steps, places, V'] on a recording, which is text number `text`."""
    size = recording.log_p.shape[-1]
    finite = logits.isfinite().all(-1)
    logits = torch.where(finite[..., None], logits, 0.0)
    logits = F.pad(logits[..., :size], (0, max(0, size - logits.shape[-1])), value=-torch.inf)
    log_q = logits.to(recording.log_p.dtype).log_softmax(-1)
    chosen = log_q.argmax(-1)
    of_choice = log_q.gather(-1, recording.choices.expand(len(log_q), -1)[..., None])[..., 0]
    blocks = np.array([(text << 32) + place // BLOCK for place in range(len(recording.places))])
    return Scores(
        (chosen == recording.choices).cpu().numpy(),
        acceptance(recording.log_p, log_q).double().cpu().numpy(),
        of_choice.clamp_min(UNSAID).double().cpu().numpy(),
        finite.cpu().numpy(),
        chosen[0].cpu().numpy(),
        recording.choices.cpu().numpy(),
        blocks,
    )


def join(parts: Sequence[Scores]) -> Scores:
    """The scores of several texts as one."""
    return Scores(*(np.concatenate([getattr(part, one.name) for part in parts], axis=-1) for one in fields(Scores)))


def chance_of(lead: np.ndarray, blocks: np.ndarray) -> float:
    """The p-value of a mean lead [places]: the probability of one at least as large if every block's sign were random.

    The sign-flip test of paired observations (Fisher 1935, §21). 1 if there are too few places for a verdict.
    """
    _, place = np.unique(blocks, return_inverse=True)
    sums = np.bincount(place, weights=lead).astype(np.float32)  # exact, as the terms are halves and ones
    if len(lead) < FEWEST * BLOCK:
        return 1.0
    as_large = int((_signs(len(sums)) @ sums >= sums.sum()).sum())
    return (1 + as_large) / (1 + FLIPS)


@functools.lru_cache(maxsize=2)
def _signs(count: int) -> np.ndarray:
    """Random signs [flips, count] from a fixed seed."""
    signs: np.ndarray = np.random.default_rng(0).integers(2, size=(FLIPS, count), dtype=np.int8).astype(np.float32)
    return 2 * signs - 1


def is_better(one: Scores, than: Scores, tried: int = 1) -> tuple[bool, float]:
    """Whether `one` agrees more than `than` by `MARGIN` and significantly, and the p-value.

    tried: the number of readings compared, for Bonferroni's bound on the p-value.
    """
    chance = min(1.0, tried * chance_of((one.agree.astype(float) - than.agree).mean(0), one.blocks))
    return chance < CHANCE and one.agreement - than.agreement >= MARGIN, chance


def is_apart(one: Scores, other: Scores) -> bool:
    """Whether `one` agrees more than `other`, which is on other texts, by `MARGIN` and significantly.

    Blocks are reassigned to the two sides at random (the two-sample permutation test).
    """
    means = [_by_block(scores.agree.mean(0), scores.blocks) for scores in (one, other)]
    lead = means[0].mean() - means[1].mean()
    if min(map(len, means)) < FEWEST // 2 or lead < MARGIN:
        return False
    pooled, count = np.concatenate(means), len(means[0])
    orders = np.random.default_rng(0).permuted(np.tile(pooled, (DEALS, 1)), axis=1)
    leads = orders[:, :count].mean(1) - orders[:, count:].mean(1)
    return bool((1 + (leads >= lead - 1e-9).sum()) / (1 + DEALS) < CHANCE)


def _by_block(values: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """The mean of values [places] in each block."""
    _, place = np.unique(blocks, return_inverse=True)
    means: np.ndarray = np.bincount(place, weights=values) / np.bincount(place)
    return means


def relabelled(scores: Scores) -> Scores:
    """The first step's agreement with the drafter's tokens relabelled: labels are learnt on half of the blocks and
    tested on the other half, both ways.

    A drafter with a wrong vocabulary map agrees only after relabelling.
    """
    half = np.unique(scores.blocks, return_inverse=True)[1] % 2
    agree = np.zeros_like(scores.agree[:1])
    for side in (0, 1):
        seen: dict[int, Counter[int]] = defaultdict(Counter)
        for drafted, said in zip(scores.drafted[half != side], scores.said[half != side], strict=True):
            seen[int(drafted)][int(said)] += 1
        meant = {drafted: counts.most_common(1)[0][0] for drafted, counts in seen.items()}
        for place in np.flatnonzero(half == side):
            agree[0, place] = meant.get(int(scores.drafted[place]), -1) == scores.said[place]
    return replace(scores, agree=agree)
