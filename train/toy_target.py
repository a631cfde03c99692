"""Train a small Llama on the Python standard library: `python train/toy_target.py`."""

from pathlib import Path

from conf import entry
from train.core import run_dir
from train.settings.toy import TOY_REPORT, ToyTargetConfig


@entry("toy_target", ToyTargetConfig)
def main(config: ToyTargetConfig) -> None:
    if run_dir.finished(Path(config.out_dir), TOY_REPORT, config.deciding(), config.resume, config):
        return print(f"{config.out_dir}: finished already")
    from train.recipes.toy import train_toy_target  # heavy, so only when there is something to do

    return train_toy_target(config)


if __name__ == "__main__":
    main()
