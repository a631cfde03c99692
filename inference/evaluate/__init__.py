"""The evaluate-checkpoint command: arms and baselines, their results, the judgement of losslessness, the report."""
