"""The phases of an evaluation that run models: load, tune, measure.

Results are stored prompt by prompt (`measure.results`), and the report is made from the stored results. So a stopped
run can be continued, with any number of processes.
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

    prepared: of the run that is continued; None for a new run. finished: the number of groups that it has measured.
    share: the groups of this process, in the order to measure. required: the groups that are measured in any case, the
    first of all shares. file: the number of this process's file of results.
    """

    prepared: Prepared | None
    finished: int
    share: Sequence[int]
    required: Collection[int]
    limit: TimeLimit
    file: int


def measure_prompts(plan: EvaluationPlan, queue: Queue) -> Prepared:
    """Load, tune and measure; results go to `plan.out_dir`. All processes of a launcher call this.

    On a CPU the main process loads its models first, alone, as it chooses the kernels by their speed; the others load
    with these. On a GPU all load at once. Only the main process tunes, while no other runs a model.
    """
    state = plan.processes
    is_first = queue.prepared is not None or plan.setup.device.type != "cpu" or state.is_main_process
    models = load_plan_models(plan, queue.prepared) if queue.share and is_first else None
    prepared = queue.prepared or tune_methods(plan, models)
    count = measure_share(plan, queue, prepared, models or load_plan_models(plan, prepared)) if queue.share else 0
    state.wait_for_everyone()
    from_main(state, partial(require_results, plan, queue.finished + sum(gather_object([count]))))
    return prepared


def require_results(plan: EvaluationPlan, group_count: int) -> None:
    """Raise `UserError` unless the results of so many groups are in `plan.out_dir`."""
    group_size = plan.config.batch
    if missing := group_size * group_count - len(finished_results(plan.out_dir, group_size)):
        raise UserError(f"out_dir={plan.out_dir}: the results of {missing} prompts are missing there; give resume=true")


def open_queue(plan: EvaluationPlan) -> Queue:
    """What remains in `plan.out_dir`. Raises `UserError` if it holds results that must not be continued."""
    group_size, state = plan.config.batch, plan.processes

    def open_results() -> tuple[object, float, set[int], int]:
        """(prepared, seconds of the runs before, groups that they measured, the first unused number of a file)."""
        prepared = open_run(plan.out_dir, plan.identity, plan.config.resume)
        measured = finished_results(plan.out_dir, group_size)
        seconds, groups = max((m.spent for m in measured), default=0.0), {m.position // group_size for m in measured}
        return prepared, seconds, groups, next_number(plan.out_dir)

    prepared, seconds, groups, number = from_main(state, open_results)
    limit = replace(plan.limit, earlier=seconds)
    todo, required = limit.to_do(plan.groups, groups)
    return Queue(
        prepared=None if prepared is None else construct(Prepared, prepared),
        finished=len(groups),
        share=todo[state.process_index :: state.num_processes],
        required=todo[:required],
        limit=limit,
        file=number + state.process_index,
    )


def load_plan_models(plan: EvaluationPlan, prepared: Prepared | None) -> Models:
    """The models. Without anything `prepared`, the kernels of a CPU are chosen now, by their speed."""
    return load_models(plan.config, plan.setup, plan.drafters, None if prepared is None else prepared.products)


def tune_methods(plan: EvaluationPlan, models: Models | None) -> Prepared:
    """Measure once, on the main process, what all prompts need (see `Prepared`), and record it with the identity."""

    def begin() -> object:
        assert models is not None  # the main process has a share of a new run
        doctor = examine_drafters(plan, models)
        prepared = prepare_methods(plan.config, plan.setup, models, plan.rendered[0], plan.positions)
        content = to_json(replace(prepared, doctor=dict(doctor)))
        begin_run(plan.out_dir, plan.identity, content)
        return content

    plan.processes.wait_for_everyone()
    return construct(Prepared, from_main(plan.processes, begin))


def examine_drafters(plan: EvaluationPlan, models: Models) -> Mapping[str, Findings]:
    """The doctor's findings, printed. Raises `UserError` if a drafter is misread and a better reading is available."""
    from outrider.inference.doctor.examine import examine  # imported only if requested

    with Stage("examining drafters"):
        findings = examine(plan.config, plan.setup, models, plan.rendered)
    for kind, finding in findings.items():
        print("\n".join(describe_findings(kind, finding)), flush=True)
        refuse_reading(KINDS[kind].option or kind, str(plan.config.where(KINDS[kind])), finding)
    return findings


def measure_share(plan: EvaluationPlan, queue: Queue, prepared: Prepared, models: Models) -> int:
    """Measure the groups of this process's share, as many as the time limit leaves; returns their number."""
    config, setup, group_size = plan.config, plan.setup, plan.config.batch
    models.runtime.prepare(plan.positions, prepared.kernels)
    prompt = plan.rendered[group_size * queue.share[0]]
    bench = make_bench(config, setup, models, prepared, prompt, len(plan.prompts))

    def measure_next(group: int) -> float:
        members = range(group_size * group, group_size * (group + 1))
        talks = [Talk(plan.prompts[position], plan.rendered[position], position) for position in members]
        measure_talks(config, talks, setup, models, bench)
        spent = store_results(plan, queue, bench, talks)
        measurements = queue.share.index(group) + 1
        if plan.processes.is_main_process and measurements & (measurements - 1) == 0:  # after 1, 2, 4, … groups
            results = [result for prompt in finished_results(plan.out_dir, group_size) for result in prompt.turns]
            print("\n".join(result_lines(results, config)), flush=True)
        return spent

    return measure_in_time(plan, queue, measure_next)


def store_results(plan: EvaluationPlan, queue: Queue, bench: Bench, talks: Sequence[Talk]) -> float:
    """Append the results of one group; returns the seconds that all runs have spent."""
    spent, cpu_share, peak = queue.limit.spent(), bench.watch.take(), peak_memory(plan.setup.device)
    for talk in talks:
        measured = MeasuredPrompt(
            position=talk.position,
            processes=plan.processes.num_processes,
            turns=tuple(talk.results),
            skipped=talk.skipped,
            threads=torch.get_num_threads(),
            spent=spent,
            peak_bytes=peak,
            cpu_share=cpu_share,
            load=load_average(),
        )
        append_result(plan.out_dir, queue.file, measured)
    return spent


def measure_in_time(plan: EvaluationPlan, queue: Queue, measure_next: Callable[[int], float]) -> int:
    """Measure the groups of the share while the limit leaves time, the required ones in any case; returns how many.

    measure_next: measures a group, and returns the seconds that are spent after it.
    """
    limit, share, group_size = queue.limit, queue.share, plan.config.batch
    began, count = limit.spent(), 0
    spent = began
    with Stage("measuring", len(share), "prompts" if group_size == 1 else "groups", most=limit.left(spent)) as progress:
        for group in share:
            if group not in queue.required and not limit.holds(spent, (spent - began) / max(1, count)):
                break
            if limit.is_over(spent):
                progress.total = len({*queue.required} & {*share})
                if plan.processes.is_main_process:
                    print(_overtime(plan, queue, count), flush=True)
            spent, count = measure_next(group), count + 1
            progress.advance()
    return count


def _overtime(plan: EvaluationPlan, queue: Queue, count: int) -> str:
    """How many of the required prompts are done after the time is over. count: the groups done by this process."""
    required_groups, group_size = queue.finished + len(queue.required), plan.config.batch
    groups = min(required_groups, queue.finished + count * plan.processes.num_processes)
    prompts = f"{group_size * groups} of at least {group_size * required_groups} prompts"
    return f"{queue.limit.minutes:.3g} minutes are over: {prompts} are done"
