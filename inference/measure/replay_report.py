"""The report of a replay: the figures of each method, as JSON and as a table.

A replay decodes recorded answers anew, with the drafts of a method and without the target (see `replay_turns`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from outrider.base.files import write_atomically, write_json
from outrider.base.machine import describe_machine
from outrider.base.words import Columns, fill_table
from outrider.draft_models.early_exit.checkpoint import provenance
from outrider.inference.core.rounds import Generation
from outrider.inference.measure import statistics
from outrider.inference.measure.recordings import RecordedTurn
from outrider.inference.settings.evaluate import ReplayConfig
from outrider.inference.settings.method import MethodConfig

REPLAYED: Columns = {  # title: template of cells (.3f: as of `format`; "?": also zero as a dash), and "": unexplained
    "method": ("{method}", ""),
    "τ": ("{tau:.3f?}", ""),
    "τ without loops": ("{tau_without_loops:.3f?}", ""),
    "drafted/round": ("{drafted_tokens_per_round:.1f}", ""),
    "draft µs": ("{draft_us:.0f}", ""),
}


@dataclass(frozen=True, kw_only=True)
class TurnsReplay(statistics.DecodeStatistics):
    """The figures of a method on recorded turns. loops: the texts that repeat a cycle of tokens."""

    loops: statistics.Loops


@dataclass(frozen=True, kw_only=True)
class MethodReplay(TurnsReplay):
    """The figures of a method on all recorded turns. draft_us: median microseconds that a round spent drafting.

    greedy_turns: the number of turns whose answers are known to be greedy. τ of the others is teacher-forced: a draft
    is accepted if it was sampled. expected: the speed-up over plain decoding in the engine behind `config.server`.
    structure: means over rounds by name. acceptance_by_position: by depth in the draft.
    """

    method: str
    turns: int
    greedy_turns: int
    tokens: int
    structure: Mapping[str, float]
    draft_us: float | None
    acceptance_by_position: tuple[statistics.DepthAcceptance, ...]
    tau_without_loops: float
    by_category: Mapping[str, TurnsReplay]
    settings: MethodConfig
    expected: statistics.MedianInterval | None = None


def replay_report(
    name: str, method: MethodConfig, turns: Sequence[RecordedTurn], generations: Sequence[Generation]
) -> MethodReplay:
    draft_seconds = [r.draft_seconds + r.structure_seconds for g in generations for r in g.rounds]
    by_category: dict[str, list[Generation]] = {}
    for turn, generation in zip(turns, generations, strict=True):
        by_category.setdefault(turn.category, []).append(generation)
    return MethodReplay(
        method=name,
        turns=len(turns),
        greedy_turns=sum(turn.greedy for turn in turns),
        tokens=sum(len(g.tokens) for g in generations),
        **vars(_turns_replay(generations)),
        structure=statistics.structure_statistics(generations),
        draft_us=1e6 * median(draft_seconds) if draft_seconds else None,
        acceptance_by_position=statistics.acceptance_by_position(generations),
        tau_without_loops=_turns_replay([g for g in generations if not statistics.loop_length(g.tokens)]).tau,
        by_category={category: _turns_replay(group) for category, group in by_category.items()},
        settings=method,
    )


def _turns_replay(generations: Sequence[Generation]) -> TurnsReplay:
    loops = statistics.count_loops([g.tokens for g in generations])
    return TurnsReplay(**vars(statistics.decode_statistics(generations)), loops=loops)


def write_replay(config: ReplayConfig, out_dir: Path, reports: Sequence[MethodReplay]) -> None:
    markdown = replay_markdown(reports, config.transcripts)
    write_atomically(out_dir / "report.md", markdown.encode())
    config_keys = ("transcripts", "tokenizer", "max_new_tokens", "seed", "table", "small_lm", "server", "server_model",
            "draft_server")  # fmt: skip
    content = {
        "target": "replay",
        **{key: getattr(config, key) for key in config_keys},
        "machine": describe_machine("cpu"),
        "made_with": provenance(),
        "reports": [{"method": report.method, **asdict(report)} for report in reports],
    }
    write_json(out_dir / "report.json", content)
    print(f"{markdown}\nreport: {out_dir / 'report.md'}", flush=True)


def replay_markdown(reports: Sequence[MethodReplay], transcripts: str) -> str:
    """A table of τ per method, overall and by category."""
    first = reports[0]
    columns = {
        f"category {name}" if name in REPLAYED else name: (f"{{tau_of_{number}:.2f?}}", "")
        for number, name in enumerate(first.by_category)
    }
    unsure_turns = first.turns - first.greedy_turns
    decoding = f"teacher-forced, as {unsure_turns} turns are not known to be greedy" if unsure_turns else "greedy"
    summary = f"{first.turns} turns, {first.tokens} tokens, {decoding}; {first.loops}."
    extra = {"speed-up there [95 %]": ("{expected:interval}", "")} if any(r.expected for r in reports) else {}
    rows = [{f"tau_of_{n}": r.by_category[name].tau for n, name in enumerate(first.by_category)} for r in reports]
    table = fill_table({**REPLAYED, **extra, **columns}, [vars(r) | row for r, row in zip(reports, rows, strict=True)])
    return "\n".join([f"# Replay of {Path(transcripts).name}", "", summary, "", *table.markdown(), ""])
