"""Self-speculation leaves out the layers whose absence shows least."""

from pathlib import Path

import pytest
import torch

from outrider.inference.core.decode import autoregressive
from outrider.inference.core.target_session import TargetSession
from outrider.inference.core.tree import ROOT
from outrider.inference.drafters.skip_layers.drafter import SkipLayersDraftModel
from tests.tiny import open_stack, random_prompt, save_target


def test_the_layers_to_skip_are_those_whose_absence_shows_least(tmp_path: Path) -> None:
    """Counted as a draft would begin, place by place; two layers that change nothing are chosen."""
    from choose_skip import Answer, choose, tokens_per_cost

    _, stack = open_stack(save_target(tmp_path, "mistral", kv_heads=2, peak=6.0))
    prompt = random_prompt(12)
    answer = [token for r in autoregressive(stack, prompt, max_new_tokens=20) for token in r.tokens]
    measured = Answer(stack, prompt, answer)
    for skip in ([1], [0, 3]):
        session, source, right, text = TargetSession(stack, 0, 64), SkipLayersDraftModel(skip), 0, [*prompt, *answer]
        with torch.inference_mode():
            session.prefill(text[:11])
            source.begin(session)
            session.commit(range(11))
            for place, token in enumerate(text[11:-1], start=11):
                right += int(source.extend(torch.tensor([token]), (ROOT,))[0].argmax()) == text[place + 1]
                session.finish()
                session.commit([0])
        assert measured.right_without(skip) == right
    for layer in (stack.layers[1], stack.layers[2]):
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    answer = [token for r in autoregressive(stack, prompt, max_new_tokens=20) for token in r.tokens]
    found = choose(stack, [Answer(stack, prompt, answer)])
    assert found["skip"] == [1, 2]
    assert found["best"]["right"] == 1.0
    assert tokens_per_cost(1.0, 0.5) == (pytest.approx(11 / 6), 10)
    assert tokens_per_cost(0.0, 0.5) == (pytest.approx(1 / 1.5), 1)
