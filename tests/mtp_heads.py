"""Tiny MTP heads as each family stores them, and a reference for their logits, row by row.

It shares nothing with the code under test: no names, no reading of files, no forward. Weights are by role: what
multiplies the embedding and what multiplies the hidden state are two matrices, norms are factors, and gates are apart.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.eagle3_heads import Row

HEADS, KEY_HEADS, HEAD_DIM, INNER = 4, 2, 16, 96  # as in `tests.tiny.save_target`
WIDTH, VOCABULARY, EPSILON = 64, 260, 1e-6
BASE = 10000.0


@dataclass(frozen=True)
class Family:
    """What a family's head has. architecture: of a target with such layers. on: differences from the plain head."""

    architecture: str
    on: frozenset[str] = frozenset()
    rotated: float = 1.0


FAMILIES = {
    "qwen": Family("qwen3_next", frozenset({"gate", "head norms"}), rotated=0.5),
    "mimo": Family("qwen2", frozenset({"biases", "before the norm"})),
    "deepseek": Family("llama", frozenset({"embedding", "head"})),
    "speculators": Family("qwen3", frozenset({"head norms", "before the norm"})),
    "gguf": Family("qwen3", frozenset({"head norms"})),
}
Weights = dict[str, Tensor]


def head_weights(family: Family, seed: int = 0) -> Weights:
    """Random weights by role."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 * columns**-0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    sizes = {"q": HEADS * HEAD_DIM, "k": KEY_HEADS * HEAD_DIM, "v": KEY_HEADS * HEAD_DIM}
    weights = {name: matrix(size, WIDTH) for name, size in sizes.items()}
    weights |= {"o": matrix(WIDTH, HEADS * HEAD_DIM), "of embedding": matrix(WIDTH, WIDTH)}
    weights |= {"of hidden": matrix(WIDTH, WIDTH), "mlp gate": matrix(INNER, WIDTH), "mlp up": matrix(INNER, WIDTH)}
    weights |= {"mlp down": matrix(WIDTH, INNER)}
    weights |= {f"norm of {what}": norm(WIDTH) for what in ("embedding", "hidden", "attention", "mlp", "output")}
    if "head norms" in family.on:
        weights |= {f"norm of {name}": norm(HEAD_DIM) for name in "qk"}
    if "biases" in family.on:
        weights |= {f"bias of {name}": torch.randn(size, generator=generator) for name, size in sizes.items()}
    if "gate" in family.on:
        weights["gate"] = matrix(HEADS * HEAD_DIM, WIDTH)
    if "embedding" in family.on:
        weights["embedding"] = torch.randn(VOCABULARY, WIDTH, generator=generator)
    if "head" in family.on:
        weights["head"] = matrix(VOCABULARY, WIDTH)
    return weights


_LAYER = {
    "q": "self_attn.q_proj.weight", "k": "self_attn.k_proj.weight", "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight", "mlp gate": "mlp.gate_proj.weight", "mlp up": "mlp.up_proj.weight",
    "mlp down": "mlp.down_proj.weight", "norm of attention": "input_layernorm.weight",
    "norm of mlp": "post_attention_layernorm.weight", "norm of q": "self_attn.q_norm.weight",
    "norm of k": "self_attn.k_norm.weight", "bias of q": "self_attn.q_proj.bias", "bias of k": "self_attn.k_proj.bias",
    "bias of v": "self_attn.v_proj.bias",
}  # fmt: skip
_GGUF = {
    "q": "attn_q.weight", "k": "attn_k.weight", "v": "attn_v.weight", "o": "attn_output.weight",
    "mlp gate": "ffn_gate.weight", "mlp up": "ffn_up.weight", "mlp down": "ffn_down.weight",
    "norm of attention": "attn_norm.weight", "norm of mlp": "ffn_norm.weight", "norm of q": "attn_q_norm.weight",
    "norm of k": "attn_k_norm.weight",
}  # fmt: skip
_MIMO = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj")
# By spelling: the prefix, the prefix of the layer; norms of embedding, hidden state and output, and the projection.
_SPELLINGS: dict[str, tuple[str, str, tuple[str, str, str, str]]] = {
    "qwen": ("mtp.", "mtp.layers.0.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")),
    "mimo": ("model.mtp_layers.0.", "model.mtp_layers.0.", _MIMO),
    "deepseek": ("model.layers.4.", "model.layers.4.", ("enorm", "hnorm", "shared_head.norm", "eh_proj")),
    "speculators": ("mtp_layers.0.", "mtp_layers.0.", _MIMO),
    "gguf": ("blk.4.", "blk.4.", ("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm", "nextn.eh_proj")),
}


def stored_tensors(spelling: str, weights: Weights, offset: float | None = None) -> Weights:
    """The tensors of a file, by the names of a spelling. offset: what norms add to their weight; None: the family's."""
    prefix, of_layer, (embedding, hidden, output, projection) = _SPELLINGS[spelling]
    pair = [weights["of embedding"], weights["of hidden"]]
    layer = _GGUF if spelling == "gguf" else _LAYER
    tensors = {of_layer + layer[role]: tensor for role, tensor in weights.items() if role in layer}
    roles = {"norm of embedding": embedding, "norm of hidden": hidden, "norm of output": output}
    roles |= {"embedding": "embed_tokens", "head": "shared_head.head"}
    tensors |= {f"{prefix}{name}.weight": weights[role] for role, name in roles.items() if role in weights}
    tensors[f"{prefix}{projection}.weight"] = torch.cat(pair[::-1] if spelling == "mimo" else pair, 1)
    if "gate" in weights:  # head by head
        parts = [weights[name].view(HEADS, HEAD_DIM, WIDTH) for name in ("q", "gate")]
        tensors[of_layer + layer["q"]] = torch.cat(parts, 1).flatten(0, 1)
    offset = float(spelling == "qwen") if offset is None else offset
    return {name: tensor - offset if "norm" in name else tensor for name, tensor in tensors.items()}


