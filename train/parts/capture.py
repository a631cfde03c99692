"""Capture of drafting outcomes: a target with its drafter continues texts, and every tested token is recorded.

The target decodes them, or what it would say is on record (see `inference.measure.replay`). In shards on disk, so that
a killed run goes on where it was.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import PartialState
from safetensors.torch import load_file, save
from torch import Tensor

from data_prep.responses.directory import SECONDS_FILE, seconds_spent
from data_prep.text.sources import Split
from inference.core.drafter import Drafter, DraftModel
from inference.core.rounds import Round
from inference.drafters.shaped import ModelDrafter
from inference.measure.time_limit import TimeLimit, spread_order
from inference.shapes.factory import Chain
from inference.stopping.interface import Step
from outrider.errors import UserError, require
from outrider.files import require_writable, write_atomically, write_json
from outrider.processes import say
from outrider.progress import counted
from train.core import run_dir
from train.parts.calibration_model import EXAMPLES
from train.parts.calibration_scores import Batch
from train.settings.drafters import CalibrateConfig

SHARD_PROMPTS = 8


class Text(NamedTuple):
    """What is continued: token ids, and the target's greedy answer to them where it is on record."""

    prompt: list[int]
    answer: list[int] | None = None


@dataclass(frozen=True)
class Drafting:
    """How texts are continued by a drafter.

    load: loads what of the target is needed, once, and gives what decodes: `speculative` of a target, or `replay` of
    texts with answers. draft_model: makes one, fresh for a text. new_tokens: at most; ends: the tokens that end a text.
    """

    load: Callable[[], Callable[..., Iterator[Round]]]
    draft_model: Callable[[], DraftModel]
    new_tokens: int
    ends: Collection[int] = ()

    def rounds(self, drafter: Drafter, text: Text) -> Iterator[Round]:
        """The rounds of decoding `text`."""
        most, given = self.new_tokens, [text.prompt]
        if text.answer is not None:
            given.append(text.answer)
            if text.answer[-1] not in self.ends:  # a draft does not see where another one ends
                most = min(most, len(text.answer))
        return self.load()(drafter, *given, max_new_tokens=most, eos=self.ends)


def capture_splits(
    config: CalibrateConfig,
    settings: Mapping[str, object],
    texts_of: Callable[[Split, int], Sequence[Text]],
    drafting: Drafting,
    state: PartialState,
) -> dict[Split, Batch]:
    """The training and held-out examples: `capture` on the texts of each split, stored in `config.out_dir`.

    settings: JSON-able, what decides what is captured of a text. texts_of: so many texts of a split.

    Raises `UserError` where no token was drafted.
    """
    out_dir, found = Path(config.out_dir), dict[Split, Batch]()
    begun = bool(run_dir.checkpoints(out_dir))  # then the set of examples is fixed
    counts: dict[Split, int] = {"train": config.prompts, "heldout": config.heldout_prompts}
    minutes, texts = config.minutes, sum(counts.values())  # the remaining minutes and texts
    every = {split: texts_of(split, count) for split, count in counts.items()}
    for split, prompts in every.items():  # known before a target is loaded
        require(bool(prompts), "data", config.data.source, f"a text of the {split} split that can be continued")
        if len(prompts) < counts[split]:
            say(f"calibrate split={split}: {len(prompts)} texts, not {counts[split]}: there are no more")
    for split, prompts in every.items():
        count = counts[split]
        known = [text.prompt if text.answer is None else text for text in prompts]
        folder = require_writable(out_dir / "captured" / f"{split}-{digest_of([settings, known])}")
        limit = TimeLimit(minutes and minutes * count / texts)
        there = _captured(folder, prompts)
        state.wait_for_everyone()  # no process adds shards before all have listed them
        if not (begun and there):
            capture_shards(config, folder, prompts, drafting, state, limit, whole=split == "heldout")
            state.wait_for_everyone()
            there = [*_starts(prompts)] if limit.minutes is None else _captured(folder, prompts)
            _end_time(folder, limit, whole=len(there) == len(_starts(prompts)), state=state)
        elif len(there) < len(_starts(prompts)):
            said = "goes on with the texts that it learns from; for more another out_dir"
            say(f"calibrate split={split}: {said}")
        shards = [shard for start in there if (shard := load_file(_shard(folder, start)))]
        if not shards:
            raise UserError(f"data: the {split} split has no text in which a token is drafted; give others")
        found[split] = {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}
        minutes, texts = minutes and max(0.0, minutes - seconds_spent(folder) / 60), texts - count
    return found


def _starts(prompts: Sequence[Text]) -> range:
    """The index of the first prompt of every shard."""
    return range(0, len(prompts), SHARD_PROMPTS)


def _captured(folder: Path, prompts: Sequence[Text]) -> list[int]:
    """The existing shards."""
    return [start for start in _starts(prompts) if _shard(folder, start).exists()]


