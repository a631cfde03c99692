"""The target's hidden states for all rows, stored on disk: a head then trains without running the target again.

`add_states` chooses by `features`: a folder that `compute_states` fills before the training, or with features=auto rows
that are computed when they are first read (`RowsWithLazyStates`). A folder has:

    states.bin     [rows, T, k + 1, H_t]: the k aux hidden states, those at boundaries of target layers that the head
                   reads, in ascending order, and the states after the last norm; in the target's dtype
    states.json    what they are made from
    states.done    while rows are missing: a byte for every block of rows, 1 if written

A killed run continues with the missing blocks. Every process of a launcher writes its share of the rows to the same
file, so the folder must be visible to all of them.
"""

import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from accelerate import PartialState
from torch import Tensor
from torch.utils.data import default_collate

from outrider.base.errors import UserError, warn
from outrider.base.files import differences, read_mapping, require_writable, reserve_space, write_json
from outrider.base.processes import from_main, only_run_of
from outrider.base.progress import track_progress
from outrider.base.words import list_words
from outrider.data_prep.text.rows import PackedRows
from outrider.train.core.driver import TrainingRun
from outrider.train.core.training import Batch, TrainRows
from outrider.train.parts.drafter import frozen_dtype
from outrider.train.parts.head_student import HeadStudent
from outrider.train.settings.drafters import HeadConfig

STATES_FILE, MADE_FROM_FILE, DONE_FILE = "states.bin", "states.json", "states.done"
FEATURES = "features"  # the folder in out_dir, while a training with features=auto runs
ROWS_AT_ONCE = 8  # rows in a block


def add_states(
    config: HeadConfig,
    rows: PackedRows,
    row_shape: tuple[int, int, int],
    made_from: Mapping[str, object],
    build: Callable[[], HeadStudent],
    run: TrainingRun,
) -> tuple[HeadStudent, TrainRows]:
    """The student that `build` makes, and `rows`, with the target's states as `config.features` says or without.

    Without states the target runs in every step. row_shape, made_from: see `compute_states`.
    """
    dtype = frozen_dtype(config.frozen_dtype, run.device)
    made_from = {**made_from, "frozen_dtype": str(dtype)}
    if config.features not in (None, "auto"):  # a folder
        rows_with_states = compute_states(
            rows, lambda: build().states_of, row_shape, config.features, dtype, made_from, run.state
        )
        return build(), rows_with_states
    student = build()
    is_sharded = bool({"ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"} & os.environ.keys())
    has_whole_target = run.state.num_processes == 1 and not is_sharded
    # Stored states save time only if a row is read again.
    repeats_rows = (config.fit.total_steps(len(rows)) - 1) * config.fit.batch_rows >= len(rows)
    if config.features is None or not has_whole_target or not repeats_rows:
        return student, rows
    return student, RowsWithLazyStates(rows, student.states_of, row_shape, run.out_dir / FEATURES, dtype, made_from)


@dataclass(frozen=True)
class RowsWithStates:
    """`PackedRows` whose items also have states [T, k + 1, H_t]."""

    rows: PackedRows
    states: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        return {**self.rows[index], "states": self.states[index]}


