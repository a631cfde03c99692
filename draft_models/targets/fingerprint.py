"""The identity of a drafter's target: config, tokenizer, and digests of its tensors."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase

from outrider.base.errors import UserError
from outrider.base.files import differences, digest_of
from outrider.base.words import list_words
from outrider.draft_models.formats.convert import description_location
from outrider.draft_models.formats.save_model import with_older_rope
from outrider.draft_models.targets.model_files import model_spec
from outrider.draft_models.targets.tensor_files import TensorFiles
from outrider.draft_models.targets.vocabulary import tokenizer_digest

# The fields of config.json that do not affect logits; every other field counts, also an unknown one.
NOT_DECIDING = {
    "_name_or_path", "_commit_hash", "transformers_version",  # where it came from, and what wrote it
    "architectures", "auto_map",  # Python classes: the runtime goes by model_type, and runs no code of a model's
    "dtype", "torch_dtype",  # each run chooses and records its own; the stored one is in the tensors' digests
    "use_cache", "output_attentions", "output_hidden_states", "return_dict",  # further outputs of a forward
    "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params",  # of classifiers
    "initializer_range", "init_std",  # the weights before training
    "gradient_checkpointing",  # memory while training
}  # fmt: skip


@dataclass(frozen=True)
class Fingerprint:
    """The identity of a drafter's target. All fields except `target` (a path or Hub name) and `revision` must match.

    weights: digest of a few rows of the first and the last layer and of the tensors outside layers. tokenizer,
    chat_template: digests. config: the fields of config.json that affect logits. tensors: digests of a sample of every
    tensor, by part of the model (see `TensorFiles.digests`), except parts that were not on the machine.
    """

    target: str
    revision: str | None
    architecture: str
    layers: int
    hidden_size: int
    vocab_size: int
    weights: str
    tokenizer: str
    chat_template: str | None
    config: dict[str, object]
    tensors: dict[str, str]

    def differences(self, target: "Fingerprint") -> list[str]:
        """Descriptions of the fields, except path and revision, in which `target` differs from the drafter's."""
        drafter_fields, target_fields = dataclasses.asdict(self), dataclasses.asdict(target)
        descriptions = [
            f"{field_name}: drafter {value!r}, target {target_fields[field_name]!r}"
            for field_name, value in drafter_fields.items()
            if field_name not in ("target", "revision", "config", "tensors") and value != target_fields[field_name]
        ]
        return descriptions + model_differences(drafter_fields, target_fields)  # of config and tensors


def require_text_alone(config: PreTrainedConfig) -> None:
    """Raise `UserError` for a model that also reads images or sounds, whose text model is a part."""
    if (why := why_not_text_alone(config)) is not None:
        raise UserError(f"target={config.name_or_path}: {why}")


def why_not_text_alone(config: PreTrainedConfig) -> str | None:
    """The reason why the model is more than a text model; None if it is not."""
    is_part = config.get_text_config() is not config
    why = f"a {config.model_type} model has other parts than text; give its text model alone, as a directory"
    return why if is_part else None


def fingerprint_target(
    files: TensorFiles, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, *, fetch: bool = True
) -> Fingerprint:
    """The fingerprint of a target. Reads a few MB, and fetches missing files unless `fetch` is off."""
    require_text_alone(config)
    try:
        prefixes = model_spec(config).prefixes((0, config.num_hidden_layers - 1))
    except UserError:  # its layers are unknown: all tensors
        prefixes = ("",)
    return Fingerprint(
        target=files.source,
        revision=files.revision,
        architecture=config.model_type,
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        weights=files.digest(name for name in files.file_of if name.startswith(prefixes)),
        tokenizer=tokenizer_digest(tokenizer)[:16],
        chat_template=None if tokenizer.chat_template is None else digest_of(tokenizer.chat_template)[:16],
        **model_identity(files, fetch=fetch),
    )


def model_identity(files: TensorFiles, *, fetch: bool = True) -> dict[str, Any]:
    """{"config", "tensors"}, JSON-able, equal for the same model anywhere: `deciding_config` and digests of a sample
    of every tensor, by part of the model (see `TensorFiles.digests`)."""
    config = deciding_config(files.source, files.revision)
    return {"config": config, "tensors": files.digests(files.file_of, fetch=fetch)}


def deciding_config(source: str, revision: str | None) -> dict[str, object]:
    """The fields of config.json, without `NOT_DECIDING`, as they stand in the file, without transformers' defaults, and
    without those that repeat its `rope_parameters` for older readers."""
    location, revision = description_location(source, revision)
    fields, _ = PreTrainedConfig.get_config_dict(location, revision=revision)
    rope_fields = dict[str, object]((key, fields[key]) for key in ("model_type", "rope_parameters") if key in fields)
    old_items = [(key, value) for key, value in with_older_rope(rope_fields).items() if key not in rope_fields]
    return {key: value for key, value in fields.items() if key not in NOT_DECIDING and (key, value) not in old_items}


def model_differences(drafter_identity: Mapping[str, Any], target_identity: Mapping[str, Any]) -> list[str]:
    """How a target's `model_identity` differs from a drafter's, in words; facts that one lacks are not compared."""
    configs = drafter_identity.get("config"), target_identity.get("config")
    changes = [] if None in configs else config_differences(*configs)
    descriptions = [f"config.{key}: drafter {old!r}, target {new!r}" for key, old, new in changes]
    return descriptions + changed_parts(drafter_identity.get("tensors") or {}, target_identity.get("tensors") or {})


def changed_parts(old_digests: Mapping[str, str], digests: Mapping[str, str]) -> list[str]:
    """One line naming the parts of `old_digests` whose digest differs in `digests` or is missing there; empty: none."""
    changed = [part for part in sorted(old_digests) if old_digests[part] != digests.get(part)]
    return [f"the weights differ in {list_words(changed)}"] if changed else []


def config_differences(old_config: object, new_config: object) -> list[tuple[str, object, object]]:
    """The differences of two `deciding_config`s; a field that states its default equals a missing field."""
    return differences(old_config, new_config) and differences(_add_defaults(old_config), _add_defaults(new_config))


def _add_defaults(config: Any) -> Any:
    """The config with the names and defaults of the installed transformers, if it accepts the config."""
    try:
        completed = AutoConfig.for_model(**config).to_dict()
    except Exception:  # of its many validators; the fields are then compared unchanged
        return config
    return {key: value for key, value in completed.items() if key not in NOT_DECIDING}
