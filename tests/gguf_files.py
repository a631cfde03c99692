"""GGUF files of Hugging Face models, made with the gguf package's own writer as llama.cpp's converter lays them out."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from outrider.draft_models.targets.open_target import open_target
from tests.tiny import save_target

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


def save_plain_target(path: Path, architecture: str = "llama", **changes: Any) -> Path:
    """A target whose matrices have whole blocks of every quantisation, none wider than 256."""
    tokenizer = bpe_tokenizer()
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": len(tokenizer)}
    whole = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 28}  # no layer has a window
    plain = whole if architecture == "qwen2" else {}
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    save_target(path, architecture, **{**sizes, **plain, **special, "kv_heads": 2, **changes})
    tokenizer.save_pretrained(path)
    return path


def bpe_tokenizer(before: Any = None, normalizer: Any = None, size: int = 320) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on this file's own text, after the cuts that `before` makes."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=before is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*([] if before is None else [before]), plain])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<s>", "</s>", "<pad>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def llama3_factors(rope: dict[str, Any], head_dim: int) -> list[float]:
    """By what Llama 3 divides each frequency: 1 for short waves, `factor` for long ones, and what lies between."""
    found = []
    for index in range(0, head_dim, 2):
        turns = rope["original_max_position_embeddings"] / (2 * math.pi * rope["rope_theta"] ** (index / head_dim))
        smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        smooth = min(1.0, max(0.0, smooth))
        found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return found


def permuted(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows (i, i + half) of every head as neighbours: the reference, row by row."""
    size = len(weight) // heads
    rows = []
    for head in range(heads):
        for index in range(size // 2):
            rows += [weight[head * size + index], weight[head * size + index + size // 2]]
    return np.stack(rows)


def ggml_names(family: str, layers: int, names: Iterable[str]) -> dict[str, str]:
    """ggml's names of Hugging Face's tensors, by the gguf package's own map."""
    architecture = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    known, found = gguf.get_tensor_name_map(architecture, layers), {}
    for name in names:
        stem, _, last = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "weight")
        found[name] = f"{known.get_name(stem)}.{last}"
    return found


def write_gguf(
    source: Path,
    path: Path,
    kind: str = "F32",
    *,
    permute: bool = True,
    template: str | None = None,
    pre: str = "gpt-2",
) -> Path:
    """The model directory `source` as the GGUF file `path`, matrices as `kind`.

    permute: off leaves Llama's rows of q and k as they are, which is wrong. pre: how the tokenizer says it cuts texts.
    """
    target = open_target(str(source))
    config, weights = target.config, target.files.read(target.files.file_of)
    family = {"mistral": "llama"}.get(config.model_type, config.model_type)
    keys = keys_of(config) | {"attention.layer_norm_rms_epsilon": config.rms_norm_eps}
    if getattr(config, "head_dim", None):
        keys |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if getattr(config, "sliding_window", None) and config.model_type == "mistral":
        keys["attention.sliding_window"] = config.sliding_window
    tensors = laid_out(weights, config, family, permute)
    if config.rope_parameters["rope_type"] == "llama3":
        factors = llama3_factors(config.rope_parameters, config.head_dim)
        tensors["rope_freqs.weight"] = np.array(factors, np.float32)
    return write_file(path, family, keys, tensors, kind, target.tokenizer, template, pre)


def write_file(
    path: Path,
    family: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, NDArray[Any]],
    kind: str,
    tokenizer: PreTrainedTokenizerFast,
    template: str | None,
    pre: str = "gpt-2",
) -> Path:
    """A file of `keys`, without the architecture's name before them, and `tensors`, matrices as `kind`."""
    writer = GgufWriter(path, family)
    for key, value in keys.items():
        writer.add(f"{family}.{key}", value)
    add_bpe(writer, tokenizer, template, pre)
    for name, array in tensors.items():
        writer.tensor(name, array, kind if array.ndim > 1 else "F32")
    return writer.close()


def keys_of(config: PreTrainedConfig) -> dict[str, Any]:
    """The keys that every architecture has, and those of its rotary positions."""
    found: dict[str, Any] = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": {"falcon": 1, "gpt2": 4}.get(config.model_type, config.num_key_value_heads),
    }  # fmt: skip
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if rope:
        found["rope.freq_base"] = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        found["rope.dimension_count"] = int(size * rope["partial_rotary_factor"])
    if rope.get("rope_type") in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope.get("rope_type") == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return found


def laid_out(
    state: Mapping[str, Tensor], config: PreTrainedConfig, family: str, permute: bool = True
) -> dict[str, NDArray[Any]]:
    """The tensors of a model by ggml's names, as llama.cpp's converter lays them out. permute: see `write_gguf`."""
    found = {}
    kept = {
        name: tensor for name, tensor in state.items() if name != "lm_head.weight" or not config.tie_word_embeddings
    }
    for name, known in ggml_names(family, config.num_hidden_layers, kept).items():
        array = kept[name].float().numpy()
        part = known.split(".")[-2]
        if name.endswith("experts.gate_up_proj"):  # [experts, gates and values, hidden]
            block = name.split(".")[2]
            found[f"blk.{block}.ffn_gate_exps.weight"], found[f"blk.{block}.ffn_up_exps.weight"] = np.split(array, 2, 1)
            continue
        if family == "llama" and part in ("attn_q", "attn_k") and permute:
            array = permuted(array, config.num_attention_heads if part == "attn_q" else config.num_key_value_heads)
        if family in ("gemma2", "gemma3", "nemotron") and known.endswith("norm.weight"):
            array = array + 1
        if part == "ffn_gate_inp_shexp":  # one row, which ggml keeps as a vector
            array = array[0]
        if family == "gpt2" and array.ndim == 2 and part in ("attn_qkv", "attn_output", "ffn_up", "ffn_down"):
            array = np.ascontiguousarray(array.T)
        found[known] = array
    return found


