"""Tiny EAGLE-3 heads as each trainer writes them, and a reference for their logits, row by row.

It shares nothing with the code under test: no names, no reading of configs, no forward.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

TARGET_LAYERS, TARGET_WIDTH, VOCABULARY = 8, 16, 40
TARGET = LlamaConfig(
    hidden_size=TARGET_WIDTH, num_hidden_layers=TARGET_LAYERS, vocab_size=VOCABULARY, num_attention_heads=4
)
HEADS, KEY_HEADS, INNER = 4, 2, 20
DRAFT_TOKENS = [0, 3, 4, 9, 17, 18, 25, 39]


@dataclass(frozen=True)
class Facts:
    """The description of a head in the words of the tests; `weights` by role."""

    taps: tuple[int, ...]
    config: dict[str, Any]  # as its trainer writes it
    width: int = 16
    head_dim: int = 4
    layers: int = 1
    theta: float = 10000.0
    stretch: float = 1.0  # of positions, by linear scaling
    rotated: float = 1.0
    epsilon: float = 1e-5
    windows: tuple[int | None, ...] = (None,)
    draft_tokens: tuple[int, ...] = tuple(DRAFT_TOKENS)
    on: frozenset[str] = frozenset()  # differences from the plain head
    prefix: str = "midlayer."
    file: str = "model.safetensors"
    written: frozenset[str] = field(default_factory=lambda: frozenset({"d2t", "t2d"}))


SIZES = {
    "hidden_size": 16, "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS,
    "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 2048,
}  # fmt: skip
DRAFT = {"draft_vocab_size": len(DRAFT_TOKENS)}
DIALECTS: dict[str, Facts] = {
    # The number of layers in its config is the target's; without rope_theta it is 10000.
    "eagle": Facts(
        taps=(2, 4, 5),
        config={**SIZES, **DRAFT, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40, "bias": True},
        file="pytorch_model.bin",
        on=frozenset({"fc bias"}),
    ),
    "specforge": Facts(
        taps=(1, 4, 7),
        config={
            **SIZES, **DRAFT, "architectures": ["LlamaForCausalLMEagle3"], "head_dim": 6, "rope_theta": 500.0,
            "rope_scaling": None, "fc_norm": True, "norm_output": True, "model_type": "llama",
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 3, 6]},
        },
        head_dim=6,
        theta=500.0,
        on=frozenset({"tap norms", "norm output", "embedding"}),
    ),
    # Two layers, the second with a window of three positions; narrower than the target.
    "speculators": Facts(
        taps=(0, 4, 8),
        config={
            **DRAFT, "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
            "target_hidden_size": TARGET_WIDTH, "norm_before_residual": True, "norm_before_fc": True,
            "eagle_aux_hidden_state_layer_ids": [0, 4, 8],
            "transformer_layer_config": {
                **SIZES, "hidden_size": 12, "head_dim": 8, "model_type": "qwen3", "use_sliding_window": True,
                "sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"],
                "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
            },
        },
        width=12, head_dim=8, layers=2, theta=1000.0, stretch=4.0, windows=(None, 3), prefix="layers.0.",
        on=frozenset({"joint norm", "normed residual", "head norms", "embedding"}),
    ),
    "modelopt": Facts(
        taps=(3, 5),
        config={
            **SIZES, "architectures": ["LlamaForCausalLMEagle3"], "head_dim": 8, "attention_bias": True,
            "rope_theta": 2000.0, "partial_rotary_factor": 0.5, "model_type": "llama", "num_hidden_layers": 1,
            "eagle_config": {
                "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": False, "use_last_layernorm": False,
                "use_mtp_layernorm": False, "eagle_aux_hidden_state_layer_ids": [2, 4],
            },
        },
        head_dim=8, theta=2000.0, rotated=0.5, prefix="layers.0.", draft_tokens=tuple(range(VOCABULARY)),
        on=frozenset({"biases", "no embedding norm", "no final norm"}), written=frozenset(),
    ),
}  # fmt: skip


def head_weights(facts: Facts, seed: int = 0) -> dict[str, Tensor]:
    """Random weights by the names that all trainers share; names of the first layer have no prefix."""
    generator = torch.Generator().manual_seed(seed)
    width, inner = facts.width, facts.head_dim

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * (0.7 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5)

    def norm(size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    def layer(prefix: str, given: int) -> dict[str, Tensor]:
        outputs = {"q": HEADS * inner, "k": KEY_HEADS * inner, "v": KEY_HEADS * inner}
        made = {f"{prefix}self_attn.{name}_proj.weight": matrix(size, given) for name, size in outputs.items()}
        made[f"{prefix}self_attn.o_proj.weight"] = matrix(width, HEADS * inner)
        if "biases" in facts.on:
            outputs["o"] = width
            made |= {f"{prefix}self_attn.{name}_proj.bias": matrix(size) for name, size in outputs.items()}
        if "head norms" in facts.on:
            made |= {f"{prefix}self_attn.{name}_norm.weight": norm(inner) for name in "qk"}
        made |= {f"{prefix}mlp.{name}_proj.weight": matrix(INNER, width) for name in ("gate", "up")}
        made[f"{prefix}mlp.down_proj.weight"] = matrix(width, INNER)
        made[f"{prefix}post_attention_layernorm.weight"] = norm(width)
        return made

    weights = layer(facts.prefix, 2 * width)
    for number in range(1, facts.layers):
        weights |= layer(f"layers.{number}.", width)
        weights[f"layers.{number}.input_layernorm.weight"] = norm(width)
    weights[f"{facts.prefix}hidden_norm.weight"] = norm(width)
    weights["fc.weight"] = matrix(width, len(facts.taps) * TARGET_WIDTH)
    weights["lm_head.weight"] = matrix(len(facts.draft_tokens), width)
    if "no embedding norm" not in facts.on:
        weights[f"{facts.prefix}input_layernorm.weight"] = norm(width)
    if "no final norm" not in facts.on:
        weights["norm.weight"] = norm(width)
    if "fc bias" in facts.on:
        weights["fc.bias"] = matrix(width)
    if "tap norms" in facts.on:
        weights |= {f"fc_norm.{number}.weight": norm(TARGET_WIDTH) for number in range(len(facts.taps))}
    if "joint norm" in facts.on:
        weights["input_norm.weight"] = norm(len(facts.taps) * TARGET_WIDTH)
    if "embedding" in facts.on:
        weights["embed_tokens.weight"] = matrix(VOCABULARY, width)
    if "d2t" in facts.written:
        weights["d2t"] = torch.tensor([token - place for place, token in enumerate(facts.draft_tokens)])
    if "t2d" in facts.written:
        weights["t2d"] = torch.tensor([token in facts.draft_tokens for token in range(VOCABULARY)])
    return weights


def write_head(path: Path, facts: Facts, weights: dict[str, Tensor], **changes: Any) -> str:
    """Write the directory of a trainer; changes: of its config."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**facts.config, **changes}))
    if facts.file.endswith(".bin"):
        torch.save(weights, path / facts.file)
    else:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path / facts.file)
    return str(path)