def write_head(folder: Path, spelling: str, tensors: Weights, **metadata: Any) -> str:
    """Write the tensors alone, as a directory of safetensors or a GGUF file; returns its path."""
    folder.mkdir(exist_ok=True, parents=True)
    if spelling != "gguf":
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        return str(folder)
    import gguf

    writer = gguf.GGUFWriter(folder / "head.gguf", metadata.get("architecture", "glm4moe"))
    writer.add_nextn_predict_layers(1)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(folder / "head.gguf")


def reference(
    family: Family, w: Weights, embedding: Tensor, norm_of_target: Callable[[Tensor], Tensor], head: Tensor,
    rows: Sequence[Row],
) -> list[Tensor]:  # fmt: skip
    """Logits [V] of each row, computed row by row and head by head. A true feature is the target's hidden state before
    its final norm. The next feature is the output after the head's norm."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean() + EPSILON) * w[f"norm of {name}"]

    def turn(x: Tensor, position: int) -> Tensor:
        out, size = x.clone(), int(len(x) * family.rotated)
        for i in range(size // 2):
            angle = position * BASE ** (-2 * i / size)
            a, b = x[i], x[i + size // 2]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + size // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def heads(x: Tensor, name: str, position: int) -> list[Tensor]:
        parts = (w[name] @ x + w.get(f"bias of {name}", torch.zeros(()))).split(HEAD_DIM)
        if name == "v":
            return [*parts]
        return [turn(norm(part, name) if "head norms" in family.on else part, position) for part in parts]

    outputs: list[Tensor] = []
    keys: list[list[Tensor]] = []
    values: list[list[Tensor]] = []
    for number, row in enumerate(rows):
        if isinstance(row.feature, int):
            feature = outputs[row.feature]
        else:
            state = row.feature.flatten()
            feature = state if "before the norm" in family.on else norm_of_target(state)
        token = w["embedding"][row.token] if "embedding" in w else embedding[row.token]
        hidden = w["of embedding"] @ norm(token, "embedding") + w["of hidden"] @ norm(feature, "hidden")
        x = norm(hidden, "attention")
        keys.append(heads(x, "k", row.position))
        values.append(heads(x, "v", row.position))
        seen, mixed = [*row.sees, number], list[Tensor]()
        for index, query in enumerate(heads(x, "q", row.position)):
            group = index // (HEADS // KEY_HEADS)
            scores = torch.stack([query @ keys[other][group] for other in seen]) / math.sqrt(HEAD_DIM)
            shares = scores.softmax(0)
            mixed.append(
                torch.stack([share * values[other][group] for share, other in zip(shares, seen, strict=True)]).sum(0)
            )
        attended = torch.cat(mixed)
        if "gate" in w:
            attended = attended * torch.sigmoid(w["gate"] @ x)
        hidden = hidden + w["o"] @ attended
        x = norm(hidden, "mlp")
        gate = w["mlp gate"] @ x
        hidden = hidden + w["mlp down"] @ (gate * gate.sigmoid() * (w["mlp up"] @ x))
        outputs.append(norm(hidden, "output"))
    return [w.get("head", head) @ output for output in outputs]
