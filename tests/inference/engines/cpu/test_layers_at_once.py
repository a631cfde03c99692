"""A range of layers in one call equals the layers one by one for any rows, and is used only if it is supported."""

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outrider.base.streams import Streams
from outrider.draft_models.targets.int8 import quantise
from outrider.draft_models.targets.model_files import layer_stack
from outrider.draft_models.targets.open_target import open_target
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.target import TextMasks
from outrider.inference.core import batch
from outrider.inference.core.cache import KVCache
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.core.rows import RoundRows
from outrider.inference.core.target_session import TargetSession
from outrider.inference.drafters.early_exit.drafter import EarlyExitDraftModel
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.drafters.model_plugin import Calibrated
from outrider.inference.engines.cpu import at_once, layout
from outrider.inference.engines.cpu.at_once import LayersAtOnce
from outrider.inference.engines.fused_layers import fuse_layers
from outrider.inference.engines.packing import run_at_once
from outrider.inference.loading.models import prepare_models
from outrider.inference.shapes.factory import make_structure
from tests.tiers import quick_where
from tests.tiny import (
    LAYERS,
    STRUCTURES,
    make_drafter,
    method_of,
    open_stack,
    random_prompt,
    save_target,
    shake_norms_and_biases,
)

VOCABULARY = 272  # whole panels
PAST, TREE = 9, (-1, 0, 0, 1, 1, 2, 3, 3)
WHOLE = {"use_sliding_window": False, "layer_types": None}
FAMILIES = [("llama", {"attention_bias": True}), ("mistral", {"sliding_window": None}), ("qwen2", WHOLE), ("qwen3", {})]


def make_stack(path: Path, architecture: str, dtype: torch.dtype = torch.float32, **changes: object) -> LayerStack:
    """A stack whose layers are fused and run in one call, with random norms and biases."""
    shake_norms_and_biases(save_target(path, architecture, kv_heads=2, **changes))
    stack = open_stack(path, dtype)[1]
    fuse_layers(stack)
    run_at_once(stack)
    stack.reserve(64)
    return stack


def given(stack: LayerStack, parents: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Any, Any, KVCache]:
    """Hidden states of rows after a text, their positions and masks, and the text's keys and values."""
    rows = RoundRows(parents)
    layout = rows.layout(PAST, 0, len(rows))
    cache = KVCache(range(LAYERS), 32)
    heads, width = stack.config.num_key_value_heads, stack.layers[0].head_dim
    whole = cache.buffer(PAST, heads, width, torch.empty(0, dtype=stack.dtype))
    assert whole is not None
    generator = torch.Generator().manual_seed(seed)
    whole[..., :PAST, :] = torch.randn(whole[..., :PAST, :].shape, generator=generator).to(stack.dtype)
    cache.length = PAST
    hidden = torch.randn(1, len(rows), stack.config.hidden_size, generator=generator).to(stack.dtype)
    mask = layout.masks(stack.windows, hidden.device, stack.dtype)
    return hidden, stack.rotary(layout.positions(hidden.device)), mask, cache


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parents", [(-1,), (-1, 0, 1, 2), TREE])
@pytest.mark.parametrize(("architecture", "changes"), quick_where(lambda row: row[0] == "llama", FAMILIES))
def test_equals_the_layers_one_by_one(
    tmp_path: Path, architecture: str, changes: dict[str, object], parents: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Hidden states, keys and values of every range; the inputs are unchanged."""
    stack = make_stack(tmp_path, architecture, dtype, **changes)
    together = stack.at_once
    assert isinstance(together, LayersAtOnce)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.06}
    for start, stop in ((0, LAYERS), (1, 3), (LAYERS - 1, LAYERS)):
        hidden, rotary, masks, cache = given(stack, parents)
        before = hidden.clone()
        found = together.run(hidden, start, stop, rotary.tables[0], masks[None], cache)
        assert found is not None
        assert found.dtype == dtype
        assert torch.equal(hidden, before)
        stack.at_once, (_, _, _, other) = None, given(stack, parents)
        expected = stack.run(hidden, start, stop, rotary, masks, other)
        stack.at_once = together
        torch.testing.assert_close(found, expected, **tolerance)
        assert not torch.equal(found, hidden)
        for own, theirs in zip(cache.content(32), other.content(32), strict=True):
            torch.testing.assert_close(own, theirs, **tolerance)
        torch.testing.assert_close(
            stack.run(hidden, start, stop, rotary, masks, given(stack, parents)[3]), found, rtol=0, atol=0
        )


def both(stack: LayerStack) -> tuple[Tensor, Tensor]:
    """The hidden states of a tree after all layers in one call, and after the layers one by one."""
    hidden, rotary, masks, cache = given(stack, TREE)
    found = stack.run(hidden, 0, LAYERS, rotary, masks, cache)
    stack.at_once = None
    return found, stack.run(hidden, 0, LAYERS, rotary, masks, given(stack, TREE)[3])


def halved(model: nn.Module, dtype: torch.dtype) -> None:
    """Round the weights to `dtype` but keep their storage dtype."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))


@torch.inference_mode()
@pytest.mark.parametrize("stored", [torch.int8, torch.float16, torch.bfloat16])
def test_weights_take_the_fewest_bytes(tmp_path: Path, stored: torch.dtype) -> None:
    """An int8 model is read as its codes; a float32 model from a 16-bit checkpoint is stored in 16 bits again."""
    model = open_target(str(save_target(tmp_path, kv_heads=2))).layers(dtype=torch.float32)
    if stored == torch.int8:
        quantise(model, torch.float32, "dtype=int8")
    else:
        halved(model, stored)
    stack = layer_stack(model)
    fuse_layers(stack)
    run_at_once(stack)
    stack.reserve(64)
    assert isinstance(stack.at_once, LayersAtOnce)
    assert stack.at_once.layout.weight_dtype == stored
    torch.testing.assert_close(*both(stack), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_bfloat16_in_every_way(tmp_path: Path, way: str) -> None:
    stack = make_stack(tmp_path, "llama", torch.bfloat16)
    assert isinstance(stack.at_once, LayersAtOnce)
    assert stack.at_once.layout.way == way
    torch.testing.assert_close(*both(stack), rtol=0.03, atol=0.06)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "past"), [(7, 9), (70, 9), (40, 9000), (60, 0)])
