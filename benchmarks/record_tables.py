"""The figures of arms (see bench_real.py) as Markdown. Light: needs no torch."""

from collections.abc import Mapping, Sequence
from typing import Any

Figures = Mapping[str, Any]
# An arm's name for readers; in backticks, its `method=`.
CALLED = {
    "transformers_generate": "transformers' `generate`", "autoregressive": "**Outrider, no drafter**",
    "eesd_survival": "early exit, chains (`eesd_survival`)", "ngrams": "n-grams (`ngrams`)",
    "early_exit_opt_tree_auto": "early exit, trees (`early_exit/opt_tree_auto`)", "prompt_lookup": "`prompt_lookup`",
    "small_lm_survival": "small LM, chains (`small_lm/survival`)", "opt_tree_auto": "small LM, trees (`opt_tree_auto`)",
}  # fmt: skip
TODAY = {"eesd_copies": "eesd_survival", "small_copies": "small_lm_survival", "vanilla_survival": "small_lm_survival",
         "tree_copies": "opt_tree_auto"}  # fmt: skip
OFF = ", `copy=null`"


def arms_of(entry: Mapping[str, Any]) -> dict[str, Figures]:
    """The arms of an entry by their names today, when chains of `survival` and `opt_tree_auto` copy by themselves."""
    copying = {name for name, method in entry.get("methods", {}).items() if method.get("copy")}
    off = {name for name in entry["arms"] if name.endswith(("_survival", "tree_auto")) and name not in copying}
    return {TODAY.get(name, name) + OFF * (name in off): arm for name, arm in entry["arms"].items()}


def tables(entry: Mapping[str, Any]) -> str:
    """An entry of the record: its conditions, the figures of all prompts together, and those by category."""
    arms = arms_of(entry)
    parts = [said(entry), table(arms), judgement(arms), "Tokens/s, and over plain decoding, by category:\n",
             table_by_category(arms)]  # fmt: skip
    return "\n".join(part for part in parts if part)


def summary(entry: Mapping[str, Any]) -> str:
    """The conditions, and the figures of all prompts together. A peer's default row is shown if it has no other."""
    arms = arms_of(entry)
    asked = {name: f for name, f in arms.items() if name == (own := name.removesuffix("_default")) or own not in arms}
    return "\n".join(part for part in [said(entry), table(asked), judgement(asked)] if part)


