"""EESD's tables about stop rules and trees, and its Fig. 3, on a target of yours (arXiv 2406.03853).

    python benchmarks/paper_eesd.py --target T --checkpoint E --small-lm S --prompts questions.jsonl

Table 4: what each part of EESD is worth. Table 5: Thompson sampling on other drafters. Table 7: tree attention. Fig. 3:
the speed-up by draft length K. E is an early exit with a calibration head. What runs is the project's own command, all
methods in turn on every prompt; started again, it goes on where it stopped. For self-speculation the layers are chosen
by `choose_skip.py`, on other prompts. Table 4's rows without an exit layer and without self-distillation need drafters
of their own, trained like E. `ablate_eesd.py` trains all three: with its --out runs/ablation give
--checkpoint runs/ablation/self_distilled --ablation runs/ablation.

Each claim of the paper is judged by the ratio of two speed-ups on the same prompts, in Table 4 also by the difference
of their HM. It *holds* if the 95 % interval is above 1 (or 0), it *does not hold* if that is below, else it is
*undecided*. Writes eesd_tables.json, eesd_tables.md and eesd_fig3.png in --out.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from choose_skip import choose_for
from commands import run_command
from matplotlib.figure import Figure
from paper_eesd_tables import TABLES, Claim, Row
from record_tables import interval

from conf import reported
from draft_models.calibration import META_FILE
from outrider.errors import UserError
from outrider.files import write_atomically, write_json

FIXED = 10  # K of Tables 4 and 5, and the longest draft of every rule
DRAWS, MIN_PROMPTS = 2000, 5  # of the bootstrap; fewer prompts decide nothing
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
NO_HEAD = "the checkpoint has no calibration head; run train/calibrate.py checkpoint=E"
NO_SMALL_LM = "needs --small-lm"
NO_ABLATION = "needs --ablation, a drafter that benchmarks/ablate_eesd.py trains"

# Presets of conf/method.
CALIBRATED = ("eesd_cali", "eesd_cali_model", "eesd_cali_sample", "eesd_tree_cali")
PRESETS = ("eesd_fixed", "eesd_beta", *CALIBRATED[:3], "eesd_tree_beta", CALIBRATED[3], "skip_fixed", "skip_beta")
SMALL_LM = ("vanilla", "vanilla_beta")


def run_all(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Every evaluation that the tables need and the command line allows for; reports by "method", or "drafter/method".

    Each report has what was drafted for every prompt besides, as "counts" (see `counts`).
    """
    skip = choose_layers(options)
    shared = [f"target={options.target}", f"prompts={options.prompts}", f"num_prompts={options.num_prompts}",
              f"max_new_tokens={options.tokens}", "resume=true"]  # fmt: skip
    shared += ["ignore_eos=true"] if options.ignore_eos else []
    has_head = (options.checkpoint / META_FILE).is_file()
    presets = [name for name in PRESETS if has_head or name not in CALIBRATED]
    presets += SMALL_LM if options.small_lm else ()
    lengths = {f"eesd_k{k}": k for k in options.lengths if k != FIXED}
    chains = [name for name in presets if "tree" not in name]
    methods = [f"method=[{','.join(presets)}]"]
    methods += [f"methods.{name}.stop.max_draft={FIXED}" for name in chains]
    methods += [f"methods.{name}.skip=[{','.join(map(str, skip))}]" for name in ("skip_fixed", "skip_beta")]
    for name, k in lengths.items():
        methods += [f"+method@methods.{name}=eesd_fixed", f"methods.{name}.stop.max_draft={k}"]
    models = [f"checkpoint={options.checkpoint}", *([f"small_lm={options.small_lm}"] if options.small_lm else [])]
    found = evaluated(options.out / "main", "", [*shared, *models, *methods])
    for name in ("no_layer", "open_data") if options.ablation else ():
        one = [f"checkpoint={options.ablation / name}", "method=eesd_beta", f"methods.eesd_beta.stop.max_draft={FIXED}"]
        found |= evaluated(options.out / name, f"{name}/", [*shared, *one])
    return found


