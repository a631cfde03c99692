"""Drafts recorded at every position of a text, and what any stop rule would have made of them.

Under greedy decoding neither the text nor what a drafter proposes after it depends on how long earlier drafts were. So
a draft of the longest length from every position says exactly what rounds any rule would have had, at any costs, and
what the best lengths in hindsight were. Of a sampled text it says the same of the drafts that were drawn, which a rule
would have drawn anew: there it is an estimate.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from draft_models.calibration.head import CalibrationHead, log_odds
from inference.acceptance import Chooser
from inference.auto.costs import Costs
from inference.drafters.shaped import Shaped
from inference.method_settings import LONGEST_CHAIN
from inference.stopping.calibrated import ask
from inference.stopping.interface import Step, StopRule
from inference.structures.factory import Chain
from inference.tree import DraftTree
from outrider.files import write_json


@dataclass(frozen=True)
class Draft:
    """The longest draft from one position: how many of its tokens are accepted, and of every token log q, the entropy
    of q in nats, and what the calibration head says, a logit (0 without one)."""

    accepted: int
    log_q: tuple[float, ...]
    entropy: tuple[float, ...]
    head: tuple[float, ...]


@dataclass(frozen=True)
class Text:
    """A generation, its drafts position by position."""

    prompt_id: str
    category: str
    drafts: tuple[Draft, ...]


@dataclass(frozen=True)
class Spell:
    """A round of a rule on a recorded text."""

    start: int  # position
    drafted: int
    accepted: int


class OneByOne(Chooser):
    """Verifies a draft like `like`, notes how much of it was accepted, and commits one token only."""

    def __init__(self, like: Chooser):
        self.__dict__.update(like.__dict__)
        self.accepted = 0

    def verify(self, tree: DraftTree, logits: Tensor) -> tuple[list[int], list[int], Tensor, int]:
        before = self.text if self.reads_context else None
        tokens, nodes, following, bonus = super().verify(tree, logits)
        self.accepted = len(nodes)
        if nodes:
            bonus, following = tokens[nodes[0]], tree.tokens[nodes[0] : nodes[0] + 1]
        if before is not None:
            self.text = torch.cat([before, following])
        return tokens, [], following, bonus


@dataclass
class Recorder:
    """A stop rule that never stops early and keeps what rules look at."""

    chooser: OneByOne
    head: CalibrationHead | None
    max_draft: int = LONGEST_CHAIN
    drafts: list[Draft] = field(default_factory=list)
    _steps: list[tuple[float, float, float]] = field(default_factory=list)

    def stop(self, step: Step) -> bool:
        said = ask(self.head, step) if self.head is not None else 0.0
        self._steps.append((float(step.log_probability), float(step.entropy), said))
        return step.drafted >= self.max_draft

    def observe(self, drafted: int, accepted: int) -> None:
        log_q, entropy, head = zip(*self._steps, strict=True) if self._steps else ((), (), ())
        self.drafts.append(Draft(self.chooser.accepted if drafted else 0, log_q, entropy, head))
        self._steps.clear()


def record(
    rounds: Callable[[Shaped, Chooser], Iterator[Any]], drafter: Shaped, chooser: Chooser, head: CalibrationHead | None
) -> tuple[Draft, ...]:
    """The drafts at every position of the text that `rounds` (of `speculative`) decodes."""
    watching = OneByOne(chooser)
    recorder = Recorder(watching, head)
    structure = drafter.structure
    assert isinstance(structure, Chain)
    for _ in rounds(Shaped(drafter.model, Chain(recorder, structure.generator)), watching):
        pass
    return tuple(recorder.drafts)


def save_text(path: Path, text: Text) -> None:
    write_json(path, asdict(text))


def read_text(path: Path) -> Text:
    found = json.loads(path.read_text())
    drafts = [Draft(d["accepted"], *(tuple(d[name]) for name in ("log_q", "entropy", "head"))) for d in found["drafts"]]
    return Text(found["prompt_id"], found["category"], tuple(drafts))


# --- rules on recorded texts -----------------------------------------------------------------------------------------


def said(_: Any, hidden: Any, *__: Any) -> Any:
    """The calibration head in the steps of `steps_of`: what it said is where its input would be."""
    return hidden


def steps_of(draft: Draft) -> list[Any]:
    """What a rule is asked, token by token."""
    return [
        SimpleNamespace(
            drafted=i, log_probability=log_q, log_odds=log_odds(torch.tensor(log_q)), entropy=entropy,
            hidden=torch.tensor(head), source=SimpleNamespace(target_hidden=None), token=None, logits=None,
        )
        for i, (log_q, entropy, head) in enumerate(zip(draft.log_q, draft.entropy, draft.head, strict=True), 1)
    ]  # fmt: skip


def replay(rule: StopRule, text: Text) -> list[Spell]:
    """The rounds that `rule` would have had."""
    spells, position = [], 0
    while position < len(text.drafts):
        draft = text.drafts[position]
        steps = steps_of(draft)[: rule.max_draft]
        drafted = next((s.drafted for s in steps if rule.stop(s)), len(steps))
        accepted = min(draft.accepted, drafted)
        rule.observe(drafted, accepted)
        spells.append(Spell(position, drafted, accepted))
        position += accepted + 1
    return spells


def seconds_of(drafted: int, costs: Costs) -> float:
    """What a round takes."""
    return drafted * costs.step[1] + costs.verify[drafted + 1] + costs.rest


def oracle(text: Text, costs: Costs) -> list[Spell]:
    """The rounds that take the least time together: the shortest way through the text."""
    left = [0.0] * (len(text.drafts) + LONGEST_CHAIN + 2)  # seconds from a position on
    choices = [0] * len(text.drafts)
    for position in range(len(text.drafts) - 1, -1, -1):
        draft = text.drafts[position]
        lengths = range(min(1, len(draft.log_q)), max(draft.accepted, min(1, len(draft.log_q))) + 1)

        def total(d: int, position: int = position, draft: Draft = draft) -> float:
            return seconds_of(d, costs) + left[position + min(d, draft.accepted) + 1]

        choices[position] = min(lengths, key=total)
        left[position] = total(choices[position])
    spells, position = [], 0
    while position < len(choices):
        drafted = choices[position]
        spells.append(Spell(position, drafted, min(drafted, text.drafts[position].accepted)))
        position += spells[-1].accepted + 1
    return spells


def dearer(costs: Costs, ratio: float) -> Costs:
    """The same with draft steps that take `ratio` of a pass over one row."""
    return Costs((ratio * costs.verify[1],) * len(costs.step), costs.verify, costs.rest, costs.plain)


def summary(rounds: Sequence[Sequence[Spell]], costs: Costs) -> dict[str, float]:
    """τ, drafted and wasted tokens a round, and tokens per second by `costs`. rounds: of every text."""
    spells = [spell for each in rounds for spell in each]
    emitted = sum(spell.accepted + 1 for spell in spells)
    return {
        "tau": emitted / len(spells),
        "drafted": sum(spell.drafted for spell in spells) / len(spells),
        "wasted": sum(spell.drafted - spell.accepted for spell in spells) / len(spells),
        "rate": emitted / sum(seconds_of(spell.drafted, costs) for spell in spells),
    }


def seconds_by_token(spells: Sequence[Spell], costs: Costs, tokens: int) -> list[float]:
    """When each of the first `tokens` tokens is there, from the start; the last known one stands for later ones."""
    found: list[float] = []
    spent = 0.0
    for spell in spells:
        spent += seconds_of(spell.drafted, costs)
        found += [spent] * (spell.accepted + 1)
    return [*found, *[found[-1]] * tokens][:tokens]
