"""What ADED is compared with: REST (arXiv 2311.08252) and Lookahead (arXiv 2402.02057), for greedy decoding.

REST drafts from a corpus: the continuations of the longest suffix of the text that occurs there. A suffix array finds
them. Lookahead drafts n-grams of the target's choices after guessed tokens, which run in the same passes as the text.
So REST is replayed on recorded answers, and Lookahead needs the target. Settings are those of ADED's Appendix G.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np
import torch
from torch import Tensor

from outrider.base.streams import Streams
from outrider.draft_models.ngrams.suffixes import REACH, Suffixes, places_of, read_only
from outrider.inference.core.decode import cut
from outrider.inference.core.drafter import Drafter, Stopwatch
from outrider.inference.core.ops import likeliest
from outrider.inference.core.rounds import Round, collect
from outrider.inference.core.session import Session
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.core.tree import ROOT, DraftTree, chain_parents
from papers.claims import Counts, Row
from papers.measuring import Asked, Bench, counts_of, replayed

LONGEST, SHORTEST = 16, 2  # tokens of the text that REST looks up
RETRIEVED, AHEAD = 5000, 10  # occurrences at most, and tokens of each: the defaults of REST's program
LEVELS, WINDOW, GUESSES = 5, 15, 15  # Lookahead's N, W and G
Pool = dict[int, dict[tuple[int, ...], None]]  # n-grams by their first token, the latest last


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


# ------------------------------------------------------------------------------------------------------------ lookahead


def lookahead(bench: Bench, row: Row, asked: Asked) -> Counts:
    """The counts of Lookahead, decoded live and greedily."""
    return counts_of(collect(lookahead_rounds(bench, asked)))


@torch.inference_mode()
def lookahead_rounds(bench: Bench, asked: Asked) -> Iterator[Round]:
    """Every pass runs the text's last token, the window and the guesses that begin with that token. `drafted` are the
    guesses alone."""
    assert bench.stack is not None
    budget, draw, pool = bench.budget(asked), Streams(0, asked.id).of("window"), Pool()
    levels = [[draw.choice(asked.ids) for _ in range(WINDOW + LEVELS - 3)]]
    context = len(asked.ids) + budget + WINDOW + LEVELS  # the window reaches beyond the text
    capacity = context + LEVELS * (WINDOW + GUESSES)
    with closing(bench.runtime.session(bench.stack, 0, capacity, context)) as session:
        root = int(likeliest(session.prefill(asked.ids)))
        session.commit(range(len(asked.ids)))
        yield Round((root,), 0, 0, 0, 0.0)
        budget -= 1
        while budget > 0 and root not in bench.eos:
            guesses = list(pool.get(root, ()))
            tokens, parents, ends = window_and_guesses(levels, guesses)
            tree = DraftTree(torch.tensor(tokens, device=session.device), tuple(parents), (-1,) * len(tokens))
            said = likeliest(session.run_tree(torch.tensor([root], device=session.device), tree)).tolist()
            starts = range(len(tree) - (LEVELS - 1) * len(guesses), len(tree), LEVELS - 1)
            nodes = max((agreed(guess, at, said) for guess, at in zip(guesses, starts, strict=True)), key=len,
                        default=range(0))  # fmt: skip
            session.commit(session.path(nodes))
            text = cut([said[0], *(said[node + 1] for node in nodes)], bench.eos, budget)
            levels = moved(levels, root, [said[end + 1] for end in ends], pool)
            yield Round(text, (LEVELS - 1) * len(guesses), min(len(nodes), len(text)), LEVELS - 1, 0.0)
            budget, root = budget - len(text), text[-1]


def window_and_guesses(
    levels: Sequence[Sequence[int]], guesses: Sequence[Sequence[int]]
) -> tuple[list[int], list[int], list[int]]:
    """The tokens and parents of the window, a tree under the root, and of the guesses, each a path of its own; and the
    last node of every column of the window.

    The first level is a path. The root and each of its nodes have a column below them: a node of each other level.
    """
    tokens, parents = list(levels[0]), list(chain_parents(0, len(levels[0])))
    ends = [ROOT, *range(len(tokens))]
    for level in levels[1:]:
        parents += ends
        ends = list(range(len(tokens), len(tokens) + len(level)))
        tokens += level
    for guess in guesses:
        parents += [ROOT, *range(len(tokens), len(tokens) + len(guess) - 1)]
        tokens += guess
    return tokens, parents, ends


def agreed(guess: Sequence[int], at: int, said: Sequence[int]) -> range:
    """The first nodes of `guess` that equal the target's choices. at: its first node. said: after root and nodes."""
    count = 0
    while count < len(guess) and guess[count] == said[at + count if count else 0]:
        count += 1
    return range(at, at + count)


def moved(levels: list[list[int]], root: int, new: list[int], pool: Pool) -> list[list[int]]:
    """The window, one place further. new: the target's choice after each column. A full window fills the pool."""
    if len(levels) < LEVELS - 1:
        return [level[1:] for level in levels] + [new[1:]]
    for first, *following in zip([root, *levels[0]], *levels[1:], new, strict=True):
        grams = pool.setdefault(first, {})
        grams.pop(tuple(following), None)
        grams[tuple(following)] = None
        if len(grams) > GUESSES:
            del grams[next(iter(grams))]
    return [levels[1][1:], *levels[2:], new]
