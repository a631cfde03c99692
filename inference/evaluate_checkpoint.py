"""evaluate-checkpoint: a drafter checkpoint and prompts in, a report of losslessness and speed out.

evaluate-checkpoint checkpoint=runs/eesd prompts=python_stdlib method=eesd_survival
"""

from conf import entry
from inference.settings import EvaluateConfig


@entry("evaluate_checkpoint", EvaluateConfig)
def main(config: EvaluateConfig) -> None:
    # Imported once the config is known to be good: torch and transformers take seconds.
    from inference.evaluate.command import evaluate

    evaluate(config)


if __name__ == "__main__":
    main()
