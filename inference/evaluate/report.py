"""The report: numbers from measured generations, as JSON, Markdown and plots."""

import io
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from draft_models.checkpoint import provenance
from inference.auto.policy import Tuning
from inference.evaluate.arms import AUTOREGRESSIVE, TRANSFORMERS, PromptResult
from inference.evaluate.drafter_facts import drafter_lines
from inference.evaluate.lossless_report import is_lossless, judgement_lines, lossless_section
from inference.evaluate.speed import (
    break_even,
    conversations,
    end_to_end,
    parts_of_time,
    prefill_seconds,
    speedup,
    speedups,
    speedups_over_baselines,
    time_of_a_plain_token,
    tokens_per_second,
)
from inference.evaluate.statistics import (
    acceptance_by_candidates,
    acceptance_by_position,
    chosen_sizes,
    decode_statistics,
    structure_statistics,
)
from inference.settings import SamplingConfig
from outrider.files import require_writable, write_atomically, write_json
from outrider.streams import Streams

Report = dict[str, Any]
REPORT_FILE = "report.json"
MIN_PROMPTS = 5  # conversations, however many turns they have; fewer have no interval worth the name, so no verdict


def build_report(
    method: str,
    results: Sequence[PromptResult],
    facts: Mapping[str, Any],
    seed: int,
    tuning: Tuning | None = None,
) -> Report:
    """The report of one method over all prompts; `facts` (target, temperature, settings, …) go in as they are.

    tuning: what sizes of "auto" were chosen from.
    """
    mine = [r.generations[method] for r in results]
    arms = {"autoregressive": AUTOREGRESSIVE, TRANSFORMERS: TRANSFORMERS, "speculative": method}
    streams = Streams(seed).within(method, "bootstrap")
    report: Report = {
        "method": method,
        **facts,
        "machine": describe_machine(facts["device"]),
        "made_with": provenance(),
        "prompts": conversations(results),
        "turns": len(results),
        "tokens": sum(len(g.tokens) for g in mine),
        "seed": seed,
        "lossless": lossless_section(results, method, sampled=facts["temperature"] > 0),
        **decode_statistics(mine),
        "structure": structure_statistics(mine),
        "acceptance_by_candidates": acceptance_by_candidates(mine),
        "auto": tuning and {"costs": tuning.costs.summary(), "chosen": chosen_sizes(mine)},
        "tokens_per_second": {name: tokens_per_second(results, arm) for name, arm in arms.items()},
        "prefill_seconds": {name: prefill_seconds(results, arm, streams) for name, arm in arms.items()},
        "speedup": speedups_over_baselines(results, method, streams),
        "end_to_end": speedups_over_baselines(results, method, streams, end_to_end),
        "autoregressive": time_of_a_plain_token(results),
        "break_even_acceptance": break_even(results, method),
        "seconds": parts_of_time(results, method),
        "acceptance_by_position": acceptance_by_position(mine),
        "by_category": {},
    }
    if TRANSFORMERS in results[0].generations:
        report[TRANSFORMERS] = {
            "speedup": speedup(results, TRANSFORMERS, AUTOREGRESSIVE, streams),
            "end_to_end": speedup(results, TRANSFORMERS, AUTOREGRESSIVE, streams, end_to_end),
        }
    for category in sorted({r.category for r in results}):
        group = [r for r in results if r.category == category]
        report["by_category"][category] = {
            "prompts": conversations(group),
            "turns": len(group),
            **decode_statistics(r.generations[method] for r in group),
            "speedup": speedup(group, method, AUTOREGRESSIVE, streams.within("category", category)),
        }
    report["speedup_per_prompt"] = speedups(results, method, AUTOREGRESSIVE)
    report["verdict"] = _verdict(report)
    return report


def relate_to_chain(reports: Sequence[Report]) -> None:
    """Add GSD's drafted_vs_chain: what the source drafted a round over what a chain of the same source did."""
    chains = {
        r["settings"]["source"]: r["drafted_tokens_per_round"]
        for r in reports
        if r["settings"]["structure"]["kind"] == "chain"
    }
    for report in reports:
        drafted, chain = report["structure"].get("drafted_by_source"), chains.get(report["settings"]["source"])
        if drafted and chain:
            report["structure"]["drafted_vs_chain"] = drafted / chain


