"""Drafts of several tokens in one pass: what they say is what the model says of the text and masks after it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.inference.core.decode import speculative
from outrider.inference.core.target_session import TargetSession
from outrider.inference.drafters.shaped import ModelDrafter
from outrider.inference.drafters.small_lm import ParallelSource, SmallLMSource, source_of
from outrider.inference.settings.method import StructureConfig
from outrider.inference.shapes.factory import Chain, make_tree
from outrider.inference.stopping.rules import FixedLength
from outrider.train.parts.capture import Drafting, Text, capture
from outrider.train.parts.heldout import Decoding
from tests.faults import plant
from tests.known_targets import PROMPT, Target, targets

MASK, DEPTH = 258, 5
make = pytest.fixture(scope="module")(targets)


def largest_error(target: Target, tree: bool, count: int = 14) -> float:
    """Of all logits and hidden states of a generation, against the model's own forward over text and masks.

    A draft is one pass, of no more rows than are left of the text.
    """
    small, text, depths, errors = target.small("small_lm"), [*PROMPT], list[int](), list[float]()
    whole = AutoModelForCausalLM.from_pretrained(target.folder / "small_lm", dtype=target.dtype)
    assert type(source_of(small, DEPTH)) is SmallLMSource
    with patch.object(small.config, "pard_token", MASK, create=True):
        source = source_of(small, DEPTH)
    extend = source.extend

    def compared(tokens: Tensor, parents: Sequence[int]) -> Tensor:
        if parents[0] < 0:
            depths.clear()
        depths.extend(0 if parent < 0 else depths[parent] + 1 for parent in parents)
        own = [len(text) - 1 + depth for depth in depths[-len(parents) :]]
        logits = extend(tokens, parents)
        said = whole(torch.tensor([[*text, *[MASK] * DEPTH]]), output_hidden_states=True)
        for found, wanted in ((logits, said.logits), (small.norm(source.hidden), said.hidden_states[-1])):
            errors.append(float((found - wanted[0, own]).abs().max()))
        return logits

    source.extend = compared  # type: ignore[method-assign]
    drafts, nodes = 0, StructureConfig("opt_tree", nodes=9, max_depth=DEPTH, delta=0.0)
    shape: Any = make_tree(nodes) if tree else Chain(FixedLength(DEPTH))
    with patch.object(TargetSession, "extend", autospec=True, side_effect=TargetSession.extend) as passes:
        for r in speculative(target.stack, ModelDrafter(source, shape), PROMPT, max_new_tokens=count):
            text += r.tokens
            drafts += r.drafted > 0
    rows = [one.args[3] for one in passes.call_args_list]
    assert (len(rows), max(rows)) == (drafts, DEPTH)
    assert text[len(PROMPT) :] == target.text_after(PROMPT, count)
    return max(errors)


@pytest.mark.parametrize("tree", [False, True])
def test_what_is_drafted_is_what_the_model_says_after_masks(make: Callable[..., Target], tree: bool) -> None:
    assert largest_error(make("qwen3"), tree) < 1e-9


def test_no_draft_is_deeper_than_its_pass(make: Callable[..., Target]) -> None:
    """Also in an evaluation of a training, and in what a calibration head learns from."""
    target, small = make("qwen3"), make("qwen3").small("small_lm")
    with patch.multiple(small.config, create=True, pard_token=MASK, parallel_tokens=2):
        captured = capture(
            Drafting(partial(speculative, target.stack), lambda: source_of(small, 9), 14, 6), Text(PROMPT)
        )
        found = Decoding([PROMPT], 14, ())(target.stack, source_of(small, 9))
    assert captured["position"].max() == 2
    assert {"accept_1", "accept_2"} == {*found} - {"tau"}


FAULTS = {  # of the class, and what stands there instead
    "masks stay in the cache": ("commit", "rows[:1]", "[*range(len(tokens))]"),
    "a token before the root is not read": ("commit", "tokens)", "[*tokens[:1], *tokens[2:]])"),
    "all tokens from the root": ("extend", "self._depths[parent] + 1 for", "0 for"),
    "the root is a mask": ("extend", "torch.cat([tokens, masks])", "torch.cat([masks, masks[:1]])"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(make: Callable[..., Target], monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    plant(monkeypatch, ParallelSource, *FAULTS[fault])
    assert largest_error(make("qwen3"), False) > 1e-3
