"""What a longer training of a drafter would bring: a forecast from short ones, before the time is spent.

    python train/forecast.py target=MODEL answers='runs/responses/responses-*.jsonl' prompts=prompts.jsonl minutes=60

For each of `shares` a pipeline trains every kind for this share of the minutes, on this share of the answers, and
measures it on the same prompts. `forecast_tau` continues the curve of τ to the whole budget and to multiples of it. A
size is a share or multiple of the budget, its minutes and answers. The last report has the costs: a method breaks even
at τ_even = τ / speed-up, its time of a round in tokens of plain decoding. So τ' would have the speed-up τ' / τ_even.
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    from outrider.commands import run_script

    run_script("forecast")

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.base.files import require_writable, write_atomically, write_json
from outrider.base.machine import describe_machine
from outrider.base.run_dirs import only_run, require_free
from outrider.base.words import Columns, fill_table
from outrider.commands import config_for
from outrider.data_prep.text.data_files import read_file, resolve_paths
from outrider.draft_models.card import CARD_FILE
from outrider.draft_models.early_exit.checkpoint import provenance
from outrider.draft_models.targets.vocabulary import KWARGS
from outrider.inference.measure.statistics import MIN_PROMPTS
from outrider.inference.report.types import MethodReport, read_reports
from outrider.train.auto_choice import heldout_share
from outrider.train.parts.learning_curve import COVERED, Forecast, TrainedSize, forecast_tau
from outrider.train.pipeline_run import check_steps, plan_steps, require_one_process, run_pipeline
from outrider.train.settings.forecast import FORECAST_FILE, FORECAST_KINDS, TRAININGS, ForecastConfig
from outrider.train.settings.pipeline import MINUTES, PipelineConfig

MULTIPLES = (1.0, 2.0, 4.0, 8.0)  # sizes that are forecast, as multiples of the whole budget
LEAST_ANSWERS = 12  # of the smallest share, of which the half is held out
STEPS_OF_DOUBLING = 4  # sizes in each doubling at which break-even is looked for
NO_LIMIT = {"fit.epochs": None, "fit.steps": 1_000_000}  # the minutes end a training
_FORMATS = {  # by column; a missing value is a dash, with ? a zero too
    "kind": "{kind}",
    "minutes": "{minutes:g}",
    "answers": "{answers}",
    "τ": "{tau:.2f}",
    f"{COVERED:.0%}": "{low:.2f} to {high:.2f}",  # the interval of τ
    "speed-up": "{speedup:.2f?}",
    "τ that breaks even": "{even:.2f?}",
}
TABLE: Columns = {column: (cell_format, "") for column, cell_format in _FORMATS.items()}  # "": no note


@dataclass(frozen=True)
class KindForecast:
    """What is expected of a kind of drafter.

    method: the method that is measured, as in evaluate-checkpoint. speedup, verdict: of the largest training; the
    verdict says whether it is faster than plain decoding. even: τ at which the kind breaks even; even and speedup are
    None where `judged_speedup` is. expected: at `MULTIPLES`. minutes_to_even: None if not within `MULTIPLES`.
    """

    kind: str
    method: str
    trained: tuple[TrainedSize, ...]
    speedup: float | None
    even: float | None
    expected: tuple[Forecast, ...]
    minutes_to_even: float | None
    verdict: str


@dataclass(frozen=True)
class Outcome:
    """What a training over the whole budget had. inside: whether τ is in the interval of its forecast."""

    tau: float
    speedup: float | None
    inside: bool


def forecast(config: ForecastConfig) -> None:
    """Train and measure at all shares, and write the forecast, to the screen and to `out_dir`.

    Raises `UserError`, before anything is trained, for inputs that a step could not use.
    """
    require_one_process("forecast")
    folder = require_writable(config.out_dir)
    with only_run(folder, "a forecast"):
        require_free(folder, config.run_files, config.resume)
        record_count, budget_shares = count_records(config), [*config.shares, *([1.0] if config.outcome else [])]
        pipeline_configs = [pipeline_of(config, share, record_count) for share in budget_shares]
        step_lists = [plan_steps(pipeline_config, config_for) for pipeline_config in pipeline_configs]
        for pipeline_config, steps in zip(pipeline_configs, step_lists, strict=True):
            check_steps(pipeline_config, steps)
        reports_by_share: dict[float, list[MethodReport]] = {}
        for share, pipeline_config, steps in zip(budget_shares, pipeline_configs, step_lists, strict=True):
            run_pipeline(pipeline_config, steps)
            reports_by_share[share] = read_reports(steps[-1].product, "remove it, and resume=true does the step again")
            if share == config.shares[-1]:  # the largest short training; {}: no outcomes yet
                write_forecast(config, folder, record_count, forecasts := forecast_kinds(config, reports_by_share), {})
        if config.outcome:
            outcomes = {prospect.kind: judge_outcome(prospect, reports_by_share[1.0]) for prospect in forecasts}
            write_forecast(config, folder, record_count, forecasts, outcomes)


def count_records(config: ForecastConfig) -> int:
    """The number of answers. Raises `UserError` if the smallest share has fewer than `LEAST_ANSWERS`."""
    count = sum(1 for path in resolve_paths([config.answers]) for _ in read_file(path))
    least = math.ceil(LEAST_ANSWERS / config.shares[0])
    config.require("answers", count >= least, f"{least} of them for shares={[*config.shares]}, there are {count}")
    return count


def pipeline_of(config: ForecastConfig, share: float, record_count: int) -> PipelineConfig:
    """The pipeline that trains and measures at this `share` of minutes and `record_count`."""
    experiment = config_for("train/pipeline.py", ["experiment=auto"])
    assert isinstance(experiment, PipelineConfig)
    template_options: dict[str, object] = {} if config.template == "auto" else {"template": config.template}
    template_options |= {KWARGS: config.chat_template_kwargs} if config.chat_template_kwargs else {}
    data: dict[str, object] = {"data": "responses", "data.path": config.answers}
    answer_count = round(share * record_count)
    data |= {"data.max_records": answer_count} if share < 1 else {}
    data |= {f"data.{key}": value for key, value in template_options.items()}
    heldout_options = {"data.heldout_fraction": heldout_share(answer_count)}
    limit = {MINUTES: float(f"{share * config.minutes:.3g}"), **NO_LIMIT, **heldout_options}
    step_options: dict[str, dict[str, object]] = {}
    for kind in config.kinds:
        step, _ = FORECAST_KINDS[kind]  # a table has no epochs, so it gets no limit
        step_options[step] = experiment.steps[step] | data | (limit if "fit.epochs" in experiment.steps[step] else {})
    method_names = [FORECAST_KINDS[kind][1] for kind in config.kinds]  # [0]: its step
    report_options: dict[str, object] = {"prompts": config.prompts, "method": method_names}
    report_options |= {name: getattr(config, name) for name in ("num_prompts", "max_new_tokens", "dtype")}
    step_options["report"] = report_options | {"compare_transformers": False} | template_options
    out_dir = str(Path(config.out_dir, TRAININGS, f"share_{share:.4g}"))
    return PipelineConfig(steps=step_options, target=config.target, out_dir=out_dir, resume=True)


def forecast_kinds(config: ForecastConfig, share_reports: Mapping[float, Sequence[MethodReport]]) -> list[KindForecast]:
    """The forecast of each kind. share_reports: by share, of all kinds."""
    return [forecast_kind(config, kind, {share: _report_of(kind, report) for share, report in share_reports.items()})
            for kind in config.kinds]  # fmt: skip


def forecast_kind(config: ForecastConfig, kind: str, report_by_share: Mapping[float, MethodReport]) -> KindForecast:
    """The forecast of a kind. report_by_share: of the kind's method, by share."""
    trained = tuple(
        TrainedSize(share, report.figures.tau, passes=max(1, round(report.tokens / report.figures.tau)))
        for share, report in report_by_share.items()
    )
    largest = report_by_share[max(report_by_share)]
    speedup = judged_speedup(largest)
    even_tau = None if speedup is None else largest.figures.tau / speedup
    step_count = round(STEPS_OF_DOUBLING * math.log2(MULTIPLES[-1] / config.shares[0]))
    fine_sizes = [config.shares[0] * 2 ** (step / STEPS_OF_DOUBLING) for step in range(step_count + 1)]
    fine_curve = forecast_tau(trained, fine_sizes)
    minutes = (config.minutes * point.size for point in fine_curve if even_tau is not None and point.tau >= even_tau)
    expected = tuple(forecast_tau(trained, MULTIPLES))
    _, method = FORECAST_KINDS[kind]
    minutes_to_even = min(minutes, default=None)
    return KindForecast(kind, method, trained, speedup, even_tau, expected, minutes_to_even, largest.verdict)


