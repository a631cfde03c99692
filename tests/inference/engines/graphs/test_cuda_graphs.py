"""Passes of fixed shape: the buffers they live in, the buckets they use, the attention kernels they may choose.

That they keep the same caches after every round is in test_rounds.py, and that graphs keep their contract in
test_contract.py.
"""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from outrider.base.streams import Streams
from outrider.draft_models.targets.attention import KERNELS, KernelChoice
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.core.cache import KVCache
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.core.rows import RoundRows
from outrider.inference.core.tree import chain_parents
from outrider.inference.drafters.early_exit.drafter import EarlyExitDraftModel
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.drafters.model_plugin import Calibrated
from outrider.inference.drafters.small_lm.drafter import SmallLMDraftModel
from outrider.inference.engines.fused_layers import FusedLayer
from outrider.inference.engines.graphs import attention_kernels, cuda_graphs, fixed_shapes
from outrider.inference.engines.graphs.attention_kernels import (
    SPLIT,
    attention_shape,
    measure_kernels,
    triton_kernels,
    use_kernel_on,
)
from outrider.inference.engines.graphs.cuda_graphs import Graphed
from outrider.inference.engines.graphs.fixed_shapes import WIDTHS, FixedView, GraphPool, Upload
from outrider.inference.loading.models import make_runtime, prepare_models
from outrider.inference.settings.method import MethodConfig, StopConfig, StructureConfig
from outrider.inference.shapes.factory import make_structure
from tests.inference.engines.graphs import torch_kernels
from tests.inference.graph_contract import Contract, Watch, keep_contracts, lay_out_as_on_a_gpu
from tests.known_targets import tokens_of
from tests.refusals import refusal
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

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"), "mistral", kv_heads=2, peak=6.0)


def decode(stack: LayerStack, source: Any, method: MethodConfig, runtime: Any, prompt: list[int], count: int) -> list:
    drafter = ModelDrafter(source, make_structure(method, Streams(0)))
    rounds = list(speculative(stack, drafter, prompt, max_new_tokens=count, runtime=runtime))
    assert any(r.drafted for r in rounds)
    return tokens_of(rounds)


def test_the_device_chooses_the_runtime() -> None:
    assert isinstance(make_runtime("auto", torch.device("cuda")), Graphed)
    assert not isinstance(make_runtime("auto", CPU), Graphed)


def test_masks_and_positions_made_on_the_device_are_the_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For random trees, windows and places, against the masks of the eager session."""
    generator = torch.Generator().manual_seed(0)
    upload, windows = Upload(32, CPU), (None, 33, 200)
    for _ in range(200):
        base, count = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((1, 100), (1, 33)))
        parents = [-1, *(int(torch.randint(i, (), generator=generator)) for i in range(1, count))]
        chain = bool(torch.randint(2, (), generator=generator))
        rows = RoundRows(chain_parents(0, count) if chain else parents)
        start = int(torch.randint(-1 if chain else 0, count, (), generator=generator))
        layout = rows.layout(base, start, count)
        width = next(width for width in WIDTHS if width >= count - start)
        upload.send(layout, width)
        keys = cuda_graphs.bucket(base + count, 16)
        stack = SimpleNamespace(windows=windows, dtype=torch.float32)
        view = FixedView(upload, width, keys, 1000, stack, KVCache(range(0), 1))  # type: ignore[arg-type]
        used = slice(0, count - start)
        # Padding writes where nobody reads.
        assert view.slots.tolist() == [*range(base + start, base + count), *range(1000 + count - start, 1000 + width)]
        assert torch.equal(view.positions[:, used], layout.positions(CPU))
        assert int(view.positions.max()) <= base + max(rows.depths)  # padding, too, stands inside the text
        expected = layout.masks(windows, CPU, torch.float32)
        for window, mask in view.masks().items():
            seen = torch.zeros(count - start, keys, dtype=torch.bool)
            wanted = expected[window]
            seen[:, : base + count] = True if wanted is None else wanted[0, 0] == 0
            assert torch.equal(mask[0, 0, used] == 0, seen)
            assert bool((mask[0, 0] == 0).any(-1).all())  # no row sees nothing


def test_a_drafters_buffers_are_free_when_the_generation_is_over(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even while its source is still at hand: a target and a small LM need one arena each."""
    made, arena = [], cuda_graphs.Arena
    monkeypatch.setattr(cuda_graphs, "Arena", lambda *given: made.append(arena(*given)) or made[-1])
    (_, stack), (_, small) = open_stack(target), open_stack(target)
    runtime, sources = Graphed(), [SmallLMDraftModel(small) for _ in range(3)]
    for source in sources:
        decode(stack, source, MethodConfig(stop=StopConfig(rule="fixed", max_draft=3)), runtime, random_prompt(12), 9)
    assert [arena.layers for arena in made] == [stack, small]


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_a_text_may_fill_the_context_to_the_end(tmp_path: Path, architecture: str) -> None:
    """Padding stands after the last position, where learned positions have no row and rotary tables may end."""
    path = save_target(tmp_path, architecture, peak=6.0, max_position_embeddings=64)
    _, stack = open_stack(path)
    drafter = make_drafter(path, LAYERS - 1, noise=0.3)
    method = MethodConfig(structure=StructureConfig(kind="opt_tree", nodes=9, delta=0.0, max_depth=5))
    for source in (EarlyExitDraftModel(drafter), SmallLMDraftModel(open_stack(path)[1])):
        prompt = random_prompt(20)
        assert decode(stack, source, method, Graphed(), prompt, 44) == decode(stack, source, method, None, prompt, 44)


