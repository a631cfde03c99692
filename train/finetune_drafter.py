"""Train a small LM as a drafter for a target."""

from outrider.commands import entry
from outrider.train.settings.drafters import FinetuneConfig


@entry("finetune_drafter", FinetuneConfig)
def main(config: FinetuneConfig) -> None:
    # Imported once the config is known to be good: torch and transformers take seconds.
    from outrider.train.recipes.small_lm import finetune_drafter

    finetune_drafter(config)


if __name__ == "__main__":
    main()
