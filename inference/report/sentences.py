"""The sentences about a report, for report.md, report.html and the console.

write_recommendation   the verdict in one sentence: which method to use, or why that is undecided
conditions_text        how it was measured
write_sentences        plain decoding, each method, the drafters, skipped turns
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import shorten

from outrider.base.words import format_figure, format_seconds, quote_word, write_option
from outrider.inference.doctor.scores import describe_findings
from outrider.inference.measure.statistics import MARGIN, MIN_PROMPTS, MedianInterval
from outrider.inference.report import types
from outrider.inference.settings.sampling import SamplingConfig

_LOOPS = ", where drafts are nearly always right; verdicts and the recommendation come from the others"
_LOOPS_CAUSE = "as those of a base model do under a chat template (give template=none or longer prompts)"
INT8 = (
    "The target is the int8 model in all arms: the weight of every linear layer, the head too, in whole numbers to "
    "±127 with one scale a row, rounded once when it was loaded. It is another target than the one its drafters were "
    "trained for, so τ may be lower than there. transformers widens the weights for every product."
)
OWN_RUN = "the target's own run differs: plain decoding here gives other texts than transformers"


def write_repeat_command(args: Sequence[str], out_dir: Path, command: Sequence[str] = ("evaluate-checkpoint",)) -> str:
    """The command that repeats the measurement in a new directory. args: the options of the first run."""
    words = [*args, write_option("out_dir", f"{out_dir}-again"), "resume=false"]
    word_by_option = {word.partition("=")[0]: word for word in words}  # of an option that occurs twice, the later word
    return f"measure the same again: {' '.join(map(quote_word, [*command, *word_by_option.values()]))}"


def write_recommendation(reports: Sequence[types.MethodReport]) -> str:
    """The recommendation in one sentence: the fastest method, "nothing pays here", or why it is undecided.

    The first word is lower-case, because a label precedes it. A method is named in backticks. A method whose texts are
    not the target's is never recommended.
    """
    if any(report.verdict == types.TARGET_DIFFERS for report in reports):
        return f"{OWN_RUN}, so no method is judged; please report it."
    wrong_names = [f"`{report.method}`" for report in reports if report.verdict == types.NOT_LOSSLESS]
    warning = f"; do not use {' or '.join(wrong_names)}: not lossless" if wrong_names else ""
    lossless_reports = [r for r in reports if r.figures.speedup.median is not None and r.verdict != types.NOT_LOSSLESS]
    ranked = sorted(lossless_reports, key=lambda report: -(report.figures.speedup_without_loops.median or 0))
    return f"{_recommend(ranked)}{warning}.{_slower_plain(reports[0])}"


def _recommend(ranked: Sequence[types.MethodReport]) -> str:
    """The sentence for lossless methods that were timed, the fastest first."""
    if not ranked:
        return "undecided: no lossless method was timed"
    if any(report.conditions.load.busy for report in ranked):
        return "undecided: the machine was busy; measure again when nothing else runs on it"
    if (prompt_count := ranked[0].figures.speedup.prompts) < MIN_PROMPTS:
        return f"undecided: a verdict needs {MIN_PROMPTS} timed prompts, here: {prompt_count}"
    if (prompt_count := max(report.figures.speedup_without_loops.prompts for report in ranked)) < MIN_PROMPTS:
        loops_text = f"{ranked[0].figures.loops}, {_LOOPS_CAUSE}"
        return f"undecided: {loops_text}; a verdict needs {MIN_PROMPTS} prompts that do not, here: {prompt_count}"
    best = next(report for kind in ("faster", "undecided", "slower") for report in ranked if report.verdict == kind)
    gain_text = format_figure(best.figures.speedup_without_loops).replace(" ", " plain decoding ", 1)  # 1.5× [1, 2]
    if best.verdict == "faster":
        return f"`{best.method}` is the fastest: {gain_text}{_rivals(best, ranked)}"
    if best.verdict == "slower":
        return f"nothing pays here: the best, `{best.method}`, has {gain_text}{_needed_acceptance(best)}"
    condition = f"all of it must be above {1 + MARGIN}; more prompts narrow it"
    return f"undecided: the best, `{best.method}`, has {gain_text}, and {condition}"


def _needed_acceptance(report: types.MethodReport) -> str:
    """The acceptance at which a slower method would pay, if that is more than it has."""
    break_even, rate = report.break_even_acceptance or 0.0, report.figures.acceptance_rate
    never = " (so never pays)" if break_even > 1 else ""
    return f"; it would need an acceptance of {break_even:.2f}{never} and has {rate:.2f}" if break_even > rate else ""


def _rivals(best: types.MethodReport, ranked: Sequence[types.MethodReport]) -> str:
    """The methods whose intervals overlap with the best one's."""

    def interval(report: types.MethodReport) -> tuple[float, float]:
        return report.figures.speedup_without_loops.ci95 or (0, 0)  # (low, high)

    rivals = [report for report in ranked if report is not best and interval(report)[1] >= interval(best)[0]]
    names = [f"`{report.method}`" for report in rivals]
    phrase = " and ".join(names) if len(names) < 3 else f"{len(names)} others"
    return f"; {phrase} may be as fast, as the intervals overlap" if names else ""


