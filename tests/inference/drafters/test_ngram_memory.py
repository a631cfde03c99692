"""Memory across prompts: what it gains, that no text ever finds its own answer in it, and what is refused."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from inference.decode import speculative
from inference.drafters import ngram_memory
from inference.drafters.ngram_memory import close, memory_of, open_memory
from inference.drafters.ngrams import make_ngram_drafter
from inference.method_settings import MethodConfig, NgramConfig, StructureConfig
from inference.settings import EvaluateConfig
from outrider.errors import UserError
from tests.inference.ngram_cases import TABLE, FakeSession
from tests.tiny import open_stack, random_prompt, reference_generate, save_target

ANSWER = np.random.default_rng(1).integers(0, 12, 60).tolist()
TARGET = {"vocab_size": 12, "weights": "w"}
CONFIGS = {
    "mixed": NgramConfig(evidence="mixed", nodes=6, depth=4, longest=4),
    "recycled": NgramConfig(evidence="mixed", nodes=6, depth=4, longest=4, recycle=4),
    "table": NgramConfig(nodes=6, depth=4),
}


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    """A file for a memory, which is closed in the end."""
    yield tmp_path / "kept.safetensors"
    for path in list(ngram_memory._open):
        close(str(path))


def hits(config: NgramConfig, prompt: list[int]) -> int:
    """How many of ANSWER's tokens after `prompt` stand in the draft before them."""
    drafter = make_ngram_drafter(TABLE, replace(config, recycle=0) if config.keep is None else config, 0)
    session = FakeSession(prompt, {0: [1 / 12] * 12})
    drafter.begin(session, None, None)  # type: ignore[arg-type]
    right = 0
    for token, following in itertools.pairwise(ANSWER):
        tree = drafter.draft(torch.tensor([token]), 4)
        first = [t for t, parent in zip(tree.tokens.tolist(), tree.parents, strict=True) if parent == -1]
        right += following in first[:1]
        drafter.commit(tree, (), [token])
    return right


@pytest.mark.parametrize("name", CONFIGS)
def test_another_prompt_finds_what_was_learnt_and_the_same_one_does_not(kept: Path, name: str) -> None:
    config = replace(CONFIGS[name], keep=str(kept))
    open_memory(config, TABLE, TARGET)
    alone = hits(config, [1, 2])
    assert hits(config, [1, 2]) == alone  # a repeat, or a warm-up: it does not know its answer
    assert hits(config, [3]) > alone + 5
    close(str(kept))
    open_memory(config, TABLE, TARGET)
    assert hits(config, [5]) > alone + 5  # the next day
    assert hits(replace(CONFIGS[name], recycle=0), [1, 2]) == alone or name == "recycled"


def test_the_text_is_the_targets_with_a_memory(tmp_path: Path, kept: Path) -> None:
    """Greedy decoding, τ of the second of two prompts with one answer higher; and what is learnt reaches the file."""
    model, stack = open_stack(save_target(tmp_path / "target", kv_heads=2))
    prompt = random_prompt(10)
    expected = reference_generate(model, prompt, 40)
    config = NgramConfig(evidence="mixed", depth=8, nodes=30, recycle=4, keep=str(kept))
    open_memory(config, TABLE, {"vocab_size": 256})
    counts = []
    for asked in (prompt, [*prompt, *expected[:5]]):
        drafter = make_ngram_drafter(TABLE, config, 0)
        rounds = list(speculative(stack, drafter, asked, max_new_tokens=35))
        assert [t for r in rounds for t in r.tokens] == expected[len(asked) - 10 :][:35]
        counts.append(len(rounds))
    assert counts[1] < counts[0]
    close(str(kept))
    assert open_memory(config, TABLE, {"vocab_size": 256})._before.known.used[0] > 100


def test_weights_go_on_where_they_were(kept: Path) -> None:
    config = replace(CONFIGS["mixed"], keep=str(kept))
    memory = open_memory(config, TABLE, TARGET)
    hits(config, [1])
    drafter = make_ngram_drafter(TABLE, config, 0)
    drafter.begin(FakeSession([2]), None, None)  # type: ignore[arg-type]
    assert not np.array_equal(drafter.weights.now, ngram_memory.nothing(TABLE, config).shares)  # type: ignore[union-attr]
    assert np.array_equal(drafter.weights.prior, memory._before.shares)  # type: ignore[union-attr]


