"""What transformers reads of a model directory by itself; damage there gets a name in place of a traceback."""

from typing import Any

from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from draft_models.target.tensor_files import find_file, open_tensors
from outrider.errors import UserError, reason
from outrider.files import read_json

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
_MOST_LAYERS = 2**12  # a config makes lists of this length before anything else of it is looked at


def require_description(source: str, revision: str | None, role: str) -> None:
    """Raise `UserError` for a config.json that is damaged, or that would make a model of absurd size."""
    file = find_file(source, CONFIG_FILE, revision)
    if file is None:
        return  # transformers says why
    described = read_json(file, "description of a model", "fetch the model again")
    if not isinstance(described, dict):
        raise UserError(f"{role}={source}: no usable {CONFIG_FILE} (found no mapping); fetch the model again")
    layers = described.get("num_hidden_layers", 1)
    if not isinstance(layers, int) or not 1 <= layers <= _MOST_LAYERS:
        raise UserError(
            f"{role}={source}: no usable {CONFIG_FILE} (num_hidden_layers={layers!r}: expected 1 to {_MOST_LAYERS})"
        )


def load_causal_lm(
    source: str, revision: str | None = None, *, role: str = "target", **options: Any
) -> PreTrainedModel:
    """The whole causal LM in `source` as transformers loads it, its safetensors only. Raises `UserError`.

    options: handed to `from_pretrained`. The index is read first: transformers would follow it out of the directory.
    """
    open_tensors(source, revision)
    try:
        return AutoModelForCausalLM.from_pretrained(
            source, revision=revision, trust_remote_code=False, use_safetensors=True, **options
        )
    except Exception as error:  # whatever an architecture makes of a config and weights it does not expect
        raise UserError(f"{role}={source}: cannot be loaded as a causal LM ({reason(error)})") from error


def load_generation_config(source: str, revision: str | None = None) -> GenerationConfig | None:
    """What generation_config.json says, None where there is none. Raises `UserError` for a damaged one."""
    file = find_file(source, GENERATION_FILE, revision)
    if file is None:
        return None
    what, remedy = "generation config", "fetch the model again"
    read_json(file, what, remedy)
    try:
        return GenerationConfig.from_pretrained(source, revision=revision or "main", trust_remote_code=False)
    except Exception as error:
        raise UserError(f"{file}: damaged {what} ({reason(error)}); {remedy}") from error
