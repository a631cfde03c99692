"""Make a pipeline's drafters small enough to distribute: `python train/ship_drafters.py run=runs/smollm2`."""

from conf import entry
from train.settings.drafters import ShipConfig


@entry("ship_drafters", ShipConfig)
def main(config: ShipConfig) -> None:
    # Imported once the config is known to be good: torch and transformers take seconds.
    from train.shipping import ship_drafters

    ship_drafters(config)


if __name__ == "__main__":
    main()
