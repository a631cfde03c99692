"""What importing the decode loop brings along: an engine is loaded when something first decodes on it."""

import subprocess
import sys

HEAVY = {"numba", "llvmlite", "triton", "gguf", "matplotlib", "wandb", "deepspeed"}
MODULES = "inference.core.decode, inference.core.drafter"
CODE = f"import sys, {MODULES}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"


def test_the_decode_loop_is_imported_without_engines() -> None:
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=120)
    assert not HEAVY & {*run.stdout.split()}
