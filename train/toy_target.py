"""Train a small Llama on the Python standard library: `python train/toy_target.py`."""

from outrider.commands import script

main = script("toy_target", "outrider.train.recipes.toy:train_toy_target")

if __name__ == "__main__":
    main()
