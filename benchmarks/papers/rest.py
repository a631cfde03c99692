"""REST's n-grams on recorded answers: it drafts by its own code, over the corpus of a table.

It is the module `draftretriever` of FasterDecoding/REST, at its defaults: 64 nodes of at most 10 tokens after the
text's last 16 to 2; PyPI's module of this name is another program.
"""

import tempfile
from abc import abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from outrider.inference.core.drafter import Drafter, Stopwatch
from outrider.inference.core.session import Session
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.core.tree import ROOT, DraftTree
from papers.claims import Counts, Row
from papers.measuring import Asked, Bench, counts_of, replayed

NO_REST = "" if find_spec("draftretriever") else "needs the module draftretriever of FasterDecoding/REST"


class Told(Drafter):
    """Drafts all that a program says of a text."""

    max_rows = 64

    @abstractmethod
    def after(self, text: list[int]) -> Sequence[Sequence[int]]:
        """The paths that may follow the text, which is longer than before."""

    def begin(self, session: Session, selector: TokenSelector, watch: Stopwatch) -> None:
        self.text = session.tokens.tolist()

    def draft(self, root: Tensor, limit: int) -> DraftTree:
        paths = self.after([*self.text, int(root)])
        ends = (tuple(path[:end]) for path in paths for end in range(1, min(limit, len(path)) + 1))
        place = {path: at for at, path in enumerate(dict.fromkeys(ends))}  # what paths share stands once
        parents = tuple(place.get(path[:-1], ROOT) for path in place)
        return DraftTree(torch.tensor([path[-1] for path in place], dtype=torch.long), parents, (-1,) * len(place))

    def commit(self, tree: DraftTree, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        self.text += tokens


class Retrieved(Told):
    """REST's retrieval."""

    def __init__(self, tokens: np.ndarray, end: int):
        self.end, module = end, import_module("draftretriever")
        with tempfile.TemporaryDirectory() as folder:
            writer = module.Writer(index_file_path=f"{folder}/index", vocab_size=end + 1)
            for part in np.array_split(tokens, 100):
                writer.add_entry(part.tolist())
            writer.finalize()
            self.reader = module.Reader(f"{folder}/index")

    def after(self, text: list[int]) -> Sequence[Sequence[int]]:
        found = (self.reader.search(text[-size:])[0] for size in range(16, 1, -1))
        return [[*takewhile(range(self.end).__contains__, path)] for path in next(filter(None, found), ())]


def measured_by(make: Callable[[np.ndarray, int], Told]) -> Callable[..., Counts]:
    """What measures a program's rows over a table, the first one where they name none (see `Row.measure`).

    make: the program, of the documents' tokens and the one that is after each of them, which no text has.
    """
    known: dict[str, Told] = {}

    def told(bench: Bench, row: Row, asked: Asked) -> Counts:
        if row.other not in known:
            table = bench.others[row.other] if row.other else bench.drafters["ngrams"]
            known[row.other] = make(table.suffixes.tokens, table.vocabulary)
        return counts_of(replayed(bench, known[row.other], asked))

    return told
