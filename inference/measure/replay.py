"""Replay: recorded greedy answers stand in for a target.

Greedy decoding gives the same text with every drafter. So a recording gives the exact τ of a drafter that reads only
tokens, or also the target's first layers; no other weights are needed. The loop is that of decoding, `decode_rounds`.
The session runs only the layers that the drafter shares with the target, and the selector chooses the recorded tokens.
τ along a sampled answer is teacher-forced: a draft is accepted if it is what the target happened to sample.

The command `replay_answers` has the phases of an evaluation, without a target: `recordings` (plan), `replay_turns`
(measure), `replay_report` (judge) and `write_replay` (write).
"""

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from outrider.base.errors import UserError
from outrider.base.files import require_writable, write_atomically, write_json
from outrider.base.machine import describe_machine
from outrider.base.progress import track_progress
from outrider.base.run_dirs import only_run
from outrider.base.streams import Streams
from outrider.base.words import Columns, fill_table
from outrider.data_prep.text.prompts import read_prompts, spread_evenly
from outrider.draft_models.early_exit.checkpoint import provenance
from outrider.draft_models.targets.open_target import pick_device
from outrider.draft_models.targets.unseen_target import open_unseen
from outrider.inference.core.decode import cut, decode_rounds
from outrider.inference.core.drafter import Drafter
from outrider.inference.core.rounds import Clock, Generation, Round, collect
from outrider.inference.core.session import Session
from outrider.inference.core.target_session import TargetSession, WholeSession
from outrider.inference.core.token_selector import TokenSelector, VerifiedDraft
from outrider.inference.core.tree import DraftTree, depths
from outrider.inference.core.verify import verify_greedy
from outrider.inference.loading.drafters import Drafters, load_drafters, new_drafter
from outrider.inference.measure.recordings import (
    RecordedTurn,
    Vocabulary,
    load_vocabulary,
    read_responses,
    read_transcripts,
    recordings,
)
from outrider.inference.measure.statistics import (
    DecodeStatistics,
    DepthAcceptance,
    Loops,
    acceptance_by_position,
    count_loops,
    decode_statistics,
    loop_length,
    structure_statistics,
)
from outrider.inference.settings.evaluate import ReplayConfig
from outrider.inference.settings.kinds import SMALL_LM
from outrider.inference.settings.method import MethodConfig

CPU = torch.device("cpu")
REPLAYED: Columns = {
    "method": ("{method}", ""),
    "τ": ("{tau:.3f?}", ""),
    "τ without loops": ("{tau_without_loops:.3f?}", ""),
    "drafted/round": ("{drafted_tokens_per_round:.1f}", ""),
    "draft µs": ("{draft_us:.0f}", ""),
}


class RecordedSession(WholeSession):
    """The session of a drafter that shares nothing with the target: it counts rows and runs no layer.

    Logits [n, 0] have no columns, since `RecordedSelector` reads none. The target's last hidden state [1, width] is 0.
    """

    dtype = torch.float32

    def __init__(
        self, split: int, capacity: int, context: int, *, vocabulary: int = 2**31, width: int = 0,
        device: torch.device = CPU,
    ):  # fmt: skip
        self.device, self.capacity, self.context = device, capacity, context
        self.base, self._vocabulary = 0, vocabulary
        self.target_hidden = torch.zeros(1, width, device=device)
        self.start_round()

    @property
    def vocabulary(self) -> int:
        return self._vocabulary

    def finish(self, rows: Sequence[int] | None = None, *, last_only: bool = False) -> Tensor:
        self.finished = range(self.rows) if rows is None else rows
        return torch.empty(len(self.finished), 0)

    def commit(self, rows: Sequence[int]) -> None:
        self.base += len(rows)
        self.start_round()


class FirstLayersSession(TargetSession):
    """The session of a drafter that shares the target's first layers. Only these layers run."""

    def finish(self, rows: Sequence[int] | None = None, *, last_only: bool = False) -> Tensor:
        self.finished = range(self.rows) if rows is None else rows
        self.target_hidden = torch.zeros_like(self.hidden[0, :1])
        return self.hidden.new_empty(len(self.finished), 0)


