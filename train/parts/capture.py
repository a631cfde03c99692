"""Capture of drafting outcomes: a target with its drafter continues texts, and every tested token is recorded.

A drafted token is tested if the target says whether it is accepted: the tokens up to the first rejected one. The target
decodes the texts, or its greedy answers are on record (see `inference.measure.replay`). The records train a calibration
head, which estimates from them how likely a drafted token is accepted.

`capture_splits` captures the texts of both splits once and keeps the tokens in a file. It calls `capture_texts` for
each split, which calls `capture` for each text, whose tokens a `Recorder` records.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from safetensors.torch import load_file, save
from torch import Tensor

from outrider.base.errors import UserError
from outrider.base.files import digest_of, require_writable, write_atomically
from outrider.base.processes import from_main
from outrider.base.progress import track_progress
from outrider.data_prep.text.sources import Split
from outrider.draft_models.losses import IGNORE
from outrider.inference.core.drafter import Drafter, DraftModel
from outrider.inference.core.rounds import Round
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.measure.time_limit import TimeLimit, spread_order
from outrider.inference.shapes.factory import Chain
from outrider.inference.stopping.interface import Step, StopRule
from outrider.train.core import run_dir
from outrider.train.core.training import Batch

ROW_TOKENS = 64  # drafted tokens in one row of `fit`


class TextToContinue(NamedTuple):
    """Token ids to continue, and the target's recorded greedy answer to them, if there is one."""

    prompt: list[int]
    answer: list[int] | None = None

    def rounds(
        self, decode: Callable[..., Iterator[Round]], drafter: Drafter, new_tokens: int, ends: Collection[int]
    ) -> Iterator[Round]:
        """The rounds in which `drafter` continues the text, up to `new_tokens` tokens or one of `ends`. A round is one
        draft and the pass of the target that tests it. decode: `speculative` of a target, or `replay` of the answer."""
        sequences = [self.prompt]
        if self.answer is not None:
            sequences.append(self.answer)
            # A budget bounds the last draft. One of the answer's length would show the drafter where the answer ends.
            if self.answer[-1] not in ends:  # the record was cut there, so nothing later is known
                new_tokens = min(new_tokens, len(self.answer))
        return decode(drafter, *sequences, max_new_tokens=new_tokens, eos=ends)


@dataclass(frozen=True)
class Drafting:
    """How a drafter continues texts.

    decode: `speculative` of a target, or `replay` of texts with answers. draft_model: makes a new one for each text.
    new_tokens: at most; max_draft: tokens drafted a round; ends: the tokens that end a text.
    """

    decode: Callable[..., Iterator[Round]]
    draft_model: Callable[[], DraftModel]
    new_tokens: int
    max_draft: int
    ends: Collection[int] = ()


class Recorder(StopRule):
    """A stop rule that never stops early and records the head's inputs and the outcome of every tested token.

    The accepted tokens and the first rejected one are tested; the target says nothing about later ones. untested:
    keep those too, with the label 0. Tokens after an accepted one of `ends` (indices where the drafter has a draft
    vocabulary) are never kept.
    """

    def __init__(self, max_draft: int, untested: bool, ends: Collection[int]):
        self.max_draft, self.keep_untested, self.ends = max_draft, untested, ends
        self._round: list[Batch] = []
        self._tokens: list[Tensor] = []
        self.examples: list[Batch] = []

    def stop(self, step: Step) -> bool:
        """Record the inputs for the token that was drafted last; true once the draft is long enough."""
        example = {"target_hidden": step.source.target_hidden, "draft_hidden": step.hidden}
        example |= {"position": torch.tensor([step.drafted]), "confidence": step.log_probability.exp()}
        self._round.append(example)
        self._tokens.append(step.token)
        return step.drafted >= self.max_draft

    def observe(self, drafted: int, accepted: int) -> None:
        """Add the examples of a round, of which the target accepted the first `accepted` of `drafted` tokens."""
        tokens = torch.cat(self._tokens).tolist() if self._tokens else []
        record_count = drafted if self.keep_untested else min(accepted + 1, drafted)
        end_index = next((index for index, token in enumerate(tokens[:accepted]) if token in self.ends), record_count)
        for index, example in enumerate(self._round[: min(record_count, end_index + 1)]):
            self.examples.append({**example, "label": torch.tensor([float(index < accepted)])})
        self._round.clear()
        self._tokens.clear()


def capture(drafting: Drafting, text: TextToContinue, keep_untested: bool = False) -> Batch:
    """Continue `text` greedily, drafting `max_draft` tokens a round, and keep the tested tokens; keep_untested: all.

    Returns target_hidden [n, d_T], draft_hidden [n, d_D] in the model's dtype, and position (from 1), confidence (q of
    the token) and label (1: it was the target's), each [n]; nothing where nothing was drafted.
    """
    draft_model, end_ids = drafting.draft_model(), drafting.ends
    if draft_model.predicted is not None:  # the draft vocabulary; the drafted tokens are indices into it
        end_ids = [index for index, token in enumerate(draft_model.predicted.tolist()) if token in end_ids]
    recorder = Recorder(drafting.max_draft, keep_untested, end_ids)
    drafter = ModelDrafter(draft_model, Chain(recorder))  # drafts chains of `max_draft` tokens
    for _ in text.rounds(drafting.decode, drafter, drafting.new_tokens, drafting.ends):
        pass
    return join_batches([{name: value.cpu() for name, value in example.items()} for example in recorder.examples])


