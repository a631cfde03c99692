"""Where compiled files are kept, and what is said of the time that compiling took."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from functools import partial
import numba
from outrider.base import compiled
from outrider.base.compiled import compile_entry, compile_function

compiled.LONG /= 1000  # on any machine it is long enough to be spoken of

@compile_function
def inner(x):
    return x + 1

@compile_function
def outer(x):
    return 2 * inner(x)

@partial(compile_entry, signature="void(int64)", fastmath=set())
def entry(address):
    outer(address)

print(outer(3), repr(numba.config.CACHE_DIR))
print("over", file=sys.stderr)
"""


def test_compiling_is_spoken_of_once_and_its_files_are_with_the_users_caches(tmp_path: Path) -> None:
    """The first process compiles, the second does not."""
    program = tmp_path / "program" / "program.py"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    given = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "caches"), "NUMBA_CACHE_DIR": ""}

    def run() -> tuple[str, int]:
        done = subprocess.run(
            [sys.executable, str(program)], env=os.environ | given, capture_output=True, text=True, check=True
        )
        return done.stdout, done.stderr.partition("over")[0].count("compiling CPU kernels, once: ")

    assert run() == ("8 ''\n", 1)
    indices = (tmp_path / "caches" / "outrider" / "kernels").rglob("*.nbi")
    assert {file.name.partition("-")[0] for file in indices} == {"program.inner", "program.outer", "program.entry"}
    assert list(program.parent.iterdir()) == [program]
    assert run() == ("8 ''\n", 0)
    given["XDG_CACHE_HOME"] = str(program / "no folder")
    assert run() == ("8 ''\n", 1)  # compiled for this process alone
