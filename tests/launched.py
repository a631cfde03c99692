"""What a launcher starts, without the seconds that imports take: forks of the test that know each other."""

import multiprocessing
import os
import socket
from collections.abc import Callable, Mapping

import torch
from accelerate import PartialState


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launched(count: int, work: Callable[[PartialState], None], env: Mapping[str, str] | None = None) -> list[int]:
    """Exit statuses of `count` processes, each of which does `work` with its own state as under a launcher.

    env: what it tells them besides.
    """
    port = free_port()

    def run(rank: int) -> None:
        os.environ |= env or {}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
                       "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(port)}  # fmt: skip
        torch.set_num_threads(1)  # a fork has none of the threads that its parent's OpenMP waits for
        torch.cuda.is_available, torch.cuda.device_count = lambda: False, lambda: 0  # a fork has no CUDA
        PartialState._reset_state()
        state = PartialState(cpu=True)
        work(state)
        state.destroy_process_group()

    fork = multiprocessing.get_context("fork")
    jobs = [fork.Process(target=run, args=(rank,)) for rank in range(count)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(timeout=120)
    assert all(job.exitcode is not None for job in jobs), "a process hangs"
    return [job.exitcode for job in jobs]
