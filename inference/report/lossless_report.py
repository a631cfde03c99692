"""A report's section on losslessness, and whether it holds."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from inference.measure.lossless import Judgement, judge
from inference.measure.results import AUTOREGRESSIVE, PromptResult

HALF_NAMES = ("bfloat16", "float16")


def resolution(report: Mapping[str, Any]) -> str:
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
    """How many texts were compared token by token, and the judgements of the method and of plain decoding.

    Sampled texts are not compared, as only their distribution is the same. exact: no difference is excused as a tie.
    judged: by arm, see `lossless`; None if only equal texts counted.
    """
    checked = [] if sampled else results
    judgements = {arm: judge_arm(results, arm) for arm in (method, AUTOREGRESSIVE)}
    mine = judgements[method]
    judged_right = mine is not None and not mine.faults and not exact
    ties = sum(not r.identical(method) and method in r.deviations for r in checked) if judged_right else 0
    return {
        "reference": None if sampled else results[0].reference,
        "checked": len(checked),
        "identical": sum(r.identical(method) for r in checked),
        "excused_ties": ties,
        "autoregressive_identical": sum(r.identical(AUTOREGRESSIVE) for r in checked),
        "judged": {arm: found and asdict(found) for arm, found in judgements.items()},
    }


def judge_arm(results: Sequence[PromptResult], arm: str) -> Judgement | None:
    """The judgement of an arm over all its judged texts; None without any."""
    deviations = [r.deviations[arm] for r in results if arm in r.deviations]
    return judge(deviations) if deviations else None


def is_lossless(report: Mapping[str, Any]) -> bool:
    """Whether every compared text was identical to the reference's or a rounding tie, and no fault was found."""
    lossless = report["lossless"]
    judged = lossless["judged"][report["method"]]
    same = lossless["identical"] + lossless["excused_ties"] == lossless["checked"]
    return same and not (judged and judged["faults"])


def judgement_lines(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """The judgement of every arm as Markdown; empty without judgements."""
    judged = {arm: found for report in reports for arm, found in report["lossless"]["judged"].items() if found}
    lines = ["", "Judged by rounding errors over the reference's text, in units of transformers' own:", ""]
    for arm, found in judged.items():
        faults = "; ".join(found["faults"])
        verdict = f"NOT LOSSLESS: {faults}" if faults else "No fault above rounding"
        lines.append(
            f"- {arm}: {found['bulk']:.2f} in the worst row ({found['bulk_at']}), {found['peak']:.1f} at the worst "
            f"position ({found['peak_at']}); another choice at {found['ties']} of {found['positions']} positions "
            f"(transformers' own pass: {found['own_ties']}). {verdict}."
        )
    return [*lines, "", resolution(reports[0])] if judged else []