def markdown(reports: Sequence[Report]) -> str:
    """The table people read: one row per method, baselines first."""
    first = reports[0]
    speeds = first["tokens_per_second"]
    lines = [
        f"# {first['drafter']} on {first['target']}",
        "",
        _conditions(reports),
        "",
        "| method | identical | τ | v_d | r_d | HM | drafted/round | tokens/s | speed-up [95 %] | vs transformers |",
        "|---|---|---|---|---|---|---|---|---|---|",
        f"| autoregressive | {_identical(first, 'autoregressive_identical')} | 1.00 | | | | | "
        f"{_number(speeds['autoregressive'])} | 1.00 | |",
    ]
    if speeds[TRANSFORMERS] is not None:
        role = "sampled" if first["temperature"] else "reference"
        lines.append(f"| transformers generate | {role} | 1.00 | | | | | {_number(speeds[TRANSFORMERS])} | | 1.00 |")
    lines += [_row(report) for report in reports]
    lines += ["", *_prefill_table(reports)]
    lines += ["", *_plain_sentence(first), *(_sentence(report) for report in reports), *judgement_lines(reports)]
    lines += drafter_lines(first)
    if first.get("skipped"):
        lines += ["", f"Left out: {'; '.join('{prompt_id} ({reason})'.format(**turn) for turn in first['skipped'])}."]
    return "\n".join(lines) + "\n"


def write_reports(out_dir: Path, reports: Sequence[Report], results: Sequence[PromptResult], texts: Mapping) -> None:
    """report.json, report.md, the plots and generations.jsonl in `out_dir`; each file appears whole or not at all.

    report.json is the report itself for one method, {"reports": [...]} for several. `texts` maps (prompt id,
    arm) to the decoded continuation.
    """
    require_writable(out_dir)
    generations = [
        json.dumps(
            {"id": r.prompt_id, "category": r.category, "arm": arm, "tokens": list(g.tokens),
             "text": texts[r.prompt_id, arm], "prefill_seconds": g.prefill_seconds, "decode_seconds": g.decode_seconds,
             "accepted": [round_.accepted for round_ in g.rounds], "drafted": [round_.drafted for round_ in g.rounds],
             "depth": [round_.depth for round_ in g.rounds]}
        )
        for r in results
        for arm, g in r.generations.items()
    ]  # fmt: skip
    content = reports[0] if len(reports) == 1 else {"reports": list(reports)}
    (out_dir / REPORT_FILE).unlink(missing_ok=True)  # written last: it never stands beside files of another run
    write_atomically(out_dir / "generations.jsonl", ("\n".join(generations) + "\n").encode())
    _save(plot_speedups(reports), out_dir / "speedup_per_prompt.png")
    _save(plot_acceptance(reports), out_dir / "acceptance_by_position.png")
    write_atomically(out_dir / "report.md", markdown(reports).encode())
    write_json(out_dir / REPORT_FILE, content)


