"""Recordings of the target, a drafter's agreement with them, tests whether another reading is better, and the table."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.base.errors import UserError
from outrider.draft_models.acceptance import acceptance
from outrider.draft_models.targets.target import Target
from outrider.inference.core.decode import autoregressive
from outrider.inference.core.target_session import Runtime
from outrider.inference.core.tree import chain_parents

FIRST = 3  # the first place of a text that a head can draft as its second token
BLOCK = 8  # neighbouring places that form one observation, as they are correlated
FEWEST = 16  # observations that a verdict needs, or the number of places in as many full blocks
FLIPS = 50_000
CHANCE = 1e-3  # significance level: with a larger p-value no reading is called better
UNSAID = -50.0  # lower bound on log-probabilities, which are −∞ for tokens outside the draft vocabulary
MARGIN = 0.02  # in agreement; a smaller lead does not justify another reading
LOW = 0.2  # agreement at the first token below which a drafter hardly pays under any reading
STEPS = ("first", "second")  # of a head's draft
Findings = Mapping[str, Any]


@dataclass(frozen=True)
class Recording:
    """A prompt and the target's answer to it, read once by the target.

    tokens: the whole text [n], on the target's device. places: the judged positions of the answer. log_p [places, V]
    and choices [places]: the target's log-probabilities and most likely tokens there. aux_hidden: the target's hidden
    states [1, n, d] by layer boundary (see `LayerStack.run_with_aux`). category: of the prompt.
    """

    tokens: Tensor
    places: tuple[int, ...]
    log_p: Tensor
    choices: Tensor
    aux_hidden: dict[int, Tensor]
    category: str


@torch.inference_mode()
def record(
    target: Target,
    prompt: Sequence[int],
    answer: Sequence[int],
    boundaries: Sequence[int],
    category: str = "",
) -> Recording | None:
    """One pass of the target over a text; None if no position of the answer can be judged.

    boundaries: layer boundaries to record, for a target that runs layer by layer. The answer's first token is never
    drafted, so it is not among the places.
    """
    text = [*prompt, *answer]
    places = tuple(range(max(len(prompt) + 1, FIRST), len(text)))
    if not places:
        return None
    logits, aux_hidden = read(target, text, len(prompt), boundaries)
    logits = logits[[place - 1 - len(prompt) for place in places]]
    # Logits computed in half precision are normalised in float32.
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    tokens = torch.tensor(text, device=target.device)
    return Recording(tokens, places, log_p, log_p.argmax(-1), aux_hidden, category)


@torch.inference_mode()
def read(
    target: Target, text: Sequence[int], start: int, boundaries: Sequence[int] = ()
) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits [n − start, V] after the tokens from position `start` on, and all hidden states [1, n, d] by boundary."""
    session = Runtime().session(target, 0, len(text))
    session.aux_layers = tuple(boundaries)
    tokens, parts = torch.tensor(text, device=target.device), []
    for begin, end in ((0, start), (start, len(text))):
        rows = range(end - begin)
        session.feed(tokens[begin:end], chain_parents(0, len(rows)))
        logits = session.finish(last_only=begin == 0)
        if boundaries:
            parts.append(session.aux_hidden(rows))
        session.commit(rows)
    if not boundaries:
        return logits, {}
    aux_hidden = torch.cat(parts, dim=1).chunk(len(boundaries), dim=-1)
    return logits, dict(zip(boundaries, aux_hidden, strict=True))


def answer_of(target: Target, prompt: Sequence[int], count: int, eos: frozenset[int]) -> list[int]:
    """The target's greedy answer to `prompt`, up to `count` tokens."""
    rounds = autoregressive(target, prompt, max_new_tokens=count, eos=eos)
    return [token for one in rounds for token in one.tokens]


