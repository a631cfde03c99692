"""Drafts of several tokens in one pass: what they say is what the model says of the text and masks after it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.base.streams import Streams
from outrider.draft_models.early_exit.checkpoint import as_causal_lm
from outrider.draft_models.early_exit.model import EarlyExit
from outrider.draft_models.small_lm.pard2 import TargetProjection
from outrider.draft_models.targets.open_target import open_target
from outrider.inference.core.decode import speculative
from outrider.inference.core.target_session import TargetSession
from outrider.inference.drafters.draft_model import OnePass
from outrider.inference.drafters.early_exit import drafter as early_exit
from outrider.inference.drafters.early_exit.drafter import EarlyExitPasses
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.drafters.small_lm.drafter import (
    Pard2Passes,
    SmallLMDraftModel,
    SmallLMPasses,
    SmallLMPlugin,
    draft_model_of,
)
from outrider.inference.settings.method import MethodConfig, StopConfig, StructureConfig
from outrider.inference.shapes.factory import Chain, make_tree
from outrider.inference.stopping.interface import FixedLength
from outrider.train.parts.capture import Drafting, TextToContinue, capture
from outrider.train.parts.heldout import Decoding
from tests.faults import plant
from tests.known_targets import PROMPT, Target, targets
from tests.pard2_files import MASK as MASK_2
from tests.pard2_files import SCALE, states_before, whole_model
from tests.tiny import LAYERS, VOCABULARY, make_drafter

MASK, DEPTH = 258, 5
make = pytest.fixture(scope="module")(targets)
# A source, its last norm, a model that says the same, and what that is fed for a text and masks.
Said = tuple[Any, Any, Any, Callable[[list[int]], Tensor]]


def of_small_lm(target: Target) -> Said:
    small = target.small("small_lm")
    whole = AutoModelForCausalLM.from_pretrained(target.folder / "small_lm", dtype=target.dtype)
    assert type(draft_model_of(small)) is SmallLMDraftModel
    with patch.multiple(small.config, pard_token=MASK, parallel_tokens=DEPTH, create=True):
        source = draft_model_of(small)
    embed = whole.get_input_embeddings()
    return source, small.norm, whole, lambda text: embed(torch.tensor([[*text, *[MASK] * DEPTH]]))


def of_exit(target: Target) -> Said:
    """Beside transformers' own model of the target's first layers and the exit's."""
    shape: dict[str, Any] = {"noise": 0.15, "dtype": target.dtype}
    drafter, plain = (make_drafter(target.path, LAYERS - 2, **shape, parallel=count) for count in (DEPTH, 0))
    whole: Any = as_causal_lm(plain, open_target(str(target.path)), target.dtype)
    embed = whole.get_input_embeddings()
    masks = (embed.weight[-1] + drafter.mask).expand(1, DEPTH, -1)
    said = early_exit.draft_model_of(drafter), drafter.norm, whole
    return *said, lambda text: torch.cat([embed(torch.tensor([text])), masks], 1)


def of_pard2(target: Target) -> Said:
    """Beside the target's own forward over the whole text, whose hidden states are shifted as AMD's decoding does."""
    small: Any = target.small("small_lm, PARD-2")
    whole = whole_model(target.folder / "small_lm_PARD-2", target.dtype)
    embed, tensors = whole.get_input_embeddings(), load_file(target.folder / "small_lm_PARD-2/model.safetensors")
    weight, bias = (tensors[f"target_proj.{part}"].to(target.dtype) for part in ("weight", "bias"))

    def inputs(text: list[int]) -> Tensor:
        states = states_before(target.model, torch.tensor(text))
        states = torch.cat([states, states[:, -1:].expand(-1, DEPTH, -1)], 1)
        return embed(torch.tensor([[*text, *[MASK_2] * DEPTH]])) + SCALE * (states @ weight.T + bias)

    return draft_model_of(small), small.norm, whole, inputs


# What makes them, what runs a pass of a session, and the passes of a prompt so.
KINDS = {
    "small_lm": (of_small_lm, "extend", 0),
    "early_exit": (of_exit, "run_rows", 0),
    "PARD-2": (of_pard2, "run_rows", 1),
}


def largest_error(target: Target, kind: str, tree: bool, count: int = 14) -> float:
    """Of all logits and hidden states of a generation, against the model's own forward over text and masks.

    A draft is one pass, of no more rows than are left of the text.
    """
    of, name, before = KINDS[kind]
    source, norm, whole, fed = of(target)
    text, depths, errors, extend = [*PROMPT], list[int](), list[float](), source.extend

    def compared(tokens: Tensor, parents: Sequence[int]) -> Tensor:
        if parents[0] < 0:
            depths.clear()
        depths.extend(0 if parent < 0 else depths[parent] + 1 for parent in parents)
        own = [len(text) - 1 + depth for depth in depths[-len(parents) :]]
        logits = extend(tokens, parents)
        said = whole(inputs_embeds=fed(text), output_hidden_states=True)
        for found, wanted in ((logits, said.logits), (norm(source.hidden), said.hidden_states[-1])):
            errors.append(float((found - wanted[0, own]).abs().max()))
        return logits

    source.extend = compared
    drafts, nodes = 0, StructureConfig("opt_tree", nodes=9, max_depth=DEPTH, delta=0.0)
    shape: Any = make_tree(nodes) if tree else Chain(FixedLength(DEPTH))
    with (
        patch.object(source.model, "run_pass", side_effect=source.model.run_pass) as drafted,
        patch.object(TargetSession, name, autospec=True, side_effect=getattr(TargetSession, name)) as passes,
    ):
        for r in speculative(target.stack, ModelDrafter(source, shape), PROMPT, max_new_tokens=count):
            text += r.tokens
            drafts += r.drafted > 0
    rows = [len(call.args[0]) for call in drafted.call_args_list]
    assert (len(passes.call_args_list) - before, len(rows), max(rows)) == (drafts, drafts, DEPTH)
    assert text[len(PROMPT) :] == target.text_after(PROMPT, count)
    return max(errors)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drafted_is_what_the_model_says_after_masks(make: Callable[..., Target], kind: str, tree: bool) -> None:
    assert largest_error(make("qwen3"), kind, tree) < 1e-9