class GgufWriter:
    """The package's writer, which finds the type of a value by itself."""

    def __init__(self, path: Path, family: str):
        self.path, self.writer = path, gguf.GGUFWriter(path, family)

    def add(self, key: str, value: Any) -> None:
        if isinstance(value, bool):
            self.writer.add_bool(key, value)
        elif isinstance(value, int):
            self.writer.add_uint32(key, value)
        elif isinstance(value, float):
            self.writer.add_float32(key, value)
        elif isinstance(value, str):
            self.writer.add_string(key, value)
        else:
            self.writer.add_array(key, value)

    def tensor(self, name: str, array: NDArray[Any], kind: str) -> None:
        raw = gguf.GGMLQuantizationType[kind]
        data = random_blocks(array, raw) if kind in UNQUANTISABLE else gguf.quants.quantize(array, raw)
        self.writer.add_tensor(name, data, raw_dtype=raw)

    def close(self) -> Path:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path


# The package can undo these, and not make them: any bytes are then some weights.
UNQUANTISABLE = ("Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
_SCALES = {"Q4_K": ((0, 0.004), (2, 0.03)), "Q5_K": ((0, 0.002), (2, 0.03)), "Q6_K": ((208, 0.0004),)} | {
    kind: ((0, scale),) for kind, scale in (("IQ4_NL", 0.0008), ("Q4_0", 0.02), ("Q5_0", 0.01), ("Q8_0", 0.001))
}


def random_blocks(array: NDArray[Any], kind: Any) -> NDArray[Any]:
    """Blocks of random bytes with half-precision scales of a sensible size, in the shape of `array`."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(array.size)
    raw = rng.integers(0, 256, (*array.shape[:-1], array.shape[-1] // block, size), dtype=np.uint8)
    for at, scale in _SCALES[kind.name]:
        raw[..., at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return raw.reshape(*array.shape[:-1], -1)


def add_bpe(writer: GgufWriter, tokenizer: PreTrainedTokenizerFast, template: str | None, pre: str = "gpt-2") -> None:
    """A byte-level BPE as llama.cpp's converter writes it."""
    vocabulary = tokenizer.get_vocab()
    pieces = sorted(vocabulary, key=lambda piece: vocabulary[piece])
    kinds = [CONTROL if index in tokenizer.all_special_ids else NORMAL for index in range(len(pieces))]
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add("tokenizer.ggml.model", "gpt2")
    writer.add("tokenizer.ggml.pre", pre)
    writer.add("tokenizer.ggml.tokens", pieces)
    writer.add("tokenizer.ggml.token_type", kinds)
    writer.add("tokenizer.ggml.merges", [" ".join(merge) for merge in merges])
    for key, index in (("bos", tokenizer.bos_token_id), ("eos", tokenizer.eos_token_id)):
        writer.add(f"tokenizer.ggml.{key}_token_id", index)
    writer.add("tokenizer.ggml.padding_token_id", tokenizer.pad_token_id)
    writer.add("tokenizer.ggml.add_bos_token", False)
    if template is not None:
        writer.add("tokenizer.chat_template", template)


def dequantised(source: Path, folder: Path, kind: str) -> Path:
    """The model directory `source` with every matrix as `kind` would have kept it, in float32."""
    folder.mkdir()
    raw = gguf.GGMLQuantizationType[kind]
    config = open_target(str(source)).config
    weights = load_file(source / "model.safetensors")
    for name, tensor in weights.items():
        if tensor.ndim > 1:
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            count = heads.get(name.split(".")[-2]) if config.model_type in ("llama", "mistral") else None
            array = tensor.numpy()
            array = permuted(array, count) if count else array
            data = random_blocks(array, raw) if kind in UNQUANTISABLE else gguf.quants.quantize(array, raw)
            plain = gguf.quants.dequantize(data, raw).reshape(array.shape)
            plain = plain[np.argsort(permuted(np.arange(len(plain)), count))] if count else plain
            weights[name] = torch.from_numpy(np.ascontiguousarray(plain))
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def rewritten(path: Path, tensors: bool = True, **values: Any) -> Path:
    """A copy of a GGUF file with other metadata: None leaves a key out."""
    reader, copied = gguf.GGUFReader(path), path.with_name("rewritten.gguf")
    writer = GgufWriter(copied, "llama")
    kept = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    for key, value in (kept | values).items():
        if value is None or (key == "general.architecture" and key not in values):
            continue
        if key == "general.architecture":
            del writer.writer.kv_data[0][key]
        writer.add(key, value)
    for tensor in reader.tensors if tensors else []:
        writer.writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    return writer.close()
