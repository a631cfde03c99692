"""A module for each kind of drafter: what is trained on what, and its memory. The losses are in the recipes."""
