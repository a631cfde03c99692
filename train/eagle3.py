"""Train an EAGLE-3 head for a target."""

from outrider.commands import script

main = script("eagle3", "outrider.train.recipes.eagle3:train_eagle3")

if __name__ == "__main__":
    main()
