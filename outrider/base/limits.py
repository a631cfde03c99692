"""The cores and the memory that this process may use: the machine's, or fewer in a container or batch job.

Docker, Kubernetes and Slurm limit the control groups of a process. It is killed where it takes more memory than these
may have, and waits where its threads take more time. Light: without torch.
"""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_OWN_GROUPS, _ALL_GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")  # Linux's; missing elsewhere


def usable_cores() -> int:
    """The cores that this process may run on, `usable_time` rounded up."""
    return math.ceil(usable_time())


def usable_time() -> float:
    """Seconds of all cores that this process may take in a second, of those that it may run on."""
    return _least_quota(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def limit_threads() -> None:
    """Limit OpenMP, which tells torch its number of threads on import, where the control groups limit the cores."""
    if _least_quota(math.inf) < math.inf:
        os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))


def usable_memory() -> int:
    """Bytes of memory that this process can take now. The page cache counts as free, as the kernel gives it up."""
    free = [psutil.virtual_memory().available]
    for group in _control_groups("memory"):
        limit = _read_words(group / "memory.max") or _read_words(group / "memory.limit_in_bytes")
        used = _read_words(group / "memory.current") or _read_words(group / "memory.usage_in_bytes")
        words = _read_words(group / "memory.stat")
        sizes = dict(zip(words[::2], words[1::2], strict=False))
        if used and limit and limit != ["max"]:
            cached = (sizes.get(f"total_{part}_file", sizes.get(f"{part}_file", 0)) for part in ("active", "inactive"))
            free.append(int(limit[0]) - int(used[0]) + sum(map(int, cached)))
    return max(0, min(free))


def _least_quota(quota: float) -> float:
    """`quota`, or the least of the control groups: seconds of all cores in a second."""
    for group in _control_groups("cpu"):
        words = _read_words(group / "cpu.max")
        words = words or _read_words(group / "cpu.cfs_quota_us") + _read_words(group / "cpu.cfs_period_us")
        if len(words) == 2 and words[0].isdigit():  # not "max" or "-1": no limit
            quota = min(quota, int(words[0]) / int(words[1]))
    return quota


def _control_groups(controller: str) -> Iterator[Path]:
    """The folders of this process's control groups (of version 1 or 2), and of those that contain them."""
    with suppress(OSError):
        for line in _OWN_GROUPS.read_text("utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            root = _ALL_GROUPS / controller if controllers else _ALL_GROUPS
            if controller in controllers.split(",") or not controllers:
                folder = root / path.lstrip("/")
                yield from (folder, *folder.parents[: len(folder.relative_to(root).parts)])


def _read_words(path: Path) -> list[str]:
    """The words of a file, none if there is no such file."""
    with suppress(OSError):
        return path.read_text("utf-8").split()
    return []
