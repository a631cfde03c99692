"""The prior of the weights that join q and n-grams (see `fused_growth`).

SHARES: λ, the share of q, by class: BANDS of q's confidence in its likeliest token × BANDS of the n-grams' confidence
in theirs. It was fitted on a 135M chat model's greedy answers to questions, arithmetic, code and summarisation, with an
early exit and a small LM as drafters. The fit to either drafter also suits the other. The fitting script:
`git show 5a060c4:benchmarks/fit_fused.py`.
"""

import numpy as np

_PERCENT = (  # a row per band of q, the least confident first
    "10 09 11 11 10 10 08 05",
    "19 13 14 12 11 09 09 04",
    "32 19 21 16 21 15 12 04",
    "33 41 25 32 19 23 30 10",
    "34 31 29 33 32 25 18 12",
    "34 30 44 30 34 31 21 12",
    "29 40 42 41 36 35 35 17",
    "32 38 38 45 49 34 33 34",
)
SHARES = np.array([row.split() for row in _PERCENT], float).flatten() / 100
