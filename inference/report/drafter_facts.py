"""What a report says of the drafters themselves: the vocabulary they know, the time they trained."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from inference.doctor.table import table
from inference.measure.results import PromptResult
from inference.measure.statistics import coverage
from inference.settings.evaluate import EvaluateConfig
from inference.settings.kinds import KINDS
from outrider.words import in_words


def draft_vocabularies(config: EvaluateConfig, results: Sequence[PromptResult]) -> dict[str, dict[str, Any]]:
    """Of each kind of drafter that predicts over some tokens only: how many, and which share of the target's own text
    consists of them, in all and by category."""
    found = {}
    for name, where in drafter_folders(config).items():
        tokens = config.maker(KINDS[name]).known_tokens(where)
        if tokens is not None:
            shares = coverage(tokens, ((result.category, result.answer) for result in results))
            found[name] = {"tokens": len(tokens), "coverage": shares}
    return found


def trained_seconds(config: EvaluateConfig) -> dict[str, float]:
    """How long each drafter trained, by its kind; those that do not say are left out."""
    found = {name: KINDS[name].load_maker().trained_seconds(where) for name, where in drafter_folders(config).items()}
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def digests(settings: Mapping[str, Any]) -> dict[str, str]:
    """What the target and the drafters are known by, from the settings that decide a run (see `run_settings`)."""
    target = settings["target"]
    found = {"target": target["weights"], "tokenizer": target["tokenizer"], "chat template": target["chat_template"]}
    for kind in KINDS.values():
        found |= {f"{kind.name} {name}": settings[name] for name in kind.load_maker().identity(None)}
    return {
        name: value
        if isinstance(value, str)
        else hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
        for name, value in found.items()
        if value is not None
    }


def drafter_folders(config: EvaluateConfig) -> dict[str, str]:
    """Where the model of each kind lies, by its kind."""
    return {kind.name: where for kind in KINDS.values() if (where := config.where(kind)) is not None}


def drafter_lines(report: Mapping[str, Any]) -> list[str]:
    """The same for people, as Markdown."""
    lines = [vocabulary_sentence(kind, known) for kind, known in report.get("draft_vocabularies", {}).items()]
    if trained := report.get("trained_seconds"):
        said = ", ".join(f"{kind} {in_words(seconds)}" for kind, seconds in trained.items())
        lines += ["", f"Trained, evaluations on the way included: {said}."]
    for kind, found in report.get("doctor", {}).items():
        lines += ["", "```", *(text for text, _ in table(kind, found)), "```"]
    return lines


def vocabulary_sentence(kind: str, known: Mapping[str, Any]) -> str:
    """Over which part of the vocabulary a drafter predicts, and what that is of the target's text."""
    shares = dict(known["coverage"])
    every = shares.pop("all")
    parts = ", ".join(f"{category} {share:.1%}" for category, share in sorted(shares.items()))
    return f"{kind} predicts over {known['tokens']} tokens: {every:.1%} of what the target said ({parts})."
