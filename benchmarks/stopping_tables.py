"""What compare_stopping.py found, as Markdown and as a plot. The tables need no torch."""

import io
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

Entry = Mapping[str, Any]
TOLD = (16, 64)  # tokens of a text, by which its time is told
SHOWN_COSTS = ("0.05", "0.2", "0.4")  # of a draft step, of those that were computed
FEWEST = 5  # prompts, for an interval worth the name
LABELS = {"early_exit": "early exit", "small_lm": "small LM", "eagle3": "EAGLE-3"}


def stopping(entry: Entry) -> str:
    """An entry's rules, a table for every drafter: what the clock said, and what recorded drafts say in hindsight."""
    return "\n".join(part(entry, source, found) for source, found in entry["sources"].items())


def part(entry: Entry, source: str, found: Mapping[str, Any]) -> str:
    """The table of one drafter. What was not decoded, or not recorded, has empty cells."""
    recorded, measured = found.get("recorded"), found.get("live", {"arms": {}})
    rules, arms = recorded["rules"] if recorded else {}, measured["arms"]
    kind = "greedy" if not entry["temperature"] else f"temperature {entry['temperature']:g}"
    said = [f"{measured['prompts']} prompts decoded"] if arms else []
    said += [f"{recorded['texts']} texts recorded ({recorded['positions']} positions)"] if recorded else []
    lines = [
        f"{LABELS[source][0].upper()}{LABELS[source][1:]}, {kind}, up to {entry['max_new_tokens']} tokens: "
        f"{', '.join(said)}.\n",
        "| rule | τ | drafted | wasted | of oracle | least over best K | tokens/s | over K tuned elsewhere [95 %] |",
        "|---" * 8 + "|",
    ]
    speeds = {name: rule["rate"] for name, rule in rules.items()} or {
        name: arm["tokens_per_second"] or 0.0 for name, arm in arms.items() if name != "autoregressive"
    }
    for name in sorted(speeds, key=lambda name: speeds[name]):
        lines.append(row(name, rules.get(name), rules.get("oracle"), arms.get(name)))
    return "\n".join(lines) + "\n" + (behind(recorded) if recorded else "")


def behind(recorded: Mapping[str, Any]) -> str:
    """What recorded drafts say of a rule from a cold start, after text of another kind, and at other costs."""
    rules, at_cost, shift = recorded["rules"], recorded["by_cost"], recorded["shift"]
    best = rules["oracle"]["seconds_by_token"]
    told = [place for place in TOLD if place <= len(best)]
    head = ["rule", *(f"ms behind the oracle at token {place}" for place in told)]
    head += [f"of oracle, step {ratio} of a pass" for ratio in SHOWN_COSTS]
    head += ["after another kind of text"] if shift else []
    lines = ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, rule in rules.items():
        if name == "oracle" or (name.startswith("K = ") and name != "K = 4"):
            continue
        lost = [1e3 * (rule["seconds_by_token"][place - 1] - best[place - 1]) for place in told]
        cells = [f"{value:.0f}" for value in lost]
        cells += [f"{at_cost[ratio][name]['rate'] / at_cost[ratio]['oracle']['rate']:.2f}" for ratio in SHOWN_COSTS]
        cells += [f"{shift[name]['carried'] / shift[name]['fresh']:.2f}×"] if shift else []
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def row(
    name: str, rule: Mapping[str, Any] | None, oracle: Mapping[str, Any] | None, arm: Mapping[str, Any] | None
) -> str:
    """One rule: τ and its parts as decoded, else as recorded."""
    shown = rule if arm is None else arm
    assert shown is not None
    cells = [f"{shown[key]:.2f}" for key in ("tau", "drafted", "wasted")]
    if rule is None or oracle is None:
        cells += ["", ""]
    else:
        cells += [f"{rule['rate'] / oracle['rate']:.3f}", f"{min(rule['over_hindsight'].values()):.2f}"]
    tuned = None if arm is None else arm.get("over_tuned")
    speed = "" if arm is None or arm["tokens_per_second"] is None else f"{arm['tokens_per_second']:.1f}"
    over = "" if tuned is None else f"{tuned['median']:.2f}"
    if tuned is not None and tuned["prompts"] >= FEWEST:
        over += f" [{tuned['ci95'][0]:.2f}, {tuned['ci95'][1]:.2f}]"
    return f"| {name} | {' | '.join(cells)} | {speed} | {over} |"


def plot(entries: Mapping[str, Entry]) -> bytes:
    """A PNG. Of every drafter recorded: the rate by what a draft step costs, and the time lost from a cold start."""
    parts = [(name, source, found["recorded"]) for name, entry in entries.items()
             for source, found in entry["sources"].items() if "recorded" in found]  # fmt: skip
    figure = Figure(figsize=(11, 3.6 * max(1, len(parts))), layout="constrained")
    for (name, source, recorded), (left, right) in zip(
        parts, figure.subplots(max(1, len(parts)), 2, squeeze=False), strict=False
    ):
        ratios = [float(ratio) for ratio in recorded["by_cost"]]
        rules = [rule for rule in recorded["rules"] if rule != "oracle" and not rule.startswith("K = ")]
        for place, rule in enumerate([*rules, "K = 4"]):
            style = {"color": f"C{place % 10}", "linestyle": "-" if place < 10 else "--"}
            of = [at[rule]["rate"] / at["oracle"]["rate"] for at in recorded["by_cost"].values()]
            left.plot(ratios, of, marker=".", label=rule, **style)
            best = recorded["rules"]["oracle"]["seconds_by_token"]
            mine = recorded["rules"][rule]["seconds_by_token"]
            right.plot(range(1, len(best) + 1), [1e3 * (a - b) for a, b in zip(mine, best, strict=True)], **style)
        left.set(title=f"{name}, {LABELS[source]}", xlabel="draft step / pass over one row", xscale="log",
                 ylabel="share of the oracle's tokens per second")  # fmt: skip
        right.set(xlabel="token", ylabel="milliseconds behind the oracle")
        left.set_xticks(ratios, recorded["by_cost"])
        left.minorticks_off()
        left.legend(fontsize=6, ncols=2)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=80)
    return image.getvalue()
