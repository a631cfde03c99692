"""The distribution of sampled text is the target's, whatever drafts it.

What runs is what evaluate-checkpoint builds (`make_arms`), over a target that is a table; what comes out is compared
with the table by χ². Every method draws thousands of times a token and the three before it: as often as the faults
below need that could be in it. A distribution that holds in pieces only does not pass: a token's distribution is tested
apart after every context of up to three tokens, so that a token that depends on anything else than the one before it,
such as how the round went, shows. Seeds are fixed, so a pass is a pass.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import preset
from outrider.base.streams import Streams
from outrider.draft_models.calibration_head import CalibrationHead
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.draft_models.small_lm.pard2 import Pard2
from outrider.draft_models.targets.narrowed import DraftVocabulary
from outrider.inference.core import token_selector, verify
from outrider.inference.core.sampling import Sampler
from outrider.inference.drafters.model_drafter import ModelDrafter, TimedModel
from outrider.inference.drafters.model_plugin import Calibrated
from outrider.inference.loading.generation_config import TextSettings
from outrider.inference.measure.arms import make_arms
from outrider.inference.measure.results import Arm
from outrider.inference.settings.method import AUTOREGRESSIVE, MethodConfig, NgramConfig, StopConfig, StructureConfig
from outrider.inference.settings.sampling import SamplingConfig
from outrider.inference.shapes import shapes
from outrider.inference.sizing.policy import Tuning
from tests.faults import plant
from tests.inference.ngram_cases import make_documents
from tests.inference.priced import costs
from tests.inference.table_target import TableBlock, TableHead, TableModel, TableRuntime
from tests.tiers import as_many, quick_where, typical_where

LEVEL = 1e-4
DRAWS = as_many(4_500)  # more than most faults below need
MORE = 3_000  # as many as those of draws need
SHARED = 8_000  # those of coins that a rule of success rates shares
ORDER = 3  # tokens before a token that its distribution is tested apart after
PLAIN = SamplingConfig(temperature=1.0)
Text = tuple[int, ...]


@dataclass(frozen=True)
class Tables:
    """The distribution of the next token after each token: the target's, and the drafters'."""

    p: TableModel
    q: TableModel


class OfSome(TableModel):
    """A drafter over all of the target's tokens but 1, which its own last id stands for."""

    draft_vocabulary = DraftVocabulary(torch.tensor([0, 2, 3]), 4)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden)[..., self.draft_vocabulary.tokens]


class OnePass(TableModel):
    """A drafter of two tokens in a pass: what it says after token 3 stands for all but the first."""

    parallel, vocabulary = 2, 3  # of an early exit

    def __init__(self, rows: Sequence[Sequence[float]]):
        super().__init__(rows)
        self.config.pard_token, self.config.parallel_tokens = 3, 2

    def embed(self, stack: TableModel, tokens: Tensor, positions: object) -> Tensor:
        return tokens[..., None]


class States:
    """The projection of `AfterStates`: four times the state, which is the id of the token before."""

    boundaries = (1,)

    def join_states(self, aux: Tensor, norm: object) -> Tensor:
        return aux

    def __call__(self, states: Tensor) -> Tensor:
        return 4 * states


class AfterStates(TableModel, Pard2):
    """A PARD-2 drafter of two tokens in a pass. They depend on its state and its token: row 4 · state + token."""

    windows = (None,)

    def __init__(self, rows: Sequence[Sequence[float]]):
        super().__init__([row[state:] + row[:state] for state in range(4) for row in rows])
        self.config.pard_token, self.config.parallel_tokens, self.config.vocab_size = 3, 2, 4
        self.target_norm, self.projection = [None], States()  # type: ignore[list-item,assignment]

    def embed(self, tokens: Tensor, positions: object) -> Tensor:
        return tokens[..., None].float()


# Drafts of one token, right half of the time: the text is what coins that are shared make of it, and little else.
CERTAIN = Tables(TableModel([[0.5, 0.5]] * 2), TableModel([[0.95, 0.05]] * 2))
DEAR = Tuning(costs(0.01, node=0.1, rest=0.1))  # few nodes pay
MARKOV = Tables(
    TableModel([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.5, 0.0], [0.6, 0.05, 0.05, 0.3]]),
    TableModel([[0.3, 0.3, 0.2, 0.2], [0.25, 0.25, 0.25, 0.25], [0.1, 0.4, 0.3, 0.2], [0.5, 0.2, 0.0, 0.3]]),
)
OF_SOME = Tables(MARKOV.p, OfSome(MARKOV.q.distributions.tolist()))
# A drafter that is sure of other tokens than the target: verification has much to mend, so a fault of it shows soon.
APART = Tables(
    TableModel([[0.3, 0.2, 0.25, 0.25], [0.25, 0.25, 0.2, 0.3], [0.3, 0.3, 0.4, 0.0], [0.2, 0.3, 0.25, 0.25]]),
    TableModel([[0.7, 0.2, 0.05, 0.05], [0.05, 0.7, 0.2, 0.05], [0.05, 0.1, 0.15, 0.7], [0.2, 0.0, 0.1, 0.7]]),
)


