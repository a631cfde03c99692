"""Draft shapes: chain, k-config tree, static tree, OPT-Tree, token graph."""