def _slower_plain(report: types.MethodReport) -> str:
    """A warning if transformers' `generate` is faster than plain decoding by more than `MARGIN`, as for a verdict."""
    speedup = report.transformers_generate.speedup if report.transformers_generate else MedianInterval()
    if speedup.ci95 is None or speedup.ci95[0] <= 1 + MARGIN:
        return ""
    return (
        f" Plain decoding is slower here than transformers' generate, which has {format_figure(speedup)} of its speed: "
        f"compare with generate. threads=1 helps on a machine that others use (here {_threads(report)}), "
        f"dtype=bfloat16 on a processor that has it (here {report.conditions.dtype})."
    )


def conditions_text(reports: Sequence[types.MethodReport]) -> str:
    """How it was measured. An arm is a method or a baseline; a turn is one question of a conversation (a prompt)."""
    first, run = reports[0], reports[0].conditions
    dtype_text = run.dtype if run.computes_in == run.dtype else f"{run.dtype} weights and {run.computes_in} activations"
    turns_text = f", {first.figures.turns} turns" if first.figures.turns > first.figures.prompts else ""
    processes_text = f", {run.processes} processes at a time" if run.processes > 1 else ""
    groups_text = f"by groups of {run.texts_at_once} texts at once (generate: one after another)"
    lines = [
        f"{_prompt_count(first)}{turns_text} × up to {run.max_new_tokens} tokens, {_choice(run)}, "
        f"{dtype_text} on {first.machine['device']} ({_threads(first)}), arms interleaved "
        f"{groups_text if run.texts_at_once else 'prompt by prompt'}{processes_text}."
    ]
    if run.dtype == "int8":
        lines.append(INT8)
    for key, heading in (
        ("taken_over", "Taken over from the target's generation config, in all arms"),
        ("ignored", "Left out of the target's generation config, in all arms"),
    ):
        if isinstance(options := run.generation_config.get(key), Mapping) and options:
            values = (f"{name} {shorten(json.dumps(value), 60, placeholder=' …')}" for name, value in options.items())
            lines.append(f"{heading}: {', '.join(values)}.")
    if run.cudnn_attention is False:
        lines.append("cuDNN's attention is off in all arms, transformers' too.")
    loops = max((report.figures.loops for report in reports), key=lambda loop_stats: loop_stats.looping)
    lines.append(f"{loops}{_LOOPS if loops.looping else ''}.")
    return " ".join([*lines, run.origin]).strip()


def _prompt_count(report: types.MethodReport) -> str:
    """The number of prompts with results, and the total if a time limit left some out."""
    prompt_count, total, minutes = report.figures.prompts, report.conditions.prompts_given, report.conditions.minutes
    if minutes is None or prompt_count == total:
        return f"{prompt_count} prompts"
    return f"{prompt_count} of {total} prompts, as many as {minutes:.3g} minutes held"


def _threads(report: types.MethodReport) -> str:
    """The number of CPU threads; if chosen per prompt, the number of prompts for each."""
    prompts_by_threads = report.conditions.threads
    if len(prompts_by_threads) < 2:
        return f"{next(iter(prompts_by_threads), report.machine['threads'])} threads"
    return ", ".join(f"{count} threads for {prompts} prompts" for count, prompts in prompts_by_threads.items())


def _choice(conditions: types.Conditions) -> str:
    """How tokens are chosen: greedily or sampled, with the settings."""
    settings = {key: value for key, value in conditions.sampling.items() if value != getattr(SamplingConfig(), key)}
    options = ", ".join(f"{key} {value:g}" for key, value in settings.items())
    if conditions.temperature:
        return f"sampled ({options}; the same distribution, so no tokens to compare)"
    return f"greedy ({options})" if options else "greedy"


