"""Building blocks of recipes: students with their losses, rows with teacher data, held-out evaluations, plans."""
