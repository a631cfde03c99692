"""What recorded drafts say of stop rules: bounds in hindsight, cold starts, a shift of the text, other costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recorded_drafts import Spell, Text, dearer, oracle, replay, said, seconds_by_token, summary

from inference.auto.policy import Tuning
from inference.method_settings import LONGEST_CHAIN, StopConfig
from inference.stopping.factory import make_rule
from outrider.streams import Streams

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 15)  # of fixed drafts
FIXED = "K = "  # before those in a rule's name
RATIOS = (0.02, 0.05, 0.1, 0.2, 0.4)  # a draft step over a pass of one row
TOLD = 64  # tokens of which the time from a cold start is told


@dataclass(frozen=True)
class Rules:
    """Stop rules by name. drawn: the recorded drafts were drawn from q, else they are the likeliest tokens."""

    stops: Mapping[str, StopConfig]
    tuning: Tuning
    drawn: bool

    def replayed(self, name: str, texts: Sequence[Text], *, after: Sequence[Text] = ()) -> list[list[Spell]]:
        """The rounds of a rule on every text. after: the texts that it has been through before, each its own."""
        found = []
        for number, text in enumerate(texts):
            stop, streams = self.stops[name], Streams(0, str(number))
            rule = make_rule(stop, streams, said, self.tuning, default=LONGEST_CHAIN, drawn=self.drawn)
            if after:
                replay(rule, after[number])
            found.append(replay(rule, text))
        return found


def in_hindsight(texts: Sequence[Text], given: Rules) -> dict[str, Any]:
    """What follows from recorded drafts (see compare_stopping.py)."""
    texts = [text for text in texts if text.drafts]
    stops, tuning = given.stops, given.tuning
    costs, names = tuning.costs, sorted({text.category for text in texts})
    runs = {name: given.replayed(name, texts) for name in stops}
    runs["oracle"] = [oracle(text, costs) for text in texts]
    groups = {name: [i for i, text in enumerate(texts) if text.category == name] for name in names}
    rules = {}
    for name, rounds in runs.items():
        rules[name] = summary(rounds, costs)
        rules[name]["by_category"] = {
            c: summary([rounds[i] for i in which], costs)["rate"] for c, which in groups.items()
        }
        rules[name]["seconds_by_token"] = mean_seconds(rounds, tuning)
    best = {c: max(rules[f"{FIXED}{k}"]["by_category"][c] for k in LENGTHS) for c in names}
    for rule in rules.values():
        rule["over_hindsight"] = {c: rule["by_category"][c] / best[c] for c in names}
    return {
        "texts": len(texts),
        "positions": sum(len(text.drafts) for text in texts),
        "costs": costs.summary(),
        "rules": rules,
        "shift": shifted(texts, given),
        "by_cost": {str(ratio): by_cost(texts, given, ratio) for ratio in RATIOS},
    }


def mean_seconds(rounds: Sequence[Sequence[Spell]], tuning: Tuning) -> list[float]:
    """When each of the first tokens of a text is there, on average over texts."""
    told = [seconds_by_token(spells, tuning.costs, TOLD) for spells in rounds]
    return [sum(column) / len(told) for column in zip(*told, strict=True)]


def by_cost(texts: Sequence[Text], given: Rules, ratio: float) -> dict[str, dict[str, float]]:
    """`summary` of every rule where a draft step takes `ratio` of a pass over one row."""
    costs = dearer(given.tuning.costs, ratio)
    other = replace(given, tuning=replace(given.tuning, costs=costs))
    found = {name: summary(other.replayed(name, texts), costs) for name in other.stops}
    return {**found, "oracle": summary([oracle(text, costs) for text in texts], costs)}


def shifted(texts: Sequence[Text], given: Rules) -> dict[str, dict[str, float]]:
    """Tokens per second on texts right after one of another category, over those with a fresh rule."""
    others = []
    for number, text in enumerate(texts):
        rest = [*texts[number + 1 :], *texts[:number]]
        others.append(next((other for other in rest if other.category != text.category), None))
    pairs = [(text, other) for text, other in zip(texts, others, strict=True) if other is not None]
    if not pairs:
        return {}
    second, first = zip(*pairs, strict=True)
    found = {}
    costs = given.tuning.costs
    for name in given.stops:
        fresh = summary(given.replayed(name, second), costs)["rate"]
        carried = summary(given.replayed(name, second, after=first), costs)["rate"]
        found[name] = {"fresh": fresh, "carried": carried}
    return found
