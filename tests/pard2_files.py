"""Directories of PARD-2 drafters as AMD-AGI/PARD writes them, and one whose projection predicts a target's answers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.doctor.scores import Recording
from tests.tiny import VOCABULARY, byte_tokenizer

LAYERS_READ, SCALE, MASK = (-1, -2, -3), 0.02, VOCABULARY - 1


def add_projection(
    folder: Path, weight: Tensor, *, bias: Tensor | None = None, in_bin: bool = False, **keys: Any
) -> str:
    """Write a projection, and its keys of config.json, beside the causal LM in `folder`."""
    tensors = {"target_proj.weight": weight.contiguous()} | ({} if bias is None else {"target_proj.bias": bias})
    described = {
        "pard2": True, "spd_type": "pard2", "pard2_target_layers": [*LAYERS_READ], "pard2_target_dim": weight.shape[1],
        "pard2_scale": SCALE, "pard2_proj_bias": bias is not None, "pard_token": MASK, **keys,
    }  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | described))
    if in_bin:
        torch.save(tensors, folder / "warp_model.bin")
    else:
        save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def random_projection(width: int, target_width: int, size: float = 1.0, layers: int = len(LAYERS_READ)) -> Tensor:
    joined = layers * target_width
    return size * torch.randn(width, joined, generator=torch.Generator().manual_seed(7)) * joined**-0.5


def states_before(model: Any, text: Tensor, layers: Sequence[int] = LAYERS_READ, delay: int = 1) -> Tensor:
    """The reference: what AMD's decoding gives a projection at each position of `text` [n] → [1, n, k · H_t].

    model: the target as transformers runs it.
    """
    states = model(text[None], output_hidden_states=True).hidden_states
    joined = torch.cat([states[layer] for layer in layers], dim=-1)
    return torch.cat([0 * joined[:, :delay], joined[:, : joined.shape[1] - delay]], dim=1)


@torch.no_grad()
def save_fitted(
    folder: Path, stack: LayerStack, texts: Sequence[Recording], *, normed: bool = True, delay: int = 1, **keys: Any
) -> str:
    """A drafter without attention that predicts the answers in `texts` from the target's hidden states alone.

    normed, delay: False, and another number than 1, are a training that Outrider cannot read. keys: of config.json,
    where it says otherwise than the projection was fitted.
    """
    size = {"hidden_size": 128, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    lm = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, **size)).float()
    generator = torch.Generator().manual_seed(3)
    lm.lm_head.weight.copy_(torch.randn(lm.lm_head.weight.shape, generator=generator) * 128**-0.5)
    # Without the projection, or with too little of it, a token is followed by a wrong one; with too much by another.
    lm.model.embed_tokens.weight.copy_(3 * (lm.lm_head.weight.roll(7, 0) - lm.lm_head.weight.roll(11, 0)))
    lm.model.layers[0].self_attn.o_proj.weight.zero_()
    lm.model.layers[0].mlp.down_proj.weight.zero_()
    inputs, outputs = [], []
    for text in texts:
        boundaries = [len(stack.layers) + 1 + layer for layer in LAYERS_READ]
        states = [text.aux_hidden[boundary][0] for boundary in boundaries]
        states[0] = stack.norm(states[0]) if normed else states[0]
        place = torch.arange(text.start - 1, len(text.tokens) - 1)  # of the inputs whose next token is judged
        inputs.append(torch.cat(states, dim=-1)[place - delay])
        outputs.append(lm.lm_head.weight[text.tokens[place + 1]] - lm.model.embed_tokens.weight[text.tokens[place]])
    fitted = torch.linalg.lstsq(
        torch.cat(inputs).double(), torch.cat(outputs).double() / SCALE, driver="gelsd"
    ).solution
    lm.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return add_projection(folder, fitted.T.float(), **keys)


def whole_model(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
