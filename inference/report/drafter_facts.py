"""A report's facts about drafters: their draft vocabularies and training times."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from inference.doctor.scores import table
from inference.measure.results import PromptResult
from inference.measure.statistics import coverage
from inference.report.wording import Report
from inference.settings.evaluate import EvaluateConfig
from inference.settings.kinds import KINDS
from outrider.words import in_words


def draft_vocabularies(config: EvaluateConfig, results: Sequence[PromptResult]) -> dict[str, dict[str, Any]]:
    """For each kind of drafter with a draft vocabulary: its size, and its coverage of the target's own text, overall
    and by category."""
    found = {}
    for name, where in drafter_folders(config).items():
        tokens = config.plugin(KINDS[name]).known_tokens(where)
        if tokens is not None:
            shares = coverage(tokens, ((result.category, result.answer) for result in results))
            found[name] = {"tokens": len(tokens), "coverage": shares}
    return found


def trained_seconds(config: EvaluateConfig) -> dict[str, float]:
    """Seconds of training by kind of drafter, where recorded."""
    found = {name: KINDS[name].load_plugin().trained_seconds(where) for name, where in drafter_folders(config).items()}
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def digests(settings: Report) -> dict[str, str]:
    """Digests of the target and the drafters, from the settings that identify a run (see `run_settings`)."""
    target = settings["target"]
    found = {"target": target["weights"], "tokenizer": target["tokenizer"], "chat template": target["chat_template"]}
    for kind in KINDS.values():
        found |= {f"{kind.name} {name}": settings[name] for name in kind.load_plugin().identity(None)}
    return {
        name: value
        if isinstance(value, str)
        else hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
        for name, value in found.items()
        if value is not None
    }


def drafter_folders(config: EvaluateConfig) -> dict[str, str]:
    """The path of each kind's model."""
    return {kind.name: where for kind in KINDS.values() if (where := config.where(kind)) is not None}


def drafter_lines(report: Report) -> list[str]:
    """These facts as Markdown."""
    lines = [vocabulary_sentence(kind, known) for kind, known in report.get("draft_vocabularies", {}).items()]
    if trained := report.get("trained_seconds"):
        said = ", ".join(f"{kind} {in_words(seconds)}" for kind, seconds in trained.items())
        lines += ["", f"Trained, evaluations on the way included: {said}."]
    for kind, found in report.get("doctor", {}).items():
        lines += ["", "```", *table(kind, found), "```"]
    return lines


def vocabulary_sentence(kind: str, known: Report) -> str:
    """The size of a draft vocabulary and its coverage of the target's text, as a sentence."""
    shares = dict(known["coverage"])
    every = shares.pop("all")
    parts = ", ".join(f"{category} {share:.1%}" for category, share in sorted(shares.items()))
    return f"{kind} predicts over {known['tokens']} tokens: {every:.1%} of what the target said ({parts})."
