"""Opening of a target: its config, and whether it can be run layer by layer; tokenizer, files, fingerprint, layers.

The fingerprint of a target holds digests of its files; a drafter is bound to it. To prove a model is to compare its
weights and its logits with those of transformers. Codes are the integers of a quantised weight. The description of a
model is its config and tokenizer. An original is a model that is not plain safetensors, such as a GGUF file.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.base.errors import UserError, reason
from outrider.base.files import is_local, read_mapping
from outrider.base.machine import fast_dtype
from outrider.base.settings import construct
from outrider.draft_models.formats.convert import description_location, find_original, is_loaded_as_written, locate_file
from outrider.draft_models.formats.folder_model import quantisation_of
from outrider.draft_models.formats.gguf_file import MOST_LAYERS, find_gguf, open_gguf
from outrider.draft_models.formats.gguf_tokenizer import gguf_tokenizer
from outrider.draft_models.formats.stored_tensors import CONFIG_FILE, QUANT_FILE
from outrider.draft_models.targets import model_files
from outrider.draft_models.targets.attention import leave_out_cudnn
from outrider.draft_models.targets.file_record import FileRecord
from outrider.draft_models.targets.fingerprint import Fingerprint, fingerprint_target, why_not_text_alone
from outrider.draft_models.targets.int8 import quantise, require_linear
from outrider.draft_models.targets.model_spec import context_limit, rescaling_ropes
from outrider.draft_models.targets.narrowed import is_narrowed
from outrider.draft_models.targets.proof import LARGEST_COPY, prove_layers, prove_weights
from outrider.draft_models.targets.settings import MODEL, SMALL_LM
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.tensor_files import TensorFiles, find_file, open_tensors, require_no_adapter
from outrider.draft_models.targets.vocabulary import limit_rows, rows_of, vocabulary_digest

SHORTEST_CONTEXT = 8  # positions: the texts that check a target at load have a few tokens
_SUPPORTED = (
    "supported: fp8 with scales by block, ModelOpt's FP8, integers of 4 or 8 bits packed by GPTQ, AWQ or "
    "compressed-tensors, and GGUF files. Give the model it was made from, or a GGUF file of it"
)
NARROW_ROLES = (SMALL_LM, "drafter.path")  # options that accept a drafter with a draft vocabulary


@dataclass(frozen=True)
class OpenTarget:
    """A target. Its parts are opened on first use, and once. A missing or unusable part raises `UserError`."""

    source: str  # a directory, Hub name or GGUF file
    revision: str | None  # of the Hub repository
    config: PreTrainedConfig

    is_seen: ClassVar[bool] = True  # whether its weights can be read (see `unseen_target`)

    @cached_property
    def files(self) -> TensorFiles:
        return open_tensors(self.source, self.revision)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, marked with the number of the embedding's rows, by which `require_rows` refuses ids."""
        return limit_rows(load_tokenizer(self.source, self.revision), self.config.get_text_config().vocab_size)

    @cached_property
    def vocabulary_digest(self) -> str:
        return vocabulary_digest(self.tokenizer.get_vocab())

    @property
    def vocabulary_size(self) -> int | None:
        """The number of tokens; None: not known, which only `UnseenTarget` returns."""
        return self.config.vocab_size

    @cached_property
    def identity(self) -> dict[str, object]:
        """What a drafter is bound to, JSON-able: here the fingerprint."""
        return asdict(self.fingerprint)

    def resize(self, largest_id: int) -> "OpenTarget":
        """The target, known to write the token `largest_id`: an `UnseenTarget` may then get a larger vocabulary."""
        return self

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint. Fetches missing files."""
        return self.make_fingerprint(fetch=True)

    def make_fingerprint(self, *, fetch: bool) -> Fingerprint:
        """The fingerprint; fetch: fetch and include tensors that are not on this machine yet."""
        record = FileRecord(self.files, "fingerprint", self.source, self.revision)
        if (stored_fields := record.read()) is not None:
            return construct(Fingerprint, stored_fields)
        fingerprint = fingerprint_target(self.files, self.config, self.tokenizer, fetch=fetch)
        record.write(asdict(fingerprint))
        return fingerprint

    def require_int8(self) -> None:
        """Raise `UserError` unless it can be decoded with `dtype=int8`, as far as files other than weights show."""
        original = find_original(self.source, self.revision, weights=False)
        if original is not None and original.quantised:
            raise UserError(
                f"target={self.source}: its weights are quantised as they are stored, and dtype=int8 would quantise "
                "them a second time; give the model it was made from, or decode with dtype=fast"
            )
        require_linear(model_files.empty_model(self.config), f"target={self.source}")

    def layers(
        self,
        layer_indices: Sequence[int] | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        int8: bool = False,
        coded: bool = False,
    ) -> PreTrainedModel:
        """A model of the layers `layer_indices`, by default all, proven by `load_proven`. coded: quantised weights stay
        codes, for decoding on a CPU. int8: the weights are quantised from their stored dtype to codes of 8 bits, and
        the model computes in `dtype`."""
        indices = range(self.config.num_hidden_layers) if layer_indices is None else layer_indices
        load_dtype = stored_dtype(self.config) if int8 else dtype
        load_device = "cpu" if int8 else device  # which has room for the 16-bit weights beside the codes
        model = load_proven(self.files, self.config, indices, dtype=load_dtype, device=load_device, coded=coded)
        if int8:
            quantise(model, dtype, f"target={self.source}")
            nn.Module.to(model, device)
        return model

    def stack(
        self,
        layers: Sequence[int] | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        int8: bool = False,
        coded: bool = False,
    ) -> LayerStack:
        """The model of `layers` as a `LayerStack`, which can run a range of layers at a time."""
        return model_files.layer_stack(self.layers(layers, dtype=dtype, device=device, int8=int8, coded=coded))


def load_proven(
    files: TensorFiles,
    config: PreTrainedConfig,
    layer_indices: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    role: str = "target",
    coded: bool = False,
) -> PreTrainedModel:
    """The model of the layers `layer_indices`, proven by `prove_weights` and `prove_layers`. role: the model's option.

    For `prove_weights`, transformers loads the whole model. If it is larger than `LARGEST_COPY`, only its first layer
    is loaded, and of the other layers the shapes are compared. `prove_weights` is skipped if a file is not here. The
    disk cache records that a large model was proven (see `FileRecord`). Raises `UserError`.
    """
    model = model_files.load_layers(files, config, layer_indices, dtype=dtype, device=device, role=role, coded=coded)
    record = FileRecord(files, "proof", [*layer_indices], dtype, coded, device)
    if record.read():
        return model
    if files.original is not None and not files.original.transformers_reads_weights:  # such as a GGUF file
        files.original.prove_decoding()
    elif files.paths() is not None:  # all are on this machine
        full_model, part_config = model_files.empty_model(config), None
        if dtype.itemsize * sum(weight.numel() for weight in full_model.parameters()) > LARGEST_COPY:
            all_indices = range(config.num_hidden_layers)
            model_files.load_layers(files, config, all_indices, dtype=dtype, device="meta", role=role)  # checks shapes
            part_config = model_files.pick_layers(full_model, [0], memo={}).config
        reference = model_files.load_causal_lm(files.source, files.revision, role=role, part=part_config, dtype=dtype)
        prove_weights(model, layer_indices, reference, f"{role}={files.source}")
    prove_layers(model, f"{role}={files.source}")
    record.write(True)
    return model


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """The tokenizer's special token ids, under their names in model configs; None for one without a row (`rows_of`)."""
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    n_rows = rows_of(tokenizer)
    return {name: None if n_rows and token is not None and token >= n_rows else token for name, token in ids.items()}


