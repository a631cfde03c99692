"""Block verification (arXiv 2403.10444) beside token by token, on the same drawn chains of every drafter.

Texts are decoded token by token. What either rule accepts of a chain on average follows from p and q of its tokens, so
no coin stands between the two. The drafters are those that are given, and the target without the layers of --skip.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import accumulate, takewhile
from typing import Any

from torch import Tensor

from outrider.base.streams import Streams
from outrider.inference.core.sampling import Sampler
from outrider.inference.core.token_selector import TokenSelector, VerifiedDraft
from outrider.inference.core.tree import DraftTree
from outrider.inference.settings.method import MethodConfig
from outrider.inference.settings.sampling import SamplingConfig
from papers.claims import Claim, Counts, Row, Table
from papers.measuring import Asked, Bench, continued, counts_of, sampler_of

LAWS = {
    "T = 1": SamplingConfig(temperature=1.0),
    "T = 0.7, top-p 0.95": SamplingConfig(temperature=0.7, top_p=0.95),
}
RULES = ("exact", "block")


def tables(*, options: Any, **_: Any) -> dict[str, Table]:
    skip = tuple(options.skip) if options.skip else None
    skipping = f"without {len(skip)} layers" if skip else "without every second layer"
    methods = {"small LM": MethodConfig(source="small_lm", verify="exact"), "early exit": MethodConfig(verify="exact"),
               skipping: MethodConfig(source="skip_layers", skip=skip, verify="exact")}  # fmt: skip
    rows = [Row(f"{name}, {said}", method, law, measure=by_both)
            for said, law in LAWS.items() for name, method in methods.items()]  # fmt: skip
    claims = [Claim(f"a block emits more a round ({row.name})", "", tuple(f"{row.name}@tau_{rule}" for rule in RULES),
                    of="a block emits more a round") for row in rows]  # fmt: skip
    note = "τ is on average over the coins of verification, and as the coins decoded it. Drafts have 8 tokens."
    shown = ("tau_exact", "tau_block", "tau", "per_round")
    return {"verification": Table("Verification as a block", shown, tuple(rows), tuple(claims), note=note)}


def by_both(bench: Bench, row: Row, asked: Asked) -> Counts:
    """The counts of a row, and the tokens that its rounds emit on average by each of `RULES`."""
    selector = Averaging(sampler_of(bench, asked, row.sampling), Streams(0, asked.id), bench.eos)
    return counts_of(continued(bench, row, asked, selector=selector)) | selector.sums


class Averaging(TokenSelector):
    """Verifies token by token, and adds up what the rounds emit on average by each of `RULES`."""

    def __init__(self, sampler: Sampler | None, streams: Streams, eos: Collection[int]):
        super().__init__(sampler, streams.of("verify"))
        self._eos, self.sums = eos, Counter[str]()

    def probabilities(self, logits: Tensor, contexts: Sequence[Tensor] | None) -> Tensor:
        self._p = super().probabilities(logits, contexts)
        return self._p

    def verify(self, tree: DraftTree, logits: Tensor) -> VerifiedDraft:
        verified = super().verify(tree, logits)
        going_on = takewhile(lambda token: token not in self._eos, verified.tokens)
        ratios = [float(self._p[place, token] / tree.q[place - 1][token]) for place, token in enumerate(going_on)]
        self.sums.update(dict(zip(RULES, on_average(ratios), strict=True)))
        return verified


def on_average(ratios: Sequence[Any]) -> tuple[Any, Any]:
    """The tokens that a round emits on average, verified token by token and as a block (see `verify_block`).

    ratios: p / q of the drafted tokens, but for one that ends the text and those after it.
    """
    exact = accumulate(ratios, lambda before, ratio: before * min(1, ratio), initial=1)
    block = accumulate(ratios, lambda before, ratio: min(1, before * ratio), initial=1)
    return sum(exact), sum(block)
