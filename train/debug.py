"""What debug=true makes of the commands here: the same settings where they cost nothing, everything else small."""

from dataclasses import replace
from pathlib import Path

from data_prep.debug import small_data
from draft_models.tiny_model import EARLY_EXIT, SMALL_LM, TARGET
from train.settings import CalibrateConfig, DrafterConfig, EesdConfig, FinetuneConfig, FitConfig, WandbConfig

SEQ_LEN = 64
STEPS = 2


def small_fit(fit: FitConfig) -> FitConfig:
    """Two steps, evaluated and saved each; the rows of a step stay, as the processes are to share them evenly."""
    return replace(
        fit,
        steps=STEPS,
        epochs=None,
        warmup=min(fit.warmup, STEPS),
        log_every=1,
        eval_every=1,
        save_every=1,
        wandb=WandbConfig(mode="disabled"),
    )


def small_eesd(config: EesdConfig, models: Path) -> EesdConfig:
    """See `debugged`."""
    return replace(
        config,
        target=str(models / TARGET),
        revision=None,
        data=small_data(config.data, models),
        fit=small_fit(config.fit),
        exit_layer=1,
        seq_len=min(config.seq_len, SEQ_LEN),
        eval_rows=min(config.eval_rows, 4),
        decode_prompts=min(config.decode_prompts, 2),
        decode_tokens=min(config.decode_tokens, 8),
    )


def small_calibrate(config: CalibrateConfig, models: Path) -> CalibrateConfig:
    """See `debugged`."""
    return replace(
        config,
        checkpoint=str(models / EARLY_EXIT),
        target=None,
        revision=None,
        data=small_data(config.data, models),
        fit=small_fit(config.fit),
        prompts=min(config.prompts, 4),
        heldout_prompts=min(config.heldout_prompts, 2),
        seq_len=min(config.seq_len, SEQ_LEN),
        new_tokens=min(config.new_tokens, 8),
        max_draft=min(config.max_draft, 4),
    )


def small_finetune(config: FinetuneConfig, models: Path) -> FinetuneConfig:
    """See `debugged`. A drafter to start from is a tiny one as well; one from random weights keeps what else it has."""
    shape = {"layers": 1, "hidden": 64, "heads": 4, "kv_heads": None, "intermediate": 96, "tied": config.drafter.tied}
    return replace(
        config,
        target=str(models / TARGET),
        revision=None,
        data=small_data(config.data, models),
        drafter=DrafterConfig(path=str(models / SMALL_LM)) if config.drafter.path else DrafterConfig(**shape),  # type: ignore[arg-type]
        fit=small_fit(config.fit),
        on_policy_tokens=min(config.on_policy_tokens, 8),
        seq_len=min(config.seq_len, SEQ_LEN),
        decode_prompts=min(config.decode_prompts, 2),
        decode_tokens=min(config.decode_tokens, 8),
    )
