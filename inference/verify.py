"""Verification rules: pure functions from a draft and the target's opinion to what is accepted."""

from collections.abc import Sequence

from inference.tree import ROOT


def verify_greedy(tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> tuple[list[int], int]:
    """Greedy verification: walk down while the target's own choice is among the children.

    tokens, parents [n]: the draft tree; choices [n + 1]: the target's argmax after the root and after each
    node. Returns (accepted nodes in order, the next token), the next token being the target's choice after
    the last accepted node. The emitted text is exactly the target's greedy text.
    """
    accepted: list[int] = []
    last = ROOT
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == last and token == choices[last + 1]:
            accepted.append(node)
            last = node
    return accepted, choices[last + 1]
