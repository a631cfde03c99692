"""What debug=true makes of an evaluation: the same methods on tiny random models, with few tokens."""

from dataclasses import replace
from pathlib import Path

from draft_models.tiny_models import EARLY_EXIT, SMALL_LM, TABLE, TARGET
from inference.settings import EvaluateConfig


def small_evaluation(config: EvaluateConfig, models: Path) -> EvaluateConfig:
    """See `debugged`."""
    return replace(
        config,
        target=str(models / TARGET),
        revision=None,
        checkpoint=str(models / EARLY_EXIT) if config.checkpoint else None,
        small_lm=str(models / SMALL_LM) if config.small_lm else None,
        table=str(models / TABLE) if config.table else None,
        prompts="python_stdlib",
        prompt_text=[],
        prompt_chars=min(config.prompt_chars, 120),
        num_prompts=2,
        max_new_tokens=min(config.max_new_tokens, 16),
        repeats=1,
    )
