"""A report's section on losslessness, whether it holds, and what pages say of it."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from outrider.inference.measure.lossless import Judgement, judge
from outrider.inference.measure.results import PromptResult
from outrider.inference.report.tables import Report
from outrider.inference.settings.method import AUTOREGRESSIVE

HALF_NAMES = ("bfloat16", "float16")


def resolution(report: Report) -> str:
    """The size of faults that a judgement in this report's dtype cannot detect, and the check that can."""
    computes = report.get("computes_in", report["dtype"])
    said = f"What is below the rounding of {computes} is not seen"
    if computes not in HALF_NAMES:
        return f"{said}."
    return (
        f"{said}. In bfloat16 an attention scale × 1.005, a row of a projection × 1.01 and an eps of the norms × 10 "
        "pass. dtype=float32 sampling.temperature=1 judges the same methods in float32, and sees faults of that size."
    )


def lossless_section(
    results: Sequence[PromptResult], method: str, *, sampled: bool, exact: bool = False
) -> dict[str, Any]:
    """The number of texts compared token by token, and the judgements of the method and of plain decoding.

    Sampled texts are not compared, as only their distribution is the same. exact: no difference is excused as a tie.
    judged: by arm, see `lossless`; None if only equal texts counted.
    """
    checked = [] if sampled else results
    judgements = {arm: judge_arm(results, arm) for arm in (method, AUTOREGRESSIVE)}

    def ties(arm: str) -> int:
        found = judgements[arm]
        judged_right = found is not None and not found.faults and not exact
        return sum(not r.identical(arm) and arm in r.deviations for r in checked) if judged_right else 0

    return {
        "reference": None if sampled else results[0].reference,
        "checked": len(checked),
        "identical": sum(r.identical(method) for r in checked),
        "excused_ties": ties(method),
        "autoregressive_identical": sum(r.identical(AUTOREGRESSIVE) for r in checked),
        "autoregressive_excused_ties": ties(AUTOREGRESSIVE),
        "judged": {arm: found and asdict(found) for arm, found in judgements.items()},
    }


def judge_arm(results: Sequence[PromptResult], arm: str) -> Judgement | None:
    """The judgement of an arm over all its judged texts; None without any."""
    deviations = [r.deviations[arm] for r in results if arm in r.deviations]
    return judge(deviations) if deviations else None


def is_lossless(report: Report) -> bool:
    """Whether every compared text was identical to the reference's or a rounding tie, and no fault was found."""
    lossless = report["lossless"]
    judged = lossless["judged"][report["method"]]
    same = lossless["identical"] + lossless["excused_ties"] == lossless["checked"]
    return same and not (judged and judged["faults"])


def target_differs(report: Report) -> bool:
    """Whether plain decoding by this runtime fails in the same sense: then no method is to blame."""
    lossless, computes = report["lossless"], report.get("computes_in", report.get("dtype"))
    judged = lossless["judged"].get(AUTOREGRESSIVE)
    same = lossless["autoregressive_identical"] == lossless["checked"] or (judged and computes in HALF_NAMES)
    return not same or bool(judged and judged["faults"])


def wrong_arms(reports: Sequence[Report]) -> list[str]:
    """The arms whose text is not that of the target alone."""
    if target_differs(reports[0]):
        return ["the target's own run, plain decoding,"]
    return [report["method"] for report in reports if not is_lossless(report)]


def most_that_differ(checked: int, chance: float = 0.05) -> float:
    """The upper confidence bound on the share of differing prompts if none of `checked` prompts differs.

    With a share s all n are equal with probability (1 − s)ⁿ; the bound is the s where this equals `chance`.
    """
    return 1 - chance ** (1 / checked)
