"""measure-engine: what evaluate-checkpoint measures, and the same methods in a serving engine."""

from outrider.commands import script
from outrider.commands.composing import with_methods

run = "outrider.inference.evaluate.engine:measure_engine"
main = script("measure_engine", run, complete=lambda words: with_methods(words, fixed=True))  # as engines draft

if __name__ == "__main__":
    main()
