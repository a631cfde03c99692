"""What debug=true makes of the commands here: the same settings where they cost nothing, everything else small."""

from dataclasses import replace
from pathlib import Path

from data_prep.debug import shrink
from draft_models.tiny_models import EARLY_EXIT, SMALL_LM, TARGET
from train.fit_settings import FitConfig, WandbConfig
from train.settings import CalibrateConfig, DrafterConfig, EesdConfig, FinetuneConfig

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
    limits = {"seq_len": SEQ_LEN, "eval_rows": 4, "decode_prompts": 2, "decode_tokens": 8}
    return shrink(config, models, limits, target=str(models / TARGET), fit=small_fit(config.fit), exit_layer=1)


def small_calibrate(config: CalibrateConfig, models: Path) -> CalibrateConfig:
    """See `debugged`."""
    limits = {"prompts": 4, "heldout_prompts": 2, "seq_len": SEQ_LEN, "new_tokens": 8, "max_draft": 4}
    return shrink(config, models, limits, checkpoint=str(models / EARLY_EXIT), target=None, fit=small_fit(config.fit))


def small_finetune(config: FinetuneConfig, models: Path) -> FinetuneConfig:
    """See `debugged`. A drafter to start from is a tiny one as well; one from random weights keeps what else it has."""
    shape = DrafterConfig(layers=1, hidden=64, heads=4, intermediate=96, tied=config.drafter.tied)
    drafter = DrafterConfig(path=str(models / SMALL_LM)) if config.drafter.path else shape
    limits = {"seq_len": SEQ_LEN, "on_policy_tokens": 8, "decode_prompts": 2, "decode_tokens": 8}
    return shrink(config, models, limits, target=str(models / TARGET), drafter=drafter, fit=small_fit(config.fit))
