"""What a process may use in a container: control groups of both versions, written as Linux does."""

import math
from pathlib import Path

import psutil
import pytest

from outrider.base import limits

GIB = 1 << 30


def write_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str]) -> None:
    monkeypatch.setattr(limits, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(limits, "_ALL_GROUPS", tmp_path / "groups")
    for name, text in {"own": own, **{f"groups/{name}": text for name, text in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)


VERSION_2 = {  # the job's limit is on the group that contains the step's
    "job/memory.max": f"{4 * GIB}\n", "job/memory.current": f"{3 * GIB}\n",
    "job/memory.stat": f"anon {GIB}\nactive_file {GIB}\ninactive_file {GIB // 2}\n",
    "job/step/memory.max": "max\n", "job/step/memory.current": f"{3 * GIB}\n",
    "job/step/cpu.max": "max 100000\n", "job/cpu.max": "150000 100000\n",
}  # fmt: skip
VERSION_1 = {
    "memory/job/step/memory.limit_in_bytes": f"{4 * GIB}\n", "memory/job/step/memory.usage_in_bytes": f"{3 * GIB}\n",
    "memory/job/step/memory.stat": f"active_file 1\ntotal_active_file {GIB}\ntotal_inactive_file {GIB // 2}\n",
    "cpu/job/step/cpu.cfs_quota_us": "-1\n", "cpu/job/step/cpu.cfs_period_us": "100000\n",
    "cpu/job/cpu.cfs_quota_us": "150000\n", "cpu/job/cpu.cfs_period_us": "100000\n",
}  # fmt: skip


@pytest.mark.parametrize(
    ("own", "files"), [("0::/job/step\n", VERSION_2), ("4:memory:/job/step\n1:cpu,cpuacct:/job/step\n", VERSION_1)]
)
def test_groups_limit_memory_and_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str]
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 64 * GIB}))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(32))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    write_groups(tmp_path, monkeypatch, own, files)
    assert limits.usable_memory() == 2.5 * GIB
    assert (limits.usable_time(), limits.usable_cores()) == (1.5, 2)
    limits.limit_threads()
    assert limits.os.environ["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("own", ["", "0::/\n", "0::/docker/unseen\n", "4:memory:/\n1:cpu:/\n"])
def test_without_limits_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 7}))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(32))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    write_groups(tmp_path, monkeypatch, own, {"cgroup.procs": ""})
    assert (limits.usable_memory(), limits.usable_cores()) == (7, 32)
    limits.limit_threads()
    assert "OMP_NUM_THREADS" not in limits.os.environ
    assert limits._least_quota(math.inf) == math.inf
