"""Tiny block drafters as each trainer writes them, and a reference for their hidden states, row by row.

It shares nothing with the code under test: no names, no reading of configs, no forward.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

LAYERS, WIDTH, VOCABULARY, MASK = 6, 16, 40, 37
TARGET = LlamaConfig(hidden_size=WIDTH, num_hidden_layers=LAYERS, vocab_size=VOCABULARY, num_attention_heads=4)
HEADS, KEY_HEADS, DIM, INNER, RANK = 4, 2, 6, 20, 5
DRAFT_TOKENS = (0, 3, 4, 9, 17, 18, 25, 39)
ALL_TOKENS = tuple(range(VOCABULARY))


@dataclass(frozen=True)
class Facts:
    """The description of a drafter in the words of the tests.

    sees: for each layer (positions that a row sees before its own, or None; whether it sees later rows of its block).
    """

    config: dict[str, Any]
    taps: tuple[int, ...]
    block: int = 4
    from_anchor: bool = False
    sees: tuple[tuple[int | None, bool], ...] = ((None, True), (None, True))
    theta: float = 10000.0
    neighbours: bool = False
    scale: float = 1.0
    rank: int = 0
    confidence: int = 0  # inputs of its head
    draft_tokens: tuple[int, ...] = ALL_TOKENS
    embeds: bool = False


LAYER = {
    "hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS,
    "head_dim": DIM, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-6, "hidden_act": "silu", "num_hidden_layers": 2,
    "max_position_embeddings": 512, "attention_bias": False, "tie_word_embeddings": False, "model_type": "qwen3",
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
DIALECTS: dict[str, Facts] = {
    "z-lab": Facts(
        taps=(2, 4, 5), theta=500.0,
        config={
            **LAYER, "architectures": ["DFlashDraftModel"], "block_size": 4, "rope_theta": 500.0, "rope_scaling": None,
            "num_target_layers": LAYERS, "layer_types": [FULL, FULL],
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3, 4]},
        },
    ),
    # A layer that slides is causal, one that does not is not; newer files have the block's size inside.
    "z-lab, mixed": Facts(
        taps=(1, 6), block=5, sees=((3, False), (None, True)), neighbours=True, scale=3.0,
        config={
            **LAYER, "rope_theta": 10000.0, "layer_types": [SLIDING, FULL], "sliding_window": 3, "is_neox_style": False,
            "input_embedding_scale": 3.0,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 5], "block_size": 5},
        },
    ),
    # Windows of all layers, that look both ways.
    "z-lab, windows": Facts(
        taps=(3,), sees=((4, True), (4, True)),
        config={
            **LAYER, "rope_theta": 10000.0, "block_size": 4,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [2], "use_swa": True, "swa_window_size": 4},
        },
    ),
    "specforge, dspark": Facts(
        taps=(2, 5), from_anchor=True, rank=RANK, confidence=WIDTH + RANK,
        config={
            **LAYER, "architectures": ["DSparkDraftModel"], "block_size": 4, "rope_theta": 10000.0,
            "layer_types": [FULL, FULL],
            "dflash_config": {
                "mask_token_id": MASK, "target_layer_ids": [1, 4], "projector_type": "dspark", "markov_rank": RANK,
                "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
            },
        },
    ),
    "deepspec": Facts(
        taps=(1, 3), block=3, from_anchor=True, rank=RANK, confidence=WIDTH, sees=((None, False), (None, False)),
        config={
            **LAYER, "architectures": ["Qwen3DSparkModel"], "block_size": 3, "rope_theta": 10000.0,
            "mask_token_id": MASK, "target_layer_ids": [0, 2], "is_causal": True, "markov_rank": RANK,
            "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": False,
        },
    ),
    "speculators": Facts(
        taps=(0, 3), draft_tokens=DRAFT_TOKENS, embeds=True, sees=((None, True), (6, True)),
        config={
            "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "block_size": 4,
            "aux_hidden_state_layer_ids": [0, 3], "mask_token_id": MASK, "draft_vocab_size": len(DRAFT_TOKENS),
            "sample_from_anchor": False, "sliding_window_non_causal": True,
            "transformer_layer_config": {
                **LAYER, "layer_types": [FULL, SLIDING], "use_sliding_window": True, "sliding_window": 6,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "speculators, dspark": Facts(
        taps=(2, 4), from_anchor=True, rank=RANK, confidence=WIDTH + RANK, draft_tokens=DRAFT_TOKENS,
        config={
            "architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark", "block_size": 4,
            "aux_hidden_state_layer_ids": [2, 4], "mask_token_id": MASK, "draft_vocab_size": len(DRAFT_TOKENS),
            "sample_from_anchor": True, "sliding_window_non_causal": False, "markov_rank": RANK,
            "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
            "transformer_layer_config": {**LAYER, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        },
    ),
}  # fmt: skip
Weights = dict[str, Tensor]


def drafter_weights(facts: Facts, seed: int = 0) -> Weights:
    """Random weights in float64, by the names that all trainers share."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * 1.5 * shape[-1] ** -0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator, dtype=torch.float64)

    weights = {"fc.weight": matrix(WIDTH, len(facts.taps) * WIDTH), "hidden_norm.weight": norm(WIDTH)}
    weights["norm.weight"] = norm(WIDTH)
    for number in range(len(facts.sees)):
        attention, prefix = f"layers.{number}.self_attn.", f"layers.{number}."
        for name, heads in (("q", HEADS), ("k", KEY_HEADS), ("v", KEY_HEADS)):
            weights[f"{attention}{name}_proj.weight"] = matrix(heads * DIM, WIDTH)
        weights[f"{attention}o_proj.weight"] = matrix(WIDTH, HEADS * DIM)
        weights |= {f"{attention}{name}_norm.weight": norm(DIM) for name in "qk"}
        weights |= {f"{prefix}mlp.{name}_proj.weight": matrix(INNER, WIDTH) for name in ("gate", "up")}
        weights[f"{prefix}mlp.down_proj.weight"] = matrix(WIDTH, INNER)
        weights |= {f"{prefix}{name}_layernorm.weight": norm(WIDTH) for name in ("input", "post_attention")}
    if facts.rank:
        weights["markov_head.markov_w1.weight"] = matrix(VOCABULARY, RANK) * 2
        weights["markov_head.markov_w2.weight"] = matrix(len(facts.draft_tokens), RANK) * 2
    if facts.confidence:
        weights |= {"confidence_head.proj.weight": matrix(1, facts.confidence), "confidence_head.proj.bias": matrix(1)}
    if facts.embeds:
        weights["embed_tokens.weight"] = matrix(VOCABULARY, WIDTH)
    if facts.draft_tokens != ALL_TOKENS:
        weights["lm_head.weight"] = matrix(len(facts.draft_tokens), WIDTH)
        weights["d2t"] = torch.tensor([token - index for index, token in enumerate(facts.draft_tokens)])
        weights["t2d"] = torch.tensor([token in facts.draft_tokens for token in range(VOCABULARY)])
    return weights


