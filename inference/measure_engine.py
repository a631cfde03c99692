"""measure-engine: what evaluate-checkpoint measures, and the same methods in a serving engine."""

from outrider.commands import script
from outrider.commands.evaluating import with_methods

main = script("measure_engine", "outrider.inference.evaluate.compare:evaluate", complete=with_methods)

if __name__ == "__main__":
    main()
