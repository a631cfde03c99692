"""The methods that a serving engine can run, and with what draft length; light, as all settings are."""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from inference.settings.kinds import KINDS, NGRAMS
from inference.settings.method import AUTO, MethodConfig, NgramConfig

Engine = Literal["vllm", "openvino", "transformers"]
MODULES: Mapping[str, str] = {"vllm": "vllm", "openvino": "openvino_genai", "transformers": "transformers"}
# How an engine that does not draft in all ways of vLLM can, in vLLM's words for its methods (see `Kind.served`).
DRAFTS: Mapping[str, Collection[str]] = dict.fromkeys(("openvino", "transformers"), ("draft_model", "ngram"))
_SERVED_NGRAMS = NgramConfig(evidence="mixed", depth=1, nodes=1)  # by `NgramProposer`, which drafts chains of any depth


def why_not(engine: str, method: MethodConfig) -> str | None:
    """Why `engine` cannot run `method`; None if it can. A server by its URL may be any engine."""
    kind = KINDS[method.source]
    if kind.served is None or kind.served not in DRAFTS.get(engine, (kind.served,)):
        return f"it does not draft by {method.source}"
    if method.verify != "exact":
        return "it verifies exactly"
    if kind.shaped and (method.structure.kind != "chain" or method.stop.rule != "fixed"):
        return "it drafts chains of fixed length"
    if method.stop.max_draft == AUTO:
        return "the length of drafts is auto; draft_tokens says it"
    if method.source == NGRAMS.name and replace(method.ngrams, depth=1, nodes=1) != _SERVED_NGRAMS:
        return "n-grams are served with ngrams.evidence=mixed and no other option of them but depth"
    return None


def draft_length(method: MethodConfig) -> int:
    """The tokens of a draft of a method that an engine can run."""
    return method.stop.longest() if _has_stop(method) else method.ngrams.depth


def with_lengths(engine: str, methods: Mapping[str, MethodConfig], lengths: Sequence[int]) -> dict[str, MethodConfig]:
    """`methods`, of which those that `engine` can run come once for each of `lengths`, as NAME_kLENGTH."""
    found: dict[str, MethodConfig] = {}
    for name, method in methods.items():
        runs = why_not(engine, _with_length(method, 1)) is None
        variants = {f"{name}_k{count}": _with_length(method, count) for count in lengths if runs}
        found |= variants or {name: method}
    return found


def _with_length(method: MethodConfig, count: int) -> MethodConfig:
    if _has_stop(method):
        return replace(method, stop=replace(method.stop, max_draft=count))
    return replace(method, ngrams=replace(method.ngrams, depth=count))


def _has_stop(method: MethodConfig) -> bool:
    kind = KINDS[method.source]
    return kind.shaped or "stop.max_draft" in kind.own


def python_in(place: str | None) -> str:
    """The Python of the environment in the directory `place`, or `place` itself; None: the one that is running."""
    if place is None:
        return sys.executable
    return str(Path(place, "bin", "python").absolute()) if Path(place).is_dir() else place
