"""A drafter's agreement with the target: recorded answers, scores at each position, tests, and the findings as text.

A judged position is that of an answer's token. A drafter agrees there if its likeliest token is the target's. Agreement
of neighbours is correlated, so `BLOCK` positions form one observation of the test whether another reading is better.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from outrider.base.errors import UserError
from outrider.draft_models.targets.target import Target
from outrider.inference.core.decode import autoregressive
from outrider.inference.core.target_session import Runtime
from outrider.inference.core.tree import chain_parents

FIRST = 5  # the first position that can be a block's fourth token: context at 0, the block's root at 1
TITLES = ("1st token", "2nd token", "3rd token", "4th token")
BLOCK = 8  # neighbouring positions that form one observation, as they are correlated
MIN_BLOCKS = 16  # observations that a verdict needs
MAX_P_VALUE = 1e-3  # significance level: with a larger p-value no reading is called better
MARGIN = 0.02  # in agreement; a smaller lead does not justify another reading
LOW_SHARE = 0.2  # agreement at the first token below which a drafter hardly pays under any reading


@dataclass(frozen=True)
class Fact:
    """A fact that a drafter's files tell, such as its training target. suspect: it may explain a bad drafter."""

    name: str
    said: str
    suspect: bool = False


@dataclass(frozen=True)
class ReadingScores:
    """The agreement of a drafter by one reading of its checkpoint, a way to run it that its config may not declare.

    name: how the reading differs from the declared one. option: selects the reading; "": no option does. meaning: what
    is wrong with the drafter if this reading is better. agreement: over steps and positions. agree, finite: by draft
    step, the share of positions with the target's token, and with finite logits. chance: the p-value of the lead over
    the declared reading; None for the declared reading. is_better: whether it is better.
    """

    name: str
    option: str
    meaning: str
    agreement: float
    agree: tuple[float, ...]
    finite: tuple[float, ...]
    chance: float | None
    is_better: bool


@dataclass(frozen=True)
class Findings:
    """The findings on one drafter, over so many judged `positions` (in JSON "places") of `texts` answers.

    ways: the declared reading, then the others; none without an answer. better: the best of the readings that are
    better than the declared one. lengths: the agreement of the declared reading by length of text.
    """

    positions: Annotated[int, Field(alias="places")] = field(metadata={"key": "places"})
    texts: int
    ways: tuple[ReadingScores, ...]
    better: ReadingScores | None
    facts: tuple[Fact, ...] = ()
    lengths: Mapping[str, float] | None = field(default=None, metadata={"optional": True})  # None: not in JSON


class Recording(NamedTuple):
    """A prompt and the target's greedy answer to it, read once by the target.

    tokens: the whole text [n], on the target's device. start: positions start … n − 1, in the answer, are judged.
    aux_hidden: the target's hidden states [1, n, d] by layer boundary (b: the input of layer b).
    """

    tokens: Tensor
    start: int
    aux_hidden: dict[int, Tensor]


def record_answer(
    target: Target, prompt: Sequence[int], boundaries: Sequence[int], max_new: int, eos: frozenset[int] = frozenset()
) -> Recording | None:
    """The answer of `target` to `prompt`, of up to `max_new` tokens; None if no position of it can be judged.

    boundaries: layer boundaries to record, of a target that runs layer by layer. The answer's first token is never
    drafted, so it is not judged.
    """
    rounds = autoregressive(target, prompt, max_new_tokens=max_new, eos=eos)
    tokens = torch.tensor([*prompt, *(token for r in rounds for token in r.tokens)], device=target.device)
    start = max(len(prompt) + 1, FIRST)
    if start >= len(tokens):
        return None
    return Recording(tokens, start, read_states(target, tokens, len(prompt), boundaries)[1] if boundaries else {})


