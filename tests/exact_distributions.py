"""The distribution of whatever is decided by chance, exactly: every random branch is run, with rational weights.

The code that runs is the code that ships: it gets numpy arrays of fractions instead of tensors.
"""

import functools
import random
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from outrider.inference.core.tree import ROOT
from outrider.inference.core.verify import Chance, NodeRule, Rows, verify_sampled

Distribution = dict[Hashable, Fraction]
Text = tuple[int, ...]
Model = Callable[[Text], Rows]  # the distribution of the next token
Draft = tuple[list[int], list[int], dict[int, Rows]]  # tokens, parents, q
Drafter = Callable[[Chance], Draft]
Verify = Callable[[Sequence[int], Sequence[int], Mapping[int, Rows], Rows, Chance], tuple[list[int], int]]


@dataclass
class Branch:
    """A `Chance` that follows `script` and then always takes the first possible branch, noting the others."""

    script: tuple[int, ...]
    taken: tuple[int, ...] = ()
    weight: Fraction = Fraction(1)
    others: list[tuple[int, ...]] = field(default_factory=list)

    def accept(self, probability: Fraction) -> bool:
        probability = min(Fraction(1), probability)
        return self._take([1 - probability, probability]) == 1

    def choose(self, weights: Rows) -> int:
        total = sum(weights)
        return self._take([weight / total for weight in weights])

    def _take(self, weights: Sequence[Fraction]) -> int:
        assert all(isinstance(weight, int | Fraction) and weight >= 0 for weight in weights)  # nothing was rounded
        assert sum(weights) == 1
        possible = [branch for branch, weight in enumerate(weights) if weight > 0]
        if len(self.taken) < len(self.script):
            branch = self.script[len(self.taken)]
        else:
            branch, *rest = possible
            self.others += [(*self.taken, other) for other in rest]
        self.taken += (branch,)
        self.weight *= weights[branch]
        return branch


def distribution_of(run: Callable[[Chance], Hashable]) -> Distribution:
    """The probability of every outcome of `run`."""
    found: Counter = Counter()
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        branch = Branch(waiting.pop())
        found[run(branch)] += branch.weight
        waiting += branch.others
    assert sum(found.values()) == 1
    return dict(found)


def distribution(weights: Sequence[int]) -> Rows:
    return np.array([Fraction(weight, sum(weights)) for weight in weights], dtype=object)


def random_model(seed: int, size: int) -> Model:
    """A next-token distribution for every text, some probabilities 0."""

    @functools.cache
    def model(text: Text) -> Rows:
        chance = random.Random(f"{seed} {text}")
        weights = [chance.choice([0, 1, 1, 2, 5]) for _ in range(size)]
        weights[chance.randrange(size)] += 1
        return distribution(weights)

    return model


def paths(tokens: Sequence[int], parents: Sequence[int]) -> list[Text]:
    """The drafted text up to the root () and up to each node."""
    found: list[Text] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*found[parent + 1], token))
    return found


def sampled(q: Model, config: Sequence[int], *, replace: bool, pad: bool = False) -> Drafter:
    """config[0] children of the root drawn from q, config[1] of each of them, …: the k-config trees of MCSD.

    Where the support is exhausted the tree is narrower, or with `pad` the missing children are token 0.
    """

    def draws(chance: Chance, left: Rows, count: int) -> list[int]:
        drawn: list[int] = []
        for _ in range(count):
            if left.sum() == 0 and not pad:
                break
            drawn.append(chance.choose(left) if left.sum() else 0)
            if not replace:
                left = left.copy()
                left[drawn[-1]] = 0
        return drawn

    return _level_by_level(q, config, draws)


def likeliest(q: Model, config: Sequence[int]) -> Drafter:
    """As `sampled`, with the most probable tokens instead of draws."""
    return _level_by_level(q, config, lambda _, row, count: sorted(range(len(row)), key=lambda t: -row[t])[:count])


def _level_by_level(q: Model, config: Sequence[int], choose: Callable[[Chance, Rows, int], list[int]]) -> Drafter:
    """Trees whose nodes of a level have `choose(chance, q there, children wanted)` as their children."""

    def draft(chance: Chance) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        rows: dict[int, Rows] = {}
        level = [ROOT]
        for count in config:
            start = len(tokens)
            for parent in level:
                rows[parent] = q(paths(tokens, parents)[parent + 1])
                tokens += choose(chance, rows[parent], count)
                parents += [parent] * (len(tokens) - len(parents))
            level = list(range(start, len(tokens)))
        return tokens, parents, rows

    return draft


def ships(rule: NodeRule, *, at_once: bool = False) -> Verify:
    return lambda tokens, parents, q, p, chance: verify_sampled(tokens, parents, q, p, rule, chance, at_once=at_once)


def emitted(p: Model, draft: Drafter, verify: Verify, length: int) -> Distribution:
    """The distribution of the first `length` tokens of a round, completed by sampling from p where the round was
    shorter."""

    def run(chance: Chance) -> Text:
        tokens, parents, q = draft(chance)
        contexts = paths(tokens, parents)
        accepted, token = verify(tokens, parents, q, np.stack([p(context) for context in contexts]), chance)
        text = (*(tokens[node] for node in accepted), token)
        assert text[:-1] == (contexts[accepted[-1] + 1] if accepted else ())  # a path from the root
        while len(text) < length:
            text = (*text, chance.choose(p(text)))
        return text[:length]

    return distribution_of(run)


def plain(p: Model, length: int) -> Distribution:
    """The distribution of `length` tokens sampled from p one by one."""
    found: Distribution = {(): Fraction(1)}
    for _ in range(length):
        found = {(*t, x): w * m for t, w in found.items() for x, m in enumerate(p(t)) if m}
    return found


def everywhere(row: Rows) -> Model:
    return lambda _: row
