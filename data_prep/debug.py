"""What debug=true makes of the commands here: the same settings where they cost nothing, everything else small."""

from dataclasses import replace
from pathlib import Path

from data_prep.settings import DataConfig, GenerateConfig, MixPart, TrigramConfig
from draft_models.tiny_model import TARGET

RECORDS = 10  # files of the standard library; half of them held out


def small_data(data: DataConfig, models: Path) -> DataConfig:
    """A few files of the standard library in the place of `data`, or of each of its sources; see `debugged`."""
    library = {"source": "python_stdlib", "layout": "code", "max_records": RECORDS}
    mix = {name: MixPart(**library, weight=part.weight) for name, part in data.mix.items()}  # type: ignore[arg-type]
    cache = str(models.parent / "cache")
    if mix:
        return DataConfig(source="mix", mix=mix, heldout_fraction=0.5, cache_dir=cache)
    return DataConfig(**library, heldout_fraction=0.5, cache_dir=cache)  # type: ignore[arg-type]


def small_responses(config: GenerateConfig, models: Path) -> GenerateConfig:
    """See `debugged`."""
    return replace(
        config,
        target=str(models / TARGET),
        revision=None,
        data=small_data(config.data, models),
        prefix_tokens=min(config.prefix_tokens, 24),
        max_new_tokens=min(config.max_new_tokens, 12),
        top_k_logits=min(config.top_k_logits, 8),
        batch_size=min(config.batch_size, 8),
        shard_size=min(config.shard_size, 8),
    )


def small_table(config: TrigramConfig, models: Path) -> TrigramConfig:
    """See `debugged`."""
    return replace(
        config,
        tokenizer=str(models / TARGET),
        revision=None,
        data=small_data(config.data, models),
        merge=(),
        workers=1,
        memory_gb=0.1,
    )
