"""The sentence at the top of a report, by hand."""

from typing import Any

import pytest

from inference.measure.statistics import verdict
from inference.report.wording import recommendation


def report(method: str, median: float | None, low: float = 0.0, high: float = 9.0, **more: Any) -> dict[str, Any]:
    interval = None if median is None else [low, high]
    speedup = {"median": median, "ci95": interval, "prompts": 0 if median is None else more.pop("prompts", 6)}
    found = {"method": method, "speedup": speedup, "break_even_acceptance": 0.62, "acceptance_rate": 0.41, **more}
    return {"verdict": verdict(speedup, (more.get("load") or {}).get("busy")), **found}


NGRAMS, CHAIN = report("ngrams", 1.95, 1.85, 2.23), report("chain", 0.9, 0.85, 0.95)
EVEN, WRONG = report("even", 1.03, 0.97, 1.1), report("wrong", 3.0, 2.9, 3.1, verdict="not lossless")
FASTEST = "`ngrams` is the fastest: 1.95× plain decoding [1.85, 2.23]"
SLOW = "nothing pays here: the best, `chain`, has 0.90× plain decoding [0.85, 0.95]"
OVERLAP = "; {} may be as fast, as the intervals overlap."
CLOSE = [report(name, 1.9, 1.7, 2.0) for name in "abc"]
BUSY = {"busy": "The machine was busy: …"}


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ([CHAIN, NGRAMS, EVEN], f"{FASTEST}."),
        ([WRONG, NGRAMS], f"{FASTEST}; do not use `wrong`: not lossless."),
        ([NGRAMS, *CLOSE[:2]], FASTEST + OVERLAP.format("`a` and `b`")),
        ([NGRAMS, *CLOSE], FASTEST + OVERLAP.format("3 others")),
        ([report("noisy", 2.5, 0.9, 3.0), NGRAMS], FASTEST + OVERLAP.format("`noisy`")),
        ([CHAIN], f"{SLOW}; it would need an acceptance of 0.62 and has 0.41."),
        ([CHAIN | {"break_even_acceptance": 1.3}], f"{SLOW}; it would need an acceptance of 1.30 (so never pays) and "
         "has 0.41."),
        ([CHAIN | {"break_even_acceptance": None}], f"{SLOW}."),
        ([CHAIN, EVEN], "undecided: the best, `even`, has 1.03× plain decoding [0.97, 1.10], and all of it must be "
         "above 1.02; more prompts narrow it."),
        ([report("m", 2.0, 1.9, 2.1, prompts=4)], "undecided: a verdict needs 5 timed prompts, here: 4."),
        ([report("m", 2.0, 1.9, 2.1, load=BUSY)], "undecided: the machine was busy; measure again when nothing else "
         "runs on it."),
        ([report("m", None)], "undecided: no lossless method was timed."),
        ([WRONG], "undecided: no lossless method was timed; do not use `wrong`: not lossless."),
    ],
)  # fmt: skip
def test_what_is_recommended(reports: list[dict[str, Any]], said: str) -> None:
    assert recommendation(reports) == said


def test_where_plain_decoding_differs_no_method_is_accused() -> None:
    said = recommendation([report("tree", 2.0, 1.9, 2.1, verdict="target differs"), NGRAMS])
    assert "the target's own run differs" in said
    assert not any(name in said for name in ("tree", "ngrams", "do not use"))
