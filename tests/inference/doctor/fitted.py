"""An EAGLE-3 head that predicts all answers of a tiny target to some prompts, and needs all its inputs for that."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter
from transformers import AutoModelForCausalLM

from outrider.draft_models.eagle3.checkpoint import head_shapes, save_head
from outrider.draft_models.eagle3.model import Eagle3
from outrider.draft_models.eagle3.reading import Reading
from outrider.draft_models.heads.files import DRAFT_TOKENS, MADE_WITH
from outrider.draft_models.targets.open_target import OpenTarget
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.doctor.examinees import draft_by_head
from outrider.inference.doctor.scores import Recording, record_answer
from tests.tiny import byte_tokenizer, open_stack, save_target

TOKENS = range(5, 125)  # of the target and the head
ROPE = {"rope_type": "default", "rope_theta": 20.0}  # of both; most frequencies turn within a short text
TAPS = (1, 2, 3)
TEXTS = [f"{number}: what is it" for number in ("one", "two", "three", "four", "five", "six", "seven")]
NEW = 32  # tokens of an answer


class Clinic(NamedTuple):
    """A target, its answers, and two heads that predict them; the other one is trained with `still`."""

    folder: Path
    target: OpenTarget
    stack: LayerStack
    texts: list[Recording]
    head: Eagle3
    other: Eagle3


def save_plain_target(path: Path) -> LayerStack:
    """A target that emits `TOKENS` only, saved and opened."""
    save_target(path, rope_parameters=ROPE)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        others = [token for token in range(model.config.vocab_size) if token not in TOKENS]
        model.lm_head.weight[others] = 0
        model.model.layers[1].mlp.down_proj.weight *= 6  # so that aux hidden states have different norms
    model.save_pretrained(path)
    return open_stack(path)[1]


def recordings(stack: LayerStack) -> list[Recording]:
    """The answers to `TEXTS`, with the hidden states at all boundaries of the target."""
    found = []
    for text in TEXTS:
        prompt = byte_tokenizer()(text)["input_ids"]
        recording = record_answer(stack, prompt, range(len(stack.layers) + 1), NEW)
        assert recording is not None
        found.append(recording)
    return found


def fitted(stack: LayerStack, said: list[Recording], *, still: bool = False, steps: int = 40) -> Eagle3:
    """The head, with normed aux hidden states and outputs, that predicts `said`.

    still: trained with constant positions, with a normed residual and the target's head.
    """
    reading = Reading(
        taps=TAPS, target_hidden=64, hidden=64, intermediate=96, layers=1, heads=4, key_heads=2, head_dim=16,
        epsilon=1e-5, activation="silu", vocabulary=stack.config.vocab_size, draft_vocabulary=len(TOKENS), rope=ROPE,
        max_positions=128, windows=(None,), tap_norms=True, norm_before_residual=still, norm_output=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, Tensor] = {
        name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        if len(shape) == 2
        else torch.ones(shape)
        + 0.5 * ("layers" in name or name == "norm.weight") * torch.randn(shape, generator=generator)
        for name, shape in head_shapes(reading).items()
    }
    weights["fc.weight"] *= 10 if still else 5  # the feature is large, so that its norm matters
    ids = torch.tensor(TOKENS)
    rows = stack.head.weight[ids].clone()
    weights["lm_head.weight"] = rows if still else rows @ torch.linalg.qr(torch.randn(64, 64, generator=generator)).Q
    head = Eagle3.of(reading, {**weights, DRAFT_TOKENS: ids})
    head.use_embedding(stack.embed_tokens.weight)
    learn(head, said, steps, still=still)
    return head.requires_grad_(False)


def learn(head: Eagle3, said: list[Recording], steps: int, *, still: bool = False) -> None:
    """Fit the matrices of a head but the last one to what a target `said`."""
    learning = [one for name, one in head.named_parameters() if one.ndim == 2 and name != "lm_head.weight"]
    draft: Callable[..., Tensor] = draft_by_head.__wrapped__  # type: ignore[attr-defined]  # without inference mode
    learn_drafts(partial(draft, head, still=still), learning, said, steps)


def learn_drafts(
    draft: Callable[[Recording], Tensor], weights: list[Parameter], said: list[Recording], steps: int
) -> None:
    """Fit `weights`, of the drafter that makes the logits `draft`, to what a target `said`."""
    optimizer = torch.optim.Adam([weight.requires_grad_(True) for weight in weights], lr=5e-3)
    texts = [_outside_of_inference(recording) for recording in said]
    for _ in range(steps):
        drafts = [(draft(text), text.tokens[text.start :]) for text in texts]
        loss = sum(F.cross_entropy(logits.flatten(0, 1), said.repeat(len(logits))) for logits, said in drafts)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()


def _outside_of_inference(recording: Recording) -> Recording:
    return recording._replace(aux_hidden={place: hidden.clone() for place, hidden in recording.aux_hidden.items()})


Edit = Callable[[dict[str, Any], dict[str, Tensor]], None]  # of config.json and the tensors


def write(path: Path, head: Eagle3, stack: LayerStack, *edits: Edit) -> str:
    """Write `head` in the dialect of speculators, as another trainer would, with faults."""
    save_head(path, head, "speculators", stack.config, "a target")
    return as_another_trainer(path, *edits)


def as_another_trainer(path: Path, *edits: Edit) -> str:
    """Change a drafter in `path` into another trainer's, with faults."""
    config, weights = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    del config[MADE_WITH]
    for edit in edits:
        edit(config, weights)
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors")
    return str(path)
