"""The phases of an evaluation that run models: load, tune, measure.

A method is a drafter and how it drafts; tuning chooses the sizes of drafts that are "auto". A group is `config.batch`
prompts that are decoded together. Results are stored prompt by prompt (`measure.results`), and the report is made from
the stored results. So a stopped run can be continued, with any number of processes.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from accelerate.utils import gather_object

from outrider.base.errors import UserError
from outrider.base.processes import from_main
from outrider.base.progress import Stage
from outrider.base.settings import construct
from outrider.inference.doctor.scores import Findings, describe_findings, refuse_reading
from outrider.inference.evaluate.planning import EvaluationPlan
from outrider.inference.loading.models import Models, load_models
from outrider.inference.measure.bench import Bench, Talk, make_bench, measure_talks, peak_memory, prepare_methods
from outrider.inference.measure.prepared import Prepared
from outrider.inference.measure.results import (
    MeasuredPrompt,
    append_result,
    begin_run,
    finished_results,
    next_number,
    open_run,
)
from outrider.inference.measure.threads import load_average
from outrider.inference.measure.time_limit import TimeLimit
from outrider.inference.report.types import to_json
from outrider.inference.report.writing import result_lines
from outrider.inference.settings.kinds import KINDS


@dataclass(frozen=True)
class Queue:
    """The groups of prompts that remain to be measured, after the runs before this one.

    prepared: what tuning measured in the run that is continued; None for a new run. finished: the number of groups that
    it has measured. share: the groups of this process, in the order to measure. required: the groups that are measured
    even if the time `limit` is over, the first of all shares. file: the number of this process's file of results.
    """

    prepared: Prepared | None
    finished: int
    share: Sequence[int]
    required: Collection[int]
    limit: TimeLimit
    file: int


def measure_prompts(plan: EvaluationPlan, queue: Queue) -> Prepared:
    """Load, tune and measure; results go to `plan.out_dir`. All processes of a launcher call this. On a CPU the main
    process loads its models first, alone, as it chooses the kernels by their speed; the others then use these kernels.
    On a GPU all load at once. Only the main process tunes, while no other runs a model."""
    processes = plan.processes
    loads_first = queue.prepared is not None or plan.setup.device.type != "cpu" or processes.is_main_process
    models = load_plan_models(plan, queue.prepared) if queue.share and loads_first else None
    prepared = queue.prepared or tune_methods(plan, models)
    group_count = measure_share(plan, queue, prepared, models or load_plan_models(plan, prepared)) if queue.share else 0
    processes.wait_for_everyone()
    from_main(processes, partial(require_results, plan, queue.finished + sum(gather_object([group_count]))))
    return prepared


def require_results(plan: EvaluationPlan, group_count: int) -> None:
    """Raise `UserError` unless the results of so many groups are in `plan.out_dir`."""
    group_size = plan.config.batch
    if missing := group_size * group_count - len(finished_results(plan.out_dir, group_size)):
        raise UserError(f"out_dir={plan.out_dir}: the results of {missing} prompts are missing there; give resume=true")


def open_queue(plan: EvaluationPlan) -> Queue:
    """What remains in `plan.out_dir`. Raises `UserError` if it holds results that must not be continued."""
    group_size, processes = plan.config.batch, plan.processes

    def open_results() -> tuple[object, float, set[int], int]:
        """(prepared, seconds of the runs before, groups that they measured, the first unused number of a file)."""
        prepared = open_run(plan.out_dir, plan.identity, plan.config.resume)
        measured = finished_results(plan.out_dir, group_size)
        seconds, groups = max((m.spent for m in measured), default=0.0), {m.position // group_size for m in measured}
        return prepared, seconds, groups, next_number(plan.out_dir)

    prepared_json, spent_seconds, measured_groups, file_number = from_main(processes, open_results)
    time_limit = replace(plan.limit, earlier=spent_seconds)
    remaining_groups, required_count = time_limit.to_do(plan.groups, measured_groups)
    return Queue(
        prepared=None if prepared_json is None else construct(Prepared, prepared_json),
        finished=len(measured_groups),
        share=remaining_groups[processes.process_index :: processes.num_processes],
        required=remaining_groups[:required_count],
        limit=time_limit,
        file=file_number + processes.process_index,
    )


def load_plan_models(plan: EvaluationPlan, prepared: Prepared | None) -> Models:
    """The models. Without anything `prepared`, the kernels of a CPU are chosen now, by their speed."""
    return load_models(plan.config, plan.setup, plan.drafters, None if prepared is None else prepared.products)


def tune_methods(plan: EvaluationPlan, models: Models | None) -> Prepared:
    """Measure once, on the main process, what all prompts need (see `Prepared`), and record it with the identity."""

    def begin() -> object:
        assert models is not None  # the main process has a share of a new run
        findings = examine_drafters(plan, models)
        prepared = prepare_methods(plan.config, plan.setup, models, plan.rendered[0], plan.positions)
        prepared_json = to_json(replace(prepared, doctor=dict(findings)))
        begin_run(plan.out_dir, plan.identity, prepared_json)
        return prepared_json

    plan.processes.wait_for_everyone()
    return construct(Prepared, from_main(plan.processes, begin))


def examine_drafters(plan: EvaluationPlan, models: Models) -> Mapping[str, Findings]:
    """The findings of the doctor, printed: how each drafter's files should be read. Raises `UserError` if a drafter is
    misread and a better reading is available."""
    from outrider.inference.doctor.examine import examine  # imported only where it runs

    with Stage("examining drafters"):
        findings = examine(plan.config, plan.setup, models, plan.rendered)
    for kind, finding in findings.items():
        print("\n".join(describe_findings(kind, finding)), flush=True)
        refuse_reading(KINDS[kind].option or kind, str(plan.config.where(KINDS[kind])), finding)
    return findings


def measure_share(plan: EvaluationPlan, queue: Queue, measured_once: Prepared, models: Models) -> int:
    """Measure the groups of this process's share, as many as the time limit leaves; returns their number."""
    config, setup, group_size = plan.config, plan.setup, plan.config.batch
    models.runtime.prepare(plan.positions, measured_once.kernels)
    first_prompt_ids = plan.rendered[group_size * queue.share[0]]
    bench = make_bench(config, setup, models, measured_once, first_prompt_ids, len(plan.prompts))

    def measure_next(group_index: int) -> float:
        prompt_indices = range(group_size * group_index, group_size * (group_index + 1))
        talks = [Talk(plan.prompts[position], plan.rendered[position], position) for position in prompt_indices]
        measure_talks(config, talks, setup, models, bench)
        spent_seconds = store_results(plan, queue, bench, talks)
        measured_count = queue.share.index(group_index) + 1
        if plan.processes.is_main_process and measured_count & (measured_count - 1) == 0:  # after 1, 2, 4, … groups
            results = [result for measured in finished_results(plan.out_dir, group_size) for result in measured.turns]
            print("\n".join(result_lines(results, config)), flush=True)
        return spent_seconds

    return measure_in_time(plan, queue, measure_next)


