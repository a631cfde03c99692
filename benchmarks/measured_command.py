"""Run a script of the project and leave what it took beside its results.

    python benchmarks/measured_command.py FACTS.json SCRIPT ARGUMENT…

FACTS.json: {"seconds", "host_bytes", "device_bytes"} of this process: wall clock from before its imports on, the most
memory of the host, and the most that torch had of a CUDA device. Of several attempts (a run that was cut and goes on)
seconds add up, and the larger memory counts. null: not known here.
"""

import json
import re
import runpy
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.errors import UserError
from outrider.files import write_json

STATUS = Path("/proc/self/status")


def run_measured(facts: Path, script: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
    """The same in a process of its own. Raises `UserError` where it fails, after what it says itself."""
    line = [sys.executable, __file__, str(facts), script, *arguments]
    print(f"+ {facts.stem}:", *(textwrap.shorten(part, 120) for part in line[3:]), flush=True)
    status = subprocess.run(line, check=False, env=environment).returncode
    if status:
        raise UserError(f"{script}: ended with status {status}, for the reason above; the same command goes on")


def joined(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """What two attempts took together."""
    memory = ("host_bytes", "device_bytes")
    most = {name: max((each[name] for each in (earlier, now) if each[name] is not None), default=None)
            for name in memory}  # fmt: skip
    return {"seconds": earlier["seconds"] + now["seconds"], **most}


def _host_bytes() -> int | None:
    found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text()) if STATUS.exists() else None
    return 1024 * int(found[1]) if found else None


def _device_bytes() -> int | None:
    torch = sys.modules.get("torch")  # a script without it had none
    return torch.cuda.max_memory_allocated() if torch is not None and torch.cuda.is_available() else None


def main(facts: str, script: str, *arguments: str) -> None:
    began, file = time.perf_counter(), Path(facts)
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        taken = {"seconds": time.perf_counter() - began, "host_bytes": _host_bytes(), "device_bytes": _device_bytes()}
        write_json(file, joined(json.loads(file.read_text()), taken) if file.exists() else taken)


if __name__ == "__main__":
    main(*sys.argv[1:])
