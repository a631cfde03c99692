"""measure-engine: what evaluate-checkpoint measures, and the same methods in a serving engine."""

from outrider.commands import entry
from outrider.commands.evaluating import run, with_methods
from outrider.inference.settings.engine import EngineConfig


@entry("measure_engine", EngineConfig, complete=with_methods)
def main(config: EngineConfig) -> None:
    run(config)


if __name__ == "__main__":
    main()
