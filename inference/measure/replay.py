"""Replay: recorded greedy answers stand in for a target.

Greedy decoding gives the same text with every drafter. So a recording gives the exact τ of a drafter that reads only
tokens, or also the target's first layers; no other weights are needed. The loop is that of decoding, `decode_rounds`.
In decoding a session runs the target and a selector chooses tokens from its logits. Here the session runs only the
layers that the drafter shares with the target, and the selector chooses the recorded tokens. A row is a token that a
session runs. τ along a sampled answer is teacher-forced: a draft is accepted if the target happened to sample it.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from outrider.base.errors import UserError
from outrider.base.progress import track_progress
from outrider.base.streams import Streams
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.draft_models.small_lm.model import pass_tokens_of
from outrider.draft_models.targets.open_target import pick_device
from outrider.draft_models.targets.unseen_target import open_unseen
from outrider.inference.core.decode import cut, decode_rounds
from outrider.inference.core.drafter import Drafter
from outrider.inference.core.rounds import Clock, Generation, Round, collect, synchronized_clock
from outrider.inference.core.session import Session
from outrider.inference.core.target_session import TargetSession, WholeSession
from outrider.inference.core.token_selector import TokenSelector, VerifiedDraft
from outrider.inference.core.tree import DraftTree, depths
from outrider.inference.core.verify import verify_greedy
from outrider.inference.loading.drafters import Drafters, load_drafters, new_drafter
from outrider.inference.measure.recordings import RecordedTurn, Vocabulary
from outrider.inference.serving.proposer import chain_rounds
from outrider.inference.settings.engine import draft_length, refusal_of
from outrider.inference.settings.evaluate import ReplayConfig
from outrider.inference.settings.kinds import SMALL_LM
from outrider.inference.settings.method import MethodConfig

CPU = torch.device("cpu")
# From the number of target layers that the drafter shares, the rows that a cache holds, and the most tokens of a text.
MakeSession = Callable[[int, int, int], Session]


class RecordedSession(WholeSession):
    """The session of a drafter that shares no layer with the target: it counts rows and runs no layer.

    Logits [n, 0] have no columns, since `RecordedSelector` reads none. The target's last hidden state [1, width] is 0.
    split (not read), capacity, context: see `MakeSession`. vocabulary: the number of the target's ids, at most.
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
    """The session of a drafter that shares the target's first layers, for `train.calibrate`. Only these run."""

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
        accepted_nodes, bonus_token = verify_greedy(proposed, tree.parents, choices)
        self._position += len(accepted_nodes) + 1
        return VerifiedDraft(proposed, accepted_nodes, self._token(bonus_token), bonus_token)

    def _after(self, depth: int) -> int:
        """The recorded token after a node of that depth (the root: 0), if the path to the node is the recorded one."""
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
    session: MakeSession = RecordedSession,
) -> Iterator[Round]:
    """The rounds, the prefill first, in which decoding with `drafter` would have written the recorded `answer`.

    The answer ends with an end token, or is at least max_new_tokens long. Raises `UserError` if the answer is empty.
    """
    if not answer:
        raise UserError("empty recorded answer: expected the target's tokens, the end token included")
    max_length = len(prompt) + max_new_tokens
    recorded_session = session(drafter.split, max_length + drafter.max_rows + 1, max_length)
    selector = RecordedSelector(cut(answer, eos, max_new_tokens))
    yield from decode_rounds(recorded_session, drafter, selector, prompt, max_new_tokens, eos, clock)


def load_replayed(
    config: ReplayConfig, vocabulary: Vocabulary, turns: Sequence[RecordedTurn]
) -> tuple[Drafters, MakeSession]:
    """The drafters, and what makes the session of a turn.

    A small LM is loaded for a target that has a tokenizer only, with as many ids as the turns and the LM need.
    """
    if config.small_lm is None:
        return load_drafters(config, vocabulary), RecordedSession
    target, device = open_unseen(config.tokenizer), pick_device("auto")
    drafters = load_drafters(config, target, dtype=torch.float32, device=device)
    plugin = SMALL_LM.load_plugin()
    [lm] = plugin.causal_lms(drafters[SMALL_LM.name])
    plugin.prepare(drafters[SMALL_LM.name], lm)
    largest_id = max(max(turn.prompt + turn.answer) for turn in turns)
    vocab_size = target.resize(max(largest_id, lm.config.vocab_size - 1)).config.vocab_size
    return drafters, partial(RecordedSession, vocabulary=vocab_size, device=device)


def drafts_in_one_pass(drafters: Drafters) -> bool:
    """Whether the small LM, if there is one, drafts all tokens in one pass (PARD)."""
    model = drafters.get(SMALL_LM.name)
    lms = [] if model is None else SMALL_LM.load_plugin().causal_lms(model)
    return any(pass_tokens_of(lm.config)[0] is not None for lm in lms)  # [0]: the id of the mask


def replay_turns(
    name: str,
    method: MethodConfig,
    drafters: Drafters,
    turns: Sequence[RecordedTurn],
    config: ReplayConfig,
    make_session: MakeSession = RecordedSession,
) -> list[Generation]:
    """Replay every recorded turn as `method` would have decoded it, up to its end token.

    The budget of an answer that ended is max_new_tokens or, if larger, its length: so drafts do not know where it ends.
    """
    generations = []
    drafter_model = drafters.get(method.source)
    # Drafts are computed on the device of the small LM, which a clock without synchronisation does not wait for.
    clock = synchronized_clock if SMALL_LM.name in drafters and torch.cuda.is_available() else time.perf_counter
    replay_turn = partial(replay, clock=clock, session=make_session)
    for turn in track_progress(turns, f"replaying by {name}", "turns"):
        runs_in_engine = bool(config.draft_tokens) and refusal_of("", method) is None  # a serving engine, as vLLM
        if runs_in_engine and isinstance(drafter_model, TrigramTable):  # it drafts chains in an engine, but trees here
            generations.append(replay_chains(drafter_model, turn.prompt, turn.answer, draft_length(method)))
            continue
        drafter = new_drafter(method, drafters, Streams(config.seed, turn.id).within(name))
        max_tokens = max(config.max_new_tokens * turn.ended, len(turn.answer))
        eos_ids = {turn.answer[-1]} if turn.ended else set[int]()
        rounds = replay_turn(drafter, turn.prompt, turn.answer, max_new_tokens=max_tokens, eos=eos_ids)
        generations.append(collect(rounds, clock))
    return generations


def replay_chains(table: TrigramTable, prompt: Sequence[int], text: Sequence[int], max_draft: int) -> Generation:
    """`text` after `prompt` in the rounds that chains of `max_draft` tokens from the table give, as in an engine.

    Nothing is decoded, so all times are of look-up alone.
    """
    rounds = tuple(
        Round(tokens, drafted=length, accepted=len(tokens) - 1, depth=length, seconds=spent, structure_seconds=spent)
        for length, tokens, spent in chain_rounds(table, prompt, text, max_draft)
    )
    return Generation(tuple(text), prefill_seconds=0.0, decode_seconds=sum(r.seconds for r in rounds), rounds=rounds)
