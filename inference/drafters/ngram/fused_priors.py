"""What joining q and n-grams begins with (see `fused_growth`), before a generation has said anything.

SHARES: λ, the share of q, by class: BANDS of how sure q is of its likeliest token, times BANDS of how sure the n-grams
are of theirs. It was fitted on a 135M chat model's greedy answers to questions, sums, code and texts to sum up, with an
early exit and a small LM as drafters. What one of them says fits the other as well. The script that fitted
it: `git show 5a060c4:benchmarks/fit_fused.py`.
"""

import numpy as np

_PERCENT = (  # a row is a band of q, the least sure first
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
