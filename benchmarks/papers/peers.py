"""What ADED is compared with: REST (arXiv 2311.08252), for greedy decoding.

REST drafts from a corpus: the continuations of the longest suffix of the text that occurs there. A suffix array finds
them. It is replayed on recorded answers. Settings are those of ADED's Appendix G.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.draft_models.ngrams.suffixes import REACH, Suffixes, places_of, read_only
from outrider.inference.core.drafter import Drafter, Stopwatch
from outrider.inference.core.session import Session
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.core.tree import ROOT, DraftTree
from papers.claims import Counts, Row
from papers.measuring import Asked, Bench, counts_of, replayed

LONGEST, SHORTEST = 16, 2  # tokens of the text that REST looks up
RETRIEVED, AHEAD = 5000, 10  # occurrences at most, and tokens of each: the defaults of REST's program


def rest(bench: Bench, row: Row, asked: Asked) -> Counts:
    """The counts of REST with row.x nodes over the row's table, replayed."""
    table = bench.others[row.other] if row.other else bench.drafters["ngrams"]
    return counts_of(replayed(bench, Rest(read_only(table.suffixes), int(row.x or 0)), asked))


class Rest(Drafter):
    """The most frequent beginnings, at most `nodes`, of what follows the text's longest known suffix in a corpus."""

    def __init__(self, suffixes: Suffixes, nodes: int):
        self.suffixes, self.max_rows = suffixes, nodes
        self.text: list[int] = []

    def begin(self, session: Session, selector: TokenSelector, watch: Stopwatch) -> None:
        self.text = session.tokens.tolist()

    def draft(self, root: Tensor, limit: int) -> DraftTree:
        found = continuations(self.suffixes, [*self.text[-LONGEST:], int(root)])[:, :limit]
        tokens, parents = most_frequent(found, self.max_rows)
        return DraftTree(torch.from_numpy(tokens), tuple(parents.tolist()), (-1,) * len(tokens))

    def commit(self, tree: DraftTree, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        self.text += tokens


def continuations(suffixes: Suffixes, text: Sequence[int]) -> np.ndarray:
    """What follows the occurrences of the text's longest suffix in the corpus: int64 [m, `AHEAD`], −1 after its end.

    At most `RETRIEVED` occurrences, evenly spread.
    """
    recent, vocabulary = np.array(text[: -LONGEST - 1 : -1], np.int64), len(suffixes.starts) - 1
    size, first, end = 0, 0, 0
    for longer in range(SHORTEST, min(REACH, len(recent)) + 1):
        begin, stop = places_of(suffixes, recent, 0, longer)
        if begin == stop:
            break
        size, first, end = longer, begin, stop
    count = min(end - first, RETRIEVED)
    after = suffixes.order[first + np.arange(count) * (end - first) // max(1, count)].astype(np.int64) + size
    for longer in range(REACH + 1, len(recent) + 1) if size == REACH else ():  # no further is the array sorted
        alike = after[after >= longer]
        alike = alike[suffixes.tokens[alike - longer] == recent[longer - 1]]
        after = alike if len(alike) else after
        if not len(alike):
            break
    places = np.minimum(after[:, None] + np.arange(AHEAD), len(suffixes.tokens) - 1)
    found = suffixes.tokens[places].astype(np.int64)
    return np.where(np.logical_or.accumulate(found == vocabulary, axis=1), -1, found)


def most_frequent(found: np.ndarray, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """The `nodes` most frequent beginnings of the rows of `found` [m, ahead], shorter ones first among equals: their
    last tokens, and the places of their parents."""
    levels, begun, made = [np.empty((3, 0), np.int64)], np.full(len(found), ROOT), 0
    for depth in range(found.shape[1]):
        alive = found[:, depth] >= 0
        found, begun = found[alive], begun[alive]
        pairs = ((begun + 1) << 32) + found[:, depth]
        pairs, which, counts = np.unique(pairs, return_inverse=True, return_counts=True)
        levels.append(np.stack([pairs & 0xFFFFFFFF, (pairs >> 32) - 1, counts]))
        begun, made = made + which, made + len(pairs)
    tokens, parents, counts = np.concatenate(levels, axis=1)
    kept = np.argsort(-counts, kind="stable")[:nodes]  # no child occurs more often than its parent
    place = np.full(made + 1, ROOT)  # the last one is the root's
    place[kept] = np.arange(len(kept))
    return tokens[kept], place[parents[kept]]
