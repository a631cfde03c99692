"""What shape a draft has: chain, k-config, static tree, OPT-Tree, token graph."""
