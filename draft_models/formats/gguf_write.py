"""A causal LM as a GGUF file in the layout of llama.cpp's converter; refused if it would be read as another model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.base.errors import UserError
from outrider.draft_models.formats.gguf_config import KEYS, LLAMA3, ROPE_FACTORS, gguf_config, llama3_factors
from outrider.draft_models.formats.gguf_file import GgufFile, MetadataValue, TensorLocation
from outrider.draft_models.formats.gguf_model import load_package, tensor_names
from outrider.draft_models.formats.gguf_tokenizer import PATTERNS, SPECIAL, gguf_tokenizer

GGUF_FILE = "model.gguf"
BLOCK = 32  # consecutive weights of a row that share a scale in Q8_0, Q5_0 and Q4_0
_FAMILIES = ("llama", "qwen2", "qwen3")  # the families that can be written; Mistral's models are "llama"
# Fields of a config that change no logits of a frozen model, besides those that every config has.
_FREE = {
    "initializer_range", "use_cache", "attention_dropout", "pretraining_tp", "max_window_layers", "bos_token_id",
    "eos_token_id", "pad_token_id",
}  # fmt: skip
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 3, 4, 5, 6  # ggml's types of tokens
TokenizerStep = dict[str, object]  # of a normalizer or a pre-tokenizer, as tokenizer.json has it
_KEY, _BYTES = "tokenizer.ggml.", [f"<0x{byte:02X}>" for byte in range(256)]  # a prefix of keys; the byte tokens
# Each known pattern splits this text differently.
_PROBE = "  Don't WE'LL  3.14159 1234567\n\n \t x+=[1]; nai\u0308ve façade\r\n   北京2026年 🚀 ▁_ I'm\n"


def require_gguf(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, MetadataValue]:
    """The metadata of a GGUF file of a model with `config`, which may lack a tokenizer. `KEYS` names the config's
    fields by ggml's keys. Raises `UserError` if the metadata would be read as another model."""
    family = {"mistral": "llama"}.get(config.model_type, config.model_type)
    if family not in _FAMILIES:
        raise _unsupported_error(f"model_type={config.model_type!r}, other than {', '.join(_FAMILIES)} and mistral")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    head_dims = dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), head_dim)
    field_of = {key: name for key, name in KEYS[family].items() if name and not key.startswith("rope.")}
    key_values: dict[str, MetadataValue] = {key: getattr(config, name) for key, name in field_of.items()} | head_dims
    key_values["rope.freq_base"] = float(config.rope_parameters["rope_theta"])
    if config.model_type == "mistral" and config.sliding_window is not None:
        raise _unsupported_error(f"sliding_window={config.sliding_window}, which llama.cpp ignores in a Mistral")
    prefixed_values = {f"{family}.{key}": value for key, value in key_values.items()}
    metadata: dict[str, MetadataValue] = {"general.architecture": family} | prefixed_values
    _require_read_back(config, metadata)
    no_tokenizer: dict[str, MetadataValue] = {"tokenizer.ggml.model": "none"}
    return metadata | no_tokenizer if tokenizer is None else _add_tokenizer(metadata, tokenizer, config.vocab_size)


def write_gguf(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, path: Path, block_kind: str | None = None
) -> None:
    """Write `model`, in float32, float16 or bfloat16, as the file `path`. block_kind: as for `write_file`.

    Raises `UserError` as `require_gguf`.
    """
    metadata, state = require_gguf(model.config, tokenizer), model.state_dict()
    hf_name_of = tensor_names(model, str(metadata["general.architecture"]))
    tensors = {name: state[hf_name] for name, hf_name in hf_name_of.items()}
    write_file(model.config, metadata, tensors, path, block_kind)