def open_target(source: str, revision: str | None = None, *, by_layers: bool = True) -> OpenTarget:
    """The target in `source`. Raises `UserError` unless the runtime can be exact with its config. by_layers: False if
    transformers runs the target as a whole; then any architecture is accepted. The call turns cuDNN's attention off."""
    leave_out_cudnn()
    return OpenTarget(source, revision, (load_config if by_layers else read_config)(source, revision))


def load_tokenizer(source: str, revision: str | None = None, *, role: str = "target") -> PreTrainedTokenizerBase:
    """The target's tokenizer; role: the option that names it. Raises `UserError` if there is no usable tokenizer. With
    role="tokenizer" nothing else in `source` is read, so that it may lack the weights."""
    gguf_path, directory = find_gguf(source) if role == "tokenizer" else None, source
    if role != "tokenizer":
        directory, revision = description_location(source, revision)
    as_written = gguf_path is None and is_loaded_as_written(directory, revision)  # a conversion wrote it
    cls = transformers.PreTrainedTokenizerFast if as_written else transformers.AutoTokenizer
    try:
        if gguf_path is None:
            tokenizer = cls.from_pretrained(directory, revision=revision or "main", trust_remote_code=False)
        else:
            tokenizer = gguf_tokenizer(open_gguf(gguf_path))
        tokenizer.decode(tokenizer("a text")["input_ids"])  # some of its settings are only checked now
    except Exception as error:  # any error of the Hub client or of a tokenizer's own files
        raise UserError(f"{role}={source}: no usable tokenizer ({reason(error)})") from error
    tokenizer.name_or_path = source
    return tokenizer


def embedding_rows_in(source: str, revision: str | None) -> int | None:
    """The embedding rows of the model in a tokenizer's directory; None: no model there, or no such field."""
    file = locate_file(source, revision, CONFIG_FILE)
    n_rows = read_mapping(file, "description of a model", "fetch the model again").get("vocab_size") if file else None
    return n_rows if isinstance(n_rows, int) else None


