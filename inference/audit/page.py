"""report.md of an audit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from inference.audit.draws import LARGER, MOST
from outrider.tables import Table

SHOWN = 10  # tokens of a sort


class Token(NamedTuple):
    """A token of an answer by its line and its position there, the likeliest one in its place, and what it is off by.

    A greedy one is off by so many rounding errors of logits below the best; of a sampled one that p allows, it is the
    probability of one as unlikely.
    """

    line: int
    position: int
    token: int
    likeliest: int
    off: float


@dataclass(frozen=True)
class Finding:
    """The judgement of a file. faults: in words; at: the tokens that are faults; numbers: what says so."""

    faults: tuple[str, ...]
    at: tuple[Token, ...]
    numbers: Mapping[str, float | None]
    oddest: tuple[Token, ...]
    unlikeliest: tuple[Token, ...]

    @property
    def verdict(self) -> str:
        """It in a line."""
        if self.at:
            places = ", ".join(f"{token.line}:{token.position}" for token in self.at[:SHOWN])
            return f"{len(self.at)} tokens are faults: {places}{', …' * (len(self.at) > SHOWN)} (line:position)"
        return "a fault over all tokens, at none alone" if self.faults else "only rounding"


def markdown(
    question: str, arms: Mapping[str, Finding], needed: Mapping[str, int | None], tokenizer: PreTrainedTokenizerBase
) -> str:
    """The page on the findings by arm; needed: by fault, how many sampled tokens show it."""

    def named(token: int) -> str:
        return f"{token} {tokenizer.decode([token])!r}".replace("|", "\\|")

    answers = arms["answers"]
    rows = [[key.replace("_", " "), *(_said(arm.numbers.get(key)) for arm in arms.values())] for key in answers.numbers]
    odd = [
        [name, str(token.line), str(token.position), named(token.token), named(token.likeliest), unit.format(token.off)]
        for name, arm in arms.items()
        for tokens, unit in ((arm.oddest, "{:.1f} rounding errors"), (arm.unlikeliest, "a chance of {:.1g}"))
        for token in tokens
    ]
    tried = min(MOST, LARGER * int(answers.numbers["sampled_tokens"] or 0))
    power = [[fault, f"more than {tried:,}" if count is None else f"{count:,}"] for fault, count in needed.items()]
    tables = (
        ("Numbers", ("", *arms), rows),
        ("The oddest tokens", ("arm", "line", "position", "token", "likeliest", "off by"), odd),
        ("How many sampled tokens show a fault", ("fault", "tokens"), power),
    )
    if again := answers.numbers["retokenised"]:
        question += f" {again} answers came as text and were tokenised again: their tokens may not be those decoded."
    faults = [f"- {name}: {fault}" for name, arm in arms.items() for fault in arm.faults]
    lines = [f"# Audit: {answers.verdict}", "", question, "", *faults]
    for title, columns, content in tables:
        lines += ["", f"## {title}", "", *Table(dict.fromkeys(columns, ""), content).markdown()] if content else []
    return "\n".join(lines) + "\n"


def _said(value: float | None) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.2g}"
