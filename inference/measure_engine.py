"""measure-engine: what evaluate-checkpoint measures, and the same methods in a serving engine."""

from outrider.commands import entry
from outrider.inference.evaluate_checkpoint import run, with_methods
from outrider.inference.settings.engine import EngineConfig

main = entry("measure_engine", EngineConfig, complete=with_methods)(run)

if __name__ == "__main__":
    main()