def write_file(
    config: PreTrainedConfig,
    metadata: dict[str, MetadataValue],
    tensors: Mapping[str, Tensor],
    path: Path,
    block_kind: str | None = None,
) -> None:
    """Write the file `path` of a model with `config`. tensors: by ggml's names, in Hugging Face's layout.

    block_kind: ggml's name of the blocks, of `BLOCK` weights, in which matrices are quantised, such as "Q8_0". Matrices
    without whole blocks keep their dtype. Vectors are float32.
    """
    gguf, family = load_package(), str(metadata.pop("general.architecture"))
    writer = gguf.GGUFWriter(path, family)
    ggml_name_of = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    for key, value in metadata.items():
        writer.add_key_value(key, value, gguf.GGUFValueType[ggml_name_of[type(value)]])
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor(ROPE_FACTORS, llama3_factors(config.rope_parameters, config.head_dim))
    head_counts = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    # ggml rotates rows 2i and 2i + 1 of a Llama's head together, transformers rows i and i + head_dim / 2.
    rotates_pairs = family.startswith(("llama", "eagle"))
    for name, tensor in tensors.items():
        module_name = f".{name}".split(".")[-2]
        if module_name in head_counts and rotates_pairs:
            tensor = tensor.unflatten(0, (head_counts[module_name], 2, -1)).transpose(1, 2).flatten(0, 2)
        array, kind_name = _as_stored(tensor.detach().cpu().contiguous(), block_kind)
        writer.add_tensor(name, array, raw_dtype=kind_name and gguf.GGMLQuantizationType[kind_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _as_stored(tensor: Tensor, block_kind: str | None) -> tuple[np.ndarray, str | None]:
    """The numbers of a tensor on the CPU as a file has them, and ggml's name of their type; None: numpy's type."""
    if block_kind is not None and tensor.ndim == 2 and tensor.shape[1] % BLOCK == 0:
        gguf = load_package()
        return gguf.quants.quantize(tensor.float().numpy(), gguf.GGMLQuantizationType[block_kind]), block_kind
    if tensor.ndim == 1 and tensor.is_floating_point():
        return tensor.float().numpy(), None
    if tensor.dtype == torch.bfloat16:  # for which numpy has no name
        return tensor.view(torch.uint8).numpy(), "BF16"
    return tensor.numpy(), None


def _require_read_back(config: PreTrainedConfig, metadata: dict[str, MetadataValue]) -> None:
    """Raise `UserError` unless reading `metadata` gives `config`, in all fields that change logits."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    names, state = tensor_names(model, str(metadata["general.architecture"])), model.state_dict()
    locations = {name: TensorLocation(name, tuple(state[names[name]].shape), 0, 0) for name in names}  # 0: float32
    reread_config = gguf_config(GgufFile(Path(GGUF_FILE), metadata, locations)).to_dict()
    expected_config, rope = config.to_dict(), config.rope_parameters
    if rope["rope_type"] == "llama3" and rope.items() >= LLAMA3.items():  # `write_file` writes it as a tensor
        expected_config["rope_parameters"] = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    for name in sorted(expected_config.keys() & reread_config.keys() - PreTrainedConfig().to_dict().keys() - _FREE):
        if expected_config[name] != reread_config[name]:
            raise _unsupported_error(f"{name}={expected_config[name]!r}")


def _add_tokenizer(
    metadata: dict[str, MetadataValue], tokenizer: PreTrainedTokenizerBase, n_rows: int
) -> dict[str, MetadataValue]:
    """`metadata` with the tokenizer's, for an embedding of `n_rows` rows.

    Each known way to cut texts, by its name in `PATTERNS`, is tried: what it writes is read again and must give equal
    rules and ids. Raises `UserError` if no way does.
    """
    base = metadata | _token_metadata(tokenizer, n_rows)
    backend = tokenizer.backend_tokenizer
    bpe = json.loads(backend.to_str())["model"]
    if bpe.get("byte_fallback"):  # SentencePiece's BPE: merges go by score, and ids are in their order
        base |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [-float(index) for index in range(n_rows)]}
        key = "tokenizer.ggml.add_space_prefix"
        candidates: list[dict[str, MetadataValue]] = [{key: adds_space} for adds_space in (True, False)]
    else:
        merges: list[MetadataValue] = [" ".join(merge) for merge in bpe.get("merges", ())]
        if not merges:
            raise _unsupported_error("a tokenizer without merges")
        base |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": merges}
        candidates = [{"tokenizer.ggml.pre": split_name} for split_name in PATTERNS]
    probe_text, rules = _PROBE + _PROBE.join(tokenizer.get_added_vocab()), _read_rules(tokenizer)
    for candidate in candidates:
        reread = gguf_tokenizer(GgufFile(Path(GGUF_FILE), base | candidate, tensors={}))
        if _read_rules(reread) == rules and _encode(reread, [probe_text]) == _encode(tokenizer, [probe_text]):
            token_texts = backend.decode_batch([[index] for index in range(n_rows)], skip_special_tokens=False)
            # Each token alone, after a space and within a word.
            variants = [variant for token in token_texts for variant in (token, f" {token}", f"a{token}b")]
            if _encode(reread, variants) == _encode(tokenizer, variants):
                return base | candidate
    raise _unsupported_error(
        f"a tokenizer that cuts, changes or merges texts otherwise than {', '.join(PATTERNS)}, SentencePiece"
    )


def _read_rules(tokenizer: PreTrainedTokenizerBase) -> list[object]:
    """The steps before merges, and the merges that can apply: together they decide the ids of any text."""
    parsed = json.loads(tokenizer.backend_tokenizer.to_str())
    bpe, steps = parsed["model"], [*_flatten_steps(parsed["normalizer"]), *_flatten_steps(parsed["pre_tokenizer"])]
    if bpe.get("byte_fallback"):  # every space is a ▁ before a text is cut
        steps = [step for step in steps if step["type"] != "Split" or step["pattern"] != {"String": " "}]
    unmerged_tokens = {*tokenizer.get_added_vocab(), *_BYTES}
    return [steps, [merge for merge in bpe.get("merges", ()) if not {*merge, "".join(merge)} & unmerged_tokens]]


def _flatten_steps(component: TokenizerStep | None) -> list[TokenizerStep]:
    """A normalizer or a pre-tokenizer, which may be a sequence, as a list of steps."""
    if component is None:
        return []
    if component["type"] == "Sequence":
        members = cast(list[TokenizerStep], component.get("normalizers") or component.get("pretokenizers") or [])
        return [step for member in members for step in _flatten_steps(member)]
    if component == {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False}:
        return [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    return [{key: value for key, value in component.items() if key != "trim_offsets"}]


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch(texts)]


def _token_metadata(tokenizer: PreTrainedTokenizerBase, row_count: int) -> dict[str, MetadataValue]:
    """The tokens with their types, the ids of the special ones, and the chat template."""
    tokens, added = {index: token for token, index in tokenizer.get_vocab().items()}, tokenizer.added_tokens_decoder
    if max(tokens) >= row_count:
        raise _unsupported_error(f"{max(tokens) + 1} tokens of a model with vocab_size={row_count}")
    metadata: dict[str, MetadataValue] = {
        f"{_KEY}tokens": [tokens.get(index, f"[PAD{index}]") for index in range(row_count)],
        f"{_KEY}token_type": [
            _UNUSED if index not in tokens
            else (_CONTROL if added[index].special else _USER_DEFINED) if index in added
            else _BYTE if tokens[index] in _BYTES
            else _NORMAL
            for index in range(row_count)
        ],
    }  # fmt: skip
    for name, ggml_name in SPECIAL.items():
        if (index := getattr(tokenizer, f"{name}_id")) is not None:
            metadata[f"{_KEY}{ggml_name}_token_id"] = index
    ids, bare_ids = (tokenizer("a", add_special_tokens=add_special)["input_ids"] for add_special in (True, False))
    metadata[f"{_KEY}add_bos_token"] = ids[:1] != bare_ids[:1]
    metadata[f"{_KEY}add_eos_token"] = ids[-1:] != bare_ids[-1:]
    if isinstance(tokenizer.chat_template, str):
        metadata["tokenizer.chat_template"] = tokenizer.chat_template
    return metadata


def _unsupported_error(feature: str) -> UserError:
    return UserError(
        f"GGUF: not supported here: {feature}; export it for engine=transformers, or try llama.cpp's own "
        "convert_hf_to_gguf.py"
    )