def _end_time(folder: Path, limit: TimeLimit, *, whole: bool, state: PartialState) -> None:
    """If the time limit left out some shards, record the whole limit as spent: a resumed run must also find its time
    over, because the examples are part of its identity."""
    if limit.minutes is not None and not whole and state.is_main_process:
        write_json(folder / SECONDS_FILE, {"seconds": max(seconds_spent(folder), 60 * limit.minutes)})


def capture_shards(
    config: CalibrateConfig,
    folder: Path,
    prompts: Sequence[Text],
    drafting: Drafting,
    state: PartialState,
    limit: TimeLimit,
    whole: bool = False,
) -> None:
    """Write this process's shards of `capture` on `prompts` to `folder`; existing shards are kept.

    When the time of `limit` is over, the remaining texts are left out. The captured texts are then spread over all
    texts, and the first shard has enough tokens for a row of `Examples`. The seconds spent are stored too, so a resumed
    run gets no additional time.
    """

    def is_over() -> bool:
        return limit.is_over(limit.spent())

    limit = replace(limit, earlier=seconds_spent(folder))
    left = own_shards(folder, len(prompts), state.process_index, state.num_processes)
    mine = [start for start in left if start == 0 or not limit.is_over(limit.earlier)]
    if mine:
        drafting.load()  # loading takes none of the time
    limit = replace(limit, started=limit.clock())
    for start in counted(mine, "continuing texts", f"shards of {SHARD_PROMPTS}", most=limit.left(limit.earlier)):
        if start > 0 and is_over():
            break
        texts = prompts[start : start + SHARD_PROMPTS]
        shard = capture(drafting, texts, config.max_draft, whole, is_over)
        write_atomically(_shard(folder, start), save(shard))
        if state.is_main_process:
            write_json(folder / SECONDS_FILE, {"seconds": limit.spent()})


def own_shards(folder: Path, prompts: int, process: int, processes: int) -> list[int]:
    """First prompts of the shards that `process` has to capture and that `folder` lacks, in the order of capture.

    The assignment to processes does not depend on existing shards, because processes list them at different times. The
    first shards are spread over all prompts.
    """
    starts = [SHARD_PROMPTS * index for index in spread_order(-(-prompts // SHARD_PROMPTS))[process::processes]]
    return [start for start in starts if not _shard(folder, start).exists()]


class Recorder:
    """A stop rule that never stops early and records the head's inputs and the outcome of every tested token.

    Tested are the accepted tokens and the first rejected one; nobody has asked the target about the others. whole: keep
    those too, with the label 0. After an accepted one of `ends` there is no text that any could be a part of.
    """

    def __init__(self, max_draft: int, whole: bool = False, ends: Collection[int] = ()):
        self.max_draft, self.whole, self.ends = max_draft, whole, ends
        self._round: list[Batch] = []
        self._tokens: list[Tensor] = []
        self.kept: list[Batch] = []

    def stop(self, step: Step) -> bool:
        self._round.append(
            {
                "target_hidden": step.source.target_hidden,
                "draft_hidden": step.hidden,
                "position": torch.tensor([step.drafted]),
                "confidence": step.log_probability.exp(),
            }
        )
        self._tokens.append(step.token)
        return step.drafted >= self.max_draft

    def observe(self, drafted: int, accepted: int) -> None:
        tokens = torch.cat(self._tokens).tolist() if self._tokens else []
        count = drafted if self.whole else min(accepted + 1, drafted)
        last = next((place for place, token in enumerate(tokens[:accepted]) if token in self.ends), count)
        for place, example in enumerate(self._round[: min(count, last + 1)]):
            self.kept.append({**example, "label": torch.tensor([float(place < accepted)])})
        self._round.clear()
        self._tokens.clear()


def capture(
    drafting: Drafting,
    texts: Sequence[Text],
    max_draft: int,
    whole: bool = False,
    is_over: Callable[[], bool] = lambda: False,
) -> Batch:
    """Continue `texts` greedily, drafting `max_draft` tokens a round, and keep every tested token; whole: every one.

    is_over: whether to leave out the texts that are left, once there are tokens for a row of `Examples`.

    Returns target_hidden [n, d_T], draft_hidden [n, d_D] in the model's dtype, and position (from 1), confidence (q of
    the token) and label (1: it was the target's), each [n]; nothing where nothing was drafted.
    """
    recorder = Recorder(max_draft, whole, drafting.ends)
    for text in counted(texts, "shard", "texts"):
        for _ in drafting.rounds(ModelDrafter(drafting.draft_model(), Chain(recorder)), text):
            pass
        if len(recorder.kept) >= EXAMPLES and is_over():
            break
    names = recorder.kept[0] if recorder.kept else ()
    return {name: torch.cat([example[name].cpu() for example in recorder.kept]) for name in names}


def only_tested(captured: Batch) -> Batch:
    """The tested tokens of whole rounds: the first of each round, and every token after an accepted one."""
    position, label = captured["position"], captured["label"]
    kept = (position == 1) | (label.roll(1) == 1)
    return {name: value[kept] for name, value in captured.items()}


def _shard(folder: Path, start: int) -> Path:
    return folder / f"{start:06d}.safetensors"


def digest_of(value: object) -> str:
    """A short digest of a JSON-able value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
