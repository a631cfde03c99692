"""Train the calibration head of a drafter (EESD §3.3) and store it in the drafter's checkpoint."""

from conf import entry
from train.settings.drafters import CalibrateConfig


@entry("calibrate", CalibrateConfig)
def main(config: CalibrateConfig) -> None:
    # Imported once the config is known to be good: torch and transformers take seconds.
    from train.recipes.calibration import calibrate

    calibrate(config)


if __name__ == "__main__":
    main()