def judged_speedup(report: MethodReport) -> float | None:
    """The speed-up; None where speeds cannot be judged: the machine was busy, or too few prompts were measured."""
    speedup = report.figures.speedup
    return speedup.median if report.conditions.load.busy is None and speedup.prompts >= MIN_PROMPTS else None


def _report_of(kind: str, reports: Sequence[MethodReport]) -> MethodReport:
    _, method = FORECAST_KINDS[kind]
    method_name = method.replace("/", "_")  # as reports have it
    return next(report for report in reports if report.method == method_name)


def judge_outcome(kind_forecast: KindForecast, reports: Sequence[MethodReport]) -> Outcome:
    """The outcome of the whole budget beside its forecast, the first of `expected`."""
    report, expected = _report_of(kind_forecast.kind, reports), kind_forecast.expected[0]
    tau = report.figures.tau
    return Outcome(tau, judged_speedup(report), expected.low <= tau <= expected.high)


def describe_kind(kind: KindForecast, budget_minutes: float) -> str:
    """The forecast of a kind in a sentence."""
    (budget, *_), (*_, last_trained) = kind.expected, kind.trained
    text = f"{kind.kind}: τ is {last_trained.tau:.2f} after {last_trained.size * budget_minutes:.3g} minutes"
    prospect = f"expected after {budget_minutes:g} minutes: τ {budget.tau:.2f} [{budget.low:.2f}, {budget.high:.2f}]"
    if kind.even is None:
        reason = f"its speed cannot be judged: the machine was busy, or fewer than {MIN_PROMPTS} prompts were measured"
        return f"{text}; {prospect}; {reason}"
    if kind.minutes_to_even is None:
        pays = f"it will not pay within {MULTIPLES[-1] * budget_minutes:g} minutes"
    elif last_trained.tau < kind.even:
        pays = f"it pays from about {kind.minutes_to_even:.3g} minutes"
    else:
        pays = "it pays already" if kind.verdict == "faster" else "whether it pays already is undecided"
    return f"{text}, break-even {kind.even:.2f}; {prospect}, a speed-up of about {budget.tau / kind.even:.2f}; {pays}"


