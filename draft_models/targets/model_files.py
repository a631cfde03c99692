"""What transformers reads of a model directory by itself; damage there gets a name in place of a traceback."""

from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from data_prep.formats.door import as_safetensors, located
from data_prep.formats.original import GENERATION_FILE
from draft_models.targets.tensor_files import open_tensors
from outrider.errors import UserError, reason
from outrider.files import read_json
from outrider.progress import Stage


def load_causal_lm(
    source: str, revision: str | None = None, *, role: str = "target", **options: object
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
