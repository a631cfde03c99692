"""Every option of a method acts, or is refused: none is accepted, printed in the report and ignored."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.base.errors import UserError
from outrider.base.streams import Streams
from outrider.draft_models.calibration_head import CalibrationHead
from outrider.inference.loading.drafters import new_drafter
from outrider.inference.settings.method import MethodConfig, NgramConfig, StopConfig, StructureConfig
from outrider.inference.settings.stop_rules import RULES
from outrider.inference.shapes.factory import make_structure
from outrider.inference.shapes.structure import softmax_probs
from outrider.inference.sizing.costs import Costs
from outrider.inference.sizing.policy import Tuning
from tests.inference.known_source import KnownSource, random_q, root
from tests.inference.ngram_cases import TABLE, FakeSession
from tests.refusals import refusal

# Of every option a value that is not its default.
OTHERS: dict[str, dict[str, Any]] = {
    "structure": {
        "max_depth": 4, "nodes": 9, "widths": (2, 2), "draw": "with_replacement", "delta": 0.1, "out_degree": 3,
        "theta_prob": 0.1, "theta_sibling": 0.1, "tau": 1, "shape": "binary", "temperature": 0.5, "kind": "k_config",
        "width": 3, "rank": "drafter", "deep_copies": True,
    },
    "stop": {
        "rule": "beta", "max_draft": 3, "threshold": 0.3, "gamma": 0.3, "alpha": 5.0, "beta": 3.0, "update": "printed",
        "discount": 0.9, "score": "head",
        "evidence": "model", "model_sigma": 0.2, "sample_sigma": 2.0, "prior": 0.5, "mean": "printed",
    },
    "ngrams": {
        "evidence": "mixed", "nodes": 9, "depth": 3, "order": 2, "adapt": False, "increment": 0.3,
        "max_probability": 0.9, "search": "puct", "iterations": 20, "sentences": 5, "widest": 3, "c1": 2.0, "c2": 2.0,
        "longest": 4, "decay": 0.5, "strength": 5.0, "recycle": 3,
    },
}  # fmt: skip
SHAPES = {
    "chain": StructureConfig(),
    "k_config": StructureConfig(kind="k_config"),
    "opt_tree": StructureConfig(kind="opt_tree", delta=0.0),
    "opt_tree, auto": StructureConfig(kind="opt_tree", nodes="auto", max_depth="auto"),
    "token_graph": StructureConfig(kind="token_graph"),
    "static": StructureConfig(kind="static"),
    "binary": StructureConfig(kind="static", shape="binary"),
}
STOPS = {rule: StopConfig(rule=rule) for rule in RULES}
TREE_STOPS = ("fixed", "confidence", "beta", "calibrated")
METHODS = {
    **{f"{shape}, {rule}": MethodConfig(structure=SHAPES[shape], stop=STOPS[rule])
       for shape in SHAPES for rule in TREE_STOPS if "auto" not in shape or rule == "fixed"},
    **{f"chain, {rule}": MethodConfig(stop=stop) for rule, stop in STOPS.items()},
    "chain, auto": MethodConfig(stop=StopConfig(max_draft="auto")),
    "prompt_lookup": MethodConfig(source="prompt_lookup"),
    "best_first": MethodConfig(source="ngrams"),
    "puct": MethodConfig(source="ngrams", ngrams=NgramConfig(search="puct")),
    "not adapted": MethodConfig(source="ngrams", ngrams=NgramConfig(adapt=False)),
    "mixed": MethodConfig(source="ngrams", ngrams=NgramConfig(evidence="mixed")),
}  # fmt: skip
CURVE = tuple(0.1 + 0.01 * width for width in range(66))
TUNING = Tuning(Costs(CURVE, CURVE, 0.0, 0.5))


@contextmanager
def noting() -> Iterator[set[str]]:
    """The options, as part.name, that are read meanwhile."""
    read: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        for part, kind in (("structure", StructureConfig), ("stop", StopConfig), ("ngrams", NgramConfig)):

            def get(config: Any, name: str, part: str = part) -> Any:
                read.add(f"{part}.{name}")
                return object.__getattribute__(config, name)

            patch.setattr(kind, "__getattribute__", get)
        yield read


def options_read(method: MethodConfig) -> set[str]:
    """What making and using the drafts of `method` looks at, greedily and sampling."""
    drafters, head = {"ngrams": TABLE}, CalibrationHead(1, 1).requires_grad_(False)
    with noting() as read:
        for drawn in (False, True):
            if method.source in ("prompt_lookup", "ngrams"):
                drafter: Any = new_drafter(method, drafters, Streams(0), drawn)
                drafter.begin(FakeSession([1, 2, 1, 2, 1]), None, None)
                drafter.draft(torch.tensor([2]), 9)
            else:
                source: Any = _Source(random_q(0), softmax_probs if drawn else None)
                structure = make_structure(method, Streams(0), drawn, head, TUNING)
                structure.observe(structure.draft(source, root(), 9), [])
    return read


class _Source(KnownSource):
    def __init__(self, q: Any, to_probs: Any):
        super().__init__(q)
        self.to_probs = to_probs

    @property
    def hidden(self) -> Tensor:
        return super().hidden.float()


def test_there_is_another_value_of_every_option() -> None:
    for part, kind in (("structure", StructureConfig), ("stop", StopConfig), ("ngrams", NgramConfig)):
        assert set(OTHERS[part]) == {own.name for own in fields(kind)}
        assert all(OTHERS[part][own.name] != own.default for own in fields(kind))


@pytest.mark.parametrize("name", METHODS)
def test_what_is_accepted_is_read(name: str) -> None:
    """Each option set to another value: the method is refused by its name, or drafting looks at it."""
    method, refused, accepted = METHODS[name], dict[str, str](), []
    for part, others in OTHERS.items():
        for option, other in others.items():
            own = getattr(method, part)
            if getattr(own, option) != getattr(type(own)(), option):
                continue  # what makes this method what it is
            try:
                changed = replace(method, **{part: replace(own, **{option: other})})
            except UserError as error:
                refused[option] = str(error)
            else:
                accepted.append(f"{part}.{option}")
                assert f"{part}.{option}" in options_read(changed)
    assert refused
    assert {option for option, said in refused.items() if option not in said} <= {"kind"}  # of which others are named
    assert accepted or name == "chain, auto"  # a fixed shape of a fixed rule


def of(source: str = "early_exit", verify: str = "exact", **parts: Any) -> MethodConfig:
    kinds = {"structure": StructureConfig, "stop": StopConfig, "ngrams": NgramConfig}
    given = {part: kinds[part](**value) if part in kinds else value for part, value in parts.items()}
    return MethodConfig(source, verify=verify, **given)


REFUSED: list[tuple[str, dict[str, Any]]] = [  # the option that is named, and what is said of a method
    # what nothing would come of
    ("stop.max_draft=4", {"source": "ngrams", "stop": {"max_draft": 4}}),
    ("max_ngram=2", {"max_ngram": 2}),
    ("copy=2", {"source": "prompt_lookup", "copy": 2}),
    ("prior=0.1", {"stop": {"rule": "calibrated", "evidence": "model", "prior": 0.1}}),
    ("model_sigma=1.0", {"stop": {"rule": "calibrated", "evidence": "sample", "model_sigma": 1.0}}),
    ("verify='naive'", {"source": "small_lm", "structure": {"kind": "static"}, "verify": "naive"}),
    ("verify='naive'", {"structure": {"kind": "k_config", "draw": "top_k"}, "verify": "naive"}),
    ("verify='naive'", {"source": "prompt_lookup", "verify": "naive"}),
    ("verify='block'", {"source": "ngrams", "verify": "block"}),
    ("verify='block'", {"source": "small_lm", "structure": {"kind": "k_config"}, "verify": "block"}),
    ("verify='block'", {"source": "small_lm", "structure": {"kind": "opt_tree"}, "verify": "block"}),
    # what does not go together
    ("max_draft=16", {"stop": {"rule": "survival", "max_draft": 16}}),
    ("stop.rule='survival'", {"structure": {"kind": "k_config"}, "stop": {"rule": "survival"}}),
    ("stop.rule='survival'", {"source": "skip_layers", "stop": {"rule": "survival", "score": "head"}}),
    ("stop.rule='calibrated'", {"source": "skip_layers", "stop": {"rule": "calibrated"}}),
    ("stop.rule='beta'", {"structure": {"kind": "opt_tree", "max_depth": "auto"}, "stop": {"rule": "beta"}}),
    ("max_draft='auto'", {"stop": {"rule": "beta", "max_draft": "auto"}}),
    ("stop.max_draft='auto'", {"structure": {"kind": "opt_tree"}, "stop": {"max_draft": "auto"}}),
    ("nodes='auto'", {"structure": {"kind": "token_graph", "nodes": "auto"}}),
    ("nodes='auto'", {"source": "ngrams", "ngrams": {"search": "puct", "nodes": "auto"}}),
    ("delta=0.1", {"structure": {"kind": "opt_tree", "max_depth": "auto", "delta": 0.1}}),
    ("nodes=64", {"structure": {"kind": "opt_tree", "max_depth": "auto", "nodes": 64}}),
    ("deep_copies=True", {"structure": {"kind": "token_graph", "tau": 0, "deep_copies": True}}),
    ("max_probability=0.01", {"source": "ngrams", "ngrams": {"max_probability": 0.01}}),
]


@pytest.mark.parametrize(("named", "given"), REFUSED, ids=[named for named, _ in REFUSED])
def test_what_means_nothing_is_refused_with_its_name(named: str, given: dict[str, Any]) -> None:
    refusal("^" + re.escape(named), of, **given)
