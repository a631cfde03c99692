"""The sentences about a report, for all pages."""

import json
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten

from outrider.base.words import figure, in_shell, in_words, option
from outrider.inference.measure.statistics import MARGIN, MIN_PROMPTS, loops_text
from outrider.inference.report.tables import Report
from outrider.inference.settings.method import AUTOREGRESSIVE
from outrider.inference.settings.sampling import SamplingConfig

_LOOPS = ", where drafts are nearly always right; verdicts and the recommendation come from the others"
_LOOPS_CAUSE = "as those of a base model do under a chat template (give template=none or longer prompts)"
INT8 = (
    "The target is the int8 model in all arms: the weight of every linear layer, the head too, in whole numbers to "
    "±127 with one scale a row, rounded once when it was loaded. It is another target than the one its drafters were "
    "trained for, so τ may be lower than there. transformers widens the weights for every product."
)
HALF_NAMES = ("bfloat16", "float16")
OWN_RUN = "the target's own run differs: plain decoding here gives other texts than transformers"


def busy_sentences(report: Report) -> list[str]:
    """A warning for the top of the report if the machine was busy."""
    busy = (report.get("load") or {}).get("busy")
    calmer = " threads=1 is the least disturbed by other work." if report.get("device") == "cpu" else ""
    return [f"{busy} Do not quote these speeds; no speed is judged.{calmer}"] if busy else []


def measure_again(words: Sequence[str], out_dir: Path, command: Sequence[str] = ("evaluate-checkpoint",)) -> str:
    """The command that repeats the measurement in a new directory. words: the options of the first run."""
    same = {word.partition("=")[0]: word for word in [*words, option("out_dir", f"{out_dir}-again"), "resume=false"]}
    return f"measure the same again: {' '.join(map(in_shell, [*command, *same.values()]))}"


def recommendation(reports: Sequence[Report]) -> str:
    """The recommendation in one sentence: the fastest method, "nothing pays here", or why it is undecided.

    The first word is lower-case, because a label precedes it. A method is named in backticks. Texts that are not the
    target's are never recommended.
    """
    if any(report["verdict"] == "target differs" for report in reports):
        return f"{OWN_RUN}, so no method is judged; please report it."
    wrong = [f"`{report['method']}`" for report in reports if report["verdict"] == "not lossless"]
    warning = f"; do not use {' or '.join(wrong)}: not lossless" if wrong else ""
    timed = [report for report in reports if report["speedup"]["median"] is not None]
    right = [report for report in timed if report["verdict"] != "not lossless"]
    ranked = sorted(right, key=lambda report: -(judged_speed(report)["median"] or 0))
    return f"{_recommended(ranked)}{warning}.{_slower_plain(reports[0])}"


def judged_speed(report: Report) -> Report:
    """The speed-up that decides the verdict: that of texts that do not loop (see `inference.measure.statistics`)."""
    speed: Report = report.get("speedup_without_loops", report["speedup"])
    return speed


def _recommended(ranked: Sequence[Report]) -> str:
    """The sentence for lossless methods that were timed, the fastest first."""
    if not ranked:
        return "undecided: no lossless method was timed"
    if any(map(busy_sentences, ranked)):
        return "undecided: the machine was busy; measure again when nothing else runs on it"
    if (prompts := ranked[0]["speedup"]["prompts"]) < MIN_PROMPTS:
        return f"undecided: a verdict needs {MIN_PROMPTS} timed prompts, here: {prompts}"
    if (prompts := max(judged_speed(report)["prompts"] for report in ranked)) < MIN_PROMPTS:
        loops = f"{loops_text(ranked[0]['loops'])}, {_LOOPS_CAUSE}"
        return f"undecided: {loops}; a verdict needs {MIN_PROMPTS} prompts that do not, here: {prompts}"
    best = next(report for kind in ("faster", "undecided", "slower") for report in ranked if report["verdict"] == kind)
    gain = figure(judged_speed(best)).replace(" ", " plain decoding ", 1)
    if best["verdict"] == "faster":
        return f"`{best['method']}` is the fastest: {gain}{_rivals(best, ranked)}"
    if best["verdict"] == "slower":
        even, rate = best["break_even_acceptance"], best["acceptance_rate"]
        never = " (so never pays)" if even is not None and even > 1 else ""
        needed = f"; it would need an acceptance of {even:.2f}{never} and has {rate:.2f}" if (even or 0) > rate else ""
        return f"nothing pays here: the best, `{best['method']}`, has {gain}{needed}"
    condition = f"all of it must be above {1 + MARGIN}; more prompts narrow it"
    return f"undecided: the best, `{best['method']}`, has {gain}, and {condition}"


