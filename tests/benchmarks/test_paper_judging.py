"""The papers' claims: judged by hand-made counts, and by chance no oftener than said."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

Counts = dict[str, float]
MANY = [2.0, 2.1, 1.9, 2.05, 1.95, 2.2]


def measured(**taus: list[float]) -> dict[str, dict[str, Counts]]:
    """By row, τ of every prompt, in ten rounds each."""
    return {
        row: {f"p{place}": {"tokens": 10 * tau, "rounds": 10.0} for place, tau in enumerate(values)}
        for row, values in taus.items()
    }


def judged(claim: Any, counts: Mapping[str, Mapping[str, Counts]]) -> dict[str, Any]:
    from papers.judging import judge

    return judge(claim, dict.fromkeys((term.partition("@")[0] for term in claim.terms), ""), counts)


@pytest.mark.parametrize(("kind", "bound", "terms", "taus", "verdict"), [
    ("rises", 0, "ab", {"a": MANY, "b": [x + 0.5 + x / 99 for x in MANY]}, "holds"),
    ("rises", 0, "ab", {"a": MANY, "b": [x + 0.5 for x in MANY]}, "holds"),  # the same difference everywhere
    ("rises", 0, "ba", {"a": MANY, "b": [x + 0.5 for x in MANY]}, "does not hold"),
    ("rises", 0, "ab", {"a": MANY, "b": MANY[::-1]}, "undecided"),
    ("rises", 0, "ab", {"a": MANY[:4], "b": [x + 0.5 for x in MANY[:4]]}, "undecided"),  # too few
    ("rises", 0, "abc", {"a": MANY, "b": [x - 1 for x in MANY], "c": [x + 1 for x in MANY]}, "does not hold"),
    ("rises", 0, "abc", {"a": MANY, "b": MANY[::-1], "c": [x + 1 for x in MANY]}, "undecided"),  # one step is not
    ("rises", 0, "abc", {"a": MANY, "b": [x + 1 for x in MANY], "c": [x + 2 for x in MANY]}, "holds"),
    ("level", 0.1, "ab", {"a": MANY, "b": [x * 1.05 for x in MANY]}, "holds"),
    ("level", 0.1, "ab", {"a": MANY, "b": [x * 1.5 for x in MANY]}, "does not hold"),
    ("peaks", 0, "aba", {"a": MANY, "b": [x + 0.5 for x in MANY]}, "holds"),
    ("peaks", 0, "bab", {"a": MANY, "b": [x + 0.5 for x in MANY]}, "does not hold"),
    ("above", 1.5, "a", {"a": MANY}, "holds"),
    ("below", 1.5, "a", {"a": MANY}, "does not hold"),
])  # fmt: skip
def test_claims_by_hand(kind: Any, bound: float, terms: str, taus: dict[str, list[float]], verdict: str) -> None:
    from papers.claims import Claim

    found = judged(Claim("said", "tau", tuple(terms), kind, bound), measured(**taus))
    assert found["verdict"] == verdict
    means = {row: sum(values) / len(values) for row, values in taus.items()}
    assert found["values"] == pytest.approx([means[row] for row in terms])


def test_the_interval_of_a_mean_is_students() -> None:
    """Of equally long prompts τ is a mean, and a jackknife's error is that of a mean. A text too short is none."""
    from papers.claims import Claim

    found = judged(Claim("more", "tau", ("a",), "above", 1.0), {"a": {**measured(a=MANY)["a"], "short": {"rounds": 0}}})
    middle, reach = np.mean(MANY) - 1, 2.571 * np.std(MANY, ddof=1) / len(MANY) ** 0.5  # Student's, of five degrees
    assert (found["prompts"], found["ci95"]) == (6, pytest.approx([middle - reach, middle + reach], rel=1e-2))


def test_an_undecided_claim_says_how_many_would_decide_it() -> None:
    from papers.claims import Claim

    claim = Claim("more", "tau", ("a", "b"))
    of = {n: measured(a=[5.0] * n, b=[5.12 + (-1) ** place for place in range(n)]) for n in (60, 240, 300)}
    found = {n: judged(claim, counts) for n, counts in of.items()}
    assert [found[n]["verdict"] for n in of] == ["undecided", "undecided", "holds"]
    assert 240 < found[60]["needed"] < 300
    assert found[300]["needed"] is None


@pytest.mark.parametrize("prompts", [6, 40])
@pytest.mark.parametrize(("kind", "terms"), [("rises", "ab"), ("rises", "abcd"), ("peaks", "abcdef")])
def test_chance_decides_no_oftener_than_said(prompts: int, kind: Any, terms: str) -> None:
    """Rows that are alike: of 400 claims at most 5 % are decided, and three standard errors more."""
    from papers.claims import Claim

    draw, decided = np.random.default_rng(0), 0
    for _ in range(400):
        taus = {row: list(draw.normal(3, 0.5, prompts)) for row in terms}
        decided += judged(Claim("order", "tau", tuple(terms), kind), measured(**taus))["verdict"] != "undecided"
    assert decided / 400 < 0.05 + 3 * (0.05 * 0.95 / 400) ** 0.5
    taus = {row: list(draw.normal(3 + 3 * place, 0.5, prompts)) for place, row in enumerate("abc")}
    assert judged(Claim("order", "tau", tuple("abc")), measured(**taus))["verdict"] == "holds"


def test_holms_correction_is_over_the_claims_of_an_entry() -> None:
    from papers.judging import correct

    claims = [{"verdict": "holds", "p": p} for p in (0.001, 0.04, 0.012)] + [{"verdict": "not run"}]
    correct(claims)
    assert [claim.get("stands") for claim in claims] == [True, True, True, None]
    claims = [{"verdict": "holds", "p": p} for p in (0.001, 0.04, 0.03)]
    correct(claims)
    assert [claim["stands"] for claim in claims] == [True, False, False]
