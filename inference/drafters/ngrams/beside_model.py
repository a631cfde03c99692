"""N-grams of a table and of the text beside a model: in each round the source drafts of which more is expected.

`draft` chooses before the model runs, so before anything is drawn. The choice depends on the text, on the n-grams'
search, which draws nothing, and on how earlier rounds ended. So sampled text keeps its distribution. Verification uses
the q of the source that drafted. A draft of n-grams has no q, because its tokens are not drawn.

Two rates are compared, in tokens per second by measured costs:

- the n-grams' draft: 1 + Σ worth over its nodes (`BestNodes`, which calibrates probabilities by band), over the seconds
  of a round with so many nodes;
- the model, which has no draft yet: the rate of its rounds in this text (`ModelRate`).

Example: the nodes of the n-grams' draft are worth 0.9 tokens, and a round with them takes 1.25 plain passes. So 1.52
tokens per pass are expected. The model's rounds gave 1.7 tokens per pass. The model drafts.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from outrider.draft_models.ngrams.table import TrigramTable
from outrider.inference.core.drafter import Drafter, Stopwatch
from outrider.inference.core.session import Session
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.core.tree import DraftTree
from outrider.inference.drafters.ngrams.drafter import MixedDrafter
from outrider.inference.settings.method import NgramConfig
from outrider.inference.sizing.costs import WIDEST, Costs
from outrider.inference.sizing.node_sizes import BestNodes
from outrider.inference.sizing.policy import KEEP, Tuning

# Chosen by τ on every second one of the 210 prompts of benchmarks/results/fresh_prompts.json.
SURE = 1.8  # n-grams are sure of a draft of which more tokens are expected
PRIOR_TOKENS, PRIOR_LENGTH = 2.2, 3  # of a model's round, before its first one: emitted tokens, and drafted ones
PRIOR_ROUNDS = 4.0  # weight of a prior

_NO_STEPS = (0.0,) * (WIDEST + 1)
BY_TOKENS = Tuning(Costs(_NO_STEPS, (1.0,) * (WIDEST + 1), 0.0, 1.0))  # every round takes 1: no costs are measured


class ModelRate:
    """The tokens per second that are expected of the model's next round.

    Where n-grams are sure, the text is easy for the model too. So rounds are counted apart by whether n-grams were
    sure. The rate of either kind weighs its own rounds, and `PRIOR_ROUNDS` rounds at the rate of all of the model's
    rounds. The rate of all weighs `PRIOR_ROUNDS` rounds of `PRIOR_TOKENS` tokens. Old rounds lose weight (`KEEP`).

    round_seconds: of a round of the prior.
    """

    def __init__(self, round_seconds: float):
        self._prior_seconds = PRIOR_ROUNDS * round_seconds
        self._tokens, self._seconds = [0.0, 0.0], [0.0, 0.0]  # of rounds in which n-grams were not sure, and were

    def rate(self, sure: bool) -> float:
        overall = (PRIOR_ROUNDS * PRIOR_TOKENS + sum(self._tokens)) / (self._prior_seconds + sum(self._seconds))
        return (self._prior_seconds * overall + self._tokens[sure]) / (self._prior_seconds + self._seconds[sure])

    def observe(self, sure: bool, tokens: int, seconds: float) -> None:
        """Learn from a round of the model that emitted `tokens` in `seconds`."""
        for kind in (False, True):
            self._tokens[kind] = KEEP * self._tokens[kind] + tokens * (kind == sure)
            self._seconds[kind] = KEEP * self._seconds[kind] + seconds * (kind == sure)


class NgramsBesideModel(Drafter):
    """The n-grams' draft in rounds in which it has the higher rate; else an empty one, and the model drafts.

    tuning: the measured costs of the model's rounds; None: the rates are tokens per round.
    """

    def __init__(self, table: TrigramTable, config: NgramConfig, tuning: Tuning | None):
        self._ngrams = MixedDrafter(table, config)
        self.max_rows = self._ngrams.max_rows
        self._costs = tuning or BY_TOKENS
        self._sizes = self._ngrams.sizes = BestNodes(_without_steps(self._costs))
        self._model_rate = ModelRate(self._costs.costs_now.of_chain(PRIOR_LENGTH))

    def begin(self, session: Session, selector: TokenSelector, watch: Stopwatch) -> None:
        self._ngrams.begin(session, selector, watch)

    def draft(self, root: Tensor, limit: int) -> DraftTree:
        tree, costs = self._ngrams.draft(root, limit), self._costs.costs_now
        expected_tokens = self._sizes.expected_tokens
        self._sure = expected_tokens > SURE
        ngram_rate = expected_tokens / (costs.verify[len(tree) + 1] + costs.overhead)
        return tree if ngram_rate >= self._model_rate.rate(self._sure) else DraftTree(root[:0], (), ())

    def commit(self, tree: DraftTree, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        if tree.source == "model":
            costs = self._costs.costs_now
            seconds = tree.depth * costs.step[1] + costs.verify[len(tree) + 1] + costs.overhead
            self._model_rate.observe(self._sure, len(nodes) + 1, seconds)
        self._ngrams.commit(tree, nodes, tokens)


def _without_steps(tuning: Tuning) -> Tuning:
    """The costs of drafts that take no step of a model, without the evidence, which is about the model's drafts."""
    costs = replace(tuning.costs, step=_NO_STEPS, unshared=(0.0, *tuning.costs.unshared[1:]))
    return Tuning(costs) if tuning.shared is None else Tuning(costs).of_all(tuning.shared().sharing)