def plot_speedups(reports: Sequence[Report]) -> Figure:
    """Speed-up of every prompt, sorted, one line per method, with the median and its interval."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for index, report in enumerate(reports):
        values = sorted(report["speedup_per_prompt"].values())
        speedup, colour = report["speedup"], f"C{index}"
        label = f"{report['method']}: median {speedup['median']:.2f}×" if values else report["method"]
        axes.plot(range(1, len(values) + 1), values, "o-", markersize=4, color=colour, label=label)
        if values:
            axes.axhspan(*speedup["ci95"], color=colour, alpha=0.15, linewidth=0)
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--")
    axes.set(xlabel="prompt, sorted by speed-up", ylabel="speed-up over autoregressive decoding", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    return figure


def plot_acceptance(reports: Sequence[Report]) -> Figure:
    """Share of rounds whose accepted path reached depth i, of those that drafted so deep; marker area ~ rounds."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for index, report in enumerate(reports):
        table = report["acceptance_by_position"]
        if not table:
            continue
        positions, shares = [row["position"] for row in table], [row["accepted"] for row in table]
        sizes = [120 * row["rounds"] / table[0]["rounds"] for row in table]
        axes.plot(positions, shares, color=f"C{index}", label=report["method"])
        axes.scatter(positions, shares, s=sizes, color=f"C{index}")
    axes.set(xlabel="depth in the draft", ylabel="accepted, of rounds that drafted so deep", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axes.lines:  # nothing drafted leaves nothing to name
        axes.legend()
    return figure


def describe_machine(device: str | None = None) -> dict[str, Any]:
    """What the numbers were measured on; None: the GPU where there is one."""
    measured = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return {
        "device": torch.cuda.get_device_name(measured) if measured.type == "cuda" else _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _verdict(report: Report) -> str:
    if not is_lossless(report):
        return "not lossless"
    interval = report["speedup"]["ci95"]
    if interval is None or report["speedup"]["prompts"] < MIN_PROMPTS or interval[0] <= 1.0 <= interval[1]:
        return "undecided"
    return "faster" if interval[0] > 1.0 else "slower"


def _conditions(reports: Sequence[Report]) -> str:
    """What was measured, and how."""
    first = reports[0]
    turns = f", {first['turns']} turns" if first["turns"] > first["prompts"] else ""
    together = f", {first['processes']} processes at a time" if first["processes"] > 1 else ""
    if first.get("tensor_parallel", 1) > 1:
        together += f", each copy of the target split over {first['tensor_parallel']}"
    sentences = [
        f"{_taken(first)}{turns} × up to {first['max_new_tokens']} tokens, {_choice(first)}, "
        f"{first['dtype']} on {first['machine']['device']} ({_threads(first)}), arms interleaved "
        f"prompt by prompt{together}."
    ]
    if any(report["speedup"]["prompts"] < MIN_PROMPTS for report in reports):
        sentences.append(f"Undecided with fewer than {MIN_PROMPTS} prompts.")
    for key, said in (
        ("taken_over", "Taken over from the target's generation config, in all arms"),
        ("ignored", "Left out of the target's generation config, in all arms"),
    ):
        fields = first.get("generation_config", {}).get(key)
        if fields:
            sentences.append(f"{said}: {', '.join(f'{name} {_short(value)}' for name, value in fields.items())}.")
    if first.get("cudnn_attention") is False:
        sentences.append("cuDNN's attention is off in all arms, transformers' too.")
    return " ".join(sentences)


def _taken(report: Report) -> str:
    """How many prompts there are results of, and of how many where a time limit left some out."""
    prompts, given = report["prompts"], report.get("prompts_given", report["prompts"])
    if report.get("minutes") is None or prompts == given:
        return f"{prompts} prompts"
    return f"{prompts} of {given} prompts (minutes={report['minutes']:g})"


def _threads(report: Report) -> str:
    """The CPU threads, and where their number was chosen prompt by prompt for how many prompts each was."""
    used = report.get("threads") or {}
    if len(used) < 2:
        return f"{next(iter(used), report['machine']['threads'])} threads"
    return ", ".join(f"{count} threads for {prompts} prompts" for count, prompts in used.items())


def _prefill_table(reports: Sequence[Report]) -> list[str]:
    """What an answer takes from the prompt on: the prefill, a drafter's own among it, and the decoding after it."""
    first = reports[0]
    prefills = first["prefill_seconds"]
    lines = [
        "| from the prompt on | prefill ms [95 %] | decoding | prefill and decoding [95 %] | vs transformers |",
        "|---|---|---|---|---|",
        f"| autoregressive | {_milliseconds(prefills['autoregressive'])} | 1.00 | 1.00 | |",
    ]
    if prefills[TRANSFORMERS] is not None:
        speed, whole = first[TRANSFORMERS]["speedup"], first[TRANSFORMERS]["end_to_end"]
        milliseconds = _milliseconds(prefills[TRANSFORMERS])
        lines.append(f"| transformers generate | {milliseconds} | {_times(speed)} | {_interval(whole)} | 1.00 |")
    for report in reports:
        whole = report["end_to_end"]
        lines.append(
            f"| {report['method']} | {_milliseconds(report['prefill_seconds']['speculative'])} | "
            f"{_times(report['speedup'])} | {_interval(whole)} | {_interval(whole.get('vs_transformers_generate'))} |"
        )
    return lines


def _row(report: Report) -> str:
    lossless, speedup = report["lossless"], report["speedup"]
    identical = _identical(report, "identical")
    if lossless["excused_ties"]:
        identical += f" (+{lossless['excused_ties']} ties)"
    speed = report["tokens_per_second"]["speculative"]
    return (
        f"| {report['method']} | {identical} | {report['tau']:.2f} | {report['acceptance_rate']:.2f} | "
        f"{report['draft_share']:.2f} | {100 * report['harmonic_mean']:.1f} | "
        f"{report['drafted_tokens_per_round']:.2f} | {_number(speed)} | "
        f"{_interval(speedup)} | {_interval(speedup.get('vs_transformers_generate'))} |"
    )


def _plain_sentence(report: Report) -> list[str]:
    """What the baseline itself spends outside of the model; nothing where it decoded nothing."""
    token = report["autoregressive"]
    if token["token_us"] is None:
        return []
    return [
        f"autoregressive: {token['token_us']:.0f} µs a token, of which {token['host_us']:.0f} µs "
        f"({100 * token['host_share']:.1f} %) are not the model's pass."
    ]


def _sentence(report: Report) -> str:
    total = sum(report["seconds"].values()) or 1.0
    parts = ", ".join(f"{name} {100 * part / total:.0f} %" for name, part in report["seconds"].items())
    even = report["break_even_acceptance"]
    structure = "".join(f"; {name} {value:.2f}" for name, value in report["structure"].items())
    if report["acceptance_by_candidates"]:
        shares = ", ".join(f"{share:.2f}" for share in report["acceptance_by_candidates"])
        structure += f"; accepted by the first 1, 2, … candidates {shares}"
    if report["auto"]:
        structure += "".join(f"; chose {_chosen(name, size)}" for name, size in report["auto"]["chosen"].items())
    if keep := report["settings"].get("ngrams", {}).get("keep"):
        structure += f"; remembers earlier prompts ({keep})"
    return (
        f"{report['method']}: {report['verdict']}; time: {parts}; break-even acceptance "
        f"{'–' if even is None else f'{even:.2f}'}, measured {report['acceptance_rate']:.2f}{structure}."
    )


def _chosen(name: str, size: Mapping[str, Any]) -> str:
    """What was chosen for a size of "auto", in words."""
    mean = f"{size['mean']:.1f} on average, " if "mean" in size else ""
    return f"{name} {mean}most often {size['mode']} ({100 * size['share']:.0f} % of rounds)"


def _choice(report: Report) -> str:
    """How tokens were chosen, in words."""
    settings = {key: value for key, value in report["sampling"].items() if value != getattr(SamplingConfig(), key)}
    said = ", ".join(f"{key} {value:g}" for key, value in settings.items())
    if report["temperature"]:
        return f"sampled ({said}; the same law, so no tokens to compare)"
    return f"greedy ({said})" if said else "greedy"


def _identical(report: Report, key: str) -> str:
    return "sampled" if report["temperature"] else f"{report['lossless'][key]}/{report['lossless']['checked']}"


def _number(value: float | None) -> str:
    """One decimal, or a dash where nothing was decoded to be timed."""
    return "–" if value is None else f"{value:.1f}"


def _interval(speedup: Mapping[str, Any] | None) -> str:
    if speedup is None or speedup["median"] is None:
        return "–"
    low, high = speedup["ci95"]
    return f"{_times(speedup)} [{low:.2f}, {high:.2f}]"


def _times(speedup: Mapping[str, Any]) -> str:
    return "–" if speedup["median"] is None else f"{speedup['median']:.2f}×"


def _milliseconds(seconds: Mapping[str, Any]) -> str:
    low, high = seconds["ci95"]
    return f"{1e3 * seconds['median']:.1f} [{1e3 * low:.1f}, {1e3 * high:.1f}]"


def _short(value: object) -> str:
    """A field's value as JSON, its end left out where it is a long list; report.json has it whole."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _save(figure: Figure, path: Path) -> None:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    write_atomically(path, image.getvalue())
