"""Models as transformers loads them, whole or only some layers; damage is named instead of giving a traceback."""

import copy
import re
from collections.abc import Sequence

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from outrider.base.errors import UserError, reason
from outrider.base.files import read_json
from outrider.base.progress import Stage
from outrider.draft_models.formats.convert import as_described, located
from outrider.draft_models.formats.torch_files import GENERATION_FILE
from outrider.draft_models.targets.empty_models import empty_layers, fitted, spec_of
from outrider.draft_models.targets.tensor_files import (
    BASE_PREFIX,
    TensorFiles,
    open_tensors,
    require_floats,
    require_no_adapter,
)


def load_causal_lm(
    source: str, revision: str | None = None, *, role: str = "target", **options: object
) -> PreTrainedModel:
    """The whole causal LM in `source` as transformers runs it. Raises `UserError`, also if its weights do not fit.

    options: passed to `from_pretrained`. The index is checked first: transformers would follow it out of the directory.
    """
    require_no_adapter(source, revision, role)
    files = open_tensors(source, revision)
    held = dict(files.stored(files.file_of))  # raises for what transformers would pass over: a tensor in two files
    where, revision = files.place
    renamed = {"key_mapping": {f"^{re.escape(files.wrapped)}": ""}} if files.wrapped else {}
    with Stage(f"loading {source} by transformers"):
        model = fitted(
            AutoModelForCausalLM, where, f"{role}={source}", exact=None if "config" in options else bool(renamed),
            revision=revision, use_safetensors=True, **renamed, **options,
        )  # fmt: skip
    require_floats(f"{role}={source}", held, [name for name, _ in model.named_parameters()])
    if renamed:  # else the prefix would be put back where the model is saved
        conversions = vars(model)["_weight_conversions"]
        conversions[:] = [one for one in conversions if one.target_patterns != [""]]
    return model


def load_generation_config(source: str, revision: str | None = None) -> GenerationConfig | None:
    """The contents of generation_config.json; None if there is no such file. Raises `UserError` for a damaged one."""
    where, revision = as_described(source, revision)
    file = located(where, revision, GENERATION_FILE)
    if file is None:
        return None
    what, remedy = "generation config", "fetch the model again"
    read_json(file, what, remedy)
    try:
        return GenerationConfig.from_pretrained(where, revision=revision or "main", trust_remote_code=False)
    except Exception as error:
        raise UserError(f"{file}: damaged {what} ({reason(error)}); {remedy}") from error


def load_layers(
    files: TensorFiles,
    config: PreTrainedConfig,
    layers: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    role: str = "target",
) -> PreTrainedModel:
    """The target with only `layers`: layer i of the result holds the weights of target layer `layers[i]`.

    transformers itself puts the tensors in place, as where it loads the whole: it renames and converts old ones, ties
    the head, and keeps some in float32. Reads only the embedding, those layers, the final norm and (if untied) the
    head, as `files.bytes_read` proves. Frozen, in eval mode, with this toolkit's attention. role: the model's option.
    Raises `UserError` if the weights do not fit the config.
    """
    part = None if len(layers) < config.num_hidden_layers else False
    config = copy.deepcopy(config)
    config.dtype = dtype  # in which transformers makes buffers, too
    model = empty_layers(config, layers)
    names = _names(files, spec_of(model).layers, layers)
    added = (
        BASE_PREFIX if files.headless else ""
    )  # transformers puts its own there, which an architecture may call else
    computed = dict(model.named_non_persistent_buffers())  # transformers would make them again, under FSDP of zeros
    filling = type(type(model).__name__, (type(model),), {"__new__": lambda *_, **__: model})
    options = {} if torch.device(device).type == "cpu" else {"device_map": {"": device}}
    with Stage(f"reading {files.source}", len(names), "tensors") as stage:
        stored = files.unread(set(names.values()), device, stage)
        fitted(
            filling, None, f"{role}={files.source}", exact=bool(files.wrapped) or part, config=model.config,
            dtype=dtype, state_dict={n.removeprefix(added): stored[source] for n, source in names.items()}, **options,
        )  # fmt: skip
    for name, buffer in computed.items():
        module, _, last = name.rpartition(".")
        setattr(model.get_submodule(module), last, buffer)
    model.requires_grad_(False).eval()
    return nn.Module.to(model, device)  # the rope buffers; PreTrainedModel's own has no type


def _names(files: TensorFiles, list_name: str, layers: Sequence[int]) -> dict[str, str]:
    """Tensor name in a model of `layers` → name in the files; a layer may stand at several places."""
    numbered, names = re.compile(rf"(^|\.){list_name.rpartition('.')[2]}\.(\d+)\."), dict[str, str]()
    for source in files.file_of:
        if (found := numbered.search(source)) is None:
            names[source] = source
        else:
            places = [place for place, layer in enumerate(layers) if layer == int(found[2])]
            names |= {f"{source[: found.start(2)]}{place}{source[found.end(2) :]}": source for place in places}
    return names
