"""The files of a model directory that transformers reads itself; damage is named instead of giving a traceback."""

from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from data_prep.formats.door import as_described, located
from data_prep.formats.original import GENERATION_FILE
from draft_models.targets.tensor_files import open_tensors
from outrider.errors import UserError, reason
from outrider.files import read_json
from outrider.progress import Stage


def load_causal_lm(
    source: str, revision: str | None = None, *, role: str = "target", **options: object
) -> PreTrainedModel:
    """The whole causal LM in `source` as transformers runs it. Raises `UserError`.

    options: passed to `from_pretrained`. The index is checked first: transformers would follow it out of the directory.
    """
    where, revision = open_tensors(source, revision).place
    try:
        with Stage(f"loading {source} by transformers"):
            return AutoModelForCausalLM.from_pretrained(
                where, revision=revision, trust_remote_code=False, use_safetensors=True, **options
            )
    except Exception as error:  # any error of an architecture for an unexpected config or unexpected weights
        raise UserError(f"{role}={source}: cannot be loaded as a causal LM ({reason(error)})") from error


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