def pick_device(name: str) -> torch.device:
    """The device called `name`; "auto" is the current CUDA device if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        use_device(device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device={name}: not usable here ({str(error).splitlines()[0]}); try device=auto") from None
    return device


def use_device(device: torch.device) -> None:
    """Make a named GPU the current one of this thread: streams, events and graphs are created there."""
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)


def pick_dtype(name: str, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """The dtype called `name`; "auto" is float32 on a CPU and the checkpoint's own elsewhere.

    "fast" is `fast_dtype` on a CPU, and the same as "auto" elsewhere. For "int8": the dtype the int8 model computes in,
    bfloat16 if `device` supports it natively, else float32; in float16 a sum over codes may overflow. If there is no
    GPU to ask, as in a plan, native support is assumed.
    """
    if name == "int8" or (name == "fast" and device.type == "cpu"):
        return fast_dtype(device)
    if name not in ("auto", "fast"):
        return getattr(torch, name)
    return torch.float32 if device.type == "cpu" else stored_dtype(config)


def stored_dtype(config: PreTrainedConfig) -> torch.dtype:
    """The dtype of a checkpoint's weights according to its config; float32 if the config does not state it."""
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def load_config(source: str, revision: str | None = None, *, role: str = "target") -> PreTrainedConfig:
    """The config of the model that the option `role` names. Raises `UserError` if no `LayerStack` runs it exactly."""
    config = read_config(source, revision, role=role)
    if (why := why_not_by_layers(config)) is not None:
        raise UserError(f"{role}={source}: {why}")
    if any(call.slides for call in model_files.model_spec(config).calls) and config.sliding_window < 1:
        raise UserError(f"{role}={source}: sliding_window={config.sliding_window}: expected at least 1 token, or null")
    return config


def read_config(source: str, revision: str | None = None, *, role: str = "target") -> PreTrainedConfig:
    """The config of a causal LM of any architecture. Raises `UserError`."""
    path = Path(source)
    if is_local(source) and not os.path.exists(source):
        raise UserError(f"{role}={source}: no such directory or file; give {MODEL}")
    require_description(source, revision, role)
    require_no_adapter(source, revision, role)
    name_or_path, revision = description_location(source, revision)
    try:
        config = transformers.AutoConfig.from_pretrained(name_or_path, revision=revision, trust_remote_code=False)
    except Exception as error:  # any error of an architecture's config class for unexpected values
        has_config = path.exists() or locate_file(name_or_path, revision, CONFIG_FILE)
        hint = "" if has_config else "no such local directory, and not to be had from the Hub; "
        raise UserError(f"{role}={source}: {hint}no usable {CONFIG_FILE} ({reason(error)})") from error
    config.name_or_path = source
    if role not in NARROW_ROLES and is_narrowed(config):
        raise UserError(
            f"{role}={source}: a drafter over some of its target's tokens (draft_vocabulary in {CONFIG_FILE}), which "
            "cannot be a target; give it as small_lm, and here a model of all tokens"
        )
    limit = context_limit(config)
    if limit < SHORTEST_CONTEXT:
        expected = f"expected at least {SHORTEST_CONTEXT}"
        raise UserError(f"{role}={source}: room for {limit} positions (max_position_embeddings); {expected}")
    return config


def require_description(source: str, revision: str | None, role: str) -> None:
    """Raise `UserError` for a config.json that is damaged, or that would make a model of absurd size, and for a
    quantisation by ModelOpt that this toolkit does not read. role: the option that names the model, for errors."""
    file = find_file(source, CONFIG_FILE, revision)
    if file is None:
        return  # transformers says why
    layer_count = read_mapping(file, "description of a model", "fetch the model again").get("num_hidden_layers", 1)
    # A config creates lists of this length before it checks other fields.
    if not isinstance(layer_count, int) or not 1 <= layer_count <= MOST_LAYERS:
        fault = f"num_hidden_layers={layer_count!r}: expected 1 to {MOST_LAYERS}"
        raise UserError(f"{role}={source}: no usable {CONFIG_FILE} ({fault})")
    quant_file = find_file(source, QUANT_FILE, revision)
    algorithm = quantisation_of(Path(file), Path(quant_file)).get("quant_algo") if quant_file else None
    if algorithm is not None:
        raise UserError(f"{role}={source}: quantised by {algorithm!r} ({QUANT_FILE}); {_SUPPORTED}")


def why_not_by_layers(config: PreTrainedConfig) -> str | None:
    """The reason why `LayerStack` cannot run a model of `config`; None if it can."""
    quant_config = getattr(config, "quantization_config", None) or {}
    quant_config = quant_config if isinstance(quant_config, dict) else quant_config.to_dict()
    if (why := why_not_text_alone(config) or why_quantised(quant_config)) is not None:
        return why
    try:
        model_files.model_spec(config)
    except UserError as error:
        return str(error)
    return None


def why_quantised(quant_config: Mapping[str, object]) -> str | None:
    """Why the weights, quantised as config.json's `quantization_config` says, cannot be read; None if it is empty."""
    if quant_config:
        bnb_methods = (f"bitsandbytes ({key})" for key in ("load_in_8bit", "load_in_4bit") if quant_config.get(key))
        method_name = str(quant_config.get("quant_method") or next(bnb_methods, "unnamed"))
        return f"quantised by {method_name!r} (quantization_config in {CONFIG_FILE}); {_SUPPORTED}"
    return None


def position_limit(config: PreTrainedConfig) -> int | None:
    """The number of positions of a model that are learned, or that its rope can have; None: it has any number."""
    if not getattr(config, "rope_parameters", None):
        return config.max_position_embeddings
    return context_limit(config) if rescaling_ropes(config) else None