@dataclass(frozen=True)
class Row:
    """A row of the reference: its token, its position, the rows it attends to besides itself, and its feature.

    feature: the target's aux hidden states [k, H_t], or the number of the row whose output is the feature.
    """

    token: int
    position: int
    sees: Sequence[int]
    feature: Tensor | int


def reference(facts: Facts, w: dict[str, Tensor], embedding: Tensor, rows: Sequence[Row]) -> list[Tensor]:
    """Logits [V_d] of each row, computed row by row and head by head."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean() + facts.epsilon) * weight

    def linear(x: Tensor, name: str) -> Tensor:
        product = w[f"{name}.weight"] @ x
        return product + w[f"{name}.bias"] if f"{name}.bias" in w else product

    def turn(x: Tensor, position: int) -> Tensor:
        """Rotate one head [D]: dimension i of the first half with dimension i of the second half."""
        out, size = x.clone(), int(len(x) * facts.rotated)
        for i in range(size // 2):
            angle = position / facts.stretch * facts.theta ** (-2 * i / size)
            a, b = x[i], x[i + size // 2]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + size // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def heads(x: Tensor, prefix: str, name: str, position: int) -> list[Tensor]:
        found = []
        for part in linear(x, f"{prefix}self_attn.{name}_proj").split(facts.head_dim):
            if name == "v":
                found.append(part)
            else:
                normed = norm(part, w[f"{prefix}self_attn.{name}_norm.weight"]) if "head norms" in facts.on else part
                found.append(turn(normed, position))
        return found

    outputs: list[Tensor] = []
    logits: list[Tensor] = []
    keys: dict[tuple[int, int], list[Tensor]] = {}
    values: dict[tuple[int, int], list[Tensor]] = {}
    for number, row in enumerate(rows):
        if isinstance(row.feature, int):
            hidden = outputs[row.feature]
        else:
            taps = list(row.feature)
            if "tap norms" in facts.on:
                taps = [norm(tap, w[f"fc_norm.{i}.weight"]) for i, tap in enumerate(taps)]
            joined = torch.cat(taps)
            hidden = linear(norm(joined, w["input_norm.weight"]) if "joint norm" in facts.on else joined, "fc")
        for layer in range(facts.layers):
            prefix = facts.prefix if layer == 0 else f"layers.{layer}."
            if layer == 0:
                token = embedding[row.token]
                if "no embedding norm" not in facts.on:
                    token = norm(token, w[f"{prefix}input_layernorm.weight"])
                normed = norm(hidden, w[f"{prefix}hidden_norm.weight"])
                x = torch.cat([token, normed])
                hidden = normed if "normed residual" in facts.on else hidden
            else:
                x = norm(hidden, w[f"{prefix}input_layernorm.weight"])
            keys[layer, number] = heads(x, prefix, "k", row.position)
            values[layer, number] = heads(x, prefix, "v", row.position)
            window = facts.windows[layer]
            seen = [one for one in (*row.sees, number) if window is None or rows[one].position > row.position - window]
            mixed = []
            for head, query in enumerate(heads(x, prefix, "q", row.position)):
                own = head // (HEADS // KEY_HEADS)
                scores = torch.stack([query @ keys[layer, one][own] for one in seen]) / math.sqrt(facts.head_dim)
                weights = scores.softmax(0)
                mixed.append(sum(weights[i] * values[layer, one][own] for i, one in enumerate(seen)))
            hidden = hidden + linear(torch.cat(mixed), f"{prefix}self_attn.o_proj")
            x = norm(hidden, w[f"{prefix}post_attention_layernorm.weight"])
            gate = linear(x, f"{prefix}mlp.gate_proj")
            inner = gate * gate.sigmoid() * linear(x, f"{prefix}mlp.up_proj")
            hidden = hidden + linear(inner, f"{prefix}mlp.down_proj")
        normed = hidden if "no final norm" in facts.on else norm(hidden, w["norm.weight"])
        outputs.append(normed if "norm output" in facts.on else hidden)
        logits.append(w["lm_head.weight"] @ normed)
    return logits
