"""Train the calibration head of a drafter (EESD §3.3) and store it in the drafter's checkpoint."""

from outrider.commands import script

main = script("calibrate", "outrider.train.recipes.calibration:calibrate")

if __name__ == "__main__":
    main()
