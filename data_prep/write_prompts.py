"""Write chat prompts about the documentation of Python's library, for training and for evaluation."""

from outrider.commands import entry
from outrider.data_prep.settings import PromptsConfig


@entry("write_prompts", PromptsConfig)
def main(config: PromptsConfig) -> None:
    # Imported once the config is known to be good: torch takes seconds.
    from outrider.data_prep.python_docs import write_prompts

    write_prompts(config)


if __name__ == "__main__":
    main()
