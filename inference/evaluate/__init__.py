"""The evaluate-checkpoint command: arms and baselines, their results, the check of losslessness, the report."""
