"""Evaluating a checkpoint: all arms over all prompts, spread over the processes of a launcher, and one report.

Results are stored prompt by prompt (`measure.results`), and the report is made from the stored results. So a stopped
run can be continued, with any number of processes.
"""

import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from outrider.base.errors import UserError, require
from outrider.base.files import require_writable
from outrider.base.machine import describe_machine
from outrider.base.processes import from_main, join_processes, only_run_of
from outrider.base.progress import Stage
from outrider.base.settings import construct
from outrider.data_prep.text.prompts import Prompt, read_prompts
from outrider.draft_models.card import add_report
from outrider.draft_models.formats.model_name import model_name
from outrider.inference.core.rounds import Clock
from outrider.inference.core.target_session import Runtime
from outrider.inference.doctor.scores import refuse, table
from outrider.inference.evaluate.served import export_drafters, require_served, serve_methods
from outrider.inference.loading.drafters import context_length, load_drafters
from outrider.inference.loading.memory_plan import evaluation_memory, evaluation_plan, explain_out_of_memory
from outrider.inference.loading.models import Models, load_models, make_runtime
from outrider.inference.loading.target_setup import TargetSetup, find_setup, find_target
from outrider.inference.measure.bench import (
    Peers,
    Prepared,
    Talk,
    longest_text,
    make_bench,
    measure_talks,
    peak_memory,
    prepare_methods,
    render,
    require_fits,
)
from outrider.inference.measure.results import Measured, append_result, begin_run, next_number, open_run, read_results
from outrider.inference.measure.threads import load_average, machine_load, warn_if_busy
from outrider.inference.measure.time_limit import TimeLimit
from outrider.inference.report.facts import (
    digests,
    draft_vocabularies,
    heldout_fraction,
    origin_of,
    overlaps,
    run_settings,
    trained_seconds,
)
from outrider.inference.report.page import make_page
from outrider.inference.report.report import build_report, log_reports, markdown, result_lines, write_reports
from outrider.inference.report.served import served_faults
from outrider.inference.report.wording import OWN_RUN, busy_sentences, is_lossless, measure_again, target_differs
from outrider.inference.settings.engine import EngineConfig
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kinds import KINDS


def evaluate(config: EvaluateConfig) -> None:
    """evaluate-checkpoint: compare methods on the prompts; measure-engine: also in an engine. Raises `UserError`."""
    if config.plan:
        print(evaluation_plan(config, find_target(config).config), flush=True)
        return
    warn_if_busy()
    prompts = read_prompts(
        config.prompt_text or config.prompts,
        limit=config.num_prompts,
        prompt_chars=config.prompt_chars,
        heldout_fraction=heldout_fraction(config),
    )
    if isinstance(config, EngineConfig):
        config = replace(config, methods=config.all_methods, draft_tokens=())
    with explain_out_of_memory(lambda: evaluation_memory(config, find_target(config).config)):
        evaluate_checkpoint(config, prompts)


def evaluate_checkpoint(
    config: EvaluateConfig, prompts: Sequence[Prompt], clock: Clock = time.perf_counter, peers: Peers | None = None
) -> None:
    """Compare the methods of `config` on `prompts` and write the report to `config.out_dir`.

    All processes of a launcher call this. Each measures its share of the prompts on its own device. With resume=true,
    prompts that were measured before are skipped. With `minutes`, the time by `clock` (in seconds) determines the
    number of prompts measured. If any method emitted other tokens than the target, every process exits with status 1
    after the report is written. peers: further arms.

    Raises `UserError` for bad input, and if another run is using the directory.
    """
    limit = TimeLimit(config.minutes, clock(), clock=clock)
    state = join_processes()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    out_dir = require_writable(config.out_dir)
    config.wandb.is_on()  # raises now if something it needs is missing
    with only_run_of(state, out_dir, "results", config.resume):
        wrong = _evaluate(config, prompts, out_dir, state, limit, peers)
    if wrong:
        if state.is_main_process:
            print(f"error: not lossless: {', '.join(wrong)}; see {out_dir}/generations.jsonl", file=sys.stderr)
        sys.exit(1)


