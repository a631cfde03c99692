"""Settings of measure-engine, which methods a serving engine can run (`refusal_of`), and their draft lengths.

A method is a drafter with its settings. A `Kind` describes a kind of drafters, which is the `source` of a method.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, get_args

from outrider.base.errors import require
from outrider.base.settings import Count, Url, free, only, require_defaults
from outrider.base.words import SECRET_NAME
from outrider.draft_models.targets.settings import EnginePython
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kinds import KINDS, NGRAMS
from outrider.inference.settings.method import AUTO, MethodConfig, NgramConfig

Engine = Literal["vllm", "openvino", "transformers"]
MODULES: Mapping[str, str] = {"vllm": "vllm", "openvino": "openvino_genai", "transformers": "transformers"}
# The ways of drafting of engines that have fewer ways than vLLM, by vLLM's names (see `Kind.vllm_method`).
DRAFTS: Mapping[str, Collection[str]] = dict.fromkeys(("openvino", "transformers"), ("draft_model", "ngram"))
_SERVED_NGRAMS = NgramConfig(evidence="mixed", depth=1, nodes=1)  # by `NgramProposer`, which drafts chains of any depth


def refusal_of(engine: str, method: MethodConfig) -> str | None:
    """Why `engine` cannot run `method`; None if it can. A server (`engine` is its URL) may be any engine."""
    kind = KINDS[method.source]
    if kind.vllm_method is None or kind.vllm_method not in DRAFTS.get(engine, (kind.vllm_method,)):
        return f"it does not draft by {method.source}"
    if method.verify not in (AUTO, "exact"):
        return "it verifies exactly, token by token"
    if method.copy is not None:
        return "it drafts by a model or from the text (methods.NAME.copy), not by both"
    if kind.shaped and (method.structure.kind != "chain" or method.stop.rule != "fixed"):
        return "it drafts chains of fixed length"
    if method.stop.max_draft == AUTO:
        return "the length of drafts is auto; draft_tokens says it"
    if method.source == NGRAMS.name and replace(method.ngrams, depth=1, nodes=1) != _SERVED_NGRAMS:
        return "n-grams are served with ngrams.evidence=mixed and no other option of them but depth"
    return None


def draft_length(method: MethodConfig) -> int:
    """The tokens of a draft of a method that an engine can run: of n-grams the depth, of others the stop rule's."""
    return method.stop.longest() if KINDS[method.source].has_stop else method.ngrams.depth


def with_lengths(engine: str, methods: Mapping[str, MethodConfig], lengths: Sequence[int]) -> dict[str, MethodConfig]:
    """`methods`. Each one that `engine` can run is repeated for each of `lengths`, as NAME_kLENGTH."""
    by_name: dict[str, MethodConfig] = {}
    for name, method in methods.items():
        runs = refusal_of(engine, _with_length(method, 1)) is None  # any length does: its own may be auto
        by_name |= {f"{name}_k{length}": _with_length(method, length) for length in lengths if runs} or {name: method}
    return by_name


def _with_length(method: MethodConfig, length: int) -> MethodConfig:
    """`method` with drafts of `length` tokens."""
    if KINDS[method.source].has_stop:
        return replace(method, stop=replace(method.stop, max_draft=length))
    return replace(method, ngrams=replace(method.ngrams, depth=length))


def python_in(path: str | None) -> str:
    """The Python of the environment in the directory `path`, or `path` itself; None: the one that is running."""
    if path is None:
        return sys.executable
    return str(Path(path, "bin", "python").absolute()) if Path(path).is_dir() else path


_SERVED = only(engine=get_args(Engine))


@dataclass(frozen=True, kw_only=True)
class EngineConfig(EvaluateConfig):
    """measure-engine: evaluate-checkpoint, and the same methods in a serving engine that can run them."""

    engine: Engine | Url = free()
    """the engine (docs/deploy.md): it runs without a drafter, then with each; or the URL of a running OpenAI-compatible
    server that has the drafter and draft length of one method"""
    engine_plain: Url | None = free(None)
    """with engine=URL: the same server without a drafter; null: no speed-up is reported"""
    server_model: str | None = free(None, "with engine=URL: the target's name there; null: the first one that it lists")
    engine_python: Annotated[EnginePython | None, _SERVED] = free(None)
    """directory of the engine's environment, or its Python; null: the one that runs this"""
    engine_options: Annotated[dict[str, object], _SERVED] = free(factory=dict)
    """of the engine itself, as +engine_options.NAME=VALUE"""
    concurrency: tuple[Count, ...] = free((1,), "requests to the engine at a time, one measurement for each")
    draft_tokens: tuple[Count, ...] = ()
    """lengths K of the drafts of all methods that the engine runs, one method for each; empty: their own"""
    out_dir: str = free("runs/engine", "where the report goes")

    def check_fields(self) -> None:  # after those of the bases (see `Settings`)
        engine, drafting = self.engine, self.engine_options.get("speculative_config", {})
        url_options = ("engine_plain", "server_model") if engine in MODULES else ()  # else engine is a URL
        parallel_options = ("concurrency",) if engine in ("openvino", "transformers") else ()
        unread_options = ("stop_strings", "debug", "batch", *url_options, *parallel_options)
        require_defaults(self, unread_options, f"engine={engine} does not read it")
        is_valid = isinstance(drafting, Mapping) and not drafting.keys() & {"method", "model", "num_speculative_tokens"}
        has_no_key = not any(map(SECRET_NAME.search, self.engine_options))
        for key, fits, expected in (
            ("dtype", self.dtype != "int8", f"another one with engine={engine}"),
            ("concurrency", len({*self.concurrency}) == len(self.concurrency) > 0, "numbers, each once"),
            ("engine_options", has_no_key, "no key, as reports have them: set HF_TOKEN or the engine's own variable"),
            ("engine_options", is_valid, "no drafter and no length: method and draft_tokens say them"),
        ):
            require(fits, key, getattr(self, key), expected)
        reasons = {name: refusal_of(engine, method) for name, method in self.all_methods.items()}
        refusal_text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        no_refusals = [reason for reason in reasons.values() if reason is None]
        require(bool(no_refusals), "engine", engine, f"a method that it can run ({refusal_text})")
        is_single = engine in MODULES or len(no_refusals) == 1
        require(is_single, "engine", engine, f"one method in one length, as a server has one drafter ({refusal_text})")

    @property
    def all_methods(self) -> dict[str, MethodConfig]:
        """The methods; each method that the engine runs is repeated for each of `draft_tokens`."""
        return with_lengths(self.engine, self.methods, self.draft_tokens)
