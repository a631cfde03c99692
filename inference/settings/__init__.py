"""Settings of decoding and measuring; they do not import torch, so that mistakes are reported quickly."""

MOST_NODES = 63  # that "auto" considers: with the root 64 rows
LONGEST_CHAIN = 15  # that "auto" and rule=survival consider
CHAIN_TOKENS = 8  # of a chain or of prompt lookup, where stop.max_draft is null and the rule has no costs