def test_no_draft_is_deeper_than_its_pass(make: Callable[..., Target]) -> None:
    """Also in an evaluation of a training, and in what a calibration head learns from."""
    target, small = make("qwen3"), make("qwen3").small("small_lm")
    with patch.multiple(small.config, create=True, pard_token=MASK, parallel_tokens=2):
        captured = capture(
            Drafting(partial(speculative, target.stack), lambda: draft_model_of(small), 14, 6), TextToContinue(PROMPT)
        )
        found = Decoding([TextToContinue(PROMPT)], 14, ())(target.stack, draft_model_of(small))
    assert captured["position"].max() == 2
    assert {"accept_1", "accept_2"} == {*found} - {"tau"}


@pytest.mark.parametrize(("structure", "longest"), [("chain", 12), ("k_config", 3)])
def test_a_file_that_does_not_say_how_many_drafts_as_many_as_the_method_asks(
    make: Callable[..., Target], structure: Any, longest: int
) -> None:
    """As PARD's authors write them: no `parallel_tokens`, and the mask an id that the target lacks."""
    target = make("qwen2")
    small, method = target.small("small_lm, wider vocabulary"), MethodConfig("small_lm", StructureConfig(structure))
    if structure == "chain":
        method = replace(method, stop=StopConfig(max_draft=longest))
    with patch.multiple(small.config, create=True, pard_token=VOCABULARY + 20):
        drafter: Any = SmallLMPlugin().make(small, method, Streams(0), drawn=False, tuning=None)
    with patch.object(drafter.model.model, "run_pass", side_effect=drafter.model.model.run_pass) as drafted:
        rounds = [*speculative(target.stack, drafter, PROMPT, max_new_tokens=14)]
    assert [token for r in rounds for token in r.tokens] == target.text_after(PROMPT, 14)
    assert max(len(call.args[0]) for call in drafted.call_args_list) == longest == max(r.depth for r in rounds)
    assert len(drafted.call_args_list) == sum(r.drafted > 0 for r in rounds)


FAULTS = {  # the class, its function, and what stands there instead
    "masks stay in the cache": (SmallLMPasses, "commit", "rows[:1]", "[*range(len(tokens))]"),
    "a token before the root is not read": (SmallLMPasses, "commit", "tokens)", "[*tokens[:1], *tokens[2:]])"),
    "all tokens from the root": (OnePass, "extend", "self._depths[parent] + 1 for", "0 for"),
    "the root is a mask": (OnePass, "extend", "torch.cat([tokens, mask_ids])", "torch.cat([mask_ids, mask_ids[:1]])"),
    "masks stay in the exit's cache": (EarlyExitPasses, "run_pass", "self.cache.keep(self.session.base, [0])", ""),
    "in the target's": (EarlyExitPasses, "run_pass", "self.session.first_cache.keep(self.session.base, ())", ""),
    "in the round": (EarlyExitPasses, "run_pass", "self.session.start_round()", ""),
    "states of the token itself": (Pard2Passes, "_feed_prompt", "(0, 0, 1, 0)", "(0, 0, 0, 1)"),
    "masks have other states": (
        Pard2Passes,
        "_run",
        "row_indices.clamp(max=self._states.shape[1] - 1)",
        "row_indices % self._states.shape[1]",
    ),
    "states of other tokens": (Pard2Passes, "commit", "-len(self._pending) - 1 :", "-len(self._pending) - 2 : -1"),
    "states not scaled": (TargetProjection, "forward", " * self.scale", ""),
    "states not normed": (TargetProjection, "join_states", "norm(last_chunk)", "last_chunk"),
    "masks that are tokens": (EarlyExit, "embed", "(tokens == self", "(tokens > self"),
    "a mask is another token": (EarlyExit, "embed", "self.vocabulary - 1)", "self.vocabulary - 2)"),
    "tokens that are masks": (EarlyExit, "embed", "(tokens == self.vocabulary)", "(tokens >= 0)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(make: Callable[..., Target], monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    plant(monkeypatch, *FAULTS[fault])
    kinds = {SmallLMPasses: "small_lm", OnePass: "small_lm", Pard2Passes: "PARD-2", TargetProjection: "PARD-2"}
    kind = kinds.get(FAULTS[fault][0], "early_exit")
    with pytest.raises((AssertionError, RuntimeError)):
        assert largest_error(make("qwen3"), kind, False) < 1e-3