def test_a_verified_draft_has_the_logits_of_plain_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int, past: int, way: str
) -> None:
    """Bit for bit: a chain, and a path through a tree, whose rows are in other slots. Also in several calls.

    Passes are narrow, wide, and long. A chain after no text is a prompt.
    """
    longest = {"vocab_size": VOCABULARY, "max_position_embeddings": past + rows}
    stack = open_stack(save_target(tmp_path, "llama", kv_heads=2, **longest), dtype)[1]
    prepare_models(stack, {})
    monkeypatch.setattr(at_once, "MAX_SEEN", 30 * (past + rows))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(256, (rows,), generator=generator)
    text = torch.randn(LAYERS, 2, 2, past, stack.layers[0].head_dim, generator=generator).to(dtype)

    def session() -> TargetSession:
        made = TargetSession(stack, 0, past + rows)
        made.second_cache.buffer(past, 2, text.shape[-1], text)[:, :, :, :past] = text
        made.base = made.second_cache.length = made.first_cache.length = past
        return made

    def verified(parents: Sequence[int]) -> Tensor:
        verifying = session()
        verifying.feed(tokens, parents)
        return verifying.finish()

    plain, one_by_one = session(), []
    every_third = range(0, rows, 3)
    for row in range(rows):
        plain.feed(tokens[row : row + 1], [-1])
        one_by_one.append(plain.finish())
        plain.commit([0])
    assert torch.equal(verified(range(-1, rows - 1)), torch.cat(one_by_one))

    path, along = session(), []
    for row in every_third:
        path.feed(tokens[row : row + 1], [-1])
        along.append(path.finish())
        path.commit([0])
    tree = verified([row - 3 if row % 3 == 0 and row else row - 1 for row in range(rows)])
    assert torch.equal(tree[list(every_third)], torch.cat(along))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_several_texts_equals_the_row_alone(tmp_path: Path, dtype: torch.dtype, way: str) -> None:
    """With more rows than a pass of one text has: hidden states, and the keys and values of all texts."""
    stack, rows, positions = make_stack(tmp_path, "llama", dtype), 37, 40
    together = stack.at_once
    assert isinstance(together, LayersAtOnce)
    generator = torch.Generator().manual_seed(1)
    width = stack.layers[0].head_dim
    kept = torch.randn(rows, LAYERS, 2, 2, positions, width, generator=generator).to(dtype)
    hidden = torch.randn(1, rows, stack.config.hidden_size, generator=generator).to(dtype)
    lengths = [7 * row % positions for row in range(rows)]

    def cache_of(row: int) -> KVCache:
        cache = KVCache(range(LAYERS), positions + row)
        cache.buffer(positions, 2, width, hidden)[..., :positions, :] = kept[row]
        cache.length = lengths[row]
        return cache

    caches = [cache_of(row) for row in range(rows)]
    texts = TextMasks((1,) * rows, (None,) * rows, tuple(caches), [])
    found = together.run(hidden, 0, LAYERS, stack.rotary(torch.tensor([lengths])).tables[0], texts, None)
    for row, past in enumerate(lengths):
        cache, where = cache_of(row), stack.rotary(torch.tensor([[past]])).tables[0]
        alone = together.run(hidden[:, row : row + 1], 0, LAYERS, where, None, cache)
        assert torch.equal(found[0, row], alone[0, 0])
        assert torch.equal(cache.buffer(0, 2, width, hidden), caches[row].buffer(0, 2, width, hidden))