def _table_rows(config: ForecastConfig, records: int, kinds: Sequence[KindForecast]) -> Iterator[dict[str, object]]:
    """A row of `TABLE` for each kind and size. records: the number of answers of the whole budget."""
    for kind in kinds:
        for point in kind.expected:
            facts = {"minutes": point.size * config.minutes, "answers": round(point.size * records)}
            speedup = kind.even and point.tau / kind.even
            yield {"kind": kind.kind, "even": kind.even, "speedup": speedup, **facts, **vars(point)}


def write_forecast(
    config: ForecastConfig, folder: Path, records: int, kinds: Sequence[KindForecast], outcomes: Mapping[str, Outcome]
) -> None:
    """Print the forecast and its outcomes, and write both to `FORECAST_FILE` and to README.md in `folder`."""
    lines = [describe_kind(kind, config.minutes) for kind in kinds]
    for kind_name, outcome in outcomes.items():
        verdict = "inside" if outcome.inside else "outside"
        speed_text = "" if outcome.speedup is None else f", speed-up {outcome.speedup:.2f}"
        lines.append(f"{kind_name}: the outcome is τ {outcome.tau:.2f}{speed_text}, {verdict} the interval")
    table_lines = fill_table(TABLE, [*_table_rows(config, records, kinds)]).markdown()
    write_atomically(folder / CARD_FILE, "\n".join(["# Forecast", "", *lines, "", *table_lines, ""]).encode())
    content = {"minutes": config.minutes, "answers": records, "machine": describe_machine(), "made_with": provenance()}
    content |= {"kinds": [asdict(kind) for kind in kinds], "settings": config.decisions()}
    content |= {"outcomes": {kind_name: asdict(outcome) for kind_name, outcome in outcomes.items()}}
    write_json(folder / FORECAST_FILE, content)
    print("\n".join([*lines, f"forecast out_dir={folder} state=complete"]), flush=True)
