"""What transformers reads of a model directory by itself; damage there gets a name in place of a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from data_prep.formats.door import as_safetensors, located
from data_prep.formats.original import CONFIG_FILE, GENERATION_FILE, MOST_LAYERS
from data_prep.formats.torch_files import SAFETENSORS
from draft_models.targets.tensor_files import find_file, open_tensors
from outrider.errors import UserError, reason
from outrider.files import read_json
from outrider.progress import Stage

# Sizes of a config none of which is more than the longest dimension of the model's tensors.
_SIZES = ("vocab_size", "hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads")


def require_description(source: str, revision: str | None, role: str) -> None:
    """Raise `UserError` for a config.json that is damaged, or that would make a model of absurd size."""
    file = find_file(source, CONFIG_FILE, revision)
    if file is None:
        return  # transformers says why
    described = read_json(file, "description of a model", "fetch the model again")
    if not isinstance(described, dict):
        raise UserError(f"{role}={source}: no usable {CONFIG_FILE} (found no mapping); fetch the model again")
    layers = described.get("num_hidden_layers", 1)
    # A config makes lists of this length before anything else of it is looked at.
    if not isinstance(layers, int) or not 1 <= layers <= MOST_LAYERS:
        raise UserError(
            f"{role}={source}: no usable {CONFIG_FILE} (num_hidden_layers={layers!r}: expected 1 to {MOST_LAYERS})"
        )


def require_stored(config: PreTrainedConfig, source: str, revision: str | None, role: str) -> None:
    """Raise `UserError` where `config` speaks of more layers, or of wider ones, than the weights have.

    Reads headers only, before anything is built by the config. Of weights that are not on this machine yet nothing is
    known here; what loads them compares every shape.
    """
    file = find_file(source, CONFIG_FILE, revision)  # a Hub repository's lies in a directory, too
    folder = Path(file).parent if file else Path(source)
    if not any((folder / name).exists() for name in (SAFETENSORS.index, SAFETENSORS.single)):
        return
    files = open_tensors(str(folder))
    here = [name for name, one in files.file_of.items() if (folder / one).exists()]
    longest = max((size for _, stored in files.stored(here) for size in stored.shape), default=None)
    limits = {"num_hidden_layers": files.numbered_layers()} | dict.fromkeys(_SIZES, longest)
    for key, limit in limits.items():
        said = getattr(config, key, None)
        if limit is not None and isinstance(said, int) and said > limit:
            has = f"have {limit} layers" if key == "num_hidden_layers" else f"have no dimension above {limit}"
            raise UserError(
                f"{role}={source}: {key}={said} in {CONFIG_FILE}, but the weights {has}; fetch the model again"
            )


def load_causal_lm(
    source: str, revision: str | None = None, *, role: str = "target", **options: Any
) -> PreTrainedModel:
    """The whole causal LM in `source` as transformers runs it. Raises `UserError`.

    options: handed to `from_pretrained`. The index is read first: transformers would follow it out of the directory.
    """
    where, revision = open_tensors(source, revision).place
    try:
        with Stage(f"loading {source} by transformers"):
            return AutoModelForCausalLM.from_pretrained(
                where, revision=revision, trust_remote_code=False, use_safetensors=True, **options
            )
    except Exception as error:  # whatever an architecture makes of a config and weights it does not expect
        raise UserError(f"{role}={source}: cannot be loaded as a causal LM ({reason(error)})") from error


def load_generation_config(source: str, revision: str | None = None) -> GenerationConfig | None:
    """What generation_config.json says, None where there is none. Raises `UserError` for a damaged one."""
    where, revision = as_safetensors(source, revision)
    file = located(where, revision, GENERATION_FILE)
    if file is None:
        return None
    what, remedy = "generation config", "fetch the model again"
    read_json(file, what, remedy)
    try:
        return GenerationConfig.from_pretrained(where, revision=revision or "main", trust_remote_code=False)
    except Exception as error:
        raise UserError(f"{file}: damaged {what} ({reason(error)}); {remedy}") from error


@contextmanager
def quiet() -> Iterator[None]:
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
