"""Train an EAGLE-3 head for a target."""

from outrider.commands import entry
from outrider.train.settings.drafters import Eagle3Config


@entry("eagle3", Eagle3Config)
def main(config: Eagle3Config) -> None:
    # Imported once the config is known to be good: torch and transformers take seconds.
    from outrider.train.recipes.eagle3 import train_eagle3

    train_eagle3(config)


if __name__ == "__main__":
    main()