def write_drafter(path: Path, facts: Facts, weights: Mapping[str, Tensor], **changes: Any) -> str:
    """Write the directory of a trainer; changes: of its config."""
    path.mkdir(exist_ok=True, parents=True)
    (path / "config.json").write_text(json.dumps({**facts.config, **changes}))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path / "model.safetensors")
    return str(path)


def reference(facts: Facts, w: Weights, embedding: Tensor, taps: Tensor, root: int) -> Tensor:
    """The normed hidden state [block, H] of each row of the block after a context with aux hidden states [t, k, H_t],
    computed row by row and head by head."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean() + 1e-6) * w[f"{name}.weight"]

    def turn(x: Tensor, position: int) -> Tensor:
        out, half = x.clone(), len(x) // 2
        for i in range(half):
            angle = position * facts.theta ** (-2 * i / len(x))
            first, second = (2 * i, 2 * i + 1) if facts.neighbours else (i, i + half)
            out[first] = x[first] * math.cos(angle) - x[second] * math.sin(angle)
            out[second] = x[second] * math.cos(angle) + x[first] * math.sin(angle)
        return out

    def heads(x: Tensor, attention: str, name: str, position: int) -> list[Tensor]:
        parts = (w[f"{attention}{name}_proj.weight"] @ x).split(DIM)
        return [part if name == "v" else turn(norm(part, f"{attention}{name}_norm"), position) for part in parts]

    base = len(taps)
    features = [norm(w["fc.weight"] @ tap.flatten(), "hidden_norm") for tap in taps]
    rows = [facts.scale * embedding[token] for token in [root, *[MASK] * (facts.block - 1)]]
    for number, (window, both_ways) in enumerate(facts.sees):
        prefix, attention = f"layers.{number}.", f"layers.{number}.self_attn."
        inputs = [*features, *(norm(row, f"{prefix}input_layernorm") for row in rows)]
        keys, values = ([heads(x, attention, name, at) for at, x in enumerate(inputs)] for name in "kv")
        for index, row in enumerate(rows):
            position, mixed = base + index, []
            seen = [
                at
                for at in range(len(inputs))
                if (both_ways or at <= position) and (window is None or abs(at - position) < window)
            ]
            for head, query in enumerate(heads(inputs[position], attention, "q", position)):
                group = head // (HEADS // KEY_HEADS)
                scores = torch.stack([query @ keys[at][group] for at in seen]) / math.sqrt(DIM)
                mixed.append(sum(p * values[at][group] for p, at in zip(scores.softmax(0), seen, strict=True)))
            hidden = row + w[f"{attention}o_proj.weight"] @ torch.cat(mixed)  # type: ignore[arg-type]
            x = norm(hidden, f"{prefix}post_attention_layernorm")
            gate = w[f"{prefix}mlp.gate_proj.weight"] @ x
            inner = gate * gate.sigmoid() * (w[f"{prefix}mlp.up_proj.weight"] @ x)
            rows[index] = hidden + w[f"{prefix}mlp.down_proj.weight"] @ inner
    return torch.stack([norm(row, "norm") for row in rows])


def slot_logits(facts: Facts, w: Weights, head: Tensor, hidden: Tensor, depth: int, token: int) -> Tensor:
    """Logits [V_d] of the token that is drafted at `depth`, from 0, after `token`; hidden: of the `reference`."""
    logits = w.get("lm_head.weight", head) @ hidden[depth + (not facts.from_anchor)]
    if facts.rank:
        logits = logits + w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][token]
    return logits


def slot_confidence(facts: Facts, w: Weights, hidden: Tensor, depth: int, token: int) -> Tensor:
    """The logit of the confidence head for that token."""
    evidence = hidden[depth + (not facts.from_anchor)]
    if facts.confidence > WIDTH:
        evidence = torch.cat([evidence, w["markov_head.markov_w1.weight"][token]])
    return (w["confidence_head.proj.weight"] @ evidence + w["confidence_head.proj.bias"])[0]
