"""Replay: recorded greedy answers stand in for a target.

Greedy decoding gives the same text with every drafter. So a recording gives the exact τ of a drafter that reads only
tokens, or also the target's first layers; no other weights are needed. The loop is that of decoding, `decode_rounds`.
The session runs only the layers that the drafter shares with the target, and the selector chooses the recorded tokens.

Recordings are answer files in the layout of MT-Bench and Spec-Bench: one JSON object a line, {"question_id",
"choices": [{"turns": [answer, …]}]}. They hold text, so the ids that the target emitted are recovered by tokenising.
The prompt format is Vicuna's. The system's text (the prompt's, if it has one) and the question up to "ASSISTANT:" are
tokenised as one text, which the answer continues after a space. The end token follows, and the next question is a new
text, as Hugging Face tokenizers split at special tokens. An answer is tokenised alone if its space would merge with the
text before.

The command `replay_answers` has the phases of an evaluation, without a target: `recordings` (plan), `replay_turns`
(measure), `replay_report` (judge) and `write_replay` (write).
"""

import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from outrider.data_prep.text.chat import VICUNA_SYSTEM
from outrider.data_prep.text.data_files import read_file
from outrider.data_prep.text.messages import replace_surrogates
from outrider.data_prep.text.prompts import Prompt, read_prompts
from outrider.draft_models.early_exit.checkpoint import provenance
from outrider.draft_models.targets.encoder import open_encoder
from outrider.draft_models.targets.vocabulary import vocabulary_digest
from outrider.inference.core.decode import cut, decode_rounds
from outrider.inference.core.drafter import Drafter
from outrider.inference.core.rounds import Clock, Generation, Round, collect
from outrider.inference.core.session import Session
from outrider.inference.core.target_session import TargetSession, WholeSession
from outrider.inference.core.token_selector import TokenSelector, VerifiedDraft
from outrider.inference.core.tree import DraftTree, depths
from outrider.inference.core.verify import verify_greedy
from outrider.inference.loading.drafters import Drafters, load_drafters, new_drafter
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
from outrider.inference.settings.method import MethodConfig

CPU = torch.device("cpu")
REPLAYED: Columns = {
    "method": ("{method}", ""),
    "τ": ("{tau:.3f?}", ""),
    "τ without loops": ("{tau_without_loops:.3f?}", ""),
    "drafted/round": ("{drafted_tokens_per_round:.1f}", ""),
    "draft µs": ("{draft_us:.0f}", ""),
}


@dataclass(frozen=True)
class Vocabulary:
    """The parts of a tokenizer that replay needs."""

    encode: Callable[[str], list[int]]  # without special tokens
    bos: int | None
    eos: int
    vocabulary_digest: str
    vocabulary_size: int | None = None  # of the model that recorded


@dataclass(frozen=True)
class RecordedTurn:
    """One turn: the ids of the target's prompt and of its answer, end token included."""

    id: str
    category: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


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


# ------------------------------------------------------------------------------------------------------- recordings


def load_vocabulary(source: str) -> Vocabulary:
    """The tokenizer in `source` (see `open_encoder`). Raises `UserError`."""
    encoder = open_encoder(source)
    if encoder.eos is None:
        raise UserError(f"tokenizer={source}: has no end token, which ends every recorded answer")
    digest = vocabulary_digest(encoder.pieces)
    return Vocabulary(lambda text: list(encoder.encode([text])[0]), encoder.bos, encoder.eos, digest)


def read_transcripts(name: str) -> dict[str, tuple[str, ...]]:
    """Answers by question id, one per turn. Raises `UserError` naming file and line for invalid records."""
    path = Path(os.path.expanduser(name))
    if not path.is_file():
        raise UserError(f"transcripts={name}: no such file; expected MT-Bench or Spec-Bench answers (JSONL)")
    answers = dict(_parse_answer(record, f"{path}:{number}") for number, record in read_file(path))
    if not answers:
        raise UserError(f"transcripts={name}: no answer in it")
    return answers


def _parse_answer(record: object, where: str) -> tuple[str, tuple[str, ...]]:
    match record:
        case {"question_id": question, "choices": [{"turns": [*turns]}, *_]}:
            if all(isinstance(turn, str) and replace_surrogates(turn) == turn for turn in turns):
                return str(question), tuple(turns)
    raise UserError(f"{where}: not an answer record: expected question_id and choices, the first with turns of text")


