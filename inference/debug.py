"""What debug=true makes of an evaluation: the same methods on tiny random models, with few tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from draft_models.tiny_models import TARGET
from inference.drafters.registry import KINDS
from inference.settings import EvaluateConfig


def small_evaluation(config: EvaluateConfig, models: Path) -> EvaluateConfig:
    """See `debugged`."""
    given: dict[str, Any] = {
        kind.option: str(models / kind.tiny)
        for kind in KINDS.values()
        if kind.option and kind.tiny and config.where(kind)
    }
    return replace(
        config,
        target=str(models / TARGET),
        revision=None,
        **given,
        prompts="python_stdlib",
        prompt_text=[],
        prompt_chars=min(config.prompt_chars, 120),
        num_prompts=2,
        max_new_tokens=min(config.max_new_tokens, 16),
        repeats=1,
    )