def write_sentences(reports: Sequence[types.MethodReport]) -> list[str]:
    """A line for each fact of the run; "rounding ties" are texts that part where two tokens have the same score."""
    first, run, lines = reports[0], reports[0].conditions, list[str]()
    plain_token, lossless = first.autoregressive, first.lossless
    if tie_count := lossless.autoregressive_excused_ties:
        lines.append(
            f"Without a drafter {tie_count} of {lossless.checked} texts part from those of transformers' generate, "
            "where two tokens score the same up to rounding: no drafter does that. See same text as plain decoding."
        )
    if plain_token.token_us is not None:
        lines.append(
            f"plain decoding: {plain_token.token_us:.0f} µs a token, of which {plain_token.host_us:.0f} µs "
            f"({100 * (plain_token.host_share or 0):.1f} %) are not the model's pass."
        )
    lines += map(method_sentence, reports)
    lines += [vocabulary_sentence(kind, vocabulary) for kind, vocabulary in run.draft_vocabularies.items()]
    if run.trained_seconds:
        times_text = ", ".join(f"{kind} {format_seconds(seconds)}" for kind, seconds in run.trained_seconds.items())
        lines.append(f"Trained, evaluations on the way included: {times_text}.")
    if run.skipped:
        lines.append(f"Left out: {'; '.join(f'{turn.prompt_id} ({turn.reason})' for turn in run.skipped)}.")
    return lines


def vocabulary_sentence(kind: str, vocabulary: types.DraftVocabulary) -> str:
    share_by_category = dict(vocabulary.coverage)
    overall = share_by_category.pop("all")
    shares_text = ", ".join(f"{category} {share:.1%}" for category, share in sorted(share_by_category.items()))
    return f"{kind} predicts over {vocabulary.tokens} tokens: {overall:.1%} of what the target said ({shares_text})."


def method_sentence(report: types.MethodReport) -> str:
    """A method's verdict, its split of time, and the statistics of its structure."""
    total_seconds = sum(report.seconds.values()) or 1.0
    parts_text = ", ".join(f"{name} {100 * seconds / total_seconds:.0f} %" for name, seconds in report.seconds.items())
    structure_text = "".join(f"; {name} {value:.2f}" for name, value in report.structure.items())
    if report.acceptance_by_candidates:
        shares_text = ", ".join(f"{share:.2f}" for share in report.acceptance_by_candidates)
        structure_text += f"; accepted by the first 1, 2, … candidates {shares_text}"
    for name, size in report.auto.chosen.items() if report.auto else ():  # sizes that are "auto"
        structure_text += f"; chose {name} {size.mean:.1f} on average, most often {size.mode} "
        structure_text += f"({100 * size.share:.0f} % of the rounds that chose it)"
    return (
        f"{report.method}: {report.verdict}; time: {parts_text}; break-even acceptance "
        f"{format_figure(report.break_even_acceptance, '.2f')}, measured {report.figures.acceptance_rate:.2f}"
        f"{structure_text}."
    )


def overlap_sentence(kind: str, overlap: types.Overlap) -> str:
    if overlap.why is not None:
        return f"{kind}: has it seen the prompts? Not known: {overlap.why}. Restore that text, or take newer prompts."
    searched_part = f"the first {(overlap.characters or 0) / 1e6:.0f} M characters"
    scope = "all of its training text" if overlap.complete else searched_part
    share = (overlap.runs_seen or 0) / overlap.runs if overlap.runs else 0.0
    return (
        f"{kind}: {overlap.prompts_seen} of {overlap.prompts} prompts share a run of {types.RUN} words with {scope}, "
        f"{share:.1%} of all their runs."
    )


def doctor_lines(conditions: types.Conditions) -> Iterator[str]:
    """The findings of doctor=true, which examines drafters before they are measured."""
    for kind, findings in conditions.doctor.items():
        yield from describe_findings(kind, findings)


def describe_resolution(conditions: types.Conditions) -> str:
    """The size of faults that a judgement in the run's dtype cannot detect, and the check that can."""
    limit = f"What is below the rounding of {conditions.computes_in} is not seen"
    if conditions.computes_in not in types.HALF_DTYPES:
        return f"{limit}."
    return (
        f"{limit}. In bfloat16 an attention scale × 1.005, a row of a projection × 1.01 and an eps of the norms × 10 "
        "pass. dtype=float32 sampling.temperature=1 judges the same methods in float32, and sees faults of that size."
    )


def wrong_arms(reports: Sequence[types.MethodReport]) -> list[str]:
    """The arms whose texts are not the target's, for a warning."""
    if reports[0].verdict == types.TARGET_DIFFERS:
        return ["the target's own run, plain decoding,"]
    return [report.method for report in reports if report.verdict == types.NOT_LOSSLESS or report.served_faults]