@dataclass(frozen=True)
class Case:
    """A method, and how many tokens a generation has: few where what it learns would hide how it starts.

    draws: of a token and what it is tested after. Many short ones show what depends on how streams begin; of a drafter
    that learns from the text a few are long.
    """

    method: MethodConfig
    tokens: int = 43
    tables: Tables = APART
    draws: int = DRAWS


def chain(rule: str, source: str = "small_lm", **settings: float) -> MethodConfig:
    return MethodConfig(source, stop=StopConfig(rule, **settings), verify="exact")


def block(rule: str = "fixed", source: str = "small_lm", **settings: float) -> MethodConfig:
    return replace(chain(rule, source, **settings), verify="auto")


def tree(
    kind: str, verify: str = "exact", source: str = "small_lm", stop: str = "fixed", **settings: object
) -> MethodConfig:
    return MethodConfig(source, StructureConfig(kind, **settings), StopConfig(stop), verify=verify)


def ngrams(**settings: object) -> MethodConfig:
    return MethodConfig("ngrams", ngrams=NgramConfig(**{"nodes": 8, "depth": 3, **settings}))


class TableWithLayers(TableModel):
    """A target whose layers do nothing, so that the tables say what it predicts: p, and q without some of them."""

    def __init__(self, p: TableModel, q: TableModel):
        super().__init__(p.distributions.tolist())
        self.layers, self.logits = range(3), q.logits  # type: ignore[method-assign]


CASES = {
    "chain, fixed": Case(chain("fixed", max_draft=3)),
    "chain, block": Case(block(max_draft=3)),
    "chain, block, confidence": Case(block("confidence", "eagle3", max_draft=4, threshold=0.28)),
    "chain, one pass": Case(block(max_draft=3), tables=Tables(APART.p, OnePass(APART.q.distributions.tolist()))),
    "chain, PARD-2": Case(block(max_draft=3), tables=Tables(APART.p, AfterStates(APART.q.distributions.tolist()))),
    "chain, one pass of an exit": Case(
        block(source="early_exit", max_draft=3), tables=Tables(APART.p, OnePass(APART.q.distributions.tolist()))
    ),
    "chain, block of an MTP head": Case(block(source="mtp", max_draft=3)),
    "chain, dspark": Case(block(source="dflash", max_draft=3)),
    "k_config, dspark": Case(tree("k_config", source="dflash", widths=(2, 2)), draws=MORE),
    "chain, copied": Case(preset("small_lm/survival"), 63),
    "opt_tree, copied": Case(preset("opt_tree_auto"), 63),
    "chain, confidence": Case(chain("confidence", "early_exit", max_draft=4, threshold=0.28)),
    # generations of five tokens: with four, the budget cuts most drafts before a rule has a say
    "chain, beta": Case(chain("beta"), 5, CERTAIN, SHARED),
    "chain, calibrated": Case(chain("calibrated", "early_exit"), 5, MARKOV),
    "k_config, with_replacement": Case(
        tree("k_config", source="eagle3", widths=(2, 2), draw="with_replacement"), draws=MORE
    ),
    "k_config, without_replacement": Case(tree("k_config", widths=(2, 2)), draws=MORE),
    "k_config, top_k": Case(tree("k_config", widths=(2, 2), draw="top_k")),
    "k_config, naive": Case(tree("k_config", "naive", widths=(2, 2))),
    "k_config, beta": Case(
        tree("k_config", source="skip_layers", stop="beta", widths=(2, 1, 1)),
        11,
        Tables(TableWithLayers(MARKOV.p, MARKOV.q), MARKOV.q),
    ),
    "opt_tree, calibrated": Case(
        tree("opt_tree", source="eagle3", stop="calibrated", nodes=6, max_depth=4, delta=0.0), 11
    ),
    "k_config, some tokens": Case(tree("k_config", widths=(4, 1)), tables=OF_SOME),
    "chain, some tokens": Case(block(max_draft=3), tables=OF_SOME),
    "opt_tree": Case(tree("opt_tree", nodes=6, max_depth=4, delta=0.0)),
    "token_graph": Case(tree("token_graph", nodes=10, max_depth=4, tau=1, theta_prob=0.1)),
    "opt_tree, drafter": Case(tree("opt_tree", nodes=6, max_depth=4, delta=0.0, temperature=0.5, rank="drafter")),
    "token_graph, drafter": Case(tree("token_graph", nodes=10, max_depth=4, tau=1, temperature=0.5, rank="drafter")),
    "binary": Case(tree("static", shape="binary", nodes=6)),
    "eagle": Case(tree("static", source="early_exit")),
    "prompt_lookup": Case(MethodConfig("prompt_lookup", stop=StopConfig(max_draft=3)), 403),
    "ngrams, best_first": Case(ngrams(), 403),
    "ngrams, puct": Case(ngrams(search="puct", iterations=20, sentences=6), 403),
    "ngrams, mixed": Case(ngrams(evidence="mixed"), 403),
    "ngrams, auto": Case(ngrams(evidence="mixed", nodes="auto"), 403),
    "ngrams, recycled": Case(ngrams(evidence="mixed", recycle=3), 403),
}