class RecordedSelector(TokenSelector):
    """Chooses the recorded tokens, whatever the logits are. After the recording's end it repeats the last token."""

    def __init__(self, recorded: Sequence[int]):
        super().__init__()
        self._recorded, self._position = recorded, 0

    def next_token(self, logits: Tensor) -> Tensor:
        token = self._after(0)
        self._position += 1
        return self._token(token)

    def verify(self, tree: DraftTree, logits: Tensor) -> VerifiedDraft:
        proposed = tree.tokens.tolist()
        choices = [self._after(depth) for depth in depths(tree.parents)]
        nodes, bonus = verify_greedy(proposed, tree.parents, choices)
        self._position += len(nodes) + 1
        return VerifiedDraft(proposed, nodes, self._token(bonus), bonus)

    def _after(self, depth: int) -> int:
        """The recorded token after a node of that depth, if the path to the node is the recorded one."""
        return self._recorded[min(self._position + depth, len(self._recorded) - 1)]


@torch.inference_mode()
def replay(
    drafter: Drafter,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    max_new_tokens: int,
    eos: Collection[int] = (),
    clock: Clock = time.perf_counter,
    session: Callable[[int, int, int], Session] = RecordedSession,
) -> Iterator[Round]:
    """The rounds in which `speculative` would have decoded the recorded `answer` to `prompt`, from the prefill on.

    The answer ends with an end token, or is at least max_new_tokens long. session: makes one of
    (split, capacity, context). Raises `UserError` if the answer is empty.
    """
    if not answer:
        raise UserError("empty recorded answer: expected the target's tokens, the end token included")
    context = len(prompt) + max_new_tokens
    recorded_session = session(drafter.split, context + drafter.max_rows + 1, context)
    selector = RecordedSelector(cut(answer, eos, max_new_tokens))
    yield from decode_rounds(recorded_session, drafter, selector, prompt, max_new_tokens, eos, clock)


# ----------------------------------------------------------------------------------------------------------- report


@dataclass(frozen=True, kw_only=True)
class TurnsReplay(DecodeStatistics):
    """The figures of a method on recorded turns."""

    loops: Loops


@dataclass(frozen=True, kw_only=True)
class MethodReplay(TurnsReplay):
    """The figures of a method on all recorded turns. draft_us: median microseconds that a round spent drafting.

    greedy_turns: those whose answers are known to be greedy. τ of the others is teacher-forced.
    """

    method: str
    turns: int
    greedy_turns: int
    tokens: int
    structure: Mapping[str, float]
    draft_us: float | None
    acceptance_by_position: tuple[DepthAcceptance, ...]
    tau_without_loops: float
    by_category: Mapping[str, TurnsReplay]
    settings: MethodConfig


def replay_answers(config: ReplayConfig) -> list[MethodReplay]:
    """Replay every method of `config` over recorded answers, and write report.json and report.md to `config.out_dir`.

    The report gives τ, overall and by category, and the drafting time of a round. Speed-ups would need a target.
    """
    prompts = None if config.prompts is None else read_prompts(config.prompts, limit=config.num_prompts)
    out_dir = require_writable(config.out_dir)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with only_run(out_dir, "results"):
        vocabulary = load_vocabulary(config.tokenizer)
        if prompts is None:
            turns = read_responses(config.transcripts, vocabulary)
            turns = spread_evenly(turns, config.num_prompts or len(turns))
        else:
            turns = recordings(prompts, read_transcripts(config.transcripts), vocabulary)
        drafters, session = load_replayed(config, vocabulary, turns)
        reports = [
            replay_report(name, method, turns, replay_turns(name, method, drafters, turns, config, session))
            for name, method in config.methods.items()
        ]
        write_replay(config, out_dir, reports)
    return reports


