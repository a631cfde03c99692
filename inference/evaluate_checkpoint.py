"""evaluate-checkpoint: a drafter checkpoint and prompts in, a report of losslessness and speed out."""

from outrider.commands import script
from outrider.commands.composing import with_methods

main = script("evaluate_checkpoint", "outrider.inference.evaluate.evaluation:evaluate", complete=with_methods)

if __name__ == "__main__":
    main()
