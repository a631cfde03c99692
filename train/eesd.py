"""Train EESD's early-exit drafter for a target."""

from outrider.commands import script

main = script("eesd", "outrider.train.recipes.early_exit:train_early_exit")

if __name__ == "__main__":
    main()