@torch.inference_mode()
def test_any_team_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, several, more than panels or heads, and a machine without OpenMP."""
    stack = make_stack(tmp_path, "llama")

    def run() -> Tensor:
        hidden, rotary, masks, cache = given(stack, TREE)
        return stack.run(hidden, 0, LAYERS, rotary, masks, cache)

    alone = run()
    monkeypatch.setattr(layout, "SHARE", 0)
    for threads in (2, 3, 13):
        torch.set_num_threads(threads)
        assert torch.equal(run(), alone)
    monkeypatch.setattr(layout, "_where_torch_looks", lambda: ())
    layout.team.cache_clear()
    try:
        assert layout.most_threads() == 1
        assert torch.equal(run(), alone)
    finally:
        layout.team.cache_clear()


def run_apart(source: str, *arguments: object) -> None:
    """Run Python source in a new process in this directory."""
    subprocess.run([sys.executable, "-c", textwrap.dedent(source), *map(str, arguments)], check=True, timeout=300)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what is loaded")
def test_threads_are_those_of_pytorchs_openmp(tmp_path: Path) -> None:
    """Also if packages load other copies of OpenMP: only PyTorch's copy knows its number of threads."""
    run_apart(
        """
        import ctypes, shutil, sys
        from pathlib import Path
        import torch
        from outrider.inference.engines.cpu.layout import team

        loaded = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line or "libomp" in line}
        folder = Path(sys.argv[1]) / "torch"
        folder.mkdir()
        copies = [folder / f"libgomp-{number}.so.1" for number in range(9)]
        path = loaded.pop()
        others = [ctypes.CDLL(shutil.copy(path, copy)) for copy in copies]
        begins = [ctypes.cast(other.GOMP_parallel, ctypes.c_void_p).value for other in others]
        own = ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, ctypes.c_void_p).value
        assert len({own, *begins}) == 10
        assert ctypes.cast(team().parallel, ctypes.c_void_p).value == own
        """,
        tmp_path,
    )


@pytest.mark.slow
def test_decoding_on_an_unknown_machine(tmp_path: Path) -> None:
    """LLVM may not know the processor; some systems have no `resource` module and no call that yields a core."""
    run_apart(
        """
        import os, sys
        from pathlib import Path
        import llvmlite.binding, torch
        from transformers import LlamaForCausalLM  # what others need of a system is not the question

        def unknown():
            raise RuntimeError("no such processor")

        llvmlite.binding.get_host_cpu_features = unknown
        sys.modules["resource"] = None
        del os.sched_yield
        from outrider.inference.engines.cpu.numbers import _yield_core
        from outrider.inference.core.decode import autoregressive
        from outrider.inference.evaluate import evaluation
        from outrider.inference.loading.models import prepare_models
        from outrider.inference.measure.bench import peak_memory
        from tests.tiny import open_stack, random_prompt, reference_generate, save_target

        assert callable(getattr(_yield_core, "py_func", None)), "nothing is linked that is not there"
        assert peak_memory(torch.device("cpu")) == 0
        model, stack = open_stack(save_target(Path(sys.argv[1]), "opt"))  # by PyTorch: to compile anew takes a minute
        prepare_models(stack, {})
        prompt = random_prompt(20)
        tokens = [token for r in autoregressive(stack, prompt, max_new_tokens=8) for token in r.tokens]
        assert tokens == reference_generate(model, prompt, 8)
        """,
        tmp_path,
    )


def test_passes_it_is_not_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = make_stack(tmp_path, "llama")
    with torch.inference_mode():
        hidden, rotary, masks, cache = given(stack, TREE)
        table, mask = rotary.tables[0], masks[None]
        together = stack.at_once
        assert together is not None

        def runs(hidden: Tensor = hidden, table: Any = table, mask: Any = mask, cache: Any = cache) -> bool:
            return together.run(hidden, 0, 1, table, mask, cache) is not None

        assert runs()
        assert not runs(hidden.expand(2, -1, -1))  # several texts
        assert not runs(mask=None)  # which rows see which is not said
        assert not runs(table=None)
        assert not runs(hidden.double())
        assert not runs(table=tuple(part.double() for part in table))
        assert not runs(mask=mask > -1)
        assert not runs(cache=None)
        with cache.at(torch.arange(len(TREE)), 32):
            assert not runs()
        cache.length = 0
        assert all(runs(mask=own) for own in (mask, None))  # a prompt, under a window or not
        monkeypatch.setattr(batch, "PIECE", len(TREE) - 1)
        assert not runs(mask=None)
    with torch.enable_grad():
        assert not runs()