def make_arm(case: Case, sampling: SamplingConfig = PLAIN, name: str = "m") -> Arm:
    head = CalibrationHead(1, 1)
    with torch.no_grad():  # a hidden state is its token's id
        head.target += 0.3
        head.draft -= 0.5
        head.bias += 0.8
    q: Any = case.tables.q
    size = len(case.tables.p.distributions)
    models = {"early_exit": q, "small_lm": q, "eagle3": TableHead(q.distributions.tolist())}
    models["mtp"] = models["eagle3"]
    models["dflash"] = TableBlock(q.distributions.tolist())
    table = TrigramTable.from_documents(make_documents(size), [2, 3, 4], size, "t", min_count=2)
    drafters = {name: Calibrated(model, head) for name, model in models.items()} | {"ngrams": table}
    options = {"text": TextSettings(case.tokens, sampling=sampling), "runtime": TableRuntime()}
    options["tunings"] = {"m": DEAR} if case.method.adapts else {}
    return make_arms(case.tables.p, drafters, {"m": case.method}, None, **options)[name]  # type: ignore[arg-type]


def draw(arm: Arm, tokens: int, draws: int) -> list[Text]:
    """Texts after the token 0, itself included: together `draws` tokens that have ORDER new ones before them."""
    count = -(-draws // (tokens - ORDER))
    return [(0, *arm([0], Streams(0, str(prompt), repeat=prompt % 3)).tokens) for prompt in range(count)]


def p_values(texts: Sequence[Text], distribution: Callable[[Text], Sequence[float]]) -> list[float]:
    """How likely tokens deviate from `distribution` of the text before them as much as here, or more, if it is their
    distribution.

    By context of ORDER tokens, where there are as many; by context of one; and by that and the place, since what is
    wrong at the third token only is lost among the others. Given its context each token is a draw of its own, so the
    sum over contexts has the distribution of χ² (Billingsley 1961, for the counts of Markov chains).
    """
    contexts: list[Callable[[Text], Hashable]] = [
        lambda text: text[-ORDER:],
        lambda text: text[-1],
        lambda text: (text[-1], min(len(text), ORDER + 2)),
    ]
    return [p_value(texts, distribution, context) for context in contexts]


def p_value(
    texts: Sequence[Text], distribution: Callable[[Text], Sequence[float]], context: Callable[[Text], Hashable]
) -> float:
    """As above, by any context that decides the distribution. Contexts too rare for an approximation are left out."""
    counts: dict[Hashable, Counter[int]] = {}
    distributions: dict[Hashable, Sequence[float]] = {}
    for text in texts:
        for place in range(1, len(text)):
            key = context(text[:place])
            if key not in counts:
                counts[key], distributions[key] = Counter(), distribution(text[:place])
            counts[key][text[place]] += 1
    statistic, freedom = 0.0, 0
    for key, seen in counts.items():
        expected = {token: share * seen.total() for token, share in enumerate(distributions[key]) if share > 0}
        if not set(seen) <= set(expected):
            return 0.0
        if min(expected.values()) >= 5:
            statistic += sum((seen[token] - mean) ** 2 / mean for token, mean in expected.items())
            freedom += len(expected) - 1
    return chi_square_tail(statistic, freedom)


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(χ² ≥ statistic)."""
    half = torch.tensor([freedom, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1]))


def table_distribution(tables: Tables) -> Callable[[Text], Sequence[float]]:
    rows = tables.p.distributions.tolist()
    return lambda text: rows[text[-1]]


def test_the_tail_of_chi_square() -> None:
    """Against tables of it (NIST/SEMATECH e-Handbook, 1.3.6.7.4)."""
    for freedom, critical, tail in ((1, 3.841, 0.05), (2, 13.816, 0.001), (26, 45.642, 0.01), (80, 124.839, 0.001)):
        assert chi_square_tail(critical, freedom) == pytest.approx(tail, rel=2e-3)


# distributions


# What they run is in other cases: their verification, their stop rule or their n-grams.
REPEATED = {
    "chain, fixed", "chain, beta", "opt_tree, calibrated", "k_config, top_k", "binary", "eagle", "ngrams, puct",
}  # fmt: skip


@pytest.mark.parametrize("name", typical_where(lambda name: name not in REPEATED, CASES))
@pytest.mark.slow
def test_distribution(name: str) -> None:
    case = CASES[name]
    texts = draw(make_arm(case), case.tokens, case.draws)
    assert sum(len(text) - 1 - ORDER for text in texts) >= case.draws
    assert min(p_values(texts, table_distribution(case.tables))) > LEVEL


@pytest.mark.slow
def test_distribution_of_plain_sampling() -> None:
    case = CASES["chain, fixed"]
    texts = draw(make_arm(case, name=AUTOREGRESSIVE), case.tokens, DRAWS)
    assert min(p_values(texts, table_distribution(case.tables))) > LEVEL


def penalised(sampling: SamplingConfig) -> Callable[[Text], Sequence[float]]:
    """The distribution after a whole text, with processors that read it."""
    sampler = Sampler(sampling)

    def distribution(text: Text) -> Sequence[float]:
        return sampler.probabilities(MARKOV.p.table[[text[-1]]], [torch.tensor(text)])[0].double().tolist()

    return distribution


PROCESSED = ("chain, fixed", "k_config, without_replacement", "opt_tree", "opt_tree, drafter")


@pytest.mark.parametrize("name", typical_where("k_config, without_replacement".__eq__, PROCESSED))
@pytest.mark.slow
def test_distribution_after_processors_that_read_the_text(name: str) -> None:
    """Temperature, top-k and a repetition penalty, by which the distribution depends on all tokens that the text has
    had."""
    sampling = SamplingConfig(temperature=0.8, top_k=3, repetition_penalty=1.5)
    case = Case(CASES[name].method, tokens=7, tables=MARKOV)
    texts = draw(make_arm(case, sampling), case.tokens, DRAWS)
    seen = p_value(texts, penalised(sampling), lambda text: (text[-1], frozenset(text)))
    assert seen > LEVEL
    assert p_value(texts, table_distribution(MARKOV), lambda text: text[-1]) < LEVEL  # which is another distribution


# Each is planted into what ships, and must be seen at a fraction of the draws.

Fault = tuple[Any, str, str, str]  # a class or module, its function, and what stands there instead (see `plant`)

STOPS: Fault = (Streams, "number", "*purpose]", '*("verify" if part == "stop" else part for part in purpose)]')
# The verifier chooses by 52 bits, as it did while the seeds of two streams were equal.
WORDS: Fault = (verify.RandomChance, "choose", "self._random.random()", "self._random.getrandbits(52) * 2.0**-52")
ALIKE: Fault = (Streams, "number", "self.repeat, *self.path, *purpose", "self.repeat")
NO_PROMPT: Fault = (Streams, "number", "self.prompt, self.repeat, *self.path", "'', self.repeat")
NO_RESIDUAL: Fault = (verify.Rejection, "residual", "return r[0]", "return p[parent + 1]")
EASY: Fault = (verify.RandomChance, "accept", "< probability", "< 1.5 * probability")
WITHDRAWN: Fault = (
    shapes.Chain, "draft", "draft_len = len(tokens) - 1\n",
    "tokens = tokens[: len(tokens) - (1 < len(tokens) <= max_steps)]\n    draft_len = len(tokens) - 1\n"
    "    q_by_node = {node: row for node, row in q_by_node.items() if node < draft_len - 1}\n",
)  # fmt: skip
Q_OF_COPIES: Fault = (
    ModelDrafter, "draft", "return copied_tree",
    "return replace(copied_tree, q=dict.fromkeys(range(-1, 15), torch.ones(4) / 4))",
)  # fmt: skip
VERIFIES = (token_selector.TokenSelector, "verify")
FAULTS: dict[str, tuple[Case, int, *tuple[Fault, ...]]] = {  # where, the draws that show it, and what
    "stop and verification share, as they did": (CASES["chain, beta"], SHARED, STOPS, WORDS),
    "stop and verification share": (CASES["chain, beta"], SHARED, STOPS),
    "stop and verification share, calibrated": (CASES["chain, calibrated"], 1_500, STOPS),
    "all uses share": (Case(chain("fixed", max_draft=3), 7), 1_500, ALIKE),
    "all uses share, in a tree": (Case(tree("k_config", widths=(2, 2)), 7), 1_500, ALIKE),
    "prompts share": (CASES["chain, beta"], 200, NO_PROMPT),
    "the token that stops is withdrawn": (CASES["chain, confidence"], 1_000, WITHDRAWN),
    "residual forgotten": (CASES["chain, fixed"], 1_000, NO_RESIDUAL),
    "residual forgotten, in a tree": (CASES["k_config, without_replacement"], 1_500, NO_RESIDUAL),
    "residual mirrored": (CASES["chain, fixed"], 500, (verify.Rejection, "_reject", ".clip(min=0)", ".abs()")),
    "accepted too easily": (CASES["chain, fixed"], 1_500, EASY),
    "drawn from another q": (CASES["k_config, with_replacement"], MORE, (shapes, "_draw", "(q, ", "(q**1.5, ")),
    "draws taken for independent": (
        Case(tree("k_config", widths=(3,))), MORE, (*VERIFIES, "replace=bool(tree.draws)", "replace=True"),
    ),
    "matching forgets": (CASES["opt_tree"], 1_000, (verify.Matching, "residual", "r[list(tokens)] = 0", "")),
    "a q of what was copied": (CASES["chain, copied"], 1_500, Q_OF_COPIES),
    "the source is chosen after the draw": (
        CASES["chain, copied"], 1_500,
        (ModelDrafter, "draft", "if len(copied_tree):",
         "drawn = self._source.with_ids(self.structure.draft(self._source, root, limit))\n"
         "        if len(drawn) and drawn.tokens[0] == 0:\n"
         "            return drawn\n"
         "        if True:"),
    ),
    "a q by index": (CASES["chain, some tokens"], 1_500, (TimedModel, "with_ids", "0, id_map", "0, id_map.argsort()")),
    "block accepted too easily": (CASES["chain, block"], MORE, EASY),
    "q without the states that it was drawn with": (
        CASES["chain, PARD-2"], 1_500,
        (TimedModel, "with_ids", 'tree, source="model")',
         'tree, source="model", q={node: self._draft_model.model.pard2.table[3].exp() for node in tree.q})'),
    ),
    "block by the first token's q": (
        CASES["chain, block"], 1_500, (*VERIFIES, "(tokens, tree.q,", "(tokens, dict.fromkeys(tree.q, tree.q[-1]),"),
    ),
    "a q without the Markov head's bias": (
        CASES["chain, dspark"], 1_000,
        (shapes.Chain, "draft", "= probs[0]",
         "= softmax_probs(2 * logits - source._draft_model.drafter.bias(logits, tokens[-1]), (row,))[0]"),
    ),
    "a q of siblings without it": (
        CASES["k_config, dspark"], MORE,
        (shapes.KConfig, "draft", "zip(fed_nodes, probs, strict=True)",
         "zip(fed_nodes, softmax_probs(2 * logits - source._draft_model.drafter.bias(logits, tokens), rows))"),
    ),
    "the last token by the row above": (
        CASES["chain, fixed"], 500, (*VERIFIES, "tree.q, p, rule", "tree.q, torch.cat([p[:-1], p[-2:][:1]]), rule"),
    ),
}  # fmt: skip
# The same mistake in a rule whose prior learns, which 1,500 draws of another rule show.
DEAR_FAULTS = {"stop and verification share, as they did", "stop and verification share"}


@pytest.mark.parametrize(
    "name",
    typical_where(lambda name: name not in DEAR_FAULTS, quick_where(lambda name: name == "residual mirrored", FAULTS)),
)
def test_planted_fault_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, draws, *faults = FAULTS[name]
    for fault in faults:
        plant(monkeypatch, *fault)
    assert min(p_values(draw(make_arm(case), case.tokens, draws), table_distribution(case.tables))) < LEVEL