def recordings(
    prompts: Sequence[Prompt], answers: Mapping[str, Sequence[str]], vocabulary: Vocabulary
) -> list[RecordedTurn]:
    """Every turn of every prompt with its recorded answer. Earlier turns are the later ones' context.

    Every answer is assumed to end with the end token. This is wrong for an answer that the recorder truncated, which
    its text does not show.

    Raises `UserError` for a prompt without an answer to each of its turns.
    """
    turns = []
    for prompt in prompts:
        if prompt.id not in answers:
            raise UserError(f"prompt {prompt.id}: no answer to it in the transcripts; give the prompts they belong to")
        if len(prompt.turns) != len(answers[prompt.id]):
            raise UserError(
                f"prompt {prompt.id}: {len(prompt.turns)} turns, but {len(answers[prompt.id])} answers in the "
                "transcripts; give the prompts they belong to"
            )
        ids, system = ([] if vocabulary.bos is None else [vocabulary.bos]), f"{prompt.system or VICUNA_SYSTEM} "
        for name, question, answer in zip(prompt.turn_ids, prompt.turns, answers[prompt.id], strict=True):
            opening = f"{system}USER: {question} ASSISTANT:"
            head, system = vocabulary.encode(opening), ""
            joined = vocabulary.encode(f"{opening} {answer}")
            tail = joined[len(head) :] if joined[: len(head)] == head else vocabulary.encode(answer)
            turns.append(RecordedTurn(name, prompt.category, (*ids, *head), (*tail, vocabulary.eos)))
            ids += [*head, *tail, vocabulary.eos]
    return turns


# ----------------------------------------------------------------------------------------------------------- report


@dataclass(frozen=True, kw_only=True)
class TurnsReplay(DecodeStatistics):
    """The figures of a method on recorded turns."""

    loops: Loops


@dataclass(frozen=True, kw_only=True)
class MethodReplay(TurnsReplay):
    """The figures of a method on all recorded turns. draft_us: median microseconds that a round spent drafting."""

    method: str
    turns: int
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
    prompts = read_prompts(config.prompts, limit=config.num_prompts)
    out_dir = require_writable(config.out_dir)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with only_run(out_dir, "results"):
        vocabulary = load_vocabulary(config.tokenizer)
        drafters = load_drafters(config, vocabulary)
        turns = recordings(prompts, read_transcripts(config.transcripts), vocabulary)
        reports = [
            replay_report(name, method, turns, replay_turns(name, method, drafters, turns, config))
            for name, method in config.methods.items()
        ]
        write_replay(config, out_dir, reports)
    return reports


def replay_turns(
    name: str, method: MethodConfig, drafters: Drafters, turns: Sequence[RecordedTurn], config: ReplayConfig
) -> list[Generation]:
    """Replay every recorded turn as `method` would have decoded it, up to its end token.

    The budget is max_new_tokens, or the length of a longer answer, so drafts do not know where an answer ends.
    """
    generations = []
    for turn in track_progress(turns, f"replaying by {name}", "turns"):
        drafter = new_drafter(method, drafters, Streams(config.seed, turn.id).within(name))
        budget = max(config.max_new_tokens, len(turn.answer))
        rounds = replay(drafter, turn.prompt, turn.answer, max_new_tokens=budget, eos={turn.answer[-1]})
        generations.append(collect(rounds))
    return generations


def replay_report(
    name: str, method: MethodConfig, turns: Sequence[RecordedTurn], generations: Sequence[Generation]
) -> MethodReplay:
    seconds = [r.structure_seconds for g in generations for r in g.rounds]
    groups: dict[str, list[Generation]] = {}
    for turn, generation in zip(turns, generations, strict=True):
        groups.setdefault(turn.category, []).append(generation)
    return MethodReplay(
        method=name,
        turns=len(turns),
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
    facts = {
        "target": "replay",
        **{key: getattr(config, key) for key in ("transcripts", "tokenizer", "max_new_tokens", "seed", "table")},
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
    summary = f"{first.turns} turns, {first.tokens} tokens, greedy; {first.loops}."
    table = fill_table({**REPLAYED, **groups}, [vars(report) for report in reports])
    return "\n".join([f"# Replay of {Path(transcripts).name}", "", summary, "", *table.markdown(), ""])
