"""Tiny targets and drafters of every supported architecture, made on the spot."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from outrider.draft_models.early_exit.checkpoint import save_pretrained
from outrider.draft_models.early_exit.model import EarlyExit, exit_layers
from outrider.draft_models.targets.model_files import decoder_layers, layer_stack, load_layers
from outrider.draft_models.targets.open_target import load_config, open_target
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.draft_models.tiny import models as tiny_models
from outrider.inference.settings.method import MethodConfig, StopConfig, StructureConfig

LAYERS = 4
VOCABULARY = tiny_models.VOCABULARY
WINDOW = 12  # of sliding attention: shorter than the tests' texts
_FIELDS: dict[str, dict[str, Any]] = {  # further fields of the config, by transformers' `model_type`
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3": {"head_dim": 16},
}
ARCHITECTURES = tuple(_FIELDS)
# one small draft of every kind
STRUCTURES = {
    "chain": StructureConfig(),
    "k_config": StructureConfig(kind="k_config", widths=(3, 2, 1, 1)),
    "opt_tree": StructureConfig(kind="opt_tree", nodes=12, delta=0.0, max_depth=6),
    "token_graph": StructureConfig(kind="token_graph", nodes=20, tau=1, theta_prob=0.0, theta_sibling=0.0),
    "static": StructureConfig(kind="static", shape="eagle"),
}


def method_of(structure: StructureConfig, tokens: int = 4) -> MethodConfig:
    """Drafts of `structure`: a chain of `tokens` tokens, a tree of its own depth."""
    stop = StopConfig(max_draft=tokens) if structure.kind == "chain" else StopConfig()
    return MethodConfig(structure=structure, stop=stop)


def save_target(path: Path, architecture: str = "llama", *, tied: bool = False, kv_heads: int = 4, seed: int = 0,
                shard: str = "5GB", peak: float = 1.0, **changes: object) -> Path:  # fmt: skip
    """Write a random target with peaked, input-dependent next tokens, and a byte tokenizer, to `path`."""
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": kv_heads, "max_position_embeddings": 256,
        "tie_word_embeddings": tied, "bos_token_id": 256, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    config = AutoConfig.for_model(architecture, **{**settings, **_FIELDS[architecture], **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5.0)
            elif architecture == "opt":
                parameter.add_(0.1 * torch.randn_like(parameter))  # it starts with biases of zero
        if architecture == "opt":
            model.model.decoder.embed_positions.weight.mul_(4.0)  # or it repeats one token for ever
        model.lm_head.weight.mul_(peak)  # how sure it is of its next token; an untied target stays otherwise the same
    model.save_pretrained(path, max_shard_size=shard)
    byte_tokenizer().save_pretrained(path)
    return path


def byte_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token per byte, no merges, plus <s>, </s> and <pad>."""
    tokenizer = tiny_models.byte_tokenizer()
    tokenizer.chat_template = chat_template
    return tokenizer


def open_stack(path: Path, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, LayerStack]:
    """The target in `path`: as transformers loads and runs it, and as the layers of this project."""
    config = load_config(str(path))
    model = load_layers(open_tensors(str(path)), config, range(config.num_hidden_layers), dtype=dtype)
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval(), layer_stack(model)


def make_drafter(path: Path, exit_layer: int, noise: float = 0.0, *, own_head: bool = True, depth: int = 1,
                 tokens: torch.Tensor | None = None, dtype: torch.dtype = torch.float32, parallel: int = 0,
                 ) -> EarlyExit:  # fmt: skip
    """An untrained exit (the target's last `depth` layers) after `exit_layer` layers, its matrices shaken by `noise`.

    At exit_layer = LAYERS − depth without noise it is the target itself, so every draft is accepted; some noise
    makes some drafts wrong. tokens: the only ones that it predicts. parallel: drafted in one pass, from a random mask.
    """
    config = load_config(str(path))
    model = load_layers(open_tensors(str(path)), config, exit_layers(config, exit_layer), dtype=dtype)
    shape = {"own_head": own_head, "depth": depth, "draft_tokens": tokens, "parallel": parallel}
    drafter = EarlyExit(model, exit_layer, **shape).requires_grad_(False)
    if depth > 1:
        last = load_layers(open_tensors(str(path)), config, range(LAYERS - depth, LAYERS), dtype=dtype)
        for own, layer in zip(drafter.layers, decoder_layers(last), strict=True):
            own.load_state_dict(layer.state_dict())
    generator = torch.Generator().manual_seed(1)
    for parameter in (each for layer in drafter.layers for each in layer.parameters()):
        if parameter.numel() > 1:  # one number alone has no spread
            parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    if drafter.mask is not None:
        drafter.mask.copy_(torch.randn(drafter.mask.shape, generator=generator))
    return drafter


def save_exit(where: Path, path: Path, exit_layer: int, training: Mapping[str, object] | None = None,
              **made: Any) -> EarlyExit:  # fmt: skip
    """Write the exit that `make_drafter` makes of the target in `path` to directory `where`, in float32."""
    drafter = make_drafter(path, exit_layer, **made)
    save_pretrained(where, drafter, open_target(str(path)).fingerprint, training or {}, torch.float32)
    return drafter


@contextmanager
def unproven() -> Iterator[None]:
    """Targets are taken as they are, so that a planted fault gets past the loading."""
    with (
        patch("outrider.draft_models.targets.open_target.prove_layers"),
        patch("outrider.inference.loading.models.prove_layers"),
    ):
        yield


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """`length` byte tokens."""
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def reference_generate(model: PreTrainedModel, prompt: Sequence[int], count: int, eos: Sequence[int] = ()) -> list[int]:
    """What transformers' own greedy `generate` emits."""
    ids = torch.tensor([prompt], device=model.device)
    model.generation_config.eos_token_id = list(eos) or None
    model.generation_config.pad_token_id = 0
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return out[0, len(prompt) :].tolist()


def shake_norms_and_biases(path: Path) -> None:
    """No two of them are alike afterwards."""
    model = AutoModelForCausalLM.from_pretrained(path)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(path)
