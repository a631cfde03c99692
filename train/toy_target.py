"""Train a small Llama on the Python standard library: `python train/toy_target.py`."""

from conf import entry
from train.settings import ToyTargetConfig


@entry("toy_target", ToyTargetConfig)
def main(config: ToyTargetConfig) -> None:
    from train.toy_model import train_toy_target  # heavy, so only once the config has been validated

    train_toy_target(config)


if __name__ == "__main__":
    main()
