"""GGUF files of Hugging Face models, made with the gguf package's own writer as llama.cpp's converter lays them out."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
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
    without: tuple[str, ...] = (),
    architecture: str | None = None,
    template: str | None = None,
    pre: str = "gpt-2",
    **changes: Any,
) -> Path:
    """The model directory `source` as the GGUF file `path`, matrices as `kind`.

    permute: off leaves Llama's rows of q and k as they are, which is wrong. without: keys and tensors to leave out.
    architecture: another name of it. pre: how the tokenizer says it cuts texts. changes: keys to add, without the
    architecture's name before them and with "__" for a point.
    """
    target = open_target(str(source))
    config: PreTrainedConfig = target.config
    family = architecture or {"mistral": "llama"}.get(config.model_type, config.model_type)
    writer = GgufWriter(path, family, without)
    _add_config(writer, config, family)
    for key, value in changes.items():
        writer.add(f"{family}.{key.replace('__', '.')}", value)
    add_bpe(writer, target.tokenizer, template, pre)
    weights = target.files.read(target.files.file_of)
    names = ggml_names(family, config.num_hidden_layers, weights)
    for name, tensor in weights.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if family == "llama" and heads and permute:
            array = permuted(array, heads)
        writer.tensor(names[name], array, kind if array.ndim > 1 else "F32")
    rope = config.rope_parameters
    if rope["rope_type"] == "llama3":
        writer.tensor("rope_freqs.weight", np.array(llama3_factors(rope, config.head_dim), np.float32), "F32")
    return writer.close()


class GgufWriter:
    """The package's writer, with keys that may be left out."""

    def __init__(self, path: Path, family: str, without: tuple[str, ...] = ()):
        self.path, self.without = path, without
        self.writer = gguf.GGUFWriter(path, family)
        if "general.architecture" in without:
            del self.writer.kv_data[0]["general.architecture"]

    def add(self, key: str, value: Any) -> None:
        if key in self.without:
            return
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
        if name in self.without:
            return
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
UNQUANTISABLE = ("Q4_K", "Q6_K", "IQ4_NL")
_SCALES = {"Q4_K": ((0, 0.004), (2, 0.03)), "Q6_K": ((208, 0.0004),), "IQ4_NL": ((0, 0.0008),)}


def random_blocks(array: NDArray[Any], kind: Any) -> NDArray[Any]:
    """Blocks of random bytes with half-precision scales of a sensible size, in the shape of `array`."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(array.size)
    raw = rng.integers(0, 256, (*array.shape[:-1], array.shape[-1] // block, size), dtype=np.uint8)
    for at, scale in _SCALES[kind.name]:
        raw[..., at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return raw.reshape(*array.shape[:-1], -1)


def _add_config(writer: GgufWriter, config: PreTrainedConfig, family: str) -> None:
    values = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": config.rope_parameters["rope_theta"],
    }  # fmt: skip
    if getattr(config, "head_dim", None):
        values |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if getattr(config, "sliding_window", None) and config.model_type == "mistral":
        values["attention.sliding_window"] = config.sliding_window
    rope = config.rope_parameters
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    for key, value in values.items():
        writer.add(f"{family}.{key}", value)


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
            plain = unpermuted(plain, count) if count else plain
            weights[name] = torch.from_numpy(np.ascontiguousarray(plain))
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def unpermuted(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """The rows that `permuted` was given."""
    return weight[np.argsort(permuted(np.arange(len(weight)), heads))]


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
