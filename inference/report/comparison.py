"""Comparison of two finished evaluations, paired by prompt, over the prompts that both measured.

The two ran at different times, perhaps on different machines. So a method is compared by its speed-up over plain
decoding in its own run, which a slow machine does not change. Seconds are reported too. Example: 2.0× in the first run
and 2.2× in the second, on the same prompt, is a gain of 1.1. An arm is a method or a baseline of a run. A turn is one
question of a conversation; its text loops if it repeats a cycle of tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.base.errors import UserError, require
from outrider.base.files import require_writable, write_atomically, write_json
from outrider.base.run_dirs import only_run
from outrider.base.streams import Streams
from outrider.base.words import Columns, fill_table, list_words
from outrider.inference.measure.results import REPORT_FILE, PromptResult, read_results
from outrider.inference.measure.speed import decoding, median_of, select_timed, without_loops
from outrider.inference.measure.statistics import Loops, MedianInterval, count_loops, judge_speed
from outrider.inference.report.types import NOT_LOSSLESS, TARGET_DIFFERS, MethodReport, read_reports, to_json
from outrider.inference.settings.method import AUTOREGRESSIVE
from outrider.inference.settings.tools import CompareConfig

COMPARISON = "compare.json"
COMPARED: Columns = {  # by title: (template of cells, no meaning); `MedianInterval` formats "interval"
    "first": ("{pair[0]}", ""),
    "second": ("{pair[1]}", ""),
    "over plain decoding [95 %]": ("{gain:interval}", ""),
    "without loops [95 %]": ("{gain_without_loops:interval}", ""),
    "tokens/s as they were [95 %]": ("{seconds:interval}", ""),
    "τ [95 %]": ("{tau:interval}", ""),
    "same text": ("{same_text}/{prompts}", ""),
    "verdict": ("{verdict}", ""),
}
Figure = Callable[[PromptResult, str], float]  # a figure of a method on a prompt; its name names a random stream


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation: its folder, its reports by method, its results by prompt."""

    folder: str
    reports: Mapping[str, MethodReport]
    results: Mapping[str, PromptResult]

    @property
    def first(self) -> MethodReport:
        """The report of its first method, which has the conditions of all."""
        return next(iter(self.reports.values()))

    @property
    def busy(self) -> str | None:
        """Why its speeds are unreliable; None if they are reliable."""
        return self.first.conditions.load.busy


@dataclass(frozen=True)
class MethodsCompared:
    """The second method of `pair` over the first: medians over prompts of ratios, each with its interval.

    gain: ratio of the speed-ups over plain decoding, each in its own run. seconds: ratio of the tokens per second.
    tau: ratio of τ. same_text: the number of prompts on which both texts are equal. loops: of the texts of both.
    gain_without_loops: the gain on prompts where no text loops: neither the methods' texts, nor those of plain
    decoding, nor any decoded together with these. `verdict` comes from it.
    """

    pair: tuple[str, str]
    gain: MedianInterval
    gain_without_loops: MedianInterval
    loops: Loops
    seconds: MedianInterval
    tau: MedianInterval
    same_text: int
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """Two evaluations. compare: their folders. prompts: the turns of the first, of the second, and those in both.

    differences: by the name of a condition, its two values. busy: by folder, why its speeds are unreliable.
    """

    compare: tuple[str, str]
    prompts: tuple[int, int, int]
    differences: Mapping[str, tuple[object, object]]
    busy: Mapping[str, str]
    methods: tuple[MethodsCompared, ...]


def compare_reports(config: CompareConfig) -> Comparison:
    """Write compare.md and compare.json to `config.out_dir`, and print compare.md.

    Raises `UserError` if a directory has no finished evaluation, or if the two share no prompt or method.
    """
    out_dir = require_writable(config.out_dir)
    with only_run(out_dir, "a comparison"):
        expected = "a directory without a comparison; resume=true makes it anew"
        require(config.resume or not (out_dir / COMPARISON).exists(), "out_dir", config.out_dir, expected)
        comparison = _compare(config)
        write_atomically(out_dir / "compare.md", comparison_table(comparison).encode())
        write_json(out_dir / COMPARISON, to_json(comparison))
    print(comparison_table(comparison), flush=True)
    return comparison


def _compare(config: CompareConfig) -> Comparison:
    before, after = (read_evaluation(folder) for folder in config.compare)
    pairs = config.pairs or {name: name for name in before.reports if name in after.reports}  # first: second
    for evaluation, method_names in ((before, list(pairs)), (after, list(pairs.values()))):
        unknown = [name for name in method_names if name not in evaluation.reports]
        require(not unknown, "pairs", unknown, f"methods of {evaluation.folder}: {', '.join(evaluation.reports)}")
    if not pairs:
        methods_text = f"{', '.join(before.reports)} and {', '.join(after.reports)}"
        raise UserError(f"compare={config.compare}: no method in both ({methods_text}); say which with pairs={{A: B}}")
    shared, streams = shared_prompts(before, after), Streams(config.seed).within("compare")
    return Comparison(
        compare=(before.folder, after.folder),
        prompts=(len(before.results), len(after.results), len(shared)),
        differences=list_differences(before, after),
        busy={run.folder: run.busy for run in (before, after) if run.busy},
        methods=tuple(compare_methods(before, after, shared, pair, streams.within(*pair)) for pair in pairs.items()),
    )


