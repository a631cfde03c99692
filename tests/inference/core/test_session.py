"""The session and its caches, against fresh forward passes; and what importing the decode loop brings along."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.inference.core.decode import speculative
from outrider.inference.core.target_session import TargetSession
from outrider.inference.core.tree import chain_parents
from outrider.inference.drafters.early_exit.drafter import EarlyExitDraftModel
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.shapes.factory import Chain
from outrider.inference.stopping.interface import FixedLength
from tests.inference.core.test_rounds import assert_starts_with
from tests.tiny import LAYERS, make_drafter, open_stack, random_prompt, save_target


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    """Parents of a random tree of rows under row 0."""
    size = draw(st.integers(1, 10))
    return [-1, *(draw(st.integers(0, i)) for i in range(size))]


@settings(max_examples=25, deadline=None)
@given(
    parents=trees(),
    cut=st.integers(1, 11),
    window=st.sampled_from([None, 6]),
    ends=st.none() | st.sets(st.integers(0, 10), min_size=1),
)
@example(parents=[-1, 0, 0, 2], cut=3, window=6, ends={3})  # a row in between is left out
@pytest.mark.slow
def test_every_row_of_a_tree_sees_its_own_path(
    tmp_path_factory: pytest.TempPathFactory, parents: list[int], cut: int, window: int | None, ends: set[int] | None
) -> None:
    """Logits of every finished row equal those of its path fed as plain text, and commit keeps just that path.

    `ends` are the leaves of the part of the tree that is verified; None verifies all of it.
    """
    if window not in _tree_targets:
        path = save_target(tmp_path_factory.mktemp("tree"), "mistral", kv_heads=2, sliding_window=window)
        _tree_targets[window] = open_stack(path, torch.float64)[1]
    stack = _tree_targets[window]
    prompt, tokens = random_prompt(5), torch.tensor(random_prompt(len(parents), seed=7))
    session = TargetSession(stack, 2, 64)
    session.feed(torch.tensor(prompt), chain_parents(0, 5))
    session.finish(last_only=True)
    session.commit(range(5))
    cut = min(cut, len(parents))
    session.feed(tokens[:cut], parents[:cut])
    if cut < len(parents):
        session.feed(tokens[cut:], parents[cut:])

    def path_to(row: int) -> list[int]:
        return ([] if parents[row] < 0 else path_to(parents[row])) + [row]

    def fresh(rows: list[int]) -> tuple[TargetSession, Tensor]:
        other = TargetSession(stack, 2, 64)
        text = torch.cat([torch.tensor(prompt), tokens[rows]])
        other.feed(text, chain_parents(0, len(text)))
        out = other.finish()
        other.commit(range(len(text)))
        return other, out[-1]

    chosen = sorted({r for end in ends or range(len(parents)) if end < len(parents) for r in (0, *path_to(end))})
    logits = session.finish(None if ends is None else chosen or [0])
    for place, row in enumerate(chosen or [0]):
        torch.testing.assert_close(logits[place], fresh(path_to(row))[1], rtol=1e-9, atol=1e-9)
    rows = path_to((chosen or [0])[-1])
    session.commit(rows)
    expected = fresh(rows)[0]
    assert session.first_cache.length == session.second_cache.length == expected.first_cache.length
    assert_starts_with(session.first_cache, expected.first_cache)
    assert_starts_with(session.second_cache, expected.second_cache)


_tree_targets: dict = {}


def test_first_half_is_not_run_again(tmp_path: Path) -> None:
    """Verification of drafted rows calls only the layers after the split, and each layer once per row."""
    path = save_target(tmp_path)
    _, stack = open_stack(path)
    calls: dict[int, int] = {}
    for index, layer in enumerate(stack.layers):
        layer.register_forward_hook(
            lambda _m, _i, out, index=index: calls.__setitem__(index, calls.get(index, 0) + out.shape[1])
        )
    source = EarlyExitDraftModel(make_drafter(path, 2))
    rounds = list(speculative(stack, ModelDrafter(source, Chain(FixedLength(4))), random_prompt(10), max_new_tokens=20))
    rows = 10 + sum(r.drafted + 1 for r in rounds[1:])
    assert calls == dict.fromkeys(range(LAYERS), rows)


HEAVY = {"numba", "llvmlite", "triton", "gguf", "matplotlib", "wandb", "deepspeed"}
MODULES = "inference.core.decode, inference.core.drafter"
CODE = f"import sys, {MODULES}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"


def test_the_decode_loop_is_imported_without_engines() -> None:
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=120)
    assert not HEAVY & {*run.stdout.split()}
