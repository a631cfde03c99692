"""Block drafters as llama.cpp reads them: a GGUF file of its architecture `dflash`, which is DSpark's too."""

from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from outrider.base.errors import UserError
from outrider.draft_models.dflash.model import DFlash
from outrider.draft_models.formats.gguf_file import MetadataValue
from outrider.draft_models.formats.gguf_model import tensor_names
from outrider.draft_models.formats.gguf_write import require_gguf, write_file
from outrider.draft_models.heads.configs import layer_config, layer_fields_of
from outrider.draft_models.heads.files import DRAFT_TOKENS
from outrider.draft_models.targets.model_files import empty_model

# The tensors that no Qwen3 has: name in `DFlash` → name in the file. d2t: the target's id of each draft token.
_DRAFTER_GGUF_NAMES = {
    "fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight", DRAFT_TOKENS: "d2t",
    "markov_head.markov_w1.weight": "markov_w1.weight", "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight", "confidence_head.proj.bias": "conf_proj.bias",
}  # fmt: skip


def write_gguf_drafter(
    drafter: DFlash,
    target: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    quant_type: str | None = None,  # of matrices: `block_kind` of `write_file`
) -> None:
    """Write `drafter`, for a target of config `target` and with its `tokenizer`, as `write_gguf` writes a model.

    Facts of llama.cpp's src/models/dflash.cpp and conversion/qwen.py (2026-10): layers are Qwen3's; target_layers are
    taps (i: the input of layer i); d2t has target ids, not offsets; the mask is a token of the tokenizer; a Markov head
    makes it DSpark, whose rows predict the token after theirs. Raises `UserError` for what that cannot express.
    """
    reading = drafter.reading  # how its tensors are meant; field_fits: whether llama.cpp means the same
    field_fits = {
        "causal": not reading.causal, "windows": not any(reading.windows), "neox": reading.neox,
        "embedding_scale": reading.embedding_scale == 1.0, "confidence": reading.confidence != "hidden",
        "head_norms": reading.head_norms, "target_hidden": reading.target_hidden == reading.hidden,
        "sample_from_anchor": reading.sample_from_anchor == (reading.markov_rank > 0),
    }  # fmt: skip
    if lost := ", ".join(
        f"{name}={getattr(reading, name)!r}" for name, is_readable in field_fits.items() if not is_readable
    ):
        raise UserError(f"engine=llama_cpp: has no word for {lost}, so it would run another drafter; take engine=vllm")
    config = layer_config(layer_fields_of(reading, target), reading.layers)
    metadata: dict[str, MetadataValue] = {
        key.replace("qwen3.", "dflash."): value for key, value in require_gguf(config, tokenizer).items()
    }
    metadata |= {"general.architecture": "dflash", "dflash.block_size": reading.block}
    metadata |= {"dflash.target_layers": [*reading.taps], "tokenizer.ggml.mask_token_id": reading.mask_token}
    ggml_names = tensor_names(empty_model(config), "qwen3").items()
    names = {parameter.removeprefix("model."): name for name, parameter in ggml_names} | _DRAFTER_GGUF_NAMES
    write_file(config, metadata, {names[key]: tensor for key, tensor in drafter.state_dict().items()}, path, quant_type)