@torch.inference_mode()
def read_states(
    model: Target, tokens: Tensor, start: int, boundaries: Sequence[int] = ()
) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits [n − start, V] after the tokens from position `start` on, and all hidden states [1, n, d] by boundary."""
    session, aux_parts = Runtime().session(model, split=0, capacity=len(tokens)), list[Tensor]()
    session.aux_layers = tuple(boundaries)
    for begin, end in ((0, start), (start, len(tokens))):  # so that a prompt has no logits, which would be many
        rows = range(end - begin)
        session.feed(tokens[begin:end], chain_parents(0, len(rows)))
        logits = session.finish(last_only=begin == 0)
        if boundaries:
            aux_parts.append(session.aux_hidden(rows))
        session.commit(rows)
    boundary_states = torch.cat(aux_parts, dim=1).chunk(len(boundaries), dim=-1) if boundaries else ()
    return logits, dict(zip(boundaries, boundary_states, strict=True))


class AgreementScores(NamedTuple):
    """Scores at all judged positions of all texts.

    agrees [steps, positions]: whether the drafter's likeliest token is the target's. finite [steps, positions]: whether
    all logits are finite; if not, it does not agree. blocks [positions]: the observation that each belongs to.
    """

    agrees: np.ndarray
    finite: np.ndarray
    blocks: np.ndarray

    @property
    def agreement(self) -> float:
        """The mean over steps and positions. Readings are compared by it: greedy decoding depends on nothing else."""
        return float(self.agrees.mean())


def score_logits(logits: Tensor, recording: Recording, text_id: int) -> AgreementScores:
    """The scores of a drafter's logits [steps, positions, V'] on a recording, which is text number `text_id`."""
    finite = logits.isfinite().all(-1)
    agrees = finite & (logits.argmax(-1) == recording.tokens[recording.start :])
    blocks = (text_id << 32) + np.arange(agrees.shape[-1]) // BLOCK  # a number of its own for each block of each text
    return AgreementScores(agrees.cpu().numpy(), finite.cpu().numpy(), blocks)


def join_scores(parts: Sequence[AgreementScores]) -> AgreementScores:
    return AgreementScores(*(np.concatenate(arrays, axis=-1) for arrays in zip(*parts, strict=True)))


def lead_chance(lead: np.ndarray, block_ids: np.ndarray) -> float:
    """The p-value of a lead: the probability of a sum at least as large if every block's sign were random.

    lead: correct steps at each position minus those of the declared reading, integers [positions]. The p-value is 1 if
    there are too few positions for a verdict. The sign-flip test of paired observations (Fisher 1935, §21), over all
    flips. Blocks of sums 2 and 1 give the sums −3, −1, 1, 3, so a lead of 3 has the p-value 1/4.
    """
    if len(lead) < MIN_BLOCKS * BLOCK:
        return 1.0
    block_sums = np.bincount(np.unique(block_ids, return_inverse=True)[1], weights=lead).astype(int)
    sum_probs = np.ones(1)  # probability of every sum, from the least sum on
    for sum_of_block in np.abs(block_sums[block_sums != 0]):  # it adds −sum or +sum, with probability ½ each
        sum_probs = np.convolve(sum_probs, [0.5, *[0.0] * (2 * sum_of_block - 1), 0.5])
    return float(sum_probs[block_sums.sum() + np.abs(block_sums).sum() :].sum())


def is_better(challenger: AgreementScores, declared: AgreementScores, tried: int = 1) -> tuple[bool, float]:
    """Whether `challenger` agrees more than `declared` by `MARGIN` and significantly, and the p-value.

    tried: the number of readings compared, for Bonferroni's bound on the p-value.
    """
    p_value = min(1.0, tried * lead_chance((challenger.agrees.astype(int) - declared.agrees).sum(0), challenger.blocks))
    return p_value < MAX_P_VALUE and challenger.agreement - declared.agreement >= MARGIN, p_value


def describe_findings(kind: str, findings: Findings) -> Iterator[str]:
    """The findings on one drafter: a line per reading, the declared one first, then facts and the verdict.

    A fact that may explain a bad drafter begins with an exclamation mark.
    """
    yield f"doctor: {kind}, {findings.positions} tokens of {findings.texts} answers of the target"
    if not findings.ways:
        yield "  no token of an answer could be judged: give prompts that the target answers with more"
        return
    readings = [findings.ways[0], *sorted(findings.ways[1:], key=lambda reading: -reading.agreement)]
    name_width = max(len(reading.name) for reading in readings)
    titles_text = "".join(f"{title:>11}" for title in TITLES[: len(readings[0].agree)])
    yield f"  {'read':<{name_width}}{titles_text}{'chance':>9}"
    for reading in readings:
        shares_text = "".join(f"{agreement:>11.1%}" for agreement in reading.agree)
        p_text = "" if reading.chance is None else f"{reading.chance:>9.1g}" if reading.chance < 0.1 else f"{'–':>9}"
        yield f"  {reading.name:<{name_width}}{shares_text}{p_text}"
    for length, agreement in (findings.lengths or {}).items():
        yield f"  at {length} tokens: {agreement:.1%}"
    yield from (f"  {'! ' * fact.suspect}{fact.name}: {fact.said}" for fact in findings.facts)
    yield from _describe_verdict(findings)


def _describe_verdict(findings: Findings) -> Iterator[str]:
    better, declared = findings.better, findings.ways[0]
    if min(declared.finite) < 1:
        yield f"  {1 - min(declared.finite):.1%} of its logits are not finite: its numbers overflow in this dtype"
    if findings.positions < MIN_BLOCKS * BLOCK:
        yield f"  fewer than {MIN_BLOCKS * BLOCK} tokens are too few to call a reading better: give more prompts"
    if better is not None:
        yield f"  {better.name} is better: {better.meaning}"
    elif declared.agree[0] < LOW_SHARE:
        yield "  it seldom agrees, and no other reading is better: look at its target, its data and the template"


def refuse_reading(kind: str, where: str, findings: Findings) -> None:
    """Raise `UserError` if another reading is better and an option selects it."""
    winners = [row for row in findings.ways if row.is_better and row.option]
    if not winners:
        return
    better, declared = max(winners, key=lambda row: row.agreement), findings.ways[0]
    raise UserError(
        f"{kind}={where}: its config.json declares another head than its weights are. Over {findings.positions} tokens "
        f"it agrees with the target at {declared.agreement:.1%} as declared, and at {better.agreement:.1%} with "
        f"{better.option} (by chance with a probability of at most {better.chance:.1g}): {better.meaning}. "
        f"Give {better.option} to read it so, or doctor=false to take it as declared"
    )
