"""The processes of a launcher (`accelerate launch`, torchrun, srun): joined once, left in order."""

import atexit
import functools
import time
from datetime import timedelta

import torch
from accelerate import PartialState
from torch import distributed


@functools.cache
def join_processes() -> PartialState:
    """This process among those it was launched with (alone without a launcher). Any number of calls is one.

    A collective waits up to six hours: what only the main process does (a download, an evaluation) may take long.
    """
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(hours=6))
    atexit.register(_leave)
    return state


def _leave() -> None:
    """Let the communication threads finish before the interpreter shuts down.

    gloo's threads drop the tensors of a collective after it has returned and need the interpreter for it; one
    that asks too late aborts a process that had succeeded. Nothing joins them: DistributedDataParallel keeps
    its process group alive, destroyed or not.
    """
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        time.sleep(0.5)
