"""evaluate-checkpoint: a drafter checkpoint and prompts in, a report of losslessness and speed out.

evaluate-checkpoint checkpoint=runs/eesd prompts=python_stdlib method=eesd_beta
"""

from conf import entry
from inference.settings import EvaluateConfig


@entry("evaluate_checkpoint", EvaluateConfig)
def main(config: EvaluateConfig) -> None:
    # Imported once the config is known to be good: torch and transformers take seconds.
    from data_prep.conversations import VICUNA_SYSTEM, render_prompt
    from data_prep.prompts import read_prompts
    from data_prep.settings import DataConfig
    from inference.compare import evaluate_checkpoint
    from inference.replay import evaluate_replay
    from inference.subject import heldout_fraction

    if config.debug:
        from draft_models.tiny_model import debugged
        from inference.debug import small_evaluation

        config = debugged(config, small_evaluation)
    prompts = read_prompts(
        config.prompt_text or config.prompts,
        limit=config.num_prompts,
        prompt_chars=config.prompt_chars,
        heldout_fraction=heldout_fraction(config, DataConfig.heldout_fraction),
    )
    if config.target == "replay":
        evaluate_replay(config, prompts, VICUNA_SYSTEM)
        return
    evaluate_checkpoint(
        config,
        prompts,
        lambda tokenizer, messages, chat: render_prompt(messages, tokenizer, config.template if chat else "none"),
    )


if __name__ == "__main__":
    main()
