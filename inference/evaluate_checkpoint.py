"""evaluate-checkpoint: a drafter checkpoint and prompts in, a report of losslessness and speed out.

evaluate-checkpoint checkpoint=runs/eesd prompts=python_stdlib method=eesd_beta
"""

from conf import entry
from inference.settings import EvaluateConfig


@entry("evaluate_checkpoint", EvaluateConfig)
def main(config: EvaluateConfig) -> None:
    # Imported once the config is known to be good: torch and transformers take seconds.
    from data_prep.conversations import render_prompt
    from data_prep.prompts import read_prompts
    from data_prep.settings import DataConfig
    from inference.compare import evaluate_checkpoint, heldout_fraction

    prompts = read_prompts(
        config.prompt_text or config.prompts,
        limit=config.num_prompts,
        prompt_chars=config.prompt_chars,
        heldout_fraction=heldout_fraction(config, DataConfig.heldout_fraction),
    )
    evaluate_checkpoint(
        config,
        prompts,
        lambda tokenizer, messages, chat: render_prompt(messages, tokenizer, config.template if chat else "none"),
    )


if __name__ == "__main__":
    main()