def load_replayed(
    config: ReplayConfig, vocabulary: Vocabulary, turns: Sequence[RecordedTurn]
) -> tuple[Drafters, Callable[[int, int, int], Session]]:
    """The drafters, and what makes the session of a turn (see `replay`)."""
    if config.small_lm is None:
        return load_drafters(config, vocabulary), RecordedSession
    target, device = open_unseen(config.tokenizer), pick_device("auto")
    drafters = load_drafters(config, target, dtype=torch.float32, device=device)
    plugin = SMALL_LM.load_plugin()
    [lm] = plugin.causal_lms(drafters[SMALL_LM.name])
    plugin.prepare(drafters[SMALL_LM.name], lm)
    largest_id = max(max(turn.prompt + turn.answer) for turn in turns)
    size = target.resize(max(largest_id, lm.config.vocab_size - 1)).config.vocab_size
    return drafters, partial(RecordedSession, vocabulary=size, device=device)


def replay_turns(
    name: str,
    method: MethodConfig,
    drafters: Drafters,
    turns: Sequence[RecordedTurn],
    config: ReplayConfig,
    session: Callable[[int, int, int], Session] = RecordedSession,
) -> list[Generation]:
    """Replay every recorded turn as `method` would have decoded it, up to its end token.

    The budget is max_new_tokens, or the length of a longer answer, so drafts do not know where an answer ends.
    """
    generations = []
    for turn in track_progress(turns, f"replaying by {name}", "turns"):
        drafter = new_drafter(method, drafters, Streams(config.seed, turn.id).within(name))
        budget = max(config.max_new_tokens * turn.ended, len(turn.answer))
        ends = {turn.answer[-1]} if turn.ended else set[int]()
        rounds = replay(drafter, turn.prompt, turn.answer, max_new_tokens=budget, eos=ends, session=session)
        generations.append(collect(rounds))
    return generations


def replay_report(
    name: str, method: MethodConfig, turns: Sequence[RecordedTurn], generations: Sequence[Generation]
) -> MethodReplay:
    seconds = [r.draft_seconds + r.structure_seconds for g in generations for r in g.rounds]
    groups: dict[str, list[Generation]] = {}
    for turn, generation in zip(turns, generations, strict=True):
        groups.setdefault(turn.category, []).append(generation)
    return MethodReplay(
        method=name,
        turns=len(turns),
        greedy_turns=sum(turn.greedy for turn in turns),
        tokens=sum(len(g.tokens) for g in generations),
        **vars(decode_statistics(generations)),
        loops=count_loops([g.tokens for g in generations]),
        structure=structure_statistics(generations),
        draft_us=1e6 * statistics.median(seconds) if seconds else None,
        acceptance_by_position=acceptance_by_position(generations),
        tau_without_loops=decode_statistics(g for g in generations if not loop_length(g.tokens)).tau,
        by_category={
            category: TurnsReplay(**vars(decode_statistics(group)), loops=count_loops([g.tokens for g in group]))
            for category, group in groups.items()
        },
        settings=method,
    )


def write_replay(config: ReplayConfig, out_dir: Path, reports: Sequence[MethodReplay]) -> None:
    table = replay_markdown(reports, config.transcripts)
    write_atomically(out_dir / "report.md", table.encode())
    keys = ("transcripts", "tokenizer", "max_new_tokens", "seed", "table", "small_lm")
    facts = {
        "target": "replay",
        **{key: getattr(config, key) for key in keys},
        "machine": describe_machine("cpu"),
        "made_with": provenance(),
    }
    rows = [{"method": report.method, **asdict(report)} for report in reports]
    write_json(out_dir / "report.json", {**facts, "reports": rows})
    print(f"{table}\nreport: {out_dir / 'report.md'}", flush=True)


def replay_markdown(reports: Sequence[MethodReplay], transcripts: str) -> str:
    """A table of τ per method, overall and by category."""
    first = reports[0]
    groups = {name: (f"{{by_category[{name}].tau:.2f?}}", "") for name in first.by_category}
    unsure = first.turns - first.greedy_turns
    kind = f"teacher-forced, as {unsure} turns are not known to be greedy" if unsure else "greedy"
    summary = f"{first.turns} turns, {first.tokens} tokens, {kind}; {first.loops}."
    table = fill_table({**REPLAYED, **groups}, [vars(report) for report in reports])
    return "\n".join([f"# Replay of {Path(transcripts).name}", "", summary, "", *table.markdown(), ""])