def choose_layers(options: argparse.Namespace) -> list[int]:
    """The layers that self-speculation skips: given, or chosen, and kept in skip.json."""
    path = options.out / "skip.json"
    if options.skip is not None:
        return list(options.skip)
    if not path.exists():
        sizes = (options.skip_prompts, options.skip_tokens)
        write_json(path, choose_for(options.target, options.prompts, options.num_prompts, *sizes))
    chosen: list[int] = json.loads(path.read_text())["skip"]
    return chosen


def evaluated(out_dir: Path, prefix: str, overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The reports of one run of evaluate-checkpoint, by prefix and method."""
    run_command("inference/evaluate_checkpoint.py", out_dir, "report.json", *overrides)
    read = json.loads((out_dir / "report.json").read_text())
    lines = [json.loads(line) for line in (out_dir / "generations.jsonl").read_text().splitlines()]
    reports = {}
    for report in read.get("reports", [read]):
        own = {line["id"]: counts(line) for line in lines if line["arm"] == report["method"]}
        reports[prefix + report["method"]] = {**report, "counts": own}
    return reports


def counts(line: Mapping[str, Any]) -> tuple[int, int, int]:
    """Of one generation: drafted tokens, accepted ones, tokens of the output."""
    return sum(line["drafted"]), sum(line["accepted"]), len(line["tokens"])


# -------------------------------------------------------------------------------------------------------------- judging


def harmonic_mean(counted: Sequence[tuple[int, int, int]]) -> float:
    """The paper's HM of generations: of v_d = accepted / drafted and r_d = accepted / output, which is 2a / (d + o)."""
    drafted, accepted, output = (sum(column) for column in zip(*counted, strict=True))
    return 2 * accepted / (drafted + output)


def judge(
    turns: Mapping[str, Sequence[str]], statistic: Callable[[Sequence[str]], float], even: float
) -> dict[str, Any]:
    """A statistic of prompts, its 95 % bootstrap interval, and whether that is above `even`.

    turns: the prompts of each conversation, which are drawn together.
    """
    names = list(turns)

    def of(drawn: Sequence[str]) -> float:
        return statistic([turn for name in drawn for turn in turns[name]])

    picks = torch.randint(len(names), (DRAWS, len(names)), generator=torch.Generator().manual_seed(0)).tolist()
    values = torch.tensor([of([names[place] for place in pick]) for pick in picks], dtype=torch.float64)
    low, high = values.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    verdict = HOLDS if low > even else FAILS if high < even else UNDECIDED
    return {"value": of(names), "ci95": [low, high], "verdict": verdict if len(names) >= MIN_PROMPTS else UNDECIDED}


def compare(better: Mapping[str, Any], worse: Mapping[str, Any], hm: bool) -> dict[str, Any]:
    """Both measures of a claim, on the prompts that both reports have timed."""
    first, second = better["speedup_per_prompt"], worse["speedup_per_prompt"]
    turns: dict[str, list[str]] = {}
    for prompt in sorted(first.keys() & second.keys()):
        turns.setdefault(prompt.partition("/turn")[0], []).append(prompt)
    if not turns:
        return {}

    def ratio(drawn: Sequence[str]) -> float:
        return statistics.median(first[prompt] / second[prompt] for prompt in drawn)

    def difference(drawn: Sequence[str]) -> float:
        above, below = (harmonic_mean([side["counts"][prompt] for prompt in drawn]) for side in (better, worse))
        return 100 * (above - below)

    found = {"speedup": judge(turns, ratio, even=1.0)}
    if hm:
        found["hm"] = judge(turns, difference, even=0.0)
    return found


def judge_claims(claims: Sequence[Claim], reports: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each claim with its verdicts; without, where a side of it was not run."""
    return [
        {"better": claim.better, "worse": claim.worse}
        | (compare(reports[claim.better], reports[claim.worse], claim.hm) if {claim.better, claim.worse} <= set(reports)
           else {})
        for claim in claims
    ]  # fmt: skip


def lengths_of(reports: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The reports of fixed draft lengths of the early exit, by K."""
    named = {name.removeprefix("eesd_k"): report for name, report in reports.items() if name.startswith("eesd_k")}
    return dict(sorted({**{int(k): report for k, report in named.items()}, FIXED: reports["eesd_fixed"]}.items()))


def best_length(reports: Mapping[str, Any]) -> int:
    """The fixed draft length with the highest median speed-up."""
    by_length = lengths_of(reports)
    return max(by_length, key=lambda k: by_length[k]["speedup"]["median"] or 0.0)


def claims_of_figure(reports: Mapping[str, Any]) -> tuple[Claim, ...]:
    """Fig. 3: Beta-TS beats the best K, Cali-TS beats Beta-TS. The best K is that of these very prompts."""
    best = best_length(reports)
    name = "eesd_fixed" if best == FIXED else f"eesd_k{best}"
    return Claim("eesd_beta", name), Claim("eesd_cali", "eesd_beta"), Claim("eesd_cali", name)


# -------------------------------------------------------------------------------------------------------------- writing


def missing(row: Row) -> str:
    """Why a row has no report."""
    if row.never:
        return row.never
    if row.drafter != "main":
        return NO_ABLATION
    return NO_SMALL_LM if row.method in SMALL_LM else NO_HEAD


def cells(report: Mapping[str, Any]) -> list[str]:
    """What was measured here: speed-up, HM, τ, drafted tokens a round, identical texts."""
    speedup, lossless = report["speedup"], report["lossless"]
    counted = (100 * report["harmonic_mean"], report["tau"], report["drafted_tokens_per_round"])
    return [interval(speedup), *(f"{value:.2f}" for value in counted), f"{lossless['identical']}/{lossless['checked']}"]


HERE = ("here: speed-up [95 %]", "HM", "τ", "drafted/round", "identical")


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def claim_lines(claims: Sequence[Mapping[str, Any]]) -> list[str]:
    """The claims in words, with their verdicts."""
    lines = []
    for claim in claims:
        said = [
            f"by {measure} **{claim[key]['verdict']}**: {claim[key]['value']:.3f} "
            f"[{claim[key]['ci95'][0]:.3f}, {claim[key]['ci95'][1]:.3f}]"
            for key, measure in (("speedup", "the ratio of speed-ups"), ("hm", "the difference of HM"))
            if key in claim
        ]
        lines.append(f"- `{claim['better']}` over `{claim['worse']}`: {'; '.join(said) or 'not measured'}")
    return lines


def markdown(reports: Mapping[str, Any], claims: Mapping[str, Any], skip: Sequence[int]) -> str:
    """All tables, the paper's figures beside those measured here, and what became of the claims."""
    first = reports["eesd_beta"]
    lines = ["# EESD's tables on " + first["target"], "",
             f"{first['prompts']} prompts × {first['max_new_tokens']} tokens, {first['dtype']}, "
             f"{first['machine']['device']}, {first['machine']['threads']} threads. Speed-ups are over plain decoding. "
             f"Self-speculation skips layers {', '.join(map(str, skip))}.", ""]  # fmt: skip
    for key, table in TABLES.items():
        rows = []
        for row in table.rows:
            name = row.method if row.drafter == "main" else f"{row.drafter}/{row.method}"
            here = cells(reports[name]) if name in reports else [f"not run: {missing(row)}", *[""] * (len(HERE) - 1)]
            rows.append([row.label, *row.paper, *here])
        header = ["", *(f"paper: {column}" for column in table.columns), *HERE]
        lines += [f"## {table.title}", "", *table_lines(header, rows), "", *claim_lines(claims[key]), ""]
    rows = [[f"K = {k}", *cells(report)] for k, report in lengths_of(reports).items()]
    rows += [[rule, *cells(reports[name])] for name, rule in RULES.items() if name in reports]
    said = (
        "The paper has curves only. It claims that Beta-TS is a little faster than the best K, and Cali-TS more so. "
        f"The best K here is {best_length(reports)}, which is known afterwards only."
    )
    figure = ["## Fig. 3: the speed-up by draft length", "", said, ""]
    return "\n".join([*lines, *figure, *table_lines(["", *HERE], rows), "", *claim_lines(claims["fig_3"])]) + "\n"


RULES = {"eesd_beta": "Beta-TS", "eesd_cali": "Cali-TS"}


def plot(reports: Mapping[str, Any]) -> Figure:
    """Fig. 3: the median speed-up of each K with its interval, and of the rules."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    timed = {k: r["speedup"] for k, r in lengths_of(reports).items() if r["speedup"]["median"] is not None}
    medians = [speedup["median"] for speedup in timed.values()]
    ends = [[abs(speedup["median"] - speedup["ci95"][side]) for speedup in timed.values()] for side in (0, 1)]
    axes.errorbar(list(timed), medians, yerr=ends, fmt="o-", color="black", capsize=3, label="fixed K")
    for (name, rule), colour, style in zip(RULES.items(), ("#0072B2", "#D55E00"), ("--", "-."), strict=True):
        if name in reports and reports[name]["speedup"]["median"] is not None:
            speedup = reports[name]["speedup"]
            axes.axhline(speedup["median"], color=colour, linestyle=style, label=rule)
            axes.axhspan(*speedup["ci95"], color=colour, alpha=0.12, linewidth=0)
    axes.set(xlabel="draft length K", ylabel="speed-up over plain decoding", xticks=list(timed))
    axes.legend()
    return figure


# ---------------------------------------------------------------------------------------------------------------- main


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--checkpoint", required=True, type=Path, help="an early exit with a calibration head")
    parser.add_argument("--small-lm", help="a small LM for the target")
    parser.add_argument("--ablation", type=Path, help="--out of ablate_eesd.py: its no_layer and open_data")
    parser.add_argument("--prompts", default="python_stdlib", help="as of evaluate-checkpoint")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--ignore-eos", action="store_true", help="always so many tokens, as in the paper")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 3, 4, 5, 6, 8, 10], metavar="K", help="of Fig. 3")
    parser.add_argument("--skip", type=int, nargs="+", help="layers that self-speculation skips; else they are chosen")
    parser.add_argument("--skip-prompts", type=int, default=3, help="to choose them by")
    parser.add_argument("--skip-tokens", type=int, default=48, help="of an answer to those")
    parser.add_argument("--out", type=Path, default=Path("runs/paper_eesd"))
    return parser.parse_args()


def require_same_options(options: argparse.Namespace) -> None:
    """Raise `UserError` where --out has results of other options, which would be taken for these."""
    asked = {key: str(value) for key, value in vars(options).items() if key != "out"}
    path = options.out / "options.json"
    if not path.exists():
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(path, asked)
    if (before := json.loads(path.read_text())) != asked:
        changed = sorted(key for key in asked if before.get(key) != asked[key])
        raise UserError(f"--out {options.out}: has results of another --{', --'.join(changed)}; choose another --out")


def main() -> None:
    options = parse()
    with reported():
        require_same_options(options)
        try:
            reports = run_all(options)
        except subprocess.CalledProcessError as failed:  # it has said why
            sys.exit(failed.returncode)
    claims = {key: judge_claims(table.claims, reports) for key, table in TABLES.items()}
    claims["fig_3"] = judge_claims(claims_of_figure(reports), reports)
    text = markdown(reports, claims, choose_layers(options))
    write_json(options.out / "eesd_tables.json", {"claims": claims, "reports": reports})
    plot(reports).savefig(options.out / "eesd_fig3.png", format="png", dpi=120)
    write_atomically(options.out / "eesd_tables.md", text.encode())
    print(text)


if __name__ == "__main__":
    main()
