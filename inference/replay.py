"""replay: recorded greedy answers stand in for a target, and give the exact τ of drafters that read tokens only."""

from outrider.commands import entry
from outrider.commands.evaluating import with_methods
from outrider.inference.settings.evaluate import ReplayConfig


@entry("replay", ReplayConfig, complete=with_methods)
def main(config: ReplayConfig) -> None:
    # Imported after the config is checked, as torch takes seconds to import.
    from outrider.inference.measure.replay import replay_answers

    replay_answers(config)


if __name__ == "__main__":
    main()
