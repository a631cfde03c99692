"""measure-engine: what evaluate-checkpoint measures, and the same methods in a serving engine."""

from outrider.commands import entry
from outrider.inference.evaluate_checkpoint import with_methods
from outrider.inference.settings.engine import EngineConfig


@entry("measure_engine", EngineConfig, complete=with_methods)
def main(config: EngineConfig) -> None:
    # Imported after the config is checked, as torch and transformers take seconds to import.
    from outrider.inference.evaluate.compare import evaluate

    evaluate(config)


if __name__ == "__main__":
    main()
