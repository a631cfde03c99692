"""N-grams beside a model: who drafts a round. The text: test_lossless.py; its distribution: test_distributions.py."""

from collections.abc import Callable, Sequence

import pytest

from outrider import preset
from outrider.base.streams import Streams
from outrider.inference.core.decode import speculative
from outrider.inference.core.rounds import Generation, Round
from outrider.inference.drafters.ngrams.beside_model import ModelRate, NgramsBesideModel
from outrider.inference.loading.drafters import new_drafter
from outrider.inference.measure.statistics import SourceRounds, count_rounds_by_source
from outrider.inference.sizing.policy import KEEP, Tuning
from tests.faults import plant
from tests.inference.priced import costs
from tests.known_targets import PROMPT, Target, targets, tokens_of

COSTS = costs(step=0.1, node=0.02)
make = pytest.fixture(scope="module")(targets)


def slow_rate(rounds: Sequence[tuple[bool, int, float]], sure: bool) -> float:
    """The model's rate by its rounds: whether n-grams were sure, tokens, seconds."""
    aged = [(kind, n * KEEP**age, seconds * KEEP**age) for age, (kind, n, seconds) in enumerate(reversed(rounds))]
    prior = 4 * (3 * 0.1 + 1.08 + 0.05)
    overall = (4 * 2.2 + sum(n for _, n, _ in aged)) / (prior + sum(seconds for *_, seconds in aged))
    alike = [(n, seconds) for kind, n, seconds in aged if kind == sure]
    return (prior * overall + sum(n for n, _ in alike)) / (prior + sum(seconds for _, seconds in alike))


def require_higher_rate(target: Target) -> None:
    """Each round's source is that of the higher rate, which is computed anew from all earlier rounds of the model."""
    models = {"small_lm": target.small("small_lm"), "ngrams": target.table}
    drafter = new_drafter(preset("small_lm_table"), models, Streams(0), tuning=Tuning(COSTS))
    beside, rounds, earlier = drafter.copies, list[Round](), list[tuple[bool, int, float]]()  # type: ignore[attr-defined]
    assert isinstance(beside, NgramsBesideModel)
    model_rate, history = ModelRate(3 * 0.1 + 1.08 + 0.05), [(n % 3 > 0, 1 + n % 4, 0.5 + n % 5) for n in range(12)]
    for sure, emitted, seconds in history:  # of this text the n-grams may be sure in no round of the model
        model_rate.observe(sure, emitted, seconds)
    assert [model_rate.rate(kind) for kind in (False, True)] == pytest.approx(
        [slow_rate(history, kind) for kind in (False, True)]
    )
    for r in speculative(target.stack, drafter, PROMPT, max_new_tokens=80):
        rounds.append(r)
        if len(rounds) == 1 or not r.source:
            continue
        expected, nodes = beside._sizes.expected_tokens, beside._sizes._last_count
        ngram_rate, sure = expected / (1.0 + 0.02 * (nodes + 1) + 0.05), expected > 1.8
        assert r.source == ("table" if nodes and ngram_rate >= slow_rate(earlier, sure) else "model")
        if r.source == "model":
            earlier.append((sure, r.accepted + 1, r.depth * 0.1 + 1.0 + 0.02 * (r.drafted + 1) + 0.05))
        rates = [beside._model_rate.rate(kind) for kind in (False, True)]
        assert rates == pytest.approx([slow_rate(earlier, kind) for kind in (False, True)])
    assert tokens_of(rounds) == target.text_after(PROMPT, 80)
    sources = count_rounds_by_source([Generation((), 0.0, 0.0, tuple(rounds[1:]))])
    for source in ("model", "table"):
        emitted = [len(r.tokens) for r in rounds if r.source == source]
        assert sources[source] == SourceRounds(len(emitted), sum(emitted) / len(emitted))
        assert len(emitted) > 2


def test_the_source_of_the_higher_rate_drafts(make: Callable[..., Target]) -> None:
    require_higher_rate(make())


FAULTS = {
    "rounds of n-grams count for the model": (NgramsBesideModel, "commit", 'tree.source == "model"', "len(tree)"),
    "sure rounds count as others": (ModelRate, "observe", "tokens * (kind == sure)", "tokens * (not kind)"),
    "n-grams pay for steps": (NgramsBesideModel, "draft", "costs.overhead)", "costs.overhead + costs.step[1])"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_choice_are_seen(
    make: Callable[..., Target], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    plant(monkeypatch, *FAULTS[fault])
    with pytest.raises(AssertionError):
        require_higher_rate(make())
