"""Settings are checked by their types, whoever makes them, and say themselves what of them decides a result."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt

from outrider.base import settings as base
from outrider.base.errors import UserError
from tests.refusals import refusal


@dataclass(frozen=True)
class Inner(base.Settings):
    size: base.Count = 1
    where: str = base.free("here")


@dataclass(frozen=True)
class Given:
    """A record, which is no settings."""

    size: base.Count


@dataclass(frozen=True)
class Outer(base.Settings):
    kind: Literal["plain", "deep", "wide"] = "plain"
    depth: Annotated[base.Count | Literal["auto"], base.only(kind=("deep", "wide"))] = 3
    widths: Annotated[tuple[base.Count, ...], base.only(kind="wide")] = (2,)
    ends: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Gt(0), Le(1)]] = (0.0, 1.0)
    share: base.Share | None = None
    rate: base.Positive = 1.0
    name: Annotated[str, base.Named("a name")] = "n"
    exact: bool = True
    inner: Inner = field(default_factory=Inner)
    by_name: dict[str, Inner] = field(default_factory=dict)
    log: bool = base.free(False)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kind": "round"}, "kind='round': expected 'plain', 'deep' or 'wide'"),
    ({"kind": "deep", "depth": 0}, "depth=0: expected a number greater than or equal to 1 or 'auto'"),
    ({"kind": "deep", "depth": "all"}, "depth='all': expected a valid integer or 'auto'"),
    ({"depth": 4}, "depth=4: expected 3, its default: kind=plain does not read it"),
    ({"kind": "deep", "widths": (3,)}, "widths=(3,): expected (2,), its default: kind=deep does not read it"),
    ({"share": 1.5}, "share=1.5: expected a number less than or equal to 1"),
    ({"rate": 0}, "rate=0: expected a number greater than 0"),
    ({"name": ""}, "name='': expected a name"),
    ({"exact": 1}, "exact=1: expected a valid boolean"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_a_type_excludes_is_refused_from_python_and_from_yaml(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as direct:
        Outer(**given)
    assert str(direct.value) == message
    with pytest.raises(UserError) as read:
        base.construct(Outer, json.loads(json.dumps(given)), "a.b")
    assert str(read.value) == f"a.b.{message}"


def test_a_class_checks_its_fields_after_its_bases() -> None:
    class Resumed(base.RunConfig):
        def check_fields(self) -> None:
            self.require("resume", self.resume, "true")

    for out_dir, words in (("", "^out_dir='': expected a directory"), ("o", "^resume=False: expected true")):
        refusal(words, Resumed, out_dir=out_dir)


def test_items_are_checked_too() -> None:
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"kind": "wide", "widths": (2, 0)}, r"widths\[1\]=0"), ({"ends": (0.0, 0.0)}, r"ends\[1\]=0\.0"),
        ({"ends": (1.0, 1.0)}, r"ends\[0\]=1\.0"), ({"ends": (0.5,)}, "ends.1: missing"),
        ({"inner": {"size": 1}}, "inner="), ({"by_name": {"a": {}}}, "by_name.a="),
    )  # fmt: skip
    for changes, said in refused:
        refusal(f"^{said}", Outer, **changes)
    assert Outer(kind="wide", widths=(2, 5), depth="auto", ends=(0.5, 0.5), share=0).widths == (2, 5)


def test_a_key_that_is_unknown_or_missing_is_named() -> None:
    for kind, value, said in (
        (Outer, {"inner": {"sise": 1}}, "a.inner.sise: unknown"),
        (Outer, {"by_name": {"b": {"sise": 1}}}, "a.by_name.b.sise: unknown"),
        (Given, {}, "a.size: missing"),
        (dict[str, Given], {"b": {}}, "a.b.size: missing"),
    ):
        refusal(f"^{said}$", base.construct, kind, value, "a")


def test_what_is_not_marked_decides() -> None:
    made = Outer(by_name={"a": Inner()})
    assert made.decisions() == {
        "kind": "plain", "depth": 3, "widths": (2,), "ends": (0.0, 1.0), "share": None, "rate": 1.0, "name": "n",
        "exact": True, "inner": {"size": 1}, "by_name": {"a": {"size": 1}},
    }  # fmt: skip
    assert [own.name for own in dataclasses.fields(Outer) if not own.metadata.get("decides", True)] == ["log"]
