"""What a model is, wherever it lies: the part of its config that decides numbers, and digests of its tensors."""

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from data_prep.formats.door import as_safetensors
from draft_models.targets.tensor_files import TensorFiles
from outrider.settings import differences, listed

# The fields of config.json that decide no number; any other, also one unknown here, does.
NOT_DECIDING = {
    "_name_or_path", "_commit_hash", "transformers_version",  # where it came from, and what wrote it
    "architectures", "auto_map",  # Python classes: the runtime goes by model_type, and runs no code of a model's
    "dtype", "torch_dtype",  # each run chooses and records its own; the stored one is in the tensors' digests
    "use_cache", "output_attentions", "output_hidden_states", "return_dict",  # what comes back beside the logits
    "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params",  # of classifiers
    "initializer_range", "init_std",  # the weights before training
    "gradient_checkpointing",  # memory while training
}  # fmt: skip


def model_identity(files: TensorFiles, *, fetch: bool = True) -> dict[str, Any]:
    """{"config", "tensors"}, JSON-able, equal for the same model anywhere: `deciding_config` and a sample of every
    tensor by part of the model (see `TensorFiles.digests`)."""
    config = deciding_config(files.source, files.revision)
    return {"config": config, "tensors": files.digests(files.file_of, fetch=fetch)}


def deciding_config(source: str, revision: str | None) -> dict[str, object]:
    """What config.json says, less `NOT_DECIDING`: as it stands there, not as this version of transformers has it."""
    place, revision = as_safetensors(source, revision)
    values, _ = PreTrainedConfig.get_config_dict(place, revision=revision)
    return {key: value for key, value in values.items() if key not in NOT_DECIDING}


def model_differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """In words, in what a target's `model_identity` is not the one a drafter was made for. What one lacks is passed."""
    before, now = mine.get("config"), theirs.get("config")
    known = before is not None and now is not None
    found = config_differences(before, now) if known else []
    words = [f"config.{key}: drafter {a!r}, target {b!r}" for key, a, b in found]
    return words + changed_parts(mine.get("tensors") or {}, theirs.get("tensors") or {})


def changed_parts(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """One line that names the parts of `before` whose digest is another or missing `now`; none where none is."""
    parts = [part for part in sorted(before) if before[part] != now.get(part)]
    return [f"the weights differ in {listed(parts)}"] if parts else []


def config_differences(old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    """`differences` in meaning of two `deciding_config`s: a field spelt out is no other than the same by default."""
    return differences(old, new) and differences(_completed(old), _completed(new))


def _completed(config: Any) -> Any:
    """The config with this transformers' names and defaults for everything, where it makes sense to it."""
    try:
        completed = AutoConfig.for_model(**config).to_dict()
    except Exception:  # of its many validators; the difference is then shown as it stands
        return config
    return {key: value for key, value in completed.items() if key not in NOT_DECIDING}
