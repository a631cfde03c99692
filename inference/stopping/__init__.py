"""When to stop drafting and verify: one rule a file, all on the interface of interface.py.

A rule decides the length of a chain, asked after every token, or the depth of a tree, asked after every level. It sees
the draft, and after each round how much of it was accepted. It transfers at most one number per token from the device.
"""
