"""Memory across prompts: what it gains, that no text ever finds its own answer in it, and what is refused."""

import gc
import itertools
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save

from draft_models.ngrams.kept import contexts_of
from draft_models.ngrams.overlay import ContextMap, TextIndex
from inference.core.decode import speculative
from inference.drafters.ngram import ngram_memory
from inference.drafters.ngram.ngram_memory import close, memory_of, open_memory
from inference.drafters.ngram.ngrams import make_ngram_drafter
from inference.settings.evaluate import EvaluateConfig
from inference.settings.method import MethodConfig, NgramConfig
from outrider.errors import UserError
from outrider.files import parse_json, sealed, unsealed
from tests.inference.ngram_cases import TABLE, FakeSession, draft
from tests.kept_code import kept_folder
from tests.tiny import open_stack, random_prompt, reference_generate, save_target

ROOT = Path(__file__).parents[3]
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
    assert not np.array_equal(drafter.mixture.weights.now, ngram_memory.nothing(TABLE, config).shares)  # type: ignore[union-attr]
    assert np.array_equal(drafter.mixture.weights.prior, memory._before.shares)  # type: ignore[union-attr]


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


def test_what_is_seen_now_drives_out_what_was_seen_often_long_ago(kept: Path) -> None:
    """A new kind of text, as often as the old one was: the memory is its own, half of it at least."""
    config = replace(CONFIGS["mixed"], keep=str(kept), keep_mb=0.05)
    memory = open_memory(config, TABLE, TARGET)
    kinds = [np.random.default_rng(seed).integers(0, 12, 300).tolist() for seed in (0, 1)]
    for text in kinds:
        for number in range(12):
            drafter = make_ngram_drafter(TABLE, config, 0)
            drafter.begin(FakeSession([number % 12, *text]), None, None)  # type: ignore[arg-type]
    memory.save()
    held = set(contexts_of(memory._within_limit(memory._last[1]()).known).keys.tolist())  # type: ignore[index]
    old, new = (set(contexts_of(index_of(text)).keys.tolist()) for text in kinds)
    assert len(held & (new - old)) > len(held & (old - new))


def index_of(text: list[int]) -> ContextMap:
    index = TextIndex(CONFIGS["mixed"].longest, CONFIGS["mixed"].decay)
    index.learn(np.array(text), 0, len(text))
    return index.known


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


def forged(path: Path, changed: dict[str, Any], notes: dict[str, Any] | None = None) -> None:
    """The memory in `path` with other arrays or other notes, under digests that fit."""
    with safe_open(path, "numpy") as file:
        written = unsealed(parse_json(file.metadata()["ngrams_memory"]))
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    arrays |= {name: change(arrays[name].copy()) for name, change in changed.items()}
    written = {"belongs": written["belongs"], "arrays": ngram_memory._digests(arrays)} if notes is None else notes
    path.write_bytes(save(arrays, {"ngrams_memory": json.dumps(sealed(written))}))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"lengths": lambda a: a + 1}, "lengths that are not those of its successors"),
        ({"lengths": lambda a: np.full_like(a, 2**30)}, "lengths that are not those of its successors"),
        ({"tokens": lambda a: a + 12}, "tokens that are not in the vocabulary"),
        ({"shares": lambda a: a * np.nan}, "probabilities that are not between 0 and 1"),
        ({"shares": lambda a: a + 1}, "probabilities that are not between 0 and 1"),
        ({"recycled_probs": lambda a: a - 1}, "probabilities that are not between 0 and 1"),
        ({"recycled_probs": lambda a: a * np.float32("nan")}, "probabilities that are not between 0 and 1"),
        ({"recycled_seen": lambda a: a - 1}, "of less than no occurrences"),
        ({"recycled_tokens": lambda a: a - 1}, "recycled rows of tokens"),
    ],
)
def test_a_file_is_not_trusted_for_its_digests(
    kept: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], why: str
) -> None:
    """Compiled code follows what a file says without looking where it leads, so nothing of it runs before all fits."""
    config = replace(CONFIGS["recycled"], keep=str(kept))
    open_memory(config, TABLE, TARGET)
    hits(config, [1, 2])
    close(str(kept))
    forged(kept, {})
    open_memory(config, TABLE, TARGET)  # as good as its own
    close(str(kept))
    forged(kept, changed)
    monkeypatch.setattr(ngram_memory, "map_of", lambda _: pytest.fail("linked before it was checked"))
    with pytest.raises(UserError, match=f"damaged, or no memory of n-grams.*{why}"):
        open_memory(config, TABLE, TARGET)