def _evaluate(
    config: EvaluateConfig,
    prompts: Sequence[Prompt],
    out_dir: Path,
    state: PartialState,
    limit: TimeLimit,
    peers: Peers | None,
) -> list[str]:
    """The names of the methods that were not lossless."""
    setup = find_setup(config)
    require_own_device(setup.device, state)
    if isinstance(config, EngineConfig):
        require_served(config, setup, len(prompts), state.num_processes)
    size = config.batch
    require(len(prompts) % size == 0, "batch", size, f"a divisor of the {len(prompts)} prompts (num_prompts)")
    alone = size == 1 or make_runtime(config.runtime, setup.device).name == Runtime.name
    require(alone, "batch", size, "1 with CUDA graphs, where texts take turns, or runtime=eager")
    turns = [[render(setup, prompt, [turn]) for turn in prompt.turns] for prompt in prompts]
    rendered = [first for first, *_ in turns]
    drafters = load_drafters(config, setup.target, dtype=setup.dtype, device=setup.device)
    context, new = context_length(setup, drafters), config.max_new_tokens
    require(new < context, "max_new_tokens", new, f"less than the models' context of {context} tokens")
    longest = max(config.doctor_lengths, default=0)
    require(longest <= context, "doctor_lengths", longest, f"at most the models' context of {context} tokens")
    require_fits(prompts, rendered, context - new)
    settings = run_settings(config, setup, prompts) | ({"peers": dict(peers.identity)} if peers else {})

    def open_results() -> tuple[Any, list[int], float, int]:
        earlier = open_run(out_dir, settings, config.resume)
        results = _finished(out_dir, size)
        return earlier, list(results), max((m.spent for m in results.values()), default=0.0), next_number(out_dir)

    earlier, prompts_done, spent, number = from_main(state, open_results)
    if isinstance(config, EngineConfig):
        export_drafters(config, setup, out_dir)
    limit = replace(limit, earlier=spent)
    groups = {position // size for position in prompts_done}
    todo, must = limit.to_do(len(prompts) // size, groups)
    share, count = todo[state.process_index :: state.num_processes], 0
    products = None if earlier is None else construct(Prepared, earlier).products
    # On a CPU the main process chooses the kernels; the others load their models after that.
    waits = products is None and setup.device.type == "cpu" and not state.is_main_process
    models = load_models(config, setup, drafters, products) if share and not waits else None
    positions = longest_text(turns, new, context)

    def begin() -> Any:
        assert models is not None  # the main process has a share
        doctor = see_doctor(config, setup, models, rendered)
        begun = asdict(replace(prepare_methods(config, setup, models, rendered[0], positions), doctor=doctor))
        begin_run(out_dir, settings, begun)
        return begun

    if earlier is None:
        state.wait_for_everyone()  # no other process may run while the main one measures
        earlier = from_main(state, begin)
    prepared = construct(Prepared, earlier)
    if share:
        models = models or load_models(config, setup, drafters, prepared.products)
        models.runtime.prepare(positions, prepared.kernels)
        peer_arms = {"peers": peers.make(setup, models, positions)} if peers else {}
        bench = make_bench(config, setup, models, prepared, rendered[size * share[0]], len(prompts), **peer_arms)

        def measure(group: int) -> float:
            assert models is not None
            members = range(size * group, size * (group + 1))
            talks = [Talk(prompts[position], rendered[position], position) for position in members]
            measure_talks(config, talks, setup, models, bench)
            spent = limit.spent()
            peak, cpu_share, threads = peak_memory(setup.device), bench.watch.take(), torch.get_num_threads()
            for talk in talks:
                figures = (tuple(talk.results), talk.skipped, threads, spent, peak, cpu_share, load_average())
                measured = Measured(talk.position, state.num_processes, *figures)
                append_result(out_dir, number + state.process_index, measured)
            measurements = share.index(group) + 1
            if state.is_main_process and measurements & (measurements - 1) == 0:  # after 1, 2, 4, … groups
                print("\n".join(result_lines(_finished(out_dir, size), config)), flush=True)
            return spent

        count = size * _in_time(measure, share, limit, todo[:must], len(groups), state, size)
        del bench
    state.wait_for_everyone()
    expected = len(prompts_done) + sum(gather_object([count]))
    served: Mapping[str, Mapping[str, object]] = {}
    if isinstance(config, EngineConfig):
        models, drafters = None, {}  # the engine needs the memory
        gc.collect()
        torch.cuda.empty_cache()
        answers = {position: m.turns[0] for position, m in _finished(out_dir, size).items() if m.turns}
        served = serve_methods(config, setup, rendered, answers, out_dir)
    with Stage("writing the report"):
        return from_main(state, lambda: report(config, setup, prepared, prompts, settings, expected, out_dir, served))


def _in_time(
    measure: Callable[[int], float],
    share: Sequence[int],
    limit: TimeLimit,
    must: Collection[int],
    groups_before: int,
    state: PartialState,
    size: int,
) -> int:
    """Measure the groups in `share` while `limit` leaves time, those in `must` in any case; returns how many.

    measure: returns the seconds that are spent after it. groups_before: the number of groups, of `size` prompts, that
    earlier runs measured.
    """
    began, count = limit.spent(), 0
    spent = began
    with Stage("measuring", len(share), "prompts" if size == 1 else "groups", most=limit.left(spent)) as stage:
        for group in share:
            if group not in must and not limit.holds(spent, (spent - began) / max(1, count)):
                break
            if limit.is_over(spent):
                stage.total, least = len({*must} & {*share}), groups_before + len(must)
                total = min(least, groups_before + count * state.num_processes)
                if state.is_main_process:
                    progress = f"{size * total} of at least {size * least} prompts are done"
                    print(f"{limit.minutes:.3g} minutes are over: {progress}", flush=True)
            spent, count = measure(group), count + 1
            stage.advance()
    return count


def _finished(folder: Path, size: int) -> dict[int, Measured]:
    """The results in `folder` by position, of groups of `size` prompts that are whole."""
    results = read_results(folder)
    counts = Counter(position // size for position in results)
    return {position: measured for position, measured in results.items() if counts[position // size] == size}


def require_own_device(device: torch.device, state: PartialState) -> None:
    """Raise `UserError` if several processes would share a GPU, or run on devices of different kinds."""
    if state.num_processes == 1:
        return
    if device != torch.device(device.type):
        raise UserError(f"device={device}: {state.num_processes} processes would share it; give device=auto")
    machines = sorted(set(gather_object([describe_machine(str(device))["device"]])))
    if len(machines) > 1:
        raise UserError(f"the processes run on {' and '.join(machines)}: give them devices of one kind to measure on")


def see_doctor(
    config: EvaluateConfig, setup: TargetSetup, models: Models, rendered: Sequence[list[int]]
) -> dict[str, Any]:
    """The doctor's findings, printed. Raises `UserError` if a drafter is misread and a better reading is available."""
    from outrider.inference.doctor.examine import examine  # imported only if requested

    with Stage("examining drafters"):
        findings = examine(config, setup, models, rendered)
    for kind, finding in findings.items():
        print("\n".join(table(kind, finding)), flush=True)
        refuse(KINDS[kind].option or kind, str(config.where(KINDS[kind])), finding)
    return findings


def report(
    config: EvaluateConfig,
    setup: TargetSetup,
    prepared: Prepared,
    prompts: Sequence[Prompt],
    settings: Mapping[str, Any],
    expected: int,
    out_dir: Path,
    served: Mapping[str, Mapping[str, object]],
) -> list[str]:
    """Write the report of the results in `out_dir`, which must cover `expected` of the `prompts`.

    served: the results of a serving engine, by method (see `serve_methods`). Returns the names of the methods that were
    not lossless; `OWN_RUN` in their place if plain decoding was not.
    """
    measurements = _finished(out_dir, config.batch)
    missing = expected - len(measurements)
    if missing:
        raise UserError(f"out_dir={out_dir}: the results of {missing} prompts are missing there; give resume=true")
    results = [result for _, measured in sorted(measurements.items()) for result in measured.turns]
    facts = _facts(config, setup, prepared, prompts, measurements) | {
        "digests": digests(settings),
        "draft_vocabularies": draft_vocabularies(config, results),
    }
    if config.batch > 1:
        facts["texts_at_once"] = config.batch
    reports = [
        build_report(name, results, {**facts, "settings": asdict(method)}, config.seed, prepared.tunings.get(name))
        | dict(served.get(name, {}))
        for name, method in prepared.methods.items()
    ]
    texts = {
        (r.prompt_id, arm): setup.tokenizer.decode(list(g.tokens), skip_special_tokens=True)
        for r in results
        for arm, g in r.generations.items()
    }
    page = partial(make_page, reports, results, lambda ids: str(setup.tokenizer.decode(list(ids))))
    write_reports(out_dir, reports, results, texts, page)
    print("\n".join([*result_lines(measurements, config), "", markdown(reports)]))
    for name, where in config.paths.items() if config.card else ():
        if config.plugin(KINDS[name]).has_card and Path(where).is_dir():
            add_report(Path(where), markdown(reports))
    log_reports(config.wandb, out_dir, reports, settings)
    if any(map(busy_sentences, reports)):
        command = ("outrider", "measure-engine") if isinstance(config, EngineConfig) else ("evaluate-checkpoint",)
        print(measure_again(sys.argv[1:], out_dir, command), flush=True)
    print("\n".join([*filter(None, [facts["origin"]]), f"report: {out_dir / 'report.html'}"]), flush=True)
    wrong = [row["method"] for row in reports if not is_lossless(row) or served_faults(row)]
    return [OWN_RUN] if target_differs(reports[0]) else wrong


def _facts(
    config: EvaluateConfig,
    setup: TargetSetup,
    prepared: Prepared,
    prompts: Sequence[Prompt],
    measurements: Mapping[int, Measured],
) -> dict[str, Any]:
    """The facts common to all methods of the report: settings, models, and the conditions of the measurement."""
    runs = measurements.values()
    return {
        "target": setup.target.source,
        "model": model_name(setup.target.source),
        "drafter": " + ".join(config.paths.values()) or "none",
        "dtype": setup.numbers,
        "computes_in": setup.floats,
        "device": str(setup.device),
        "runtime": make_runtime(config.runtime, setup.device).name,
        "kernels": prepared.chosen(),
        "processes": max(measured.processes for measured in runs),
        "threads": dict(sorted(Counter(m.threads for m in runs if m.threads).items())),
        "prompts_given": len(prompts),
        "template": setup.chat_template if any(prompt.chat for prompt in prompts) else None,
        "peak_memory_bytes": max((measured.peak_bytes for measured in runs), default=0),
        "load": machine_load((m.cpu_share for m in runs), (m.load for m in runs), os.cpu_count() or 1),
        "minutes": config.minutes,
        "trained_seconds": trained_seconds(config),
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.sampling.temperature,
        "sampling": asdict(config.sampling),
        "generation_config": {
            "from": config.generation_config,
            "taken_over": dict(setup.inherited.fields),
            "ignored": dict(setup.inherited.ignored),
        },
        "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled() if setup.device.type == "cuda" else None,
        "skipped": [asdict(turn) for _, measured in sorted(measurements.items()) for turn in measured.skipped],
        "overlap": overlaps(config, prompts),
        "origin": origin_of(config, prompts),
        "doctor": prepared.doctor,
    }
