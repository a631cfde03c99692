"""The processes of a launcher (`accelerate launch`, torchrun): joined once, shut down in order."""

import atexit
import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar, cast

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import distributed

from outrider.base.errors import UserError, warn
from outrider.base.limits import usable_cores
from outrider.base.run_dirs import HOLDER_FILE, RUN_TIMES, begin_time, only_run

Value = TypeVar("Value")
PATIENCE = timedelta(hours=6)  # for which a process waits for the others in a collective


@functools.cache
def join_processes() -> PartialState:
    """The state of this process in its launcher's group (a group of one without a launcher). Idempotent.

    A collective waits up to `PATIENCE`, as work of the main process alone (a download, an evaluation) may take long.
    """
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)
    has_one_thread = state.num_processes == 1 and torch.get_num_threads() == 1 < usable_cores()
    if has_one_thread and "ACCELERATE_MIXED_PRECISION" in os.environ:  # `accelerate launch` sets it
        warn(f"accelerate launch gives a process 1 thread; OMP_NUM_THREADS={usable_cores()} gives it all cores")
    atexit.register(_leave)
    return state


def from_main(state: PartialState, make: Callable[[], Value]) -> Value:
    """The result of `make()`, which only the main process calls, on every process; it must be picklable.

    If it fails there, all processes fail: the others with a `UserError` of the same message.
    """
    if state.num_processes == 1:
        return make()
    result_and_error: list[object] = [None, None]  # the result, and the error's text
    failure: Exception | None = None
    if state.is_main_process:
        try:
            result_and_error[0] = make()
        except Exception as error:
            failure, result_and_error[1] = error, str(error) or repr(error)
    broadcast_object_list(result_and_error)
    if failure is not None:
        raise failure
    if result_and_error[1] is not None:
        raise UserError(str(result_and_error[1]))
    return cast(Value, result_and_error[0])


@contextmanager
def only_run_of(state: PartialState, folder: Path, output_name: str, resume: bool | None = None) -> Iterator[None]:
    """Lock `folder` against other runs, for all processes of a launcher: the main process holds the lock (`only_run`).

    output_name: what the run writes there, for errors, which reach all processes. resume: whether the run continues an
    earlier one, whose recorded start it then takes as the time that chat templates write; None: no start is recorded.
    """
    with ExitStack() as stack:
        from_main(state, lambda: stack.enter_context(only_run(folder, output_name)))
        sees_file = gather_object([(folder / HOLDER_FILE).exists()])  # by process
        if not all(sees_file):
            problem = f"process {sees_file.index(False)} does not see what the main process writes there"
            raise UserError(f"out_dir={folder}: {problem}; give a directory that all machines share")
        if resume is not None:
            start_time = from_main(state, datetime.now)
            # Recorded and read when a text first needs the time, then kept.
            RUN_TIMES.append(functools.cache(functools.partial(begin_time, folder, resume, start_time)))
            stack.callback(RUN_TIMES.pop)
        yield


def say(line: str) -> None:
    """Print a line on the main process."""
    if PartialState().is_main_process:
        print(line, flush=True)


def _leave() -> None:
    """Let the communication threads finish before the interpreter shuts down.

    gloo's threads release the tensors of a collective after it has returned, and need the interpreter for that. A
    thread that does so too late aborts a process that had succeeded. Nothing joins the threads:
    DistributedDataParallel keeps its process group alive even if it is destroyed.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return
    if distributed.get_backend() == "gloo":
        distributed.destroy_process_group()
        time.sleep(0.5)  # seconds for its threads to end
