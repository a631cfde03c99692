"""When to stop drafting and verify: one rule a file, all on the interface of interface.py.

A rule decides how long a chain gets and how deep a tree: it is asked after every token of the one, and after every
level of the other. It sees what was drafted, and after each round what was accepted. At most one number a token comes
from the device.
"""
