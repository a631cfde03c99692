"""The residual stream at any boundary of the target's layers."""

from pathlib import Path

import pytest
import torch

from draft_models.targets.attention import stock_attention
from draft_models.targets.empty_models import layer_stack
from draft_models.targets.open_target import open_target
from tests.families import LAYERS, save_family
from tests.tiny import random_prompt


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "nanochat", "opt", "qwen3"])
def test_an_aux_hidden_state_is_that_of_transformers(tmp_path: Path, family: str) -> None:
    """At every boundary, in one run or in two halves; transformers returns the last one after the final norm."""
    model = open_target(str(save_family(tmp_path, family))).layers(dtype=torch.float32)
    stack, ids = layer_stack(model), torch.tensor([random_prompt(14)])
    positions = torch.arange(14)[None]
    stack.reserve(14)
    rotary, masks = stack.rotary(positions), stack.packed_masks(positions, torch.zeros_like(ids))
    with torch.inference_mode():
        with stock_attention(model):
            *expected, last = model(ids, output_hidden_states=True).hidden_states
        embedded = stack.embed(ids, positions)
        out, taps = stack.run_with_aux(embedded, 0, LAYERS, rotary, masks, range(LAYERS + 1))
        middle, low = stack.run_with_aux(embedded, 0, 2, rotary, masks, [1])
        high_out, high = stack.run_with_aux(middle, 2, LAYERS, rotary, masks, [2, 3])
        for tap, hidden in zip([*taps, *low, *high], [*expected, out, *expected[1:4]], strict=True):
            torch.testing.assert_close(tap, hidden, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(stack.norm(taps[-1]), last, rtol=1e-5, atol=1e-4)
        assert torch.equal(out, stack.run(embedded, 0, LAYERS, rotary, masks))
        assert torch.equal(high_out, out)