def _rivals(best: Report, ranked: Sequence[Report]) -> str:
    """The methods whose intervals overlap with the best one's."""
    low = judged_speed(best)["ci95"][0]
    rivals = [report for report in ranked if report is not best and (judged_speed(report)["ci95"] or [0, 0])[1] >= low]
    names = [f"`{report['method']}`" for report in rivals]
    phrase = " and ".join(names) if len(names) < 3 else f"{len(names)} others"
    return f"; {phrase} may be as fast, as the intervals overlap" if names else ""


def _slower_plain(report: Report) -> str:
    """A warning if transformers' `generate` is faster than plain decoding by more than the margin of a verdict."""
    faster = report.get("transformers_generate", {}).get("speedup")
    if faster is None or faster["ci95"] is None or faster["ci95"][0] <= 1 + MARGIN:
        return ""
    return (
        f" Plain decoding is slower here than transformers' generate, which has {figure(faster)} of its speed: "
        f"compare with generate. threads=1 helps on a machine that others use (here {_threads(report)}), "
        f"dtype=bfloat16 on a processor that has it (here {report['dtype']})."
    )


def conditions(reports: Sequence[Report]) -> str:
    """The conditions of the measurement as a sentence."""
    first = reports[0]
    floats, dtype = first.get("computes_in", first["dtype"]), first["dtype"]
    numbers = dtype if floats == dtype else f"{dtype} weights and {floats} activations"
    turns = f", {first['turns']} turns" if first["turns"] > first["prompts"] else ""
    together = f", {first['processes']} processes at a time" if first["processes"] > 1 else ""
    size = first.get("texts_at_once", 1)
    by = "prompt by prompt" if size == 1 else f"by groups of {size} texts at once (generate: one after another)"
    sentences = [
        f"{_prompt_count(first)}{turns} × up to {first['max_new_tokens']} tokens, {_choice(first)}, "
        f"{numbers} on {first['machine']['device']} ({_threads(first)}), arms interleaved "
        f"{by}{together}."
    ]
    if first["dtype"] == "int8":
        sentences.append(INT8)
    for key, lead in (
        ("taken_over", "Taken over from the target's generation config, in all arms"),
        ("ignored", "Left out of the target's generation config, in all arms"),
    ):
        fields = first.get("generation_config", {}).get(key)
        if fields:
            values = (f"{name} {shorten(json.dumps(value), 60, placeholder=' …')}" for name, value in fields.items())
            sentences.append(f"{lead}: {', '.join(values)}.")
    if first.get("cudnn_attention") is False:
        sentences.append("cuDNN's attention is off in all arms, transformers' too.")
    loops = max((report["loops"] for report in reports), key=lambda share: share["looping"])
    sentences.append(f"{loops_text(loops)}{_LOOPS if loops['looping'] else ''}.")
    return " ".join([*sentences, first.get("origin", "")]).strip()


def _prompt_count(report: Report) -> str:
    """The number of prompts with results, and the total if a time limit left some out."""
    prompts, total = report["prompts"], report.get("prompts_given", report["prompts"])
    if report.get("minutes") is None or prompts == total:
        return f"{prompts} prompts"
    return f"{prompts} of {total} prompts, as many as {report['minutes']:.3g} minutes held"


def _threads(report: Report) -> str:
    """The number of CPU threads; if chosen per prompt, the number of prompts for each."""
    used = report.get("threads") or {}
    if len(used) < 2:
        return f"{next(iter(used), report['machine']['threads'])} threads"
    return ", ".join(f"{count} threads for {prompts} prompts" for count, prompts in used.items())


def _choice(report: Report) -> str:
    """The decoding mode, greedy or sampled, with its settings."""
    settings = {key: value for key, value in report["sampling"].items() if value != getattr(SamplingConfig(), key)}
    options = ", ".join(f"{key} {value:g}" for key, value in settings.items())
    if report["temperature"]:
        return f"sampled ({options}; the same distribution, so no tokens to compare)"
    return f"greedy ({options})" if options else "greedy"


