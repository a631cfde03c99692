"""The mixture of a table and the text so far, against a slow computation; recycled logits, which are evidence of it."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.draft_models.ngrams.overlay import longer_key, new_recycled, recycle, recycled_slot
from outrider.draft_models.ngrams.suffixes import LEAST, REACH
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.draft_models.targets.open_target import open_target
from outrider.draft_models.targets.stack import WholeModel
from outrider.inference.core.decode import speculative
from outrider.inference.core.target_session import Runtime
from outrider.inference.core.tree import DraftTree
from outrider.inference.drafters.ngrams.drafter import MixedDrafter
from outrider.inference.drafters.ngrams.ngram_mixing import class_of, new_weights
from outrider.inference.engines.graphs.cuda_graphs import Graphed
from outrider.inference.loading.models import load_reference
from outrider.inference.settings.method import NgramConfig
from tests.draft_models.ngrams.test_suffixes import slow_successors
from tests.inference.graph_contract import keep_contracts
from tests.inference.ngram_cases import (
    TABLE,
    TEXTS,
    VOCABULARY,
    FakeSession,
    draft,
    make_documents,
    make_table,
    paths_of,
)
from tests.ngram_reading import find_context, successors
from tests.tiny import open_stack, random_prompt, save_target

Rows = dict[tuple[int, ...], tuple[int, dict[int, float]]]  # recycled: count and likely tokens by context
NO_ROWS: Rows = {}


def slow_sources(
    drafter: MixedDrafter, text: list[int], rows: Rows = NO_ROWS
) -> list[tuple[int, int, dict[int, float]]]:
    """(source, class, probabilities) of every known context, most trusted first; those of the text from scratch."""
    found = []
    for size in range(min(drafter.config.longest, len(text) - 1), 0, -1):
        counts: dict[int, float] = {}
        seen = 0
        for end in range(size, len(text)):
            if text[end - size : end] == text[-size:]:
                counts = {token: count * drafter.config.decay for token, count in counts.items()}
                counts[text[end]] = counts.get(text[end], 0.0) + 1
                seen += 1
        if counts:
            total = sum(counts.values())
            share = max(counts.values()) / total
            found.append((2 + size, class_of(seen, share), {t: c / total for t, c in counts.items()}))
    for size in (2, 1):
        if tuple(text[-size:]) in rows:
            seen, distribution = rows[tuple(text[-size:])]
            found.append((2 + drafter.config.longest + size, class_of(seen, max(distribution.values())), distribution))
    sizes = range(min(REACH, len(text)), LEAST - 1, -1) if drafter.table.suffixes is not None else ()
    for size in sizes:
        after = slow_successors(make_documents(), text[-size:])
        if after:
            counts = Counter(token for token in after if token is not None)
            share = max(counts.values(), default=0) / len(after)
            source = 3 + drafter.config.longest + drafter.mixture.recycled.longest + size - LEAST
            found.append((source, class_of(len(after), share), {t: c / len(after) for t, c in counts.items()}))
    for order in (4, 3, 2):
        state = text[-(order - 1) :]
        if order in drafter.table.levels and len(state) == order - 1 and max(state) < VOCABULARY:
            level = drafter.table.levels[order]
            tokens, probabilities = successors(drafter.table, state)
            if len(tokens):
                kind = class_of(int(level.totals[find_context(level, state)]), float(probabilities[0]))
                found.append((order - 2, kind, dict(zip(tokens.tolist(), probabilities.tolist(), strict=True))))
    return found


def slow_mixture(drafter: MixedDrafter, text: list[int], rows: Rows = NO_ROWS) -> dict[int, float]:
    mixed: Counter = Counter()
    left = 1.0
    for source, kind, probabilities in slow_sources(drafter, text, rows):
        share = drafter.mixture.weights.shares[source, kind]
        for token, p in probabilities.items():
            mixed[token] += left * share * p
        left *= 1 - share
    return mixed


@settings(deadline=None, max_examples=15)
@given(text=TEXTS, nodes=st.integers(4, 20), orders=st.sampled_from([(2, 3, 4), (3,), (2, 4)]))
def test_mixed_draft_is_the_best_of_the_mixture(text: list[int], nodes: int, orders: tuple[int, ...]) -> None:
    """Two levels of all tokens if the nodes suffice; else nearly the best, as small contributions are left out."""
    table = make_table(orders=orders)
    for budget in (400, nodes):
        drafter = MixedDrafter(table, NgramConfig(evidence="mixed", nodes=budget, depth=2, longest=4))
        tree = draft(drafter, text)
        probabilities = paths_expected(drafter, text)
        expected = [probabilities[path] for path in paths_of(tree)]
        if budget == 400:
            assert tree.path_probs.tolist() == pytest.approx(expected, rel=1e-2, abs=1e-5)
            assert sum(expected) == pytest.approx(sum(probabilities.values()), abs=1e-2)
        else:
            assert len(tree) >= 0.9 * min(nodes, len(probabilities))
            assert sum(expected) >= 0.95 * sum(sorted(probabilities.values(), reverse=True)[:nodes])


def slow_mixture_after(drafter: MixedDrafter, text: list[int], token: int, rows: Rows = NO_ROWS) -> dict[int, float]:
    """The mixture one token ahead: contexts end with the draft, their successors come from the text only."""
    mixed: Counter = Counter()
    left = 1.0
    longer = [*text, token]
    for size in range(min(drafter.config.longest, len(longer)), 0, -1):
        counts = successors(drafter.mixture.index, longer[-size:])
        if counts:
            total = sum(counts.values())
            seen = sum(longer[end - size : end] == longer[-size:] for end in range(size, len(text)))
            share = drafter.mixture.weights.shares[2 + size, class_of(seen, max(counts.values()) / total)]
            for t, c in counts.items():
                mixed[t] += left * share * c / total
            left *= 1 - share
    for source, kind, probabilities in slow_sources(drafter, longer, rows):
        if source < 3 or source > 2 + drafter.config.longest:
            share = drafter.mixture.weights.shares[source, kind]
            for t, p in probabilities.items():
                mixed[t] += left * share * p
            left *= 1 - share
    return mixed


def paths_expected(drafter: MixedDrafter, text: list[int], rows: Rows = NO_ROWS) -> dict[tuple[int, ...], float]:
    """The probabilities of all paths of one token and of two."""
    found: dict[tuple[int, ...], float] = {}
    for token, p in slow_mixture(drafter, text, rows).items():
        found[token,] = p
        for after, q in slow_mixture_after(drafter, text, token, rows).items():
            found[token, after] = p * q
    return found


def require_close(tree: DraftTree, expected: dict[tuple[int, ...], float]) -> None:
    """The tree has nearly all of the expected paths, and their probabilities."""
    found = dict(zip(paths_of(tree), tree.path_probs.tolist(), strict=True))
    assert found == pytest.approx({path: expected[path] for path in found}, rel=1e-2, abs=1e-5)
    assert sum(found.values()) == pytest.approx(sum(expected.values()), abs=1e-2)


LAWS = np.random.default_rng(5).dirichlet(np.full(VOCABULARY, 0.4), VOCABULARY).tolist()
WIDEST = 4


def note(rows: Rows, text: list[int], distribution: list[float]) -> None:
    """As `recycle` does with the row after `text`."""
    best = sorted(range(VOCABULARY), key=lambda token: -distribution[token])[:WIDEST]
    for size in (1, 2):
        context = tuple(text[-size:])
        rows[context] = (rows.get(context, (0, {}))[0] + 1, {token: distribution[token] for token in best})


def test_recycled_rows_are_evidence_of_the_mixture() -> None:
    """Rows of the root, of an accepted and of a rejected node: they rank between contexts of text and table."""
    drafter = MixedDrafter(TABLE, NgramConfig(evidence="mixed", nodes=400, depth=2, longest=2, recycle=WIDEST))
    text, rows = [1, 2, 3, 1, 2, 4, 1, 2], dict[tuple[int, ...], tuple[int, dict[int, float]]]()
    session = FakeSession(text[:-1], {row: LAWS[row] for row in range(3)})
    drafter.begin(session, None, None)
    drafter.draft(torch.tensor([2]), 2)
    drafter.commit(DraftTree(torch.tensor([7, 3]), (-1, 0), (-1, -1)), (0,), (2, 7))
    for row, path in enumerate(([], [7], [7, 3])):
        note(rows, text + path, LAWS[row])
    text += [7, 7]
    tree = drafter.draft(torch.tensor([7]), 2)
    expected = paths_expected(drafter, text, rows)
    assert {path for path in expected if path[0] == 3} > {(3,)}
    require_close(tree, expected)


def test_the_corpus_by_longest_suffix_is_evidence_of_the_mixture() -> None:
    """For a text from the corpus, with known contexts of more than three tokens, and the same one token ahead."""
    table = TrigramTable.from_documents(make_documents(), [2, 3, 4], VOCABULARY, "t", min_count=2, suffixes=True)
    drafter = MixedDrafter(table, NgramConfig(evidence="mixed", nodes=400, depth=2, longest=2))
    text = make_documents()[4][20:33]
    tree = draft(drafter, text)
    assert {source for source, *_ in slow_sources(drafter, text)} >= {5, 6, 7}
    require_close(tree, paths_expected(drafter, text))


@pytest.mark.parametrize(("recycle", "suffixes"), [(0, False), (WIDEST, False), (0, True)])
def test_weights_follow_what_came_true(recycle: int, suffixes: bool) -> None:
    """One step of expectation–maximisation per token of the output, none for the prompt.

    It learns from what was known when the token was drafted, not from the target's row that chose the token.
    """
    config = NgramConfig(evidence="mixed", longest=3, strength=5.0, recycle=recycle)
    table = TrigramTable.from_documents(make_documents(), [2, 3, 4], VOCABULARY, "t", min_count=2, suffixes=suffixes)
    drafter, rows = MixedDrafter(table, config), dict[tuple[int, ...], tuple[int, dict[int, float]]]()
    text = np.random.default_rng(2).integers(0, 4, 80).tolist()
    text[40:60] = make_documents()[4][20:40]
    session = FakeSession(text[:30])
    drafter.begin(session, None, None)
    assert np.array_equal(drafter.mixture.weights.shares, new_weights(3, 2 if recycle else 0, suffixes).prior_shares)
    hits, trials = np.zeros_like(drafter.mixture.weights.hits), np.zeros_like(drafter.mixture.weights.hits)
    for end in range(30, 80):
        sources = slow_sources(drafter, text[:end], rows)
        shares = [drafter.mixture.weights.shares[source, kind] for source, kind, _ in sources]
        drafter.draft(torch.tensor([text[end]]), 1)
        if recycle and end > 30:
            note(rows, text[:end], LAWS[text[end - 1]])
        session.rows = {0: LAWS[text[end]]}
        drafter.commit(DraftTree(torch.empty(0, dtype=torch.long), (), ()), (), [text[end]])
        left = 1.0
        for i, (source, kind, probabilities) in enumerate(sources):
            rest = 1e-5
            for share, (_, _, other) in reversed(list(zip(shares[i:], sources[i:], strict=True))):
                rest = share * other.get(text[end], 0.0) + (1 - share) * rest
            hit = left * shares[i] * probabilities.get(text[end], 0.0) / rest
            hits[source, kind] += hit
            trials[source, kind] += left
            left -= hit
    expected = (5.0 * drafter.mixture.weights.prior_shares + hits) / (5.0 + trials)
    np.testing.assert_allclose(drafter.mixture.weights.shares, expected, rtol=1e-6)  # recycled rows are float32
    assert not np.allclose(drafter.mixture.weights.shares, drafter.mixture.weights.prior_shares)
    assert (trials[6 + (2 if recycle else 0) :].sum() > 1) == suffixes


CPU, WIDTH = torch.device("cpu"), 3


def kept(recycled: Any, context: tuple[int, ...]) -> tuple[list[int], list[float], int] | None:
    """(tokens, probabilities, rows seen) under a context, None where there are none."""
    key = np.uint64(0)
    for token in reversed(context):
        key = np.uint64(longer_key(key, token))
    place = recycled_slot(recycled, key)
    if not recycled.seen[place] or recycled.keys[place] != key:
        return None
    return recycled.tokens[place].tolist(), recycled.probs[place].tolist(), int(recycled.seen[place])


@settings(deadline=None, max_examples=25)
@given(
    text=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    parents=st.lists(st.integers(-1, 20), max_size=12),
    seed=st.integers(0, 99),
)
def test_every_row_is_kept_under_what_it_followed(text: list[int], parents: list[int], seed: int) -> None:
    """Under its last token and its last two; the newest of equal contexts; none of a row that is no numbers."""
    parents = [min(parent, i - 1) for i, parent in enumerate(parents)]
    generator = np.random.default_rng(seed)
    nodes = generator.integers(0, 10, len(parents))
    rows = np.sort(generator.choice(len(parents) + 1, generator.integers(1, len(parents) + 2), replace=False))
    found = generator.random((len(rows), 2 * WIDTH)).astype(np.float32)
    found[:, :WIDTH] = generator.integers(0, 10, (len(rows), WIDTH))
    found[generator.random(len(rows)) < 0.2, WIDTH:] = np.nan
    recycled = new_recycled(2, WIDTH)
    recycle(recycled, np.array(text), len(text), nodes, np.array(parents, np.int64), rows, found)

    def path(node: int) -> list[int]:
        return [*path(parents[node]), int(nodes[node])] if node >= 0 else text

    expected: dict[tuple[int, ...], tuple[list[int], list[float], int]] = {}
    for row, values in zip(rows, found, strict=True):
        for size in (1, 2):
            context = tuple(path(row - 1)[-size:])
            if len(context) == size and not np.isnan(values).any():
                seen = expected.get(context, ((), (), 0))[2]
                expected[context] = (values[:WIDTH].astype(int).tolist(), values[WIDTH:].tolist(), seen + 1)
    for context, row in expected.items():
        assert kept(recycled, context) == row
    assert np.count_nonzero(recycled.seen) == len(expected)


@pytest.mark.parametrize("runtime", ["eager", "graphed", "graphs", "whole model"])
def test_rows_are_those_of_the_verified_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str) -> None:
    """What a drafter reads are the likeliest tokens, by the target itself, after the path to every row of the pass."""
    path = save_target(tmp_path, "llama", kv_heads=2, peak=6.0)
    model, stack = open_stack(path, torch.float64)
    if runtime == "whole model":
        stack = WholeModel(load_reference(open_target(str(path), by_layers=False), torch.float64, CPU))
    if runtime == "graphs":
        keep_contracts(monkeypatch)
    texts: list[list[int]] = []
    read: list[torch.Tensor] = []

    class Noting(MixedDrafter):
        def commit(self, tree: DraftTree, nodes: Any, tokens: Any) -> None:
            before = self._ids[: self._length + 1].tolist()
            paths = [before]
            for token, parent in zip(tree.tokens.tolist(), tree.parents, strict=True):
                paths.append([*paths[parent + 1], token])
            rows, found = self._session.top_tokens_of_rows()
            texts.extend(paths[row] for row in rows)
            read.extend(found.clone())
            super().commit(tree, nodes, tokens)

    drafter = Noting(TABLE, NgramConfig(evidence="mixed", nodes=6, depth=3, recycle=WIDTH))
    chosen = Runtime() if runtime in ("eager", "whole model") else Graphed()
    tokens = [
        t
        for r in speculative(stack, drafter, random_prompt(9) * 2, max_new_tokens=10, runtime=chosen)
        for t in r.tokens
    ]
    assert len(tokens) == 10 < len(read)
    for text, row in zip(texts, read, strict=True):
        distribution = model.double()(torch.tensor([text])).logits[0, -1].softmax(-1)
        probs, likeliest = distribution.topk(WIDTH)
        assert row[:WIDTH].long().tolist() == likeliest.tolist()
        torch.testing.assert_close(row[WIDTH:].double(), probs, rtol=1e-4, atol=1e-6)
