"""Spellings of MTP heads: where the tensors of a head are among a model's, and their names here.

qwen         Qwen3-Next, Qwen3.5, in the target's directory: `mtp.fc`, `mtp.layers.0.`
mimo         MiMo, in the target's directory: `model.mtp_layers.0.`
deepseek     DeepSeek, GLM, in the target's directory, as one layer more: `model.layers.N.eh_proj`
speculators  vllm-project/speculators, a directory of its own: `mtp_layers.0.`
gguf         llama.cpp, as one block more: `blk.N.nextn.eh_proj`

Names "here" are those of `mtp.model.MtpHead`, except that a file may have query and gate in one matrix.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from outrider.base.errors import UserError
from outrider.draft_models.formats.gguf_file import find_gguf
from outrider.draft_models.formats.gguf_model import NextnBlock
from outrider.draft_models.targets.tensor_files import TensorFiles, open_tensors

LAYER = "layers.0."
# The names here by the stored names, after a prefix and without the ending; other tensors belong to the layer.
_MIMO_NAMES = {
    "input_proj": "fc", "token_layernorm": "embedding_norm", "hidden_layernorm": "hidden_norm",
    "final_layernorm": "norm",
}  # fmt: skip
_QWEN_NAMES = {
    "fc": "fc", "pre_fc_norm_embedding": "embedding_norm", "pre_fc_norm_hidden": "hidden_norm", "norm": "norm",
    "embed_tokens": "embed_tokens",
}  # fmt: skip
_DEEPSEEK_NAMES = {
    "eh_proj": "fc", "enorm": "embedding_norm", "hnorm": "hidden_norm", "shared_head.norm": "norm",
    "shared_head.head": "lm_head", "embed_tokens": "embed_tokens",
}  # fmt: skip
_GGUF_NAMES = {
    "nextn.eh_proj": "fc", "nextn.enorm": "embedding_norm", "nextn.hnorm": "hidden_norm",
    "nextn.shared_head_norm": "norm", "nextn.shared_head_head": "lm_head", "nextn.embed_tokens": "embed_tokens",
    "attn_norm": f"{LAYER}input_layernorm", "ffn_norm": f"{LAYER}post_attention_layernorm",
    "post_attention_norm": f"{LAYER}post_attention_layernorm", "attn_output": f"{LAYER}self_attn.o_proj",
    **{f"attn_{part}": f"{LAYER}self_attn.{part}_proj" for part in "qkv"},
    **{f"attn_{part}_norm": f"{LAYER}self_attn.{part}_norm" for part in "qk"},
    **{f"ffn_{part}": f"{LAYER}mlp.{part}_proj" for part in ("gate", "up", "down")},
}  # fmt: skip
# By spelling: the pattern of the projection's name, whose group is the prefix of all names, and those names.
SPELLINGS = {
    "qwen": (r"(mtp\.)fc\.weight", _QWEN_NAMES),
    "mimo": (r"(model\.mtp_layers\.\d+\.)input_proj\.weight", _MIMO_NAMES),
    "deepseek": (r"(model\.layers\.\d+\.)eh_proj\.weight", _DEEPSEEK_NAMES),
    "speculators": (r"(mtp_layers\.\d+\.)input_proj\.weight", _MIMO_NAMES),
    "gguf": (r"(blk\.\d+\.)nextn\.eh_proj\.weight", _GGUF_NAMES),
}
# Parts of names of tensors that only layers of unsupported kinds have.
_KIND_BY_PART = {
    **dict.fromkeys(("experts", "mlp.gate.", "_exps."), "a mixture of experts"),
    **dict.fromkeys(("kv_a_", "kv_b_"), "multi-head latent attention"),
}
SUPPORTED = "supported: one dense layer with the attention of Llama, Qwen2, Qwen3 or Qwen3-Next"


def qwen_name(local_name: str) -> str:
    """The name in the spelling qwen of a tensor with this `local_name` here."""
    stem, _, ending = local_name.rpartition(".")
    return f"mtp.{next((stored for stored, local in _QWEN_NAMES.items() if local == stem), stem)}.{ending}"


@dataclass(frozen=True)
class HeadTensors:
    """The tensors of the head in a model's files, or of several heads.

    files: those tensors alone. stored_names: the names in the files by the names here, of the last of `prefixes`.
    """

    spelling: str
    prefixes: tuple[str, ...]
    files: TensorFiles
    stored_names: Mapping[str, str]

    def require_supported(self) -> None:
        """Raise `UserError` for heads that are not run here, by their tensors' names."""
        layer_numbers = {match[1] for name in self.stored_names if (match := re.match(r"layers\.(\d+)\.", name))}
        if (layer_count := max(len(layer_numbers), len(self.prefixes))) > 1:
            raise UserError(f"mtp={self.files.source}: {layer_count} MTP layers; {SUPPORTED}")
        for substring, layer_kind in _KIND_BY_PART.items():
            if name := next((name for name in self.files.file_of if substring in name), None):
                raise UserError(f"mtp={self.files.source}: its layer has {layer_kind} ({name}); {SUPPORTED}")


def find_head(source: str) -> HeadTensors | None:
    """The tensors of the head in `source`, a directory, Hub name or GGUF file; None if there is no head.

    Reads the index only.
    """
    files = _open_files(source)
    for spelling, (pattern, local_names) in SPELLINGS.items():
        prefixes = tuple(sorted({match[1] for name in files.file_of if (match := re.fullmatch(pattern, name))}))
        if prefixes:
            file_by_name = {name: file for name, file in files.file_of.items() if name.startswith(prefixes)}
            head_names = [name for name in file_by_name if name.startswith(prefixes[-1])]
            stored_names = {_local_name(name.removeprefix(prefixes[-1]), local_names): name for name in head_names}
            return HeadTensors(spelling, prefixes, replace(files, file_of=file_by_name), stored_names)
    return None


def _local_name(stored_name: str, local_names: Mapping[str, str]) -> str:
    """The name here of a tensor with this `stored_name`, after the prefix. local_names: as in `SPELLINGS`."""
    stem, _, ending = stored_name.rpartition(".")
    return f"{local_names.get(stem, stem if stem.startswith('layers.') else LAYER + stem)}.{ending}"


def _open_files(source: str) -> TensorFiles:
    """The tensors of the model in `source`; of a GGUF file of any architecture, those of its MTP layers alone."""
    if (path := find_gguf(source)) is None:
        return open_tensors(source)
    block = NextnBlock(source, path)
    if block.file.metadata.get("general.architecture") == "llama":
        raise UserError(f"mtp={source}: general.architecture='llama': expected another, as its rows are moved")
    return TensorFiles(source, None, dict.fromkeys(block.tensors(), source), location=(source, None), original=block)
