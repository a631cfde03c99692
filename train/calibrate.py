"""Train the calibration head of a drafter (EESD §3.3) and store it in the drafter's checkpoint."""

from outrider.commands import entry
from outrider.train.settings.drafters import CalibrateConfig


@entry("calibrate", CalibrateConfig)
def main(config: CalibrateConfig) -> None:
    # Imported once the config is known to be good: torch and transformers take seconds.
    from outrider.train.recipes.calibration import calibrate

    calibrate(config)


if __name__ == "__main__":
    main()
