"""The arms of transformers: the models that are compared are the same ones."""

from pathlib import Path

import pytest
import torch

from outrider.base.errors import UserError
from outrider.draft_models.early_exit.model import NoLayer
from outrider.inference.core.target_session import TargetSession
from outrider.inference.core.tree import ROOT, chain_parents
from outrider.inference.drafters.early_exit import EarlyExitSource
from tests.families import save_family
from tests.tiny import ARCHITECTURES, make_drafter, open_stack, random_prompt, save_target


@pytest.mark.parametrize("own_head", [True, False])
@pytest.mark.parametrize("own_layer", [True, False])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "phi"])  # whose head has a bias
def test_transformers_gets_the_same_drafter(tmp_path: Path, architecture: str, own_layer: bool, own_head: bool) -> None:
    from transformers_arms import as_model

    path = save_family(tmp_path, "phi") if architecture == "phi" else save_target(tmp_path, architecture, kv_heads=2)
    drafter = make_drafter(path, 2, noise=0.5, own_head=own_head)
    if not own_layer:
        drafter.layer = NoLayer()
    if drafter.head is not None:
        for weight in drafter.head.parameters():
            weight += 0.1
    drafter.norm.weight += 0.1
    tokens = random_prompt(9)
    model = as_model(str(path), drafter, torch.device("cpu"), torch.float32)
    assert model.config.num_hidden_layers == 2 + own_layer
    _, stack = open_stack(path)
    if drafter.head is None:
        drafter.use_head(stack.head)
    session, source = TargetSession(stack, drafter.exit_layer, 64), EarlyExitSource(drafter)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0, -3:]
        session.feed(torch.tensor(tokens[:-3]), chain_parents(0, len(tokens) - 3))
        session.finish(last_only=True)
        source.begin(session)
        session.commit(range(len(tokens) - 3))
        found = source.extend(torch.tensor(tokens[-3:]), (ROOT, 0, 1))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_an_exit_of_several_layers_is_not_given_to_transformers(tmp_path: Path) -> None:
    from transformers_arms import as_model

    path = save_target(tmp_path)
    with pytest.raises(UserError, match="exit_depth=1"):
        as_model(str(path), make_drafter(path, 1, depth=2), torch.device("cpu"), torch.float32)