def sentences(reports: Sequence[Report]) -> list[str]:
    """Sentences on plain decoding, each method, the drafters, and skipped turns."""
    first, lines = reports[0], list[str]()
    token, lossless = first["autoregressive"], first["lossless"]
    if ties := lossless["autoregressive_excused_ties"]:
        lines.append(
            f"Without a drafter {ties} of {lossless['checked']} texts part from those of transformers' generate, "
            "where two tokens score the same up to rounding: no drafter does that. See same text as plain decoding."
        )
    if token["token_us"] is not None:
        lines.append(
            f"plain decoding: {token['token_us']:.0f} µs a token, of which {token['host_us']:.0f} µs "
            f"({100 * token['host_share']:.1f} %) are not the model's pass."
        )
    lines += map(method_sentence, reports)
    lines += [vocabulary_sentence(kind, vocabulary) for kind, vocabulary in first.get("draft_vocabularies", {}).items()]
    if trained := first.get("trained_seconds"):
        times = ", ".join(f"{kind} {in_words(seconds)}" for kind, seconds in trained.items())
        lines.append(f"Trained, evaluations on the way included: {times}.")
    if first.get("skipped"):
        lines.append(f"Left out: {'; '.join('{prompt_id} ({reason})'.format(**turn) for turn in first['skipped'])}.")
    return lines


def vocabulary_sentence(kind: str, vocabulary: Report) -> str:
    """The size of a draft vocabulary and its coverage of the target's text, as a sentence."""
    shares = dict(vocabulary["coverage"])
    overall = shares.pop("all")
    parts = ", ".join(f"{category} {share:.1%}" for category, share in sorted(shares.items()))
    return f"{kind} predicts over {vocabulary['tokens']} tokens: {overall:.1%} of what the target said ({parts})."


def method_sentence(report: Report) -> str:
    """A method's verdict, its split of time, and the statistics of its structure."""
    total = sum(report["seconds"].values()) or 1.0
    parts = ", ".join(f"{name} {100 * part / total:.0f} %" for name, part in report["seconds"].items())
    even = report["break_even_acceptance"]
    structure = "".join(f"; {name} {value:.2f}" for name, value in report["structure"].items())
    if report["acceptance_by_candidates"]:
        shares = ", ".join(f"{share:.2f}" for share in report["acceptance_by_candidates"])
        structure += f"; accepted by the first 1, 2, … candidates {shares}"
    if report["auto"]:
        for name, size in report["auto"]["chosen"].items():
            structure += f"; chose {name} {size['mean']:.1f} on average, most often {size['mode']} "
            structure += f"({100 * size['share']:.0f} % of rounds)"
    return (
        f"{report['method']}: {report['verdict']}; time: {parts}; break-even acceptance "
        f"{'–' if even is None else f'{even:.2f}'}, measured {report['acceptance_rate']:.2f}{structure}."
    )


def resolution(report: Report) -> str:
    """The size of faults that a judgement in this report's dtype cannot detect, and the check that can."""
    computes = report.get("computes_in", report["dtype"])
    limit = f"What is below the rounding of {computes} is not seen"
    if computes not in HALF_NAMES:
        return f"{limit}."
    return (
        f"{limit}. In bfloat16 an attention scale × 1.005, a row of a projection × 1.01 and an eps of the norms × 10 "
        "pass. dtype=float32 sampling.temperature=1 judges the same methods in float32, and sees faults of that size."
    )


def is_lossless(report: Report) -> bool:
    """Whether every compared text was identical to the reference's or a rounding tie, and no fault was found."""
    lossless = report["lossless"]
    judged = lossless["judged"][report["method"]]
    same = lossless["identical"] + lossless["excused_ties"] == lossless["checked"]
    return same and not (judged and judged["faults"])


def target_differs(report: Report) -> bool:
    """Whether plain decoding by this runtime is itself not lossless: then no method is to blame."""
    lossless, computes = report["lossless"], report.get("computes_in", report.get("dtype"))
    judged = lossless["judged"].get(AUTOREGRESSIVE)
    same = lossless["autoregressive_identical"] == lossless["checked"] or (judged and computes in HALF_NAMES)
    return not same or bool(judged and judged["faults"])


def wrong_arms(reports: Sequence[Report]) -> list[str]:
    """The arms whose text is not the target's."""
    if target_differs(reports[0]):
        return ["the target's own run, plain decoding,"]
    return [report["method"] for report in reports if not is_lossless(report)]
