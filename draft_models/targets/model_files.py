"""The files of a model directory that transformers reads itself; damage is named instead of giving a traceback."""

import re

from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from data_prep.formats.door import as_described, located
from data_prep.formats.torch_files import GENERATION_FILE
from draft_models.targets.empty_models import fitted
from draft_models.targets.tensor_files import open_tensors, require_floats, require_no_adapter
from outrider.errors import UserError, reason
from outrider.files import read_json
from outrider.progress import Stage


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