@dataclass(frozen=True)
class Scores:
    """Figures at all judged places of all texts, [steps, places] each; blocks [places].

    agree: whether the drafter's most likely token is the target's. accepted: Σ min(p, q). log_q: of the target's most
    likely token. finite: whether all logits are finite. blocks: the observation that each place belongs to.
    """

    agree: np.ndarray
    accepted: np.ndarray
    log_q: np.ndarray
    finite: np.ndarray
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


def table(kind: str, found: Findings) -> list[str]:
    """The findings on one drafter: a line per reading, the declared one first, then the other findings.

    A fact that may explain a bad drafter begins with an exclamation mark.
    """
    lines = [f"doctor: {kind}, {found['places']} tokens of {found['texts']} answers of the target"]
    if found["ways"]:
        declared, *others = found["ways"]
        rows = [declared, *sorted(others, key=lambda row: -row["agreement"])]
        lines += _ways(rows)
    lines += [f"  {'! ' * fact['suspect']}{fact['name']}: {fact['said']}" for fact in found["facts"]]
    return [*lines, *_shares(found), *verdict(found)]


def _ways(rows: Sequence[Findings]) -> Iterator[str]:
    wide = max(len(row["name"]) for row in rows)
    titles = "".join(f"{head:>11}" for head in ("1st token", "2nd token")[: len(rows[0]["agree"])])
    yield f"  {'read':<{wide}}{titles}{'Σmin(p,q)':>11}{'log q':>8}{'chance':>9}"
    for row in rows:
        shares = "".join(f"{share:>11.1%}" for share in row["agree"])
        chance = "" if row["chance"] is None else f"{row['chance']:>9.4f}" if row["chance"] < 0.1 else f"{'–':>9}"
        yield f"  {row['name']:<{wide}}{shares}{row['accepted'][0]:>11.3f}{row['log_q'][0]:>8.2f}{chance}"


def _shares(found: Findings) -> Iterator[str]:
    if found["coverage"]:
        shares = dict(found["coverage"])
        every = shares.pop("all")
        parts = ", ".join(f"{name} {share:.1%}" for name, share in sorted(shares.items()))
        yield f"  its tokens are {every:.1%} of what the target said ({parts})"
    if found["ways"] and min(found["ways"][0]["finite"]) < 1:
        broken = 1 - min(found["ways"][0]["finite"])
        yield f"  {broken:.1%} of its logits are not finite: its numbers overflow in this dtype"
    for length, share in (found.get("lengths") or {}).items():
        yield f"  at {length} tokens: {share:.1%}"


def verdict(found: Findings) -> Iterator[str]:
    """The conclusion, in a line or two."""
    if not found["ways"]:
        yield "  no token of an answer could be judged: give prompts that the target answers with more"
        return
    better, declared = found["better"], found["ways"][0]
    if found["places"] < FEWEST * BLOCK:
        yield f"  fewer than {FEWEST * BLOCK} tokens are too few to call a reading better: give more prompts"
    if better is not None:
        yield f"  {better['name']} is better: {better['meaning']}"
    elif declared["agree"][0] < LOW:
        others = " No other reading is better." if len(found["ways"]) > 1 else ""
        yield f"  it seldom agrees.{others} Look at its target, its data and the template"


def refuse(kind: str, where: str, found: Findings) -> None:
    """Raise `UserError` if another reading is better and an option selects it."""
    had = [row for row in found["ways"] if row["wins"] and row["option"]]
    if not had:
        return
    better = max(had, key=lambda row: row["agreement"])
    declared = found["ways"][0]
    raise UserError(
        f"{kind}={where}: its config.json declares another head than its weights are. Over {found['places']} tokens it "
        f"agrees with the target at {_both(declared)} as declared, and at {_both(better)} with {better['name']} "
        f"(by chance with a probability of at most {better['chance']:.1g}): {better['meaning']}. "
        f"Give {better['option']} to read it so, or doctor=false to take it as declared"
    )


def _both(row: Findings) -> str:
    return " and ".join(f"{share:.1%} of {one} tokens" for share, one in zip(row["agree"], STEPS, strict=True))
