"""Stop rules, which decide when to stop drafting and verify.

A rule decides the length of a chain, after every token, or the depth of a tree, after every level. It reads the draft,
and after each round the accepted length. It transfers at most one number per token from the device.

`RULES` in inference/settings/stop_rules.py lists them.
"""
