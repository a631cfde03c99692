"""evaluate-checkpoint: a drafter checkpoint and prompts in, a report of losslessness and speed out.

evaluate-checkpoint checkpoint=runs/eesd prompts=python_stdlib method=eesd_beta
"""

from conf import entry
from inference.settings import EvaluateConfig


@entry("evaluate_checkpoint", EvaluateConfig)
def main(config: EvaluateConfig) -> None:
    # Imported once the config is known to be good: torch and transformers take seconds.
    from data_prep.settings import DataConfig
    from data_prep.text.chat import VICUNA_SYSTEM, render_prompt
    from data_prep.text.prompts import read_prompts
    from draft_models.rehearsal import rehearsable
    from inference.evaluate.compare import evaluate_checkpoint
    from inference.evaluate.replay import evaluate_replay
    from inference.evaluate.subject import heldout_fraction

    @rehearsable
    def evaluate(run: EvaluateConfig) -> None:
        prompts = read_prompts(
            run.prompt_text or run.prompts,
            limit=run.num_prompts,
            prompt_chars=run.prompt_chars,
            heldout_fraction=heldout_fraction(run, DataConfig.heldout_fraction),
        )
        if run.target == "replay":
            evaluate_replay(run, prompts, VICUNA_SYSTEM)
            return
        evaluate_checkpoint(
            run,
            prompts,
            lambda tokenizer, messages, chat: render_prompt(messages, tokenizer, run.template if chat else "none"),
        )

    evaluate(config)


if __name__ == "__main__":
    main()
