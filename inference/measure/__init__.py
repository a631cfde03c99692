"""Measuring: arms in turn on the same prompts, the judgement of losslessness, statistics, replay."""
