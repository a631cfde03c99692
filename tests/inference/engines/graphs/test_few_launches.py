"""How a layer of a fixed pass is put together of a GPU's own kernels, on a CPU with a stand-in for these."""

from pathlib import Path
from typing import Any

import pytest
import torch

from draft_models.targets.attention import KERNELS
from inference.core.decode import autoregressive, speculative
from inference.core.target_session import KernelChoice
from inference.drafters.early_exit import EarlyExitSource
from inference.drafters.shaped import Calibrated, ModelDrafter
from inference.engines import fused_layers, packing
from inference.engines.fused_layers import FusedLayer
from inference.engines.graphs import attention_kernels, cuda_graphs
from inference.engines.graphs.attention_kernels import (
    SPLIT,
    attention_shape,
    kernels_on,
    triton_kernels,
    use_kernel_on,
)
from inference.engines.graphs.cuda_graphs import Graphed
from inference.loading.targets import prepare
from inference.shapes.factory import make_structure
from outrider.errors import UserError
from outrider.streams import Streams
from tests import torch_kernels
from tests.recorded import record_graphs
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


@pytest.mark.parametrize(
    ("architecture", "changes"), [("llama", {"attention_bias": True}), ("mistral", {}), ("qwen3", {})]
)
def test_it_decodes_to_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, changes: dict[str, bool]
) -> None:
    """Every layer of every fixed pass goes by them: of target and early exit, plainly and under a tree."""
    path = save_target(tmp_path, architecture, kv_heads=2, peak=6.0, **changes)
    shake_norms_and_biases(path)
    plain, (_, stack) = open_stack(path)[1], open_stack(path)
    drafter = make_drafter(path, LAYERS - 1, noise=0.3)
    prompt, count = random_prompt(20), 30
    expected = [t for r in autoregressive(plain, prompt, max_new_tokens=count) for t in r.tokens]
    monkeypatch.setattr(packing, "can_pack", lambda *_: False)  # weights stay as on a GPU
    monkeypatch.setattr(packing, "run_at_once", lambda model: [])
    prepare(stack, {"early_exit": Calibrated(drafter)})
    record_graphs(monkeypatch)
    monkeypatch.setattr(cuda_graphs, "SMALLEST_BUCKET", 16)
    for module in (attention_kernels, fused_layers):
        monkeypatch.setattr(module, "triton_kernels", lambda device: torch_kernels)
    placed, otherwise = watch(monkeypatch, torch_kernels, "place", 0), watch(monkeypatch, FusedLayer, "_rotate", 1)
    runtime = Graphed()
    runtime.prepare(70, [KernelChoice(*attention_shape(stack), 1, 16, SPLIT)])
    options = {"max_new_tokens": count, "runtime": runtime}
    source = EarlyExitSource(drafter)
    tree = ModelDrafter(source, make_structure(method_of(STRUCTURES["opt_tree"], 3), Streams(0)))
    for rounds in (autoregressive(stack, prompt, **options), speculative(stack, tree, prompt, **options)):
        assert [t for r in rounds for t in r.tokens] == expected
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
    assert triton_kernels(CPU) is None
    assert kernels_on(CPU) == KERNELS
    with pytest.raises(UserError, match="needs Triton"):
        use_kernel_on(CPU, SPLIT)