def test_a_memory_keeps_within_its_limit(kept: Path) -> None:
    config = replace(CONFIGS["mixed"], keep=str(kept), keep_mb=0.02)
    open_memory(config, TABLE, TARGET)
    sizes = []
    for number in range(8):
        drafter = make_ngram_drafter(TABLE, config, 0)
        text = np.random.default_rng(number).integers(0, 12, 400).tolist()
        drafter.begin(FakeSession(text), None, None)  # type: ignore[arg-type]
        memory_of(str(kept)).save()
        sizes.append(kept.stat().st_size)
    assert 10_000 < max(sizes) < 20_000 + 2_000  # and what the file says of itself


def test_a_limit_that_leaves_no_room_for_contexts_is_refused(kept: Path) -> None:
    config = replace(CONFIGS["mixed"], recycle=8, keep=str(kept), keep_mb=4.5)
    with pytest.raises(
        UserError, match=r"ngrams\.keep_mb=4\.5: expected more than 4\.99, half of which is not contexts"
    ):
        open_memory(config, TABLE, TARGET)
    open_memory(replace(config, keep_mb=6.0), TABLE, TARGET)
    with pytest.raises(UserError, match=r"ngrams\.keep_mb=7\.0: expected what it was when .* was opened"):
        open_memory(replace(config, keep_mb=7.0), TABLE, TARGET)


def test_what_is_not_its_own_is_refused(kept: Path) -> None:
    config = replace(CONFIGS["mixed"], keep=str(kept))
    open_memory(config, TABLE, TARGET)
    others = [
        (config, TABLE, {**TARGET, "weights": "other"}, "another target"),
        (config, replace(TABLE, tokenizer="other"), TARGET, "another tokenizer"),
        (replace(config, longest=3), TABLE, TARGET, "another learning"),
    ]
    for opened in (True, False):
        for *given, message in others:
            with pytest.raises(UserError, match=f"ngrams.keep=.*{message}.*give another file"):
                open_memory(*given)
        if opened:
            close(str(kept))
    whole = kept.read_bytes()
    for damage in (b"", b"nothing", whole[:-3], whole[:-1] + bytes([whole[-1] ^ 1])):
        kept.write_bytes(damage)
        with pytest.raises(UserError, match="damaged, or no memory of n-grams"):
            open_memory(config, TABLE, TARGET)
    kept.write_bytes(whole)
    open_memory(config, TABLE, TARGET)


def test_one_process_at_a_time(kept: Path) -> None:
    config = replace(CONFIGS["mixed"], keep=str(kept))
    open_memory(config, TABLE, TARGET)
    lines = [
        "from outrider.run_dirs import system_lock",
        f"system_lock({str(kept.with_name(f'.{kept.name}.lock'))!r}).acquire(timeout=0)",
    ]
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, check=False).returncode != 0
    close(str(kept))
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, check=False).returncode == 0


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(UserError, match=r"keep_mb=5\.0: expected 64\.0, its default: keep is null"):
        NgramConfig(keep_mb=5.0)
    method = MethodConfig("ngrams", ngrams=NgramConfig(keep="k"))
    with pytest.raises(UserError, match="a file of its own for every method"):
        EvaluateConfig(target="t", table="t", methods={"a": method, "b": method})


def test_a_tree_of_both_keeps_a_memory_only_beside_a_table(tmp_path: Path) -> None:
    """A rehearsal's tiny models keep none."""
    shape = StructureConfig("fused", nodes=6, max_depth=2)
    fused = MethodConfig("small_lm", shape, ngrams=replace(CONFIGS["mixed"], nodes=64, keep="kept"))
    given = {"target": "target", "small_lm": "small", "methods": {"fused": fused}}
    with pytest.raises(UserError, match=r"ngrams\.keep=\['kept'\]: expected null without an n-gram table, table="):
        EvaluateConfig(**given)
    rehearsed = EvaluateConfig(table="table", **given).small(tmp_path)
    assert rehearsed.methods["fused"].ngrams.keep is None