def test_layers_it_cannot_run(tmp_path: Path) -> None:
    """Layers without a gate, layers of different shapes, and several kinds of attention in one stack."""
    opt = open_stack(save_target(tmp_path / "opt", "opt"))[1]
    odd = open_stack(save_target(tmp_path / "odd", intermediate_size=100))[1]
    narrow = open_stack(save_target(tmp_path / "narrow", head_dim=8))[1]
    for stack in (opt, odd, narrow):
        fuse_layers(stack)
        assert run_at_once(stack) == []
        assert stack.at_once is None
    mixed = make_stack(tmp_path / "mixed", "llama")
    first, second = list(mixed.layers)[:2]
    assert LayersAtOnce.of([first, second]) is not None
    assert LayersAtOnce.of([second, first]) is None
    second.mlp_norm.eps = 0.5
    assert LayersAtOnce.of([first, second]) is None


def test_decoding_uses_it_and_a_fault_in_it_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For target and early exit. After one wrong number in a pass of one row, the two paths decode different texts."""
    path = save_target(tmp_path, kv_heads=2)
    stack, drafter, prompt = open_stack(path)[1], make_drafter(path, LAYERS - 1, noise=0.3), random_prompt(20)
    prepare_models(stack, {"early_exit": Calibrated(drafter)})
    seen: set[tuple[int, int, int]] = set()
    whole = LayersAtOnce.run
    wrong = False

    def watched(self: LayersAtOnce, hidden: Tensor, start: int, stop: int, *rest: Any) -> Tensor | None:
        done = whole(self, hidden, start, stop, *rest)
        if done is not None:
            seen.add((hidden.shape[1], start, stop))
            if wrong and hidden.shape[1] == 1:
                done[..., 0] += 3.0
        return done

    monkeypatch.setattr(LayersAtOnce, "run", watched)

    def decoded() -> list[list[int]]:
        tree = ModelDrafter(
            EarlyExitDraftModel(drafter), make_structure(method_of(STRUCTURES["opt_tree"], 3), Streams(0))
        )
        arms = autoregressive(stack, prompt, max_new_tokens=30), speculative(stack, tree, prompt, max_new_tokens=30)
        return [[token for r in rounds for token in r.tokens] for rounds in arms]

    plain, drafted = decoded()
    assert plain == drafted
    assert {(1, 0, LAYERS), (1, 0, LAYERS - 1), (1, 0, 1)} <= seen  # plain decoding, the first half, the exit layer
    assert any(rows > 1 and stop == LAYERS for rows, _, stop in seen)
    wrong = True
    plain, drafted = decoded()
    assert plain != drafted


def ticks(seconds: Callable[[int], float]) -> Iterator[float]:
    """A clock: a pass in one call takes a second; layers one by one take `seconds` of the number of rows."""
    for place in count():
        rows = at_once.WIDTHS[place // (1 + at_once.REPEATS)]
        yield from (100.0 * place, 100.0 * place + 1.0, 100.0 * place + 1.0 + seconds(rows))


@pytest.mark.parametrize(
    ("seconds", "faster"),
    [(lambda rows: 1.1, True), (lambda rows: 0.9, False), (lambda rows: 3.0 if rows == 1 else 0.9, True)],
)
def test_the_faster_way_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float], faster: bool
) -> None:
    """Over all widths together: one path serves all of them."""
    stack = make_stack(tmp_path, "llama")
    together, layers = stack.at_once, list(stack.layers)
    assert isinstance(together, LayersAtOnce)
    assert together.is_faster(layers)  # too small to be measured
    monkeypatch.setattr(at_once, "SMALL_BYTES", 0)
    assert together.is_faster(layers, ticks(seconds).__next__) == faster


def test_layers_of_a_drafter_run_each_for_itself(tmp_path: Path) -> None:
    path = save_target(tmp_path, kv_heads=2)
    drafter = make_drafter(path, 1, depth=2)
    fuse_layers(drafter)
    assert run_at_once(drafter) == [(layer, [layer]) for layer in drafter.layers]
    assert all(layer.at_once is not None for layer in drafter.layers)
