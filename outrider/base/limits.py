"""The cores and the memory that this process may use: the machine's, or fewer in a container or batch job.

Docker, Kubernetes and Slurm limit the control groups of a process. The process is killed where it takes more memory
than a group may have, and waits where its threads take more time. The module does not import torch.
"""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_OWN_GROUPS, _ALL_GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")  # Linux's; missing elsewhere


def usable_cores() -> int:
    """The number of cores that this process can keep busy: `usable_time` rounded up."""
    return math.ceil(usable_time())


def usable_time() -> float:
    """The seconds of computing, summed over cores, that this process may take in a second: with 1.5 cores 1.5."""
    return _least_quota(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def limit_threads() -> None:
    """Limit OpenMP, which tells torch its number of threads on import, where the control groups limit the cores."""
    if _least_quota(math.inf) < math.inf:
        os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))


def usable_memory() -> int:
    """Bytes of memory that this process can take now. The page cache counts as free, as the kernel gives it up."""
    free_bytes = [psutil.virtual_memory().available]
    for group_dir in _control_groups("memory"):
        limit_words = _read_words(group_dir / "memory.max") or _read_words(group_dir / "memory.limit_in_bytes")
        used_words = _read_words(group_dir / "memory.current") or _read_words(group_dir / "memory.usage_in_bytes")
        stat_words = _read_words(group_dir / "memory.stat")
        stats = dict(zip(stat_words[::2], stat_words[1::2], strict=False))
        if used_words and limit_words and limit_words != ["max"]:
            cached = (stats.get(f"total_{part}_file", stats.get(f"{part}_file", 0)) for part in ("active", "inactive"))
            free_bytes.append(int(limit_words[0]) - int(used_words[0]) + sum(map(int, cached)))
    return max(0, min(free_bytes))


def _least_quota(core_quota: float) -> float:
    """`core_quota`, or the least of the control groups, in seconds of all cores in a second."""
    for group in _control_groups("cpu"):
        quota_words = _read_words(group / "cpu.max")  # "QUOTA PERIOD"; version 1 has a file for each
        quota_words = quota_words or _read_words(group / "cpu.cfs_quota_us") + _read_words(group / "cpu.cfs_period_us")
        if len(quota_words) == 2 and quota_words[0].isdigit():  # not "max" or "-1": no limit
            core_quota = min(core_quota, int(quota_words[0]) / int(quota_words[1]))
    return core_quota


def _control_groups(controller: str) -> Iterator[Path]:
    """The folders of this process's control groups (of version 1 or 2), and of those that contain them."""
    with suppress(OSError):
        for group_line in _OWN_GROUPS.read_text("utf-8").splitlines():
            _, controllers, group_path = group_line.split(":", 2)
            hierarchy_root = _ALL_GROUPS / controller if controllers else _ALL_GROUPS
            if controller in controllers.split(",") or not controllers:
                group_dir = hierarchy_root / group_path.lstrip("/")
                depth = len(group_dir.relative_to(hierarchy_root).parts)
                yield from (group_dir, *group_dir.parents[:depth])  # up to the root of the hierarchy


def _read_words(path: Path) -> list[str]:
    """The words of a file, none if there is no such file."""
    with suppress(OSError):
        return path.read_text("utf-8").split()
    return []
