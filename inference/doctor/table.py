"""The doctor's findings as text: a table of readings, other facts, and what to do."""

import os
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from outrider.errors import UserError

Findings = Mapping[str, Any]
BLOCK = 8  # neighbouring places that form one observation, as they are correlated
FEWEST = 16  # observations that a verdict needs, or the number of places in as many full blocks
PLAIN, GOOD, BAD, DOUBTFUL = 0, 32, 31, 33  # ANSI colours
Line = tuple[str, int]
STEPS = ("first", "second")  # of a head's draft
LOW = 0.2  # agreement at the first token below which a drafter hardly pays under any reading


def coloured(lines: list[Line], stream: TextIO) -> str:
    """The lines as text, in colours if `stream` is a terminal and NO_COLOR is not set."""
    plain = not stream.isatty() or "NO_COLOR" in os.environ
    return "\n".join(text if plain or not colour else f"\033[{colour}m{text}\033[0m" for text, colour in lines)


def table(kind: str, found: Findings) -> list[Line]:
    """The findings on one drafter: a line per reading, the declared one first, then the other findings."""
    lines = [(f"doctor: {kind}, {found['places']} tokens of {found['texts']} answers of the target", PLAIN)]
    if found["ways"]:
        declared, *others = found["ways"]
        rows = [declared, *sorted(others, key=lambda row: -row["agreement"])]
        lines += list(_ways(rows, found["better"] is None))
    for name, said, suspect in (fact.values() for fact in found["facts"]):
        lines.append((f"  {name}: {said}", DOUBTFUL if suspect else PLAIN))
    lines += list(_shares(found))
    return [*lines, *verdict(found)]


def _ways(rows: list[Findings], declared_wins: bool) -> Iterator[Line]:
    wide = max(len(row["name"]) for row in rows)
    steps = len(rows[0]["agree"])
    heads = ["1st token", "2nd token"][:steps]
    titles = "".join(f"{head:>11}" for head in heads)
    yield f"  {'read':<{wide}}{titles}{'Σmin(p,q)':>11}{'log q':>8}{'chance':>9}", PLAIN
    for number, row in enumerate(rows):
        shares = "".join(f"{share:>11.1%}" for share in row["agree"])
        chance = "" if row["chance"] is None else f"{row['chance']:>9.4f}" if row["chance"] < 0.1 else f"{'–':>9}"
        text = f"  {row['name']:<{wide}}{shares}{row['accepted'][0]:>11.3f}{row['log_q'][0]:>8.2f}{chance}"
        yield text, BAD if row["wins"] else GOOD if number == 0 and declared_wins else PLAIN


def _shares(found: Findings) -> Iterator[Line]:
    if found["coverage"]:
        shares = dict(found["coverage"])
        every = shares.pop("all")
        parts = ", ".join(f"{name} {share:.1%}" for name, share in sorted(shares.items()))
        yield f"  its tokens are {every:.1%} of what the target said ({parts})", PLAIN
    if found["ways"] and min(found["ways"][0]["finite"]) < 1:
        broken = 1 - min(found["ways"][0]["finite"])
        yield f"  {broken:.1%} of its logits are not finite: its numbers overflow in this dtype", DOUBTFUL
    for name, one in (found.get("templates") or {}).items():
        said = ": it agrees more on such text, as if trained on it" if one["better"] else ""
        yield f"  prompts {name}: {one['agreement']:.1%}{said}", DOUBTFUL if one["better"] else PLAIN
    for length, share in (found.get("lengths") or {}).items():
        yield f"  at {length} tokens: {share:.1%}", PLAIN


def verdict(found: Findings) -> Iterator[Line]:
    """The conclusion, in a line or two."""
    if not found["ways"]:
        yield "  no token of an answer could be judged: give prompts that the target answers with more", DOUBTFUL
        return
    better, declared = found["better"], found["ways"][0]
    if found["places"] < FEWEST * BLOCK:
        yield f"  fewer than {FEWEST * BLOCK} tokens are too few to call a reading better: give more prompts", DOUBTFUL
    if better is not None:
        yield f"  {better['name']} is better: {better['meaning']}", BAD
    elif found["relabelled"] is None and declared["agree"][0] < LOW:
        others = " No other reading is better." if len(found["ways"]) > 1 else ""
        yield f"  it seldom agrees.{others} Look at its target, its data and the template", DOUBTFUL
    if found["relabelled"] is not None:
        said = f"  if its tokens stood for others it would agree at {found['relabelled']:.1%} of the first tokens"
        yield f"{said}: its map of the vocabulary is not the one of its training", BAD


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
