"""Reports made of results by hand."""

from collections.abc import Sequence
from dataclasses import asdict, replace

from outrider.inference.measure.results import PromptResult
from outrider.inference.report.building import build_report
from outrider.inference.report.types import Conditions, MethodReport
from outrider.inference.settings.method import MethodConfig
from outrider.inference.settings.sampling import SamplingConfig
from outrider.inference.sizing.policy import Tuning

CONDITIONS = Conditions(
    target="T", model="M", drafter="D", dtype="float32", computes_in="float32", device="cpu", prompts_given=0,
    max_new_tokens=9, temperature=0.0, sampling=asdict(SamplingConfig()),
)  # fmt: skip


def report_of(
    results: Sequence[PromptResult], method: str = "m", tuning: Tuning | None = None, **conditions: object
) -> MethodReport:
    """The report of a method on `results`, under the `conditions` that are not those above."""
    return build_report(method, MethodConfig(), results, replace(CONDITIONS, **conditions), 0, tuning)
