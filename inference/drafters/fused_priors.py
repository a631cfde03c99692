"""What joining q and n-grams begins with (see `fused_growth`), before a generation has said anything.

SHARES: λ, the share of q, by BANDS classes of how sure q is of its likeliest token times BANDS of how sure the n-grams
are of theirs.
"""

import numpy as np

from inference.auto.feeding import BANDS

SHARES = np.full(BANDS * BANDS, 0.3)
