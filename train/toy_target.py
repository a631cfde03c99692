"""Train a small Llama on the Python standard library: `python train/toy_target.py`."""

from outrider.base.files import require_writable
from outrider.base.run_dirs import finished
from outrider.commands import entry
from outrider.train.settings.toy import TOY_REPORT, ToyTargetConfig


@entry("toy_target", ToyTargetConfig)
def main(config: ToyTargetConfig) -> None:
    report = require_writable(config.out_dir) / TOY_REPORT
    if finished(report, config.deciding(), config.resume, config, key="settings"):
        return print(f"{config.out_dir}: finished already")
    from outrider.train.recipes.toy import train_toy_target  # heavy, so only when there is something to do

    return train_toy_target(config)


if __name__ == "__main__":
    main()
