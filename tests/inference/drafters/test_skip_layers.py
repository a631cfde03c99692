"""The target without some of its layers drafts: over the whole target's cache, with what its own layers add.

Losslessness, caches after every round and the distribution under sampling are in test_lossless.py, test_rounds.py and
test_distributions.py.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from outrider.base.errors import UserError
from outrider.inference.core.target_session import Runtime
from outrider.inference.core.tree import ROOT, DraftTree
from outrider.inference.drafters.skip_layers.drafter import SkipLayersDraftModel, skipped_layers
from outrider.inference.engines.graphs.cuda_graphs import Graphed
from outrider.inference.loading.rehearsal import shrink
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig
from tests.inference.evaluate.evaluating import evaluate
from tests.inference.graph_contract import keep_contracts
from tests.refusals import refusal
from tests.tiny import open_stack, random_prompt, save_target


def logits_without(model: Any, skip: Sequence[int], text: Sequence[int], draft: Sequence[int]) -> torch.Tensor:
    """The slow way, by transformers: all layers read `text`, then those that are left read `draft` [len(draft), V]."""
    cache, layers = DynamicCache(), model.model.layers
    model(torch.tensor([text]), past_key_values=cache)
    model.model.layers = nn.ModuleList(layer for place, layer in enumerate(layers) if place not in skip)
    places = torch.arange(len(text), len(text) + len(draft))[None]
    logits = model(torch.tensor([draft]), past_key_values=cache, position_ids=places).logits[0]
    model.model.layers = layers
    return logits


@pytest.mark.parametrize("graphed", [False, True])
@torch.inference_mode()
def test_draft_logits_are_those_of_the_layers_left_over_the_whole_targets_cache(
    tmp_path: Path, graphed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a tree, after rounds that kept a part of one; two sets of layers take turns, and have graphs of their own."""
    keep_contracts(monkeypatch)
    runtime = Graphed() if graphed else Runtime()
    model, stack = open_stack(save_target(tmp_path, "llama", kv_heads=2), torch.float64)
    text, root, a, b, c = random_prompt(9), *random_prompt(4, seed=1)
    session = runtime.session(stack, 0, 64)
    session.prefill(text)
    sources = {1: SkipLayersDraftModel([1]), 2: SkipLayersDraftModel([2])}
    for source in sources.values():
        source.begin(session)
    session.commit(range(len(text)))
    for skip, path in ((1, [1]), (2, []), (1, [0, 2])):
        source = sources[skip]
        source.extend(torch.tensor([root]), (ROOT,))
        both = source.extend(torch.tensor([a, b]), (0, 0)).clone()
        last = source.extend(torch.tensor([c]), (1,)).clone()
        for got, draft in ((both[0], [root, a]), (both[1], [root, b]), (last[0], [root, a, c])):
            expected = logits_without(model, [skip], text, draft)[-1]
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
        session.run_tree(torch.tensor([root]), DraftTree(torch.tensor([a, b, c]), (ROOT, ROOT, 0), (1, 2, 3)))
        source.commit([], [])
        session.commit(session.path(path))
        text = [*text, root, *((a, b, c)[node] for node in path)]


@pytest.mark.parametrize("skip", [(4,), (-1,), (1, 1), (), (0, 1, 2, 3)])
def test_layers_that_cannot_be_skipped_are_refused_before_anything_is_loaded(
    skip: tuple[int, ...], config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.inference.evaluate.measuring.load_models", lambda *_: pytest.fail("loaded"))
    refusal("skip", lambda: evaluate(config("out", methods={"m": MethodConfig("skip_layers", skip=skip)})))


def test_which_layers_are_skipped() -> None:
    assert [skipped_layers(None, count) for count in (3, 4, 7)] == [[1], [1], [1, 3, 5]]
    assert skipped_layers((3, 1), 4) == [1, 3]
    refusal("none is between the target's 2", skipped_layers, None, 2)
    with pytest.raises(UserError, match=r"skip=\(1,\): expected None, its default: source=small_lm does not read it"):
        MethodConfig("small_lm", skip=(1,))


def test_a_rehearsal_leaves_out_layers_that_a_tiny_model_has(tiny_models: Path) -> None:
    method = MethodConfig("skip_layers", skip=(20, 21))
    rehearsed = shrink(EvaluateConfig(target="t", methods={"m": method}), tiny_models.parent, tiny_models)
    assert rehearsed.methods == {"m": MethodConfig("skip_layers")}