@pytest.mark.slow
def test_compiled_code_stays_within_its_arrays_whatever_a_file_says(tmp_path: Path) -> None:
    """Kept files and tables with altered numbers and right digests, in a process whose compiled code checks bounds."""
    command = [sys.executable, "-m", "tests.inference.drafters.altered_files", str(tmp_path)]
    kept = kept_folder("bounds_checked", "draft_models/ngrams/*.py", "inference/drafters/**/*.py")
    checked = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(kept)}  # it takes a minute to compile
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | checked, check=False)
    assert run.returncode == 0, run.stderr
    bounds, counts = run.stdout.splitlines()
    assert bounds == "bounds are checked"
    drafted, refused = (int(count.partition("=")[2]) for count in counts.split())
    assert min(drafted, refused) > 50  # neither refuses everything


@pytest.mark.parametrize("notes", [{"arrays": None}, {}, {"belongs": [], "arrays": None}])
def test_a_file_that_does_not_say_whose_it_is_is_refused(kept: Path, notes: dict[str, Any]) -> None:
    config = replace(CONFIGS["mixed"], keep=str(kept))
    open_memory(config, TABLE, TARGET)
    close(str(kept))
    with safe_open(kept, "numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    forged(kept, {}, {**notes, **({"arrays": ngram_memory._digests(arrays)} if "arrays" in notes else {})})
    with pytest.raises(UserError, match="damaged, or no memory of n-grams"):
        open_memory(config, TABLE, TARGET)


@pytest.mark.parametrize("name", ["mixed", "table"])
def test_the_end_of_a_text_is_learnt_too(kept: Path, name: str) -> None:
    """The tokens of the last round, after which no draft is asked for."""
    config = replace(CONFIGS[name], keep=str(kept))
    open_memory(config, TABLE, TARGET)
    alone = replace(config, keep=None)
    pairs = [pair for pair in itertools.product(range(12), repeat=2)
             if not len(draft(make_ngram_drafter(TABLE, alone, 0), [1, 2, *pair]))]  # fmt: skip
    before, last = pairs[0] if name == "table" else (12, 10)  # nothing is known to follow them
    firsts = []
    for end in ([before, last, 9], []):
        drafter = make_ngram_drafter(TABLE, config, 0)
        drafter.begin(FakeSession([1, 2, *([] if end else [before])]), None, None)  # type: ignore[arg-type]
        tree = drafter.draft(torch.tensor([3 if end else last]), 2)
        firsts.append(tree.tokens[0].item() if len(tree) else None)
        drafter.commit(tree, (), [3, *end])
    assert firsts[1] == 9


def test_what_was_always_right_may_be_wrong_in_the_next_text(kept: Path) -> None:
    """λ stays away from 0 and 1 from text to text, and a text that breaks the habit is decoded like any other."""
    config = replace(CONFIGS["mixed"], strength=1e-12, keep=str(kept))
    memory = open_memory(config, TABLE, TARGET)
    for number in range(6):
        drafter = make_ngram_drafter(TABLE, config, 0)
        drafter.begin(FakeSession([number % 3 + 4]), None, None)  # type: ignore[arg-type]
        habit = [1, 2, 3] * 20 if number < 5 else [1, 2, 9, 3, 2, 1, 11] * 3
        for token in habit:
            drafter.commit(drafter.draft(torch.tensor([token]), 4), (), [token])
    memory.save()
    shares = memory._last[1]().shares  # type: ignore[index]
    assert np.isfinite(shares).all()
    assert 0.01 <= shares.min() < shares.max() <= 0.99


def test_a_memory_does_not_hold_the_targets_cache(kept: Path) -> None:
    config = replace(CONFIGS["recycled"], keep=str(kept))
    open_memory(config, TABLE, TARGET)
    session = FakeSession([1, 2], {0: [1 / 12] * 12})
    make_ngram_drafter(TABLE, config, 0).begin(session, None, None)  # type: ignore[arg-type]
    gone = weakref.ref(session)
    del session
    gc.collect()
    assert gone() is None


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
    with pytest.raises(UserError, match="keep='k': expected null with adapt=false, which learns nothing"):
        NgramConfig(keep="k", adapt=False)
    method = MethodConfig("ngrams", ngrams=NgramConfig(keep="k"))
    with pytest.raises(UserError, match="a file of its own for every method"):
        EvaluateConfig(target="t", table="t", methods={"a": method, "b": method})