def by_dtype(entries: Sequence[Mapping[str, Any]]) -> str:
    """The arms of the float32 entry among `entries` beside those of the bfloat16 entry, slowest in bfloat16 first."""
    arms = {entry["dtype"]: arms_of(entry) for entry in entries}
    full, half = arms["float32"], arms["bfloat16"]
    lines = [
        "| method | identical to `generate`, float32 | tokens/s | over no drafter [95 %] | with prefill | bfloat16: "
        "tokens/s | over no drafter [95 %] | with prefill |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in by_speed({**full, **half}):
        f = full.get(name)
        cells = [f"{f['identical']}/{f['prompts']}" if f else "–", *map(_rate, (f, half.get(name)))]
        title = CALLED.get(own := name.removesuffix(OFF), own) + name.removeprefix(own)
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _rate(figures: Figures | None) -> str:
    ratios = [interval(figures[name]) for name in ("speedup", "end_to_end")] if figures else []
    return " | ".join([number(figures["tokens_per_second"], 1), *ratios] if figures else 3 * ["–"])


FEWEST = 5  # prompts that an interval needs


def interval(ratio: Mapping[str, Any] | None, prompts: int = FEWEST) -> str:
    """A median with its interval, as in all tables; without one for fewer than `FEWEST` prompts."""
    if ratio is None or ratio["median"] is None:
        return "–"
    if prompts < FEWEST:
        return f"{ratio['median']:.2f}×"
    return f"{ratio['median']:.2f}× [{ratio['ci95'][0]:.2f}, {ratio['ci95'][1]:.2f}]"


def said(entry: Mapping[str, Any]) -> str:
    """What was measured."""
    threads = ", ".join(f"{count} threads" for count in entry["threads"])
    return (
        f"{entry['prompts']} prompts × up to {entry['max_new_tokens']} tokens, greedy, {entry['dtype']} on "
        f"{entry['machine']['device']} ({threads}), arms interleaved prompt by prompt.\n"
    )


def table(arms: Mapping[str, Figures]) -> str:
    """All prompts together, as Markdown, slowest first."""
    lines = [
        "| arm | identical | τ | tokens/s | over plain decoding, median [95 %] | with prefill | over "
        "`generate` [95 %] |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in by_speed(arms):
        f = arms[name]
        lines.append(
            f"| {name} | {f['identical']}/{f['prompts']} | {number(f['tau'], 2)} | "
            f"{number(f['tokens_per_second'], 1)} | {interval(f['speedup'])} | "
            f"{interval(f['end_to_end'])} | {interval(f['speedup'].get('vs_transformers_generate'))} |"
        )
    return "\n".join(lines) + "\n"


def judgement(arms: Mapping[str, Figures]) -> str:
    """The result of judging the arms (`inference.measure.lossless`); empty if equal texts decide."""
    judged = {name: arm["judged"] for name, arm in arms.items() if arm["judged"]}
    if not judged:
        return ""
    over, worst = (max(found[key] for found in judged.values()) for key in ("prompts", "peak"))
    faults: dict[str, list[str]] = {}
    for name, found in judged.items():
        for fault in found["faults"]:
            faults.setdefault(fault, []).append(name)
    known = "; ".join(f"{fault} ({', '.join(names)})" for fault, names in faults.items())
    said = known or f"only rounding, at no position more than {worst:.1f} times transformers' own"
    return f"Keys, values and logits of this runtime's arms, judged on {over} prompts: {said}.\n"


def table_by_category(arms: Mapping[str, Figures]) -> str:
    """Tokens per second, and over plain decoding the median ratio, by category."""
    names = list(arms["autoregressive"]["by_category"])
    lines = [f"| arm | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for arm in by_speed(arms):
        cells = [arms[arm]["by_category"][name] for name in names]
        shown = (f"{number(c['tokens_per_second'], 1)}, {number(c['speedup']['median'], 2)}×" for c in cells)
        lines.append(f"| {arm} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def by_speed(arms: Mapping[str, Figures]) -> list[str]:
    """The names, slowest first."""
    return sorted(arms, key=lambda name: arms[name]["tokens_per_second"] or 0.0)


def number(value: float | None, digits: int) -> str:
    """A number as text; a dash for None."""
    return "–" if value is None else f"{value:.{digits}f}"


def layouts(entry: Mapping[str, Any]) -> str:
    """Milliseconds of a pass by its tokens, in every layout."""
    widths = list(next(iter(entry["results"][0]["milliseconds"].values())))
    lines = [f"| threads | layout | {' | '.join(widths)} |", "|---" * (2 + len(widths)) + "|"]
    for result in entry["results"]:
        for layout, by_width in result["milliseconds"].items():
            cells = " | ".join(f"{by_width[width]:.1f}" for width in widths)
            lines.append(f"| {result['threads']} | {layout} | {cells} |")
        alone = f"{result['generate_milliseconds_a_token']:.1f} |{' |' * (len(widths) - 1)}"
        lines.append(f"| {result['threads']} | `generate` | {alone}")
    return "\n".join(lines) + "\n"


def trainers(entry: Mapping[str, Any]) -> str:
    """The arms of trainers_cpu.json."""
    lines = [
        "| trainer | tokens/s learnt from | τ [95 %] | accepted to depth 1–4 | τ − 1 over ours [95 %] | cross-entropy "
        "| peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, arm in entry["arms"].items():
        tau, gain = (f"{f['value']:.2f} [{f['ci95'][0]:.2f}, {f['ci95'][1]:.2f}]"
                     for f in (arm["tau"], arm["gain_over_ours"]))  # fmt: skip
        cells = [f"{arm['supervised'] / arm['seconds']:,.0f}", tau, ", ".join(f"{one:.2f}" for one in arm["accepted"]),
                 gain, number(arm.get("cross_entropy"), 2), f"{arm['peak_megabytes'] * 2**20/1e9:.1f} GB"]  # fmt: skip
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def requests(entry: Mapping[str, Any]) -> str:
    """The arms of bench_batch.py, slowest first. With several numbers of requests, for each of them: tokens/s of all,
    and the seconds to the first token (median) and to the last (95 %)."""
    counts, lines = [str(count) for count in entry["in_flight"]], [entry["note"] + "\n"] if entry["note"] else []
    alone = ["tokens/s", "decoding", "over Outrider, no drafter, median [95 %]", "to the first token", "same text"]
    heads = ["arm", *(alone if counts == ["1"] else [f"{count} at once" for count in counts])]
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, arm in sorted(entry["arms"].items(), key=lambda item: item[1][counts[0]]["tokens_per_second"]):
        one, every = arm[counts[0]], [arm[count] for count in counts]
        same = "–" if entry["temperature"] else f"{one['identical']}/{one['requests']}"
        cells = [f"{one['tokens_per_second']:.0f}", f"{one['decoding']:.0f}",
                 interval(one["over_plain"], one["requests"]), f"{one['first_seconds']['median']:.2f} s",
                 same]  # fmt: skip
        if counts != ["1"]:
            cells = [f"{one['tokens_per_second']:.0f}, {one['first_seconds']['median']:.2f}, "
                     f"{one['whole_seconds']['p95']:.2f}" for one in every]  # fmt: skip
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
