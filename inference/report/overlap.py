"""Contamination: whether prompts occur in a drafter's training text, which makes its figures unrepresentative."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from data_prep.text.prompts import Prompt
from data_prep.text.settings import DataConfig
from data_prep.text.sources import read_records
from inference.report.drafter_facts import drafter_folders
from inference.settings.evaluate import EvaluateConfig
from inference.settings.kinds import KINDS
from outrider.errors import UserError
from outrider.settings import construct

RUN = 8  # consecutive words; a run this long rarely occurs twice by chance
CHARACTERS = 8_000_000  # limit on the training text searched, for a search of seconds

Run = tuple[str, ...]


def overlaps(config: EvaluateConfig, prompts: Sequence[Prompt]) -> dict[str, dict[str, Any]]:
    """By kind of drafter: the overlap of prompts and training text, or `why` it is unknown."""
    found: dict[str, dict[str, Any]] = {}
    read: dict[str, dict[str, Any]] = {}
    for name, where in drafter_folders(config).items():
        data = config.plugin(KINDS[name]).data_of(where)
        key = json.dumps(data, sort_keys=True)  # drafters of the same target often share their training text
        read[key] = read.get(key) or overlap(data, prompts)
        found[name] = read[key]
    return found


def overlap(data: Mapping[str, Any] | None, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The overlap of `prompts` with the training text that the settings `data` name, as it exists now.

    runs, runs_seen: distinct runs of `RUN` words in the prompts, and how many of them occur in the text. prompts_seen:
    prompts with at least one such run. characters: the length of the text searched; whole: whether that was all of it.
    Nothing is downloaded. If the text is not on this machine, `why` says so.
    """
    if data is None:
        return {"why": "there is no record of what it learned from"}
    try:
        config: DataConfig = construct(DataConfig, data)
        sources = {config.source} if config.source != "mix" else {part.source for _, _, part in config.parts()}
        if "hub" in sources:
            return {"why": "its training text lies on the Hub, and nothing is fetched for this"}
        asked = [{run for turn in prompt.turns for run in runs(turn)} for prompt in prompts]
        seen, characters, whole = _seen(set().union(*asked), config)
    except UserError as error:
        return {"why": f"its training text cannot be read here ({error})"}
    return {
        "prompts": len(prompts),
        "prompts_seen": sum(not seen.isdisjoint(own) for own in asked),
        "runs": len(set().union(*asked)),
        "runs_seen": len(seen),
        "characters": characters,
        "whole": whole,
    }


def runs(text: str) -> list[Run]:
    """All runs of `RUN` words, separated by whitespace, in a text."""
    words = text.split()
    return list(zip(*(words[start:] for start in range(RUN)), strict=False))


def _seen(asked: set[Run], config: DataConfig) -> tuple[set[Run], int, bool]:
    seen: set[Run] = set()
    characters = 0
    for record in read_records(config, "train"):
        texts = [record["text"]] if "text" in record else [message["content"] for message in record["messages"]]
        for text in texts:
            seen |= asked.intersection(runs(text))
            characters += len(text)
        if characters >= CHARACTERS:
            return seen, characters, False
    return seen, characters, True


def overlap_sentence(kind: str, found: Mapping[str, Any]) -> str:
    """The overlap as a sentence."""
    if "why" in found:
        return f"{kind}: whether it has seen the prompts is not known: {found['why']}."
    read = "all of its training text" if found["whole"] else f"the first {found['characters'] / 1e6:.0f} M characters"
    share = found["runs_seen"] / found["runs"] if found["runs"] else 0.0
    return (
        f"{kind}: {found['prompts_seen']} of {found['prompts']} prompts share a run of {RUN} words with {read}, "
        f"{share:.1%} of all their runs."
    )
