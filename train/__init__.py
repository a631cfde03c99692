"""Trainings: a file for each kind of drafter, to be read from top to bottom; core/ has the loop that all share."""
