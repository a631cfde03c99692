"""Let the target answer the prompts of a data set; a drafter is then trained on the answers."""

from outrider.commands import entry
from outrider.inference.batch.settings import GenerateConfig


@entry("generate_responses", GenerateConfig)
def main(config: GenerateConfig) -> None:
    # Imported once the config is known to be good: torch and transformers take seconds.
    from outrider.inference.batch.generate import generate_responses

    generate_responses(config)


if __name__ == "__main__":
    main()
