"""This machine: its description for reports, and the number type that is fast on it."""

import os
import platform
from pathlib import Path

import torch


def describe_machine(device: str | None = None) -> dict[str, str | int | None]:
    """The hardware and system of a measurement on `device`; None: the GPU if there is one."""
    torch_device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    device_name = torch.cuda.get_device_name(torch_device) if torch_device.type == "cuda" else _cpu_name()
    system = {"system": f"{platform.system()} {platform.machine()}", "python": platform.python_version()}
    return {"device": device_name, "cores": os.cpu_count(), "threads": torch.get_num_threads(), **system}


def fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16; or float32 on a device without instructions for it, which would be several times slower in bfloat16."""
    if device.type == "cuda" and torch.cuda.is_available():
        is_native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        is_native = device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if is_native else torch.float32


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