def read_evaluation(folder: str) -> Evaluation:
    """The evaluation that evaluate-checkpoint wrote to `folder`. Raises `UserError` for anything else."""
    remedy = "give the out_dir of a finished evaluation"
    file = Path(folder) / REPORT_FILE
    measured = read_results(Path(folder)).values() if file.exists() else ()
    results = {turn.prompt_id: turn for prompt in measured for turn in prompt.turns}
    if file.exists() and not results:
        raise UserError(f"{folder}: a report without results of prompts (a replay, or its files are gone); {remedy}")
    return Evaluation(folder, {report.method: report for report in read_reports(file, remedy)}, results)


def shared_prompts(before: Evaluation, after: Evaluation) -> list[str]:
    """The ids of turns that both measured with equal prompts. Raises `UserError` if there are none.

    Prompts are compared as tokens if the two targets share a tokenizer. A later turn of a conversation includes the
    target's earlier answers, so with other answers it is a different prompt.
    """
    tokenizer_digests = [run.first.conditions.digests.get("tokenizer") for run in (before, after)]
    same_tokenizer = tokenizer_digests[0] == tokenizer_digests[1]
    shared_ids = [
        prompt_id
        for prompt_id, result in before.results.items()
        if prompt_id in after.results and (not same_tokenizer or result.prompt == after.results[prompt_id].prompt)
    ]
    if not shared_ids:
        folders = f"{before.folder},{after.folder}"
        raise UserError(f"compare=[{folders}]: no prompt in both; evaluate both on the same prompts")
    return shared_ids


def list_differences(before: Evaluation, after: Evaluation) -> dict[str, tuple[object, object]]:
    """Differences of the two runs other than methods: settings and facts that a reader must know."""
    fact_keys = ("target", "drafter", "dtype", "device", "runtime", "kernels", "temperature", "sampling",
            "generation_config", "template", "max_new_tokens", "texts_at_once", "processes", "machine", "made_with",
            "digests", "seed")  # fmt: skip
    facts_before, facts_after = ({**vars(run.first.conditions), **vars(run.first)} for run in (before, after))
    return {key: (facts_before[key], facts_after[key]) for key in fact_keys if facts_before[key] != facts_after[key]}


def compare_methods(
    before: Evaluation, after: Evaluation, shared: Sequence[str], pair: tuple[str, str], streams: Streams
) -> MethodsCompared:
    """The second method of `pair`, of the run `after`, over the first, of the run `before`. shared: ids of turns."""
    (arm_before, arm_after), arms = pair, ((before, pair[0]), (after, pair[1]))
    # Turns in which both methods, and plain decoding in both runs, decoded a token after the prefill.
    fair = [name for name in shared if all(select_timed([run.results[name]], arm, AUTOREGRESSIVE) for run, arm in arms)]
    texts_by_id = {name: [run.results[name].generations[arm].tokens for run, arm in arms] for name in shared}

    def ratio(figure: Figure, ids: Sequence[str] = fair) -> MedianInterval:
        """The ratio of a figure over the turns `ids`, resampled by the coarser `PromptResult.unit` of the two runs."""
        ratios = [figure(after.results[name], arm_after) / figure(before.results[name], arm_before) for name in ids]
        results_by_run = [[run.results[name] for name in ids] for run in (before, after)]
        coarser_results = min(results_by_run, key=lambda results: len({result.unit for result in results}))
        return median_of(coarser_results, ratios, streams.within(figure.__name__))

    loopless = [{r.prompt_id for r in without_loops([*run.results.values()], arm, AUTOREGRESSIVE)} for run, arm in arms]
    loopless_gain = ratio(_speedup, [name for name in fair if all(name in names for names in loopless)])
    verdicts = {report.verdict for run, arm in arms if (report := run.reports.get(arm)) is not None}
    fault_verdict = next((verdict for verdict in (TARGET_DIFFERS, NOT_LOSSLESS) if verdict in verdicts), None)
    return MethodsCompared(
        pair=pair,
        gain=ratio(_speedup),
        gain_without_loops=loopless_gain,
        seconds=ratio(_speed),
        tau=ratio(_tau),
        loops=count_loops([text for both_texts in texts_by_id.values() for text in both_texts]),
        same_text=sum(first == second for first, second in texts_by_id.values()),
        verdict=fault_verdict or judge_speed(loopless_gain, before.busy or after.busy),
    )


def _speedup(result: PromptResult, method: str) -> float:
    return decoding(result.generations[AUTOREGRESSIVE]) / decoding(result.generations[method])  # seconds a token


def _speed(result: PromptResult, method: str) -> float:
    return 1 / decoding(result.generations[method])  # tokens per second


def _tau(result: PromptResult, method: str) -> float:
    rounds = result.generations[method].rounds
    return sum(len(r.tokens) for r in rounds) / len(rounds)


def comparison_table(comparison: Comparison) -> str:
    """The content of compare.md."""
    (name_before, name_after), (turns_before, turns_after, n_shared) = comparison.compare, comparison.prompts
    loops = max((row.loops for row in comparison.methods), key=lambda loops: loops.looping)  # the most loops
    counts = f"{n_shared} shared turns, of {turns_before} and {turns_after}"
    summary = f"{counts}. A ratio above 1 is in favour of {name_after}. {loops}."
    table = fill_table(COMPARED, ({**vars(row), "prompts": n_shared} for row in comparison.methods))
    lines = [f"# {name_after} over {name_before}", "", summary, "", *table.markdown()]
    lines += [f"\n**{folder}: {why} Do not quote its speeds.**" for folder, why in comparison.busy.items()]
    if comparison.differences:
        lines += ["", f"Not the same in both: {list_words(sorted(comparison.differences))}."]
    return "\n".join(lines) + "\n"
