"""evaluate-checkpoint: reads the prompts, then compares methods on them or replays recorded answers."""

from dataclasses import replace

from data_prep.text.prompts import read_prompts
from data_prep.text.rehearsal import rehearsable
from inference.evaluate.compare import evaluate_checkpoint
from inference.loading.memory_plan import plan_evaluation
from inference.loading.targets import find_target, heldout_fraction
from inference.measure.replay import evaluate_replay
from inference.settings.evaluate import EvaluateConfig


@rehearsable
def evaluate(config: EvaluateConfig) -> None:
    """Run the command (see `evaluate_checkpoint` and `evaluate_replay`). Raises `UserError`."""
    if config.plan:
        print(plan_evaluation(config, find_target(config).config), flush=True)
        return
    prompts = read_prompts(
        config.prompt_text or config.prompts,
        limit=config.num_prompts,
        prompt_chars=config.prompt_chars,
        heldout_fraction=heldout_fraction(config),
    )
    if config.engine is not None:
        config = replace(config, methods=config.all_methods, draft_tokens=())
    if config.target == "replay":
        evaluate_replay(config, prompts)
    else:
        evaluate_checkpoint(config, prompts)