def store_results(plan: EvaluationPlan, queue: Queue, bench: Bench, talks: Sequence[Talk]) -> float:
    """Append the results of one group; returns the seconds that all runs have spent."""
    spent_seconds, cpu_share, peak_bytes = queue.limit.spent(), bench.watch.take(), peak_memory(plan.setup.device)
    for talk in talks:
        measured = MeasuredPrompt(
            position=talk.position,
            processes=plan.processes.num_processes,
            turns=tuple(talk.results),
            skipped=talk.skipped,
            threads=torch.get_num_threads(),
            spent=spent_seconds,
            peak_bytes=peak_bytes,
            cpu_share=cpu_share,
            load=load_average(),
        )
        append_result(plan.out_dir, queue.file, measured)
    return spent_seconds


def measure_in_time(plan: EvaluationPlan, queue: Queue, measure_next: Callable[[int], float]) -> int:
    """Measure the groups of the share while the limit leaves time, the required ones in any case; returns how many.

    measure_next: measures a group, and returns the seconds that are spent after it.
    """
    limit, share, group_size = queue.limit, queue.share, plan.config.batch
    spent_before, group_count = limit.spent(), 0
    spent = spent_before
    unit, seconds_left = "prompts" if group_size == 1 else "groups", limit.left(spent)
    with Stage("measuring", len(share), unit, max_seconds=seconds_left) as progress:
        for group in share:
            # The next group is expected to take the mean seconds of those before.
            if group not in queue.required and not limit.holds(spent, (spent - spent_before) / max(1, group_count)):
                break
            if limit.is_over(spent):  # only required groups come here
                progress.total = len({*queue.required} & {*share})
                if plan.processes.is_main_process:
                    print(_overtime(plan, queue, group_count), flush=True)
            spent, group_count = measure_next(group), group_count + 1
            progress.advance()
    return group_count


def _overtime(plan: EvaluationPlan, queue: Queue, group_count: int) -> str:
    """How many of the required prompts are done after the time is over. group_count: groups done by this process."""
    required_count, group_size = queue.finished + len(queue.required), plan.config.batch
    finished_count = min(required_count, queue.finished + group_count * plan.processes.num_processes)
    progress_text = f"{group_size * finished_count} of at least {group_size * required_count} prompts"
    return f"{queue.limit.minutes:.3g} minutes are over: {progress_text} are done"