def test_passes_wider_than_any_bucket_run_as_they_are(target: Path) -> None:
    """A full tree of 5 + 25 + 125 nodes: its last level is fed to the target at once, all of it is verified."""
    _, stack = open_stack(target, torch.float64)
    drafter = make_drafter(target, LAYERS - 1, noise=0.3, dtype=torch.float64)
    method = MethodConfig(structure=StructureConfig(kind="k_config", widths=(5, 5, 5)))
    prompt = random_prompt(16)
    expected = decode(stack, EarlyExitDraftModel(drafter), method, None, prompt, 24)
    runtime, chain = Graphed(), MethodConfig(stop=StopConfig(rule="fixed", max_draft=3))
    decode(
        stack, EarlyExitDraftModel(drafter), chain, runtime, random_prompt(180), 24
    )  # leaves buffers of too few rows
    assert decode(stack, EarlyExitDraftModel(drafter), method, runtime, prompt, 24) == expected


# --- as graphs (see tests/inference/graph_contract.py) ---------------------------------------------------------------


@pytest.fixture
def contracts(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Passes are graphs, which keep the contract."""
    return keep_contracts(monkeypatch)


def test_no_graph_goes_before_its_arena(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """See `GraphPool`. Those that only chose between attention kernels are in no arena: they go at once."""
    made: list[weakref.ref[Any]] = []

    class Graph:
        def __init__(self, run: Callable[[], None]):
            self.replay = run
            made.append(weakref.ref(self))

    def living() -> int:
        gc.collect()
        return sum(graph() is not None for graph in made)

    monkeypatch.setattr(GraphPool, "_capture", lambda _, run: Graph(run))
    monkeypatch.setattr(cuda_graphs, "can_capture", lambda device: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    _, stack = open_stack(target)
    runtime = Graphed(16)
    runtime.prepare(20, runtime.choose_kernels([stack], 20))
    assert len(made) >= len(KERNELS)
    assert not living()
    made.clear()
    list(autoregressive(stack, random_prompt(12), max_new_tokens=8, runtime=runtime))
    assert len(made) == runtime.captures == living() > 0
    runtime._arenas.clear()
    assert not living()


def test_passes_that_cannot_be_captured_run_without_graphs(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture, warning = Mock(side_effect=RuntimeError("experts are chosen on the host")), Mock()
    monkeypatch.setattr(GraphPool, "_capture", capture)
    monkeypatch.setattr(fixed_shapes, "warn_once", warning)
    monkeypatch.setattr(cuda_graphs, "can_capture", lambda device: True)
    (_, stack), prompt = open_stack(target), random_prompt(12)
    plain, graphed = (autoregressive(stack, prompt, max_new_tokens=8, runtime=by) for by in (None, Graphed(16)))
    assert tokens_of(plain) == tokens_of(graphed)
    assert (capture.call_count, warning.call_count) == (1, 1)


@pytest.mark.parametrize(
    ("architecture", "kernel"),
    [("llama", SPLIT), ("mistral", SPLIT), ("qwen3", SPLIT), ("qwen3", "products"), ("opt", "fused")],
)
def test_graphs_decode_to_the_same_tokens_by_each_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, kernel: str
) -> None:
    """Every layer of every fixed pass goes by it: of target and early exit, plainly and under a tree."""
    changes = {"attention_bias": True} if architecture == "llama" else {}
    path = save_target(tmp_path, architecture, kv_heads=2, peak=6.0, **changes)
    shake_norms_and_biases(path)
    plain, (_, stack) = open_stack(path)[1], open_stack(path)
    drafter = make_drafter(path, LAYERS - 1, noise=0.3)
    prompt, count = random_prompt(20), 30
    expected = tokens_of(autoregressive(plain, prompt, max_new_tokens=count))
    lay_out_as_on_a_gpu(monkeypatch)
    prepare_models(stack, {"early_exit": Calibrated(drafter)})
    keep_contracts(monkeypatch)
    torch_kernels.stand_in(monkeypatch)
    placed = watch(monkeypatch, torch_kernels, "rotate_and_store", 0)
    otherwise = watch(monkeypatch, FusedLayer, "_rotate", 1)
    runtime = Graphed(16)
    runtime.prepare(70, [KernelChoice(*attention_shape(stack), 1, 16, kernel)])
    options = {"max_new_tokens": count, "runtime": runtime}
    tree = ModelDrafter(EarlyExitDraftModel(drafter), make_structure(method_of(STRUCTURES["opt_tree"], 3), Streams(0)))
    for rounds in (autoregressive(stack, prompt, **options), speculative(stack, tree, prompt, **options)):
        assert tokens_of(rounds) == expected
    if kernel == SPLIT:
        assert {1, 4} <= placed  # rows of plain decoding and of a tree
        assert otherwise == {len(prompt)}


def watch(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, place: int) -> set[int]:
    """How many rows `name` is called with, in the argument at `place`; filled as it is called."""
    rows: set[int] = set()
    whole = getattr(owner, name)

    def watched(*given: Any) -> Any:
        rows.add(given[place].shape[1])
        return whole(*given)

    monkeypatch.setattr(owner, name, watched)
    return rows


def test_there_are_none_without_a_gpu() -> None:
    """And a run that began with them says so, and what to do."""
    assert triton_kernels(CPU, torch.float32) is None
    refusal("needs Triton", use_kernel_on, SimpleNamespace(device=CPU, dtype=torch.float32), SPLIT)


@pytest.mark.usefixtures("contracts")
def test_what_was_faster_is_chosen_for_every_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that likes one kernel for narrow passes and the other for wide ones."""
    wide = save_target(tmp_path / "wide", kv_heads=2)
    stacks = [open_stack(wide)[1], open_stack(wide)[1], open_stack(save_target(tmp_path / "small", "qwen3"))[1]]
    seconds = iter([1.0, 2.0, 1.0, 2.0, 2.0, 1.0, 2.0, 1.0] * 6)  # fused, products at each of the four widths
    monkeypatch.setattr(attention_kernels, "_time_replays", lambda graph: next(seconds))
    found = measure_kernels(stacks, 600)
    assert {(c.heads, c.key_heads, c.head_dim) for c in found} == {attention_shape(stack) for stack in stacks}
    assert {choice.keys for choice in found} == {128, 512, 600}
    assert len(found) == 2 * 3 * len(attention_kernels.WIDTHS)
    for choice in found:
        assert choice.kernel == ("fused" if choice.width < 16 else "products")


@pytest.mark.usefixtures("contracts")
@pytest.mark.slow
def test_a_longer_prompt_captures_nothing_where_the_longest_is_known(tmp_path: Path) -> None:
    """Only shapes that no text before has met become graphs; and the caches are as large as that text, not twice."""
    _, stack = open_stack(save_target(tmp_path, max_position_embeddings=512))
    runtime = Graphed()
    runtime.prepare(230, ())

    def captured(length: int, count: int) -> int:
        before = runtime.captures
        list(autoregressive(stack, random_prompt(length), max_new_tokens=count, runtime=runtime))
        return runtime.captures - before

    assert captured(20, 150) > 0
    assert [captured(100, 20), captured(140, 8), captured(20, 150)] == [0, 0, 0]
    captured(200, 30)
    assert captured(20, 150) == 0  # the longest text has not made the others' graphs anew
    (arena,) = runtime._arenas.values()
    assert 230 <= arena.capacity <= 230 + 64 * 3


def test_a_token_of_plain_decoding_is_one_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contracts: Watch
) -> None:
    """Embedding, layers, head and argmax are one graph, and where it stands it knows by itself."""
    _, stack = open_stack(save_target(tmp_path, peak=3.0))
    runtime, counts = Graphed(), {"replays": 0, "uploads": 0}
    runtime.prepare(128, ())
    prompt = random_prompt(20)
    expected = tokens_of(autoregressive(stack, prompt, max_new_tokens=40))

    def counted(kind: Any, method: str, name: str) -> None:
        run = getattr(kind, method)

        def count(*args: Any) -> Any:
            counts[name] += 1
            return run(*args)

        monkeypatch.setattr(kind, method, count)

    counted(Contract, "replay", "replays")
    counted(Upload, "send", "uploads")
    for _ in range(2):
        counts.update(replays=0, uploads=0)
        embedded: list[int] = []
        handle = stack.embed_tokens.register_forward_hook(
            lambda *_, seen=embedded: seen.append(1) if not contracts.noting else None
        )
        rounds = autoregressive(stack, prompt, max_new_tokens=40, runtime=runtime)
        assert tokens_of(rounds) == expected
        handle.remove()
    assert counts == {"replays": 39, "uploads": 1}
    assert len(embedded) == 1  # the prompt's: outside of a graph nothing is embedded token by token
