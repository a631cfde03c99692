"""Building blocks of trainings: rows with teacher data, held-out evaluations, plans, calibration scores."""
