"""What importing the decode loop brings along: an engine is loaded when something first decodes on it."""

import subprocess
import sys

import pytest

HEAVY = {"numba", "llvmlite", "triton", "gguf", "matplotlib", "wandb", "deepspeed"}
CODE = "import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"


@pytest.mark.parametrize(
    "module", ["inference.core.decode", pytest.param("inference.core.drafter", marks=pytest.mark.slow)]
)
def test_the_decode_loop_is_imported_without_engines(module: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", CODE.format(module=module)], capture_output=True, text=True, check=True, timeout=120
    )
    assert not HEAVY & {*run.stdout.split()}
