"""Limits on the size of drafts."""

MOST_NODES = 63  # that "auto" considers: with the root 64 rows
LONGEST_CHAIN = 15  # that "auto" and rule=survival consider
CHAIN_TOKENS = 8  # of a chain or of prompt lookup, where stop.max_draft is null and the rule has no costs
