"""What debug=true makes of the commands here: the same settings where they cost nothing, everything else small."""

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from data_prep.settings import DataConfig, GenerateConfig, MixPart, TrigramConfig
from draft_models.tiny_models import TARGET

RECORDS = 10  # files of the standard library; half of them held out

Config = TypeVar("Config")


def shrink(config: Config, models: Path, limits: dict[str, int], **changes: object) -> Config:
    """The config of a command with `small_data` in place of its `data`, no revision, and numbers cut to `limits`."""
    small = {key: min(getattr(config, key), limit) for key, limit in limits.items()}
    data = small_data(config.data, models)  # type: ignore[attr-defined]
    return replace(config, revision=None, data=data, **small, **changes)  # type: ignore[type-var]


def small_data(data: DataConfig, models: Path) -> DataConfig:
    """A few files of the standard library in the place of `data`, or of each of its sources; see `debugged`."""
    library = {"source": "python_stdlib", "layout": "code", "max_records": RECORDS}
    mix = {name: MixPart(**library, weight=part.weight) for name, part in data.mix.items()}  # type: ignore[arg-type]
    cache = str(models.parent / "cache")
    if mix:
        return DataConfig(source="mix", mix=mix, heldout_fraction=0.5, cache_dir=cache)
    return DataConfig(**library, heldout_fraction=0.5, cache_dir=cache)  # type: ignore[arg-type]


def small_responses(config: GenerateConfig, models: Path) -> GenerateConfig:
    """What debug=true makes of the config of generate-responses (see `debugged`)."""
    limits = {"prefix_tokens": 24, "max_new_tokens": 12, "top_k_logits": 8, "batch_size": 8, "shard_size": 8}
    return shrink(config, models, limits, target=str(models / TARGET))


def small_table(config: TrigramConfig, models: Path) -> TrigramConfig:
    """What debug=true makes of the config of build-trigrams (see `debugged`)."""
    return shrink(config, models, {}, tokenizer=str(models / TARGET), merge=(), workers=1, memory_gb=0.1)
