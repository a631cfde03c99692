"""What a drafter sits on: a target's files, its layers, run by this project or as a whole."""
