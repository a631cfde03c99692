"""replay: recorded greedy answers stand in for a target, and give the exact τ of drafters that read tokens only."""

from outrider.commands import script
from outrider.commands.composing import with_methods

main = script("replay", "outrider.inference.measure.replay:replay_answers", complete=with_methods)

if __name__ == "__main__":
    main()