def capture_texts(
    drafting: Drafting, texts: Sequence[TextToContinue], limit: TimeLimit, state: PartialState, untested: bool = False
) -> Batch:
    """`capture` of all `texts`, in their order, on every process; each continues its share of them.

    When the time of `limit` is over, the remaining texts are left out. The captured ones are spread over all texts.
    Every process captures enough tokens for a row of `fit`, if its texts have them.
    """
    batch_by_text, captured_count = dict[int, Batch](), 0
    limit = replace(limit, started=limit.clock())
    text_indices = spread_order(len(texts))[state.process_index :: state.num_processes]
    for index in track_progress(text_indices, "continuing texts", "texts", max_seconds=limit.left(0.0)):
        if captured_count >= ROW_TOKENS and limit.is_over(limit.spent()):
            break
        batch_by_text[index] = capture(drafting, texts[index], untested)
        captured_count += len(batch_by_text[index].get("label", ()))
    batches = {index: batch for gathered in gather_object([batch_by_text]) for index, batch in gathered.items()}
    return join_batches([batches[index] for index in sorted(batches)])


def join_batches(batches: Sequence[Batch]) -> Batch:
    """The tokens of all `batches`; nothing where there are none."""
    nonempty = [batch for batch in batches if batch]
    return {name: torch.cat([batch[name] for batch in nonempty]) for name in nonempty[0]} if nonempty else {}


def capture_splits(
    out_dir: Path,
    settings: Mapping[str, object],
    texts: Mapping[Split, Sequence[TextToContinue]],
    load_drafting: Callable[[], Drafting],
    limit: TimeLimit,
    state: PartialState,
) -> dict[Split, Batch]:
    """The examples of each split; held-out ones are whole rounds, with the untested tokens too.

    The splits share the time of `limit` in proportion to their texts. The examples are kept in a file of `out_dir`, so
    a run that is stopped later continues with them. settings: JSON-able, everything that determines the capture of a
    text. load_drafting: loads the models, if anything is left to capture; this does not count as time.

    Raises `UserError` where no token was drafted, and for a run that has begun to learn from other examples.
    """
    file = out_dir / "captured" / f"{digest_of([settings, texts])[:16]}.safetensors"
    if not from_main(state, file.exists):
        if run_dir.checkpoints(out_dir):
            raise UserError(f"out_dir={out_dir}: a run there has learned from other examples than these settings give, "
                            f"or {file} was removed; give another out_dir")  # fmt: skip
        tensors, drafting, minutes = dict[str, Tensor](), load_drafting(), limit.minutes  # minutes left; None: no limit
        for index, (split, split_texts) in enumerate(texts.items()):
            texts_left = sum(map(len, [*texts.values()][index:]))
            split_minutes = minutes and minutes * len(split_texts) / texts_left
            split_limit = replace(limit, minutes=split_minutes, started=limit.clock())
            captured = capture_texts(drafting, split_texts, split_limit, state, untested=split == "heldout")
            if not captured:
                raise UserError(f"data: the {split} split has no text in which a token is drafted; give others")
            minutes = minutes and max(0.0, minutes - split_limit.spent() / 60)
            tensors |= {f"{split}.{name}": value for name, value in captured.items()}
        from_main(state, lambda: write_atomically(require_writable(file.parent) / file.name, save(tensors)))
    stored = load_file(file)
    return {split: {name.partition(".")[2]: stored[name] for name in stored if name.startswith(f"{split}.")}
            for split in texts}  # fmt: skip


def select_tested(captured: Batch) -> Batch:
    """The tested tokens of whole rounds: the first of each round, and every token after an accepted one."""
    is_tested = (captured["position"] == 1) | (captured["label"].roll(1) == 1)
    return {name: value[is_tested] for name, value in captured.items()}


def recorded_text(row: Batch) -> TextToContinue | None:
    """The first prompt of a row (see `TopKRows`) and the answer to it; None if a token of the answer is less likely
    than the target's most likely one."""
    supervised = row["labels"] != IGNORE
    answer_start = int(supervised.nonzero()[0])
    answer_span = slice(answer_start, answer_start + int(supervised[answer_start:].int().cumprod(0).sum()))
    answer, logprobs = row["labels"][answer_span], row["top_logprobs"][answer_span]
    is_likeliest = (row["top_ids"][answer_span] == answer[:, None]) & (logprobs == logprobs[:, :1])
    is_greedy = bool(is_likeliest.any(-1).all())
    return TextToContinue(row["input_ids"][: answer_start + 1].tolist(), answer.tolist()) if is_greedy else None
