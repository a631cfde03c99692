"""The commands that a user would run, for benchmarks that are made of them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run_command(script: str, out_dir: Path, done: str, *overrides: str, split: int = 1) -> None:
    """Run a command of the project unless `out_dir`/`done` is there already.

    split: by so many processes, each of which holds a part of the target.
    """
    if (out_dir / done).exists():
        return
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={split}"] if split > 1 else []
    parts = [f"tensor_parallel={split}"] if split > 1 else []
    line = [sys.executable, *launcher, str(ROOT / script), f"out_dir={out_dir}", *overrides, *parts]
    print("+", *line[1:], flush=True)
    subprocess.run(line, check=True)
