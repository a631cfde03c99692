"""From the measured generations of all prompts to the report of one method.

An arm is a way to decode: a method, plain decoding ("autoregressive"), or transformers' `generate`. A text loops if it
repeats a cycle of tokens; drafts in a loop are nearly always accepted. A rounding tie is a difference of texts where
two tokens have the same score up to rounding.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace

from outrider.base.machine import describe_machine
from outrider.base.streams import Streams
from outrider.draft_models.early_exit.checkpoint import provenance
from outrider.inference.measure import speed, statistics
from outrider.inference.measure.lossless import judge_deviations
from outrider.inference.measure.results import PromptResult
from outrider.inference.report import types
from outrider.inference.settings.method import AUTOREGRESSIVE, TRANSFORMERS, MethodConfig
from outrider.inference.sizing.policy import Tuning


def build_report(
    method: str,
    config: MethodConfig,
    results: Sequence[PromptResult],
    conditions: types.Conditions,
    seed: int,
    tuning: Tuning | None = None,
) -> types.MethodReport:
    """The report of one method, whose settings are `config`, over all prompts.

    seed: of the bootstraps. tuning: the measurements that "auto" sizes of drafts were chosen from.
    """
    generations = [r.generations[method] for r in results]
    arms = {"autoregressive": AUTOREGRESSIVE, TRANSFORMERS: TRANSFORMERS, "speculative": method}  # by key of the report
    streams = Streams(seed).within(method, "bootstrap")
    figures = make_figures(results, method, streams)
    excuses_ties = conditions.computes_in in types.HALF_DTYPES
    lossless = compare_texts(results, method, sampled=conditions.temperature > 0, excusing=excuses_ties)
    by_category = {name: [r for r in results if r.category == name] for name in sorted({r.category for r in results})}
    return types.MethodReport(
        method=method,
        conditions=conditions,
        settings=asdict(config),
        seed=seed,
        lossless=lossless,
        machine=describe_machine(conditions.device),
        made_with=provenance(),
        figures=replace(figures, speedup=speed.speedups_over_baselines(results, method, streams)),
        tokens=sum(len(g.tokens) for g in generations),
        structure=statistics.structure_statistics(generations),
        acceptance_by_candidates=tuple(statistics.acceptance_by_candidates(generations)),
        sources=statistics.count_rounds_by_source(generations),
        auto=types.AutoSizes(tuning.costs.summary(), statistics.chosen_sizes(generations)) if tuning else None,
        tokens_per_second={name: speed.tokens_per_second(results, arm) for name, arm in arms.items()},
        whole_answers_per_second={
            name: speed.tokens_per_second(results, arm, prefill=True) for name, arm in arms.items()
        },
        prefill_seconds={name: speed.prefill_seconds(results, arm, streams) for name, arm in arms.items()},
        end_to_end=speed.speedups_over_baselines(results, method, streams, speed.end_to_end),
        autoregressive=speed.time_of_a_plain_token(results),
        break_even_acceptance=speed.break_even(results, method),
        seconds=speed.parts_of_time(results, method),
        acceptance_by_position=statistics.acceptance_by_position(generations),
        acceptance_given_previous=statistics.acceptance_by_position(generations, given_previous=True),
        by_category={
            name: make_figures(group, method, streams.within("category", name)) for name, group in by_category.items()
        },
        transformers_generate=generate_speed(results, streams),
        speedup_per_prompt=speed.speedups(results, method, AUTOREGRESSIVE),
        verdict=method_verdict(method, lossless, figures, conditions),
    )


def method_verdict(method: str, lossless: types.Lossless, figures: types.Figures, conditions: types.Conditions) -> str:
    """The verdict: on the texts if they are wrong, else on the speed.

    Texts are wrong if one differs from the reference's by more than a rounding tie, or if the judgement, which is of
    keys, values and logits, has a fault. If plain decoding by this runtime is wrong itself, no method is to blame.
    Speed is judged on texts that do not loop.
    """
    judgement, plain_judgement = lossless.judged[method], lossless.judged[AUTOREGRESSIVE]
    plain_is_identical = lossless.autoregressive_identical == lossless.checked
    plain_is_excused = plain_judgement is not None and conditions.computes_in in types.HALF_DTYPES
    if not (plain_is_identical or plain_is_excused) or (plain_judgement and plain_judgement.faults):
        return types.TARGET_DIFFERS
    if lossless.identical + lossless.excused_ties != lossless.checked or (judgement and judgement.faults):
        return types.NOT_LOSSLESS
    return statistics.judge_speed(figures.speedup_without_loops, conditions.load.busy)


def make_figures(results: Sequence[PromptResult], method: str, streams: Streams) -> types.Figures:
    """The figures of a method on some prompts, its share of looping text, and the speed-up without loops."""
    generations = [r.generations[method] for r in results]
    loopless_results = speed.without_loops(results, method, AUTOREGRESSIVE)
    return types.Figures(
        prompts=speed.conversations(results),
        turns=len(results),
        **vars(statistics.decode_statistics(generations)),
        speedup=speed.speedup(results, method, AUTOREGRESSIVE, streams),
        loops=statistics.count_loops([g.tokens for g in generations]),
        speedup_without_loops=speed.speedup(loopless_results, method, AUTOREGRESSIVE, streams),
    )


def generate_speed(results: Sequence[PromptResult], streams: Streams) -> types.GenerateSpeed | None:
    """The speed-ups of transformers' `generate`; None if it was not run."""
    if TRANSFORMERS not in results[0].generations:
        return None
    arguments = (results, TRANSFORMERS, AUTOREGRESSIVE, streams)
    return types.GenerateSpeed(speed.speedup(*arguments), speed.speedup(*arguments, speed.end_to_end))


def compare_texts(results: Sequence[PromptResult], method: str, *, sampled: bool, excusing: bool) -> types.Lossless:
    """The texts compared, and the judgements of the method and of plain decoding.

    sampled: no text is compared. excusing: a difference may be a rounding tie, as in half precision.
    """
    compared_results = [] if sampled else results
    arms = (method, AUTOREGRESSIVE)
    deviations = {arm: [r.deviations[arm] for r in results if arm in r.deviations] for arm in arms}
    judgements = {arm: judge_deviations(rows) if rows else None for arm, rows in deviations.items()}

    def count_ties(arm: str) -> int:
        """The number of judged texts that differ from the reference's, of an arm whose judgement has no fault."""
        judgement = judgements[arm]
        if judgement is None or judgement.faults or not excusing:
            return 0
        return sum(not r.identical(arm) and arm in r.deviations for r in compared_results)

    return types.Lossless(
        reference=None if sampled else results[0].reference,
        checked=len(compared_results),
        identical=sum(r.identical(method) for r in compared_results),
        identical_to_plain=sum(r.identical(method, AUTOREGRESSIVE) for r in compared_results),
        autoregressive_identical=sum(r.identical(AUTOREGRESSIVE) for r in compared_results),
        excused_ties=count_ties(method),
        autoregressive_excused_ties=count_ties(AUTOREGRESSIVE),
        judged=judgements,
    )
