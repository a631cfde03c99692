"""Train EESD's early-exit drafter for a target."""

from outrider.commands import entry
from outrider.train.settings.drafters import EesdConfig


@entry("eesd", EesdConfig)
def main(config: EesdConfig) -> None:
    # Imported once the config is known to be good: torch and transformers take seconds.
    from outrider.train.recipes.early_exit import train_early_exit

    train_early_exit(config)


if __name__ == "__main__":
    main()
