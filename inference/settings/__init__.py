"""Settings of decoding and measuring; they do not import torch, so that mistakes are reported quickly."""

MOST_NODES = 63  # drafted tokens of the largest tree that a size "auto" considers: with the root a pass over 64 tokens
LONGEST_CHAIN = 15  # tokens of the longest draft that stop.max_draft=auto and rule=survival consider
CHAIN_TOKENS = 8  # of a chain or of prompt lookup, where stop.max_draft is null and the rule has no costs
