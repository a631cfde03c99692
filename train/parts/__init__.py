"""Building blocks of recipes: rows with teacher data, held-out evaluations, plans, calibration scores."""
