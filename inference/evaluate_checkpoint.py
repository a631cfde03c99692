"""evaluate-checkpoint: a drafter checkpoint and prompts in, a report of losslessness and speed out."""

from outrider.commands import entry
from outrider.commands.evaluating import run, with_methods
from outrider.inference.settings.evaluate import EvaluateConfig


@entry("evaluate_checkpoint", EvaluateConfig, complete=with_methods)
def main(config: EvaluateConfig) -> None:
    run(config)


if __name__ == "__main__":
    main()