def compute_states(
    rows: PackedRows,
    load_target: Callable[[], Callable[[Batch], Tensor]],
    row_shape: tuple[int, int, int],
    features_dir: str,
    dtype: torch.dtype,
    made_from: Mapping[str, object],
    process_state: PartialState,
) -> RowsWithStates:
    """`rows` with the target's states, read from the folder `features_dir` after computing the missing ones.

    load_target: loads the target and returns the function from a batch of rows to states. row_shape: (T, k + 1, H_t).
    dtype: of the states. made_from: JSON-able, what determines the states. Prints the required space before computing.
    All processes call this. Raises `UserError` if the folder holds other states, is not writable or has too little
    space.
    """
    folder, shape = require_writable(features_dir, "features"), (len(rows), *row_shape)
    block_count = -(-len(rows) // ROWS_AT_ONCE)
    identity, nbytes = {**made_from, "dtype": str(dtype), "shape": list(shape)}, math.prod(shape) * dtype.itemsize
    with only_run_of(process_state, folder, "states of a target"):
        is_complete = from_main(process_state, lambda: _reserve_space(folder, identity, nbytes, block_count))
        states = torch.from_file(str(folder / STATES_FILE), not is_complete, math.prod(shape), dtype=dtype).view(shape)
        if not is_complete:
            written_flags = torch.from_file(str(folder / DONE_FILE), shared=True, size=block_count, dtype=torch.uint8)
            _compute_missing(states, written_flags, rows, load_target(), process_state)
            process_state.wait_for_everyone()
            from_main(process_state, lambda: (folder / DONE_FILE).unlink(missing_ok=True))
    return RowsWithStates(rows, states)


@dataclass(frozen=True)
class RowsWithLazyStates:
    """`PackedRows` whose items also have states, computed when a row is first read, then kept in `folder` in `dtype`.

    The items have no states if all states would take more than half of the free space there, or cannot be kept.
    row_shape, made_from: as in `compute_states`. A resumed run finds the states that the killed run computed. Nothing
    is written before the first read: a command that is refused or has nothing to do changes no folder of another run.
    """

    rows: PackedRows
    states_of: Callable[[Batch], Tensor]
    row_shape: tuple[int, int, int]
    folder: Path
    dtype: torch.dtype
    made_from: Mapping[str, object]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        row = self.rows[index]
        if self._mapped_states is None:
            return row
        states, written_flags = self._mapped_states
        if not written_flags[index]:
            states[index] = self.states_of(default_collate([row]))[0]
            written_flags[index] = 1
        return {**row, "states": states[index]}

    @cached_property
    def _mapped_states(self) -> tuple[Tensor, Tensor] | None:
        """The states of all rows [rows, T, k + 1, H_t] and which of them are written, uint8 [rows]; None: not kept."""
        shape, file = (len(self.rows), *self.row_shape), require_writable(self.folder) / STATES_FILE
        nbytes = math.prod(shape) * self.dtype.itemsize
        stored_bytes = file.stat().st_size if file.exists() else 0
        if 2 * (nbytes - stored_bytes) > shutil.disk_usage(self.folder).free:
            return None
        identity = {**self.made_from, "dtype": str(self.dtype), "shape": list(shape)}
        try:
            _reserve_space(self.folder, identity, nbytes, len(self.rows))
        except UserError as error:
            warn(f"{error}; the target runs along")
            return None
        states = torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=self.dtype).view(shape)
        return states, torch.from_file(str(self.folder / DONE_FILE), True, len(self.rows), dtype=torch.uint8)


def _reserve_space(folder: Path, identity: Mapping[str, object], size: int, block_count: int) -> bool:
    """Make the files for states of `size` bytes in `folder`, unless an earlier run made them; whether all are written.

    The space is reserved, since writing to a mapped file on a full disk, or beyond a quota, kills the process. Raises
    `UserError` if other states are there, and if there is too little space.
    """
    json_file, done_file, states_file = (folder / name for name in (MADE_FROM_FILE, DONE_FILE, STATES_FILE))
    record = read_mapping(json_file, "record of a target's states", "remove its folder") if json_file.exists() else {}
    changes = differences(record, identity)
    if record and changes and not done_file.exists():
        diff_text = list_words([f"{key}={new!r} (was {old!r})" for key, old, new in changes])
        raise UserError(f"features={folder}: holds what was made with other settings: {diff_text}; give another folder")
    if not changes and states_file.exists() and states_file.stat().st_size == size:
        if not done_file.exists():
            return True
        written_count = int(torch.from_file(str(done_file), shared=False, size=block_count, dtype=torch.uint8).sum())
        print(f"features={folder} goes_on_after={written_count} of {block_count} blocks", flush=True)
        return False
    print(f"features={folder} dtype={identity['dtype']} gigabytes={size / 1e9:.2f}", flush=True)
    states_file.unlink(missing_ok=True)
    free = shutil.disk_usage(folder).free
    try:
        if free < size:
            raise OSError("too few")
        done_file.write_bytes(bytes(block_count))
        write_json(json_file, identity)
        with states_file.open("wb") as file:
            reserve_space(file, size)
    except OSError as error:
        states_file.unlink(missing_ok=True)
        space_text = f"the target's states take {size / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free there ({error})"
        remedy = "free space, choose another folder, or give features=null"
        raise UserError(f"features={folder}: {space_text}; {remedy}") from None
    return False


def _compute_missing(
    states: Tensor, written_flags: Tensor, rows: PackedRows, states_of: Callable[[Batch], Tensor], state: PartialState
) -> None:
    """Compute this process's share of the blocks, except those that are `written_flags`, uint8 [blocks]."""
    block_begins = range(state.process_index * ROWS_AT_ONCE, len(rows), state.num_processes * ROWS_AT_ONCE)
    missing_begins = [begin for begin in block_begins if not written_flags[begin // ROWS_AT_ONCE]]
    for begin in track_progress(missing_begins, "the target's states", f"blocks of {ROWS_AT_ONCE} rows"):
        end = min(begin + ROWS_AT_ONCE, len(rows))
        states[begin:end] = states_of(default_collate([rows[index] for index in range(begin, end)])).cpu()
        written_flags[begin // ROWS_AT_ONCE] = 1  # the kernel writes both mapped files even if this process is killed
