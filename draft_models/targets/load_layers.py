"""Loading of all layers of a target, or of given ones, without reading any other weight."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from data_prep.formats.original import CONFIG_FILE
from draft_models.targets.attention import ATTENTION
from draft_models.targets.empty_models import empty_layers, spec_of
from draft_models.targets.tensor_files import TensorFiles
from outrider.errors import UserError, reason
from outrider.settings import listed

OLD_HEAD = "embed_out.weight"  # in GPT-NeoX's checkpoints; transformers now names it as in other models


def load_layers(
    files: TensorFiles,
    config: PreTrainedConfig,
    layers: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """The target with only `layers`: layer i of the result holds the weights of target layer `layers[i]`.

    Reads only the embedding, those layers, the final norm and (if untied) the head, as `files.bytes_read` proves.
    Frozen, in eval mode, with this toolkit's attention. Raises `UserError` if the weights do not fit the config.
    """
    model = empty_layers(config, layers)
    parts = spec_of(model)
    head = f"{parts.head}.weight"
    prefix = f"{parts.layers}."
    source_of = {name: _source_name(name, prefix, layers) for name in model.state_dict()}
    if head not in files.file_of and OLD_HEAD in files.file_of:
        source_of = {name: OLD_HEAD if source == head else source for name, source in source_of.items()}
    outside = {name for name in files.file_of if _layer_of(name, parts.layers) is None}
    missing = set(source_of.values()) - set(files.file_of)
    alone = missing == {head} and outside <= set(source_of.values())  # saved without a head: it is the embedding
    if config.tie_word_embeddings or alone:
        source_of = {name: source for name, source in source_of.items() if source != head}
    if missing - {head} or (missing and head in source_of.values()):
        return nn.Module.to(_load_converted(files, model, layers, dtype), device)
    stored = files.read(source_of.values(), dtype, device)
    weights = {name: stored[source] for name, source in source_of.items()}
    try:
        model.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as error:  # its second line names the first tensor
        named = " ".join(str(error).split("\n\t")[1:2]) or reason(error)
        raise UserError(f"{files.source}: its weights do not fit its {CONFIG_FILE} ({named})") from None
    if not {head, OLD_HEAD} & set(source_of.values()):
        model.get_submodule(parts.head).weight = model.get_submodule(parts.embed).weight
    model.requires_grad_(False).eval()
    return nn.Module.to(model, device)  # the rope buffers; PreTrainedModel's own has no type


def _load_converted(
    files: TensorFiles,
    model: PreTrainedModel,
    layers: Sequence[int],
    dtype: torch.dtype,
) -> PreTrainedModel:
    """`model` with weights that are stored under other names or in other pieces; transformers converts them.

    Experts of a mixture are stored separately and run as one tensor; names in old checkpoints lack a prefix.
    """
    parts = spec_of(model)
    source_of = {}
    for source in files.file_of:
        found = _layer_of(source, parts.layers)
        if found is None:
            source_of[source] = source
        elif int(found["index"]) in layers:
            index = list(layers).index(int(found["index"]))
            source_of[f"{source[: found.start('index')]}{index}{source[found.end('index') :]}"] = source
    stored = files.read(source_of.values(), dtype)
    weights = {name: stored[source] for name, source in source_of.items()}
    with _quiet():
        converted: Any = type(model).from_pretrained(
            None, config=model.config, state_dict=weights, dtype=dtype, attn_implementation=ATTENTION,
            output_loading_info=True, trust_remote_code=False,
        )  # fmt: skip
    loaded, info = converted
    for trouble in ("missing_keys", "mismatched_keys"):
        if info.get(trouble):
            raise UserError(
                f"{files.source}: its weights do not fit its {CONFIG_FILE} ({trouble.replace('_', ' ')}: "
                f"{listed(sorted(map(str, info[trouble])))})"
            )
    loaded.spec = parts
    return loaded.requires_grad_(False).eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers says nothing inside: neither progress nor warnings."""
    before, bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
        if bar:
            transformers_logging.enable_progress_bar()


def _layer_of(name: str, layers: str) -> "re.Match[str] | None":
    """The match of the layer index in the `name` of a tensor; None outside of `layers`."""
    return re.search(rf"(^|\.){layers.rpartition('.')[2]}\.(?P<index>\d+)\.", name)


def _source_name(name: str, prefix: str, layers: Sequence[int]) -> str:
    if not name.startswith(prefix):
        return name
    index, _, rest = name[len(prefix) :].partition(".")
    return f"{prefix}{layers[int(index)]}.{rest}"
