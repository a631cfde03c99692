"""Train a small LM as a drafter for a target."""

from outrider.commands import script

main = script("finetune_drafter", "outrider.train.recipes.small_lm:finetune_drafter")

if __name__ == "__main__":
    main()
