"""Trainings: a file for each thing trained, to be read from top to bottom; core/ has the loop of all."""
