"""Texts in a batch: each is what it is alone, whatever the company, the order and the drafter.

Bit for bit where the layers and the head run in compiled calls. Other layers round a row differently beside others, so
there the logits are close and the tokens equal.
"""

import copy
import gc
import random
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from greenlet import getcurrent
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.base.streams import Streams
from outrider.draft_models.calibration_head import CalibrationHead
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.draft_models.targets import stack as stack_module
from outrider.draft_models.targets.stack import WholeModel
from outrider.draft_models.targets.target import TextMasks
from outrider.inference.core import batch as core
from outrider.inference.core import cache as cache_module
from outrider.inference.core.batch import ROUND, Batch, BatchText, CacheBudget, JointView, Worker
from outrider.inference.core.cache import KVCache
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.core.drafter import Drafter
from outrider.inference.core.rounds import Round
from outrider.inference.core.sampling import Sampler
from outrider.inference.core.session import Pass, Session
from outrider.inference.core.stop_strings import cut_at_stop
from outrider.inference.core.target_session import Runtime, eager_session
from outrider.inference.core.token_selector import TokenSelector, VerifiedDraft
from outrider.inference.core.tree import ROOT, DraftTree
from outrider.inference.drafters.copies import PromptLookup
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.drafters.model_plugin import make_prompt_lookup
from outrider.inference.drafters.ngrams.drafter import make_ngram_drafter
from outrider.inference.drafters.skip_layers.drafter import SkipLayersDraftModel
from outrider.inference.engines.packing import lay_out
from outrider.inference.loading.memory_plan import budget_of
from outrider.inference.settings.method import NgramConfig, StopConfig
from outrider.inference.settings.sampling import SamplingConfig
from outrider.inference.shapes.factory import Chain, make_structure
from outrider.inference.sizing.policy import Tuning
from outrider.inference.stopping.interface import FixedLength
from tests import known_targets
from tests.exact_distributions import distribution_of
from tests.families import FAMILIES, save_family
from tests.faults import plant
from tests.inference.priced import costs
from tests.known_targets import SOURCES, tokens_of
from tests.pairwise import all_pairs, each_value
from tests.tiers import quick_where, typical_where
from tests.tiny import LAYERS, STRUCTURES, method_of, open_stack, random_prompt

COUNT, VOCABULARY = 20, 272  # a head of whole panels
LENGTHS = (1, 13, 30, 8, 3, 21, 50)  # of prompts: shorter and longer than a window
COMPILED: dict[str, dict[str, Any]] = {"llama": {"attention_bias": True}, "mistral": {}, "qwen3": {}}
RULES = ("fixed", "confidence", "adaedl", "svip", "rejection_risk", "beta", "calibrated", "posterior_mean", "survival")
SAMPLERS = {
    "greedy": SamplingConfig(),
    "sampled": SamplingConfig(temperature=0.8),
    "greedy, penalty": SamplingConfig(repetition_penalty=1.3),
    "sampled, penalty, top_p": SamplingConfig(temperature=0.9, top_p=0.95, repetition_penalty=1.2),
    "greedy, until": SamplingConfig(),
}
MATRIX = all_pairs([None, *SOURCES, "lookup", "table"], STRUCTURES, RULES, SAMPLERS)
TABLE = TrigramTable.from_documents([random_prompt(90, seed=seed) for seed in range(7)], [2, 3, 4], VOCABULARY, "t")


class Target(known_targets.Target):
    """A target whose layers, and those of its drafters, run at once; texts share the drafters' models."""

    def __init__(self, folder: Path, architecture: str, dtype: torch.dtype):
        super().__init__(folder, architecture, dtype, vocab_size=VOCABULARY, **COMPILED[architecture])
        lay_out(self.stack, torch.device("cpu"))
        assert self.stack.at_once is not None
        self.stack.reserve(256)  # outside of inference mode, for a test that changes the tables
        self.kept: dict[str, Any] = {}

    def source(self, kind: str, noise: float = 0.15) -> Any:
        if kind not in self.kept:
            found = self.kept[kind] = super().source(kind, noise)
            for name in {"drafter", "lm", "head"} & set(vars(found)):
                lay_out(getattr(found, name), torch.device("cpu"))
        return copy.copy(self.kept[kind])


class Watched(TokenSelector):
    """A selector that keeps the bits of all logits that it decides on."""

    def __init__(self, sampler: Sampler | None = None, generator: random.Random | None = None) -> None:
        super().__init__(sampler, generator)
        self.seen: list[Tensor] = []

    def next_token(self, logits: Tensor) -> Tensor:
        self.seen.append(logits.nan_to_num())
        return super().next_token(logits)

    def verify(self, tree: DraftTree, logits: Tensor) -> VerifiedDraft:
        self.seen.append(logits.nan_to_num())
        return super().verify(tree, logits)


class Lookup(PromptLookup):
    """Counts its drafts, the `fails`-th of which is an error; its session can be asked whether it is alive."""

    def __init__(self, fails: int = 0):
        super().__init__(1)
        self.fails, self.drafts = fails, 0

    def begin(self, session: Session, *given: Any) -> None:
        self.session = weakref.ref(session)
        super().begin(session, *given)

    def draft(self, root: Tensor, limit: int) -> DraftTree:
        self.drafts += 1
        if self.drafts == self.fails:
            raise RuntimeError("no draft")
        return super().draft(root, limit)


@dataclass
class Found:
    """What was emitted, the logits that decided it, and the error at the end, if any; ended: [] if it was dropped."""

    seen: list[Tensor]
    rounds: list[Round] = field(default_factory=list)
    ended: list[Exception | None] = field(default_factory=list)

    def is_as(self, alone: "Found", near: float = 0.0) -> bool:
        """Whether it is, as far as it goes, what the text is alone; near: how far logits may be off."""
        tokens, expected = ([r.tokens for r in one.rounds] for one in (self, alone))
        if self.ended and (len(tokens), str(self.ended)) != (len(expected), str(alone.ended)):
            return False
        pairs = zip(self.seen, alone.seen, strict=bool(self.ended))
        return tokens == expected[: len(tokens)] and all(float((a - b).abs().max()) <= near for a, b in pairs)


@dataclass
class Asked:
    """A text that somebody wants: its own prompt, drafter, length and seed. kind: of the drafter; None: plain."""

    target: Any
    number: int
    kind: str | None = None
    structure: str = "chain"
    rule: Any = "fixed"
    chosen: str = "greedy"
    fails: int = 0

    def start(self, runtime: Runtime, seed: int) -> tuple[Iterator[Round], Found]:
        drawn = self.chosen.startswith("sampled")
        sampler = None if SAMPLERS[self.chosen] == SamplingConfig() else Sampler(SAMPLERS[self.chosen])
        selector = Watched(sampler, random.Random(seed) if drawn else None)
        prompt = random_prompt(LENGTHS[self.number % len(LENGTHS)], seed=self.number)
        options: dict[str, Any] = {"max_new_tokens": COUNT - self.number % 5, "selector": selector, "runtime": runtime}
        if self.kind is None:
            rounds = autoregressive(self.target.stack, prompt, **options)
        else:
            rounds = speculative(self.target.stack, self.drafter(self.kind, drawn), prompt, **options)
        if self.chosen.endswith("until"):
            rounds = cut_at_stop(rounds, prompt, lambda text, new: 1 if text[-new] % 9 == 0 else None)
        return rounds, Found(selector.seen)

    def drafter(self, kind: str, drawn: bool) -> Drafter:
        if kind in ("lookup", "table"):
            return Lookup(self.fails) if kind == "lookup" else make_ngram_drafter(TABLE, NgramConfig(), self.number)
        head = CalibrationHead(64, WIDTHS.get(kind, 64)).requires_grad_(False)
        head.draft.copy_(torch.linspace(-0.1, 0.1, len(head.draft)))
        rule: Any = "fixed" if self.rule == "survival" and self.structure != "chain" else self.rule  # it is for chains
        stop = StopConfig(rule=rule, max_draft=4)
        method = replace(method_of(STRUCTURES[self.structure]), stop=stop, copy=None if self.number % 3 else 1)
        structure = make_structure(method, Streams(self.number), drawn, head, Tuning(costs()))
        return ModelDrafter(self.target.source(kind), structure, copies=make_prompt_lookup(method, structure))

    @cached_property
    def alone(self) -> Found:
        rounds, found = self.start(Runtime(), self.number)
        try:
            found.rounds.extend(rounds)
            found.ended.append(None)
        except Exception as error:
            found.ended.append(error)
        return found


def decode_together(
    asked: Sequence[Asked], most: int, batch: Batch | None = None, *, leave: float = 0.0, by_place: bool = False
) -> list[Found]:
    """All texts with `most` of them in flight at once. They join in a random order, and some `leave` before a step."""
    batch, order, every = batch or Batch(), random.Random(0), {}
    waiting = list(range(len(asked)))
    order.shuffle(waiting)
    while waiting or batch.texts:
        while waiting and len(batch.texts) < most and order.random() < 0.7:
            number = waiting.pop()
            rounds, found = asked[number].start(batch, len(batch.texts) if by_place else asked[number].number)
            every[number] = found
            batch.add(BatchText(rounds, found.rounds.append, found.ended.append))
        if batch.texts and order.random() < leave:
            batch.drop(order.choice(batch.texts))
        batch.step()
    return [every[number] for number in range(len(asked))]


def different(asked: Sequence[Asked], found: Sequence[Found], near: float = 0.0) -> list[Asked]:
    return [one for one, own in zip(asked, found, strict=True) if not own.is_as(one.alone, near)]


WIDTHS = {"eagle3": 256, "dflash": 256, "dflash, markov": 262}  # of what their tokens are predicted from


@pytest.fixture(autouse=True)
def _yielding_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "PIECE", 12)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Target]:
    return cache(lambda *given: Target(tmp_path_factory.mktemp("target"), *given))


@pytest.fixture
def asked(make: Callable[..., Target]) -> list[Asked]:
    kinds = [None, None, "early_exit", "early_exit", "small_lm", "small_lm", "lookup", "eagle3", "eagle3", "lookup"]
    kinds += ["mtp", "mtp"]
    target = make("llama", torch.float32)
    return [Asked(target, n, kind, ["chain", "opt_tree"][n % 2]) for n, kind in enumerate(kinds)]


# --- the same as alone -----------------------------------------------------------------------------------------------

CASES = all_pairs(COMPILED, [torch.float32, torch.bfloat16])
MOSTLY_SHORT = (0, 7, 2, 14, 21, 5)  # texts shorter than a window beside longer ones
CHANGING = {"diffllama", "jetmoe"}  # their attention reads other keys or values than their caches hold
EVERY = quick_where(lambda name: name in ("gemma2", "jetmoe", "mistral"), sorted(FAMILIES))


@pytest.mark.parametrize(("architecture", "dtype"), typical_where(each_value(CASES).__contains__, CASES))
def test_a_text_has_the_same_bits_in_any_company(
    make: Callable[..., Target], architecture: str, dtype: torch.dtype
) -> None:
    asked = [Asked(make(architecture, dtype), number, *row) for number, row in enumerate(each_value(MATRIX))]
    found = decode_together(asked, 6, leave=0.02)
    assert not different(asked, found)
    assert sum(r.accepted for one in found for r in one.rounds) > 10
    assert 1 <= sum(not one.ended for one in found) < len(found) // 2


def test_texts_go_on_between_the_layers_of_a_long_prompt(asked: list[Asked]) -> None:
    stack, order = asked[0].target.stack, list[int]()
    for yielding, first in ((True, [0, 2, 0, 0, 2, 1]), (False, [0, 1, 2, 0, 1, 2])):
        batch = Batch(yielding=yielding)
        for number, length in enumerate((12, 50, 26)):  # a piece is all layers of one, one of the next, half the last's
            rounds = autoregressive(stack, random_prompt(length), max_new_tokens=4, runtime=batch)
            batch.add(BatchText(rounds, lambda _, number=number: order.append(number), lambda error: None))
        while batch.texts:
            batch.step()
        assert order[:6] == first
        order.clear()


@pytest.mark.thorough
def test_two_thousand_texts_have_the_same_bits(make: Callable[..., Target]) -> None:
    targets = [make(*case) for case in CASES]
    asked = [Asked(targets[n % len(targets)], n, *MATRIX[n % len(MATRIX)]) for n in range(2000)]
    assert not different(asked, decode_together(asked, 32, leave=0.1))


@pytest.mark.parametrize(
    "family", typical_where({*CHANGING, "mistral", "gemma3_text", "gpt2", "mixtral"}.__contains__, EVERY)
)
def test_other_layers_have_close_logits_and_equal_tokens(tmp_path: Path, family: str) -> None:
    dtype, near = torch.float64, 1e-9
    if "moe" in family or family in ("flex_olmo", "gpt_oss", "mimo_v2_flash", "mixtral"):  # no experts in float64
        dtype, near = torch.float32, 1e-4
    stack = open_stack(save_family(tmp_path, family), dtype)[1]
    target = SimpleNamespace(stack=stack, source=lambda _: SkipLayersDraftModel([LAYERS - 1]))
    asked = [Asked(target, n, [None, "skip_layers", "lookup"][n % 3], "opt_tree") for n in MOSTLY_SHORT]
    found = decode_together(asked, 6)
    assert not different(asked, found, near)
    assert [one.ended for one in found] == [[None]] * 6


# --- caches that grow ------------------------------------------------------------------------------------------------


def from_few_slots(patch: pytest.MonkeyPatch) -> None:
    """Caches have two slots at first, and double."""
    for module in (cache_module, stack_module):
        patch.setattr(module, "slots_of", lambda positions: 2 ** max(1, (positions - 1).bit_length()))


@pytest.mark.parametrize(("architecture", "dtype"), typical_where(each_value(CASES)[:1].__contains__, CASES))
def test_a_cache_that_grows_has_the_bits_of_a_large_one(
    make: Callable[..., Target], monkeypatch: pytest.MonkeyPatch, architecture: str, dtype: torch.dtype
) -> None:
    """With each kind of drafter, alone or not; unless the last row of a cache is lost when it grows."""
    kinds = [None, *SOURCES, "lookup"]
    asked = [Asked(make(architecture, dtype), n, kind, ["chain", "opt_tree"][n % 2]) for n, kind in enumerate(kinds)]
    assert all(one.alone.ended == [None] for one in asked)  # in caches that are large from the start
    from_few_slots(monkeypatch)
    assert not different(asked * 2, decode_together(asked, 1) + decode_together(asked, 6))
    plant(monkeypatch, KVCache, "_grow", "state.shape[2]] = state", "state.shape[2] - 1] = state[:, :, :-1]")
    assert different(asked, decode_together(asked, 6))


def test_a_cache_that_cannot_grow_is_as_before() -> None:
    cache, states = KVCache(range(1), 512), torch.rand(1, 1, 200, 4)
    cache.update(states, states, 0)
    cache.length = 200
    with patch.object(cache, "_allocate", side_effect=torch.OutOfMemoryError), pytest.raises(torch.OutOfMemoryError):
        cache.update(states, states, 0)
    assert torch.equal(cache.update(states, states, 0)[0], torch.cat([states, states], 2))


@pytest.mark.parametrize("kind", ["early_exit", "early_exit, two layers", "small_lm", "eagle3", "dflash"])
def test_a_text_takes_the_memory_of_its_positions(
    make: Callable[..., Target], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """However many tokens it may have: as much as the budget counts."""
    target, caches, grow = make("llama", torch.float32), dict[int, KVCache](), KVCache._grow
    models = {name: model for name, model in vars(target.source(kind)).items() if name in ("drafter", "lm", "head")}
    budget = budget_of(target.stack, models, 10**6)

    def grown(cache: KVCache, positions: int) -> None:
        caches[id(cache)] = cache
        grow(cache, positions)

    def memory(tokens: int) -> int:
        """Bytes of the caches after some rounds of up to so many tokens."""
        caches.clear()
        drafter = ModelDrafter(target.source(kind), Chain(FixedLength(4)))
        with closing(speculative(target.stack, drafter, [5] * 8, max_new_tokens=tokens)) as rounds:
            for _ in islice(rounds, 4):
                pass
        return sum(buffer.nbytes for cache in caches.values() for buffer in cache._all())

    monkeypatch.setattr(KVCache, "_grow", grown)
    assert memory(240) * 256 == budget.bytes_of(8) * (8 + 240 + 5)  # no more than the text can fill
    from_few_slots(monkeypatch)
    assert memory(240) == memory(100) < budget.bytes_of(8) / 4


def test_texts_that_do_not_fit_the_budget_wait(asked: list[Asked]) -> None:
    """The oldest goes on, at any size; as many others as fit. Those that came last pause when the others grow."""

    class Counting(Batch):
        most = 0

        def step(self) -> None:
            super().step()
            self.most = max(self.most, sum(text.run is not None for text in self.texts))

    size = CacheBudget(1, 0).bytes_of(0)
    for bytes_of_all, count in ((0, 1), (3 * size, 3), (9 * size, 6)):
        batch = Counting(budget=CacheBudget(1, bytes_of_all))
        assert not different(asked, decode_together(asked, 6, batch))
        assert count - 1 <= batch.most <= count  # one may have ended in the step
    order, batch = list[int](), Batch(budget=CacheBudget(1, 2 * size))
    for number in range(2):
        rounds = autoregressive(asked[0].target.stack, [5], max_new_tokens=20, runtime=batch)
        batch.add(BatchText(rounds, lambda _, number=number: order.append(number), lambda _: None, size - ROUND - 10))
    while batch.texts:
        batch.step()
    assert order == [0, 1] * 11 + [0] * 9 + [1] * 9


def test_a_target_that_runs_as_a_whole_is_run_text_by_text(asked: list[Asked], monkeypatch: pytest.MonkeyPatch) -> None:
    target = copy.copy(asked[0].target)
    target.stack = WholeModel(AutoModelForCausalLM.from_pretrained(target.path))
    asked = [replace(one, target=target) for one in asked if one.kind in (None, "small_lm", "lookup")]
    assert not different(asked, decode_together(asked, 3))
    from_few_slots(monkeypatch)
    assert not different(asked, decode_together(asked, 3))
    plant(monkeypatch, stack_module._RowLayer, "update", "= old_buffer[:, :, : self.length]", "= old_buffer[:, :, :1]")
    assert different(asked, decode_together(asked, 3))


# --- faults that are planted in the passes of several texts ----------------------------------------------------------

Outputs = tuple[Tensor, ...]
Fault = Callable[[Pass, Tensor, JointView], Outputs]


class Planted(Batch):
    """Passes of several texts are run by `fault`, and with `alone` those of one too."""

    def __init__(self, fault: Fault, alone: bool = False):
        super().__init__()
        self.fault, self.alone = fault, alone

    def session(self, target: Any, split: int | None, capacity: int, context: int | None = None) -> Session:
        def together(kind: tuple[int, int, str], pass_: Pass, x: Tensor, view: Any) -> Outputs:
            def run(x: Tensor, view: Any) -> Outputs:
                faulty = self.alone or isinstance(view, JointView)
                return self.fault(pass_, x, view) if faulty else pass_(x, view)

            return core._wait(True, kind, run, x, view)

        return eager_session(target, split, capacity, context, together)


def second(**change: Callable[[JointView, Any], Any]) -> Fault:
    """The second text's view has other attributes, each computed of the joint view and its own."""

    def fault(pass_: Pass, x: Tensor, view: JointView) -> Outputs:
        one, other, *rest = view.requests
        own = copy.copy(other.view)
        for name, compute in change.items():
            setattr(own, name, compute(view, own))
        return pass_(x, JointView([one, replace(other, view=own), *rest]))

    return fault


def of_length(cache: Any, length: int) -> Any:
    """The same memory, of which another length is valid."""
    cache = copy.copy(cache)
    cache.length = length
    return cache


def single(fault: Fault) -> Fault:
    """Only in passes of one row a text, without masks, whose caches have room for any text with all these rows."""

    def run(pass_: Pass, x: Tensor, view: JointView) -> Outputs:
        caches, ones = view.cache.caches, (1,) * len(view.requests)
        room = min(own.slots for own in caches) > max(own.length for own in caches) + len(ones)
        return fault(pass_, x, view) if room and view.cache.rows == ones else pass_(x, view)

    return run


def one_text(pass_: Pass, x: Tensor, view: JointView) -> Outputs:
    rows, cache = sum(view.cache.rows), view.cache.caches[0]
    visible = TextMasks((rows,), (x.new_zeros(1, 1, rows, cache.length + rows),), (cache,), [])
    vars(view)["masks"] = lambda: dict.fromkeys(view.requests[0].view.masks(), visible)
    return pass_(x, view)


def first_rows(pass_: Pass, x: Tensor, view: JointView) -> Outputs:
    vars(view)["logit_rows"] = lambda hidden: hidden[:, : sum(request.view.logit_count for request in view.requests)]
    return pass_(x, view)


def all_zero(mask: Any) -> Any:
    return None if mask is None else torch.zeros_like(mask)


FAULTS: dict[str, Fault] = {
    "a phantom key": single(second(cache=lambda _, own: of_length(own.cache, own.cache.length + 1))),
    "rejected rows are visible": second(_masks=lambda _, own: {w: all_zero(m) for w, m in own.masks().items()}),
    "a position off by one": second(rotary=lambda _, own: own._layers.rotary(own.positions + 1)),
    "the length of another text": single(
        second(cache=lambda view, own: of_length(own.cache, view.cache.caches[0].length))
    ),
    "the cache of another text": single(second(cache=lambda view, _: view.cache.caches[0])),
    "visible rows of other texts": single(one_text),
    "outputs for the wrong text": lambda pass_, x, view: tuple(out.roll(1, 1) for out in pass_(x, view)),
    "the wanted rows of another text": first_rows,
}


def test_planted_faults_are_seen(asked: list[Asked]) -> None:
    assert not different(asked, decode_together(asked, 10, Planted(lambda pass_, x, view: pass_(x, view))))
    assert [name for name in FAULTS if different(asked, decode_together(asked, 10, Planted(FAULTS[name])))] == [*FAULTS]
    drawn = [replace(one, chosen="sampled") for one in asked]
    assert not different(drawn, decode_together(drawn, 4))
    assert different(drawn, decode_together(drawn, 4, by_place=True))


# --- errors, memory and leaving --------------------------------------------------------------------------------------


def test_a_text_that_fails_fails_alone(asked: list[Asked]) -> None:
    """By logits without numbers, in a pass that others share, or by its drafter."""
    ((cos, _),) = asked[0].target.stack.tables
    kept = cos.clone()
    cos[60:] = torch.nan  # which only the longest text reaches
    asked[9].fails = 3
    found = decode_together(asked, 10)
    assert not different(asked, found)
    cos.copy_(kept)
    assert [str(one.ended[0])[:24] for one in found if one.ended != [None]] == ["the target's logits at p", "no draft"]


def test_a_pass_that_fails_ends_its_texts_and_one_too_large_for_memory_is_halved(asked: list[Asked]) -> None:
    def broken(pass_: Pass, x: Tensor, view: JointView) -> Outputs:
        if "aux_hidden" in view.requests[0].kind[2]:
            raise RuntimeError("broken")
        if len(view.requests) > 2:
            raise torch.OutOfMemoryError
        return pass_(x, view)

    found = decode_together(asked, 10, Planted(broken))
    assert different(asked, found) == [one for one in asked if one.kind in ("eagle3", "mtp")]
    assert [str(own.ended) for own in found if own.ended != [None]] == ["[RuntimeError('broken')]"] * 4


def test_a_text_that_is_too_large_for_memory_fails_alone(asked: list[Asked]) -> None:
    def scarce(pass_: Pass, x: Tensor, view: Any) -> Outputs:
        if any(
            one.layout.base > 60 for one in ([r.view for r in view.requests] if hasattr(view, "requests") else [view])
        ):
            raise torch.OutOfMemoryError("full")
        return pass_(x, view)

    found = decode_together(asked, 10, Planted(scarce, alone=True))
    assert len(different(asked, found)) == 1  # the only one of so many tokens
    assert [str(one.ended) for one in found if one.ended != [None]] == ["[OutOfMemoryError('full')]"]


def test_a_text_that_is_dropped_or_has_ended_drafts_no_more(make: Callable[..., Target]) -> None:
    """It keeps no session alive, and the caller's modes are as they were."""

    def drafted_after(drop: Callable[[Batch, BatchText], None]) -> list[int]:
        batch, drafters = Batch(), [Lookup(), Lookup(), Lookup()]
        texts = []
        for number, drafter in enumerate(drafters):
            options: dict[str, Any] = {"max_new_tokens": (30, 4, 30)[number], "runtime": batch}
            rounds = speculative(make("llama", torch.float32).stack, drafter, random_prompt(9, seed=number), **options)
            texts.append(BatchText(rounds, lambda _: None, lambda _: None))
            batch.add(texts[-1])
        for _ in range(6):
            batch.step()
        drop(batch, texts[0])
        assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == (False, True)
        gc.collect()
        alive, drafts = [drafter.session() is not None for drafter in drafters], [one.drafts for one in drafters]
        assert alive == [text in batch.texts for text in texts]
        for _ in range(3):
            batch.step()
        batch.close()
        return [drafter.drafts - before for drafter, before in zip(drafters, drafts, strict=True)]

    assert drafted_after(Batch.drop) == [0, 0, 3]
    assert drafted_after(lambda *_: None) == [3, 0, 3]


@pytest.mark.parametrize("fault", ["start", "begin", "step"])
def test_no_reader_waits_for_a_thread_that_is_gone(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be started, it cannot begin, or it ends. Later requests are tried again."""

    class Gone(BaseException):
        pass

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no thread") if fault == "start" else Gone

    batch = Batch()
    worker = Worker(batch, 2, fail if fault == "begin" else lambda: None)
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    with monkeypatch.context() as patched:
        if fault != "begin":
            patched.setattr(*((Thread, "start") if fault == "start" else (batch, "step")), fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"no thread|has ended"):
                list(worker.rounds(iter(())))
    if fault != "begin":
        assert worker.do(lambda: 7) == 7


def test_an_error_of_a_text_that_is_dropped_ends_no_other() -> None:
    """It would end the thread that runs the batch, and the other texts would wait for ever."""

    def failing() -> Iterator[Round]:
        try:
            yield getcurrent().parent.switch(None)  # as where it waits for a pass
        finally:
            raise RuntimeError

    batch = Batch()
    batch.add(text := BatchText(failing(), lambda _: None, lambda _: None))
    batch.step()
    batch.drop(text)
    assert not batch.texts


# --- sampling, by enumeration ----------------------------------------------------------------------------------------


class Exact(TokenSelector):
    """Samples one of the two likeliest of the tokens 0, 1, 2, in the ratio 2 to 1, by a given `Chance`."""

    def __init__(self, chance: Any):
        super().__init__()
        self.takes_argmax = self.greedy = False
        self.chance = chance

    def probabilities(self, logits: Tensor, contexts: Any) -> Any:
        p = np.full((len(logits), 3), Fraction(0), dtype=object)
        for row, order in zip(p, logits[:, :3].argsort(-1, descending=True).tolist(), strict=True):
            row[order[0]], row[order[1]] = Fraction(2, 3), Fraction(1, 3)
        return p


class Drawn(PromptLookup):
    """Drafts a token at most, drawn by the text's `Chance` from a distribution of its own."""

    def begin(self, session: Session, selector: Any, watch: Any) -> None:
        self.chance = selector.chance
        super().begin(session, selector, watch)

    def draft(self, root: Tensor, limit: int) -> DraftTree:
        q = np.array([Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)], dtype=object)
        if not limit:
            return DraftTree(root[:0], (), ())
        rows: Any = {ROOT: q}
        return DraftTree(torch.tensor([self.chance.choose(q)]), (ROOT,), (-1,), q=rows)


def test_sampled_texts_are_independent_and_distributed_as_alone(make: Callable[..., Target]) -> None:
    """Every random branch of two texts, one with drafts and one without, and of each one decoded plainly by itself."""
    stack, prompts = make("llama", torch.float32).stack, (random_prompt(4, seed=2), random_prompt(9, seed=3))

    def rounds(number: int, chance: Any, batch: Batch | None) -> Iterator[Round]:
        options: dict[str, Any] = {"max_new_tokens": 3, "selector": Exact(chance), "runtime": batch}
        if batch is None or not number:
            return autoregressive(stack, prompts[number], **options)
        return speculative(stack, Drawn(), prompts[number], **options)

    def together(batch: Batch, chance: Any) -> Hashable:
        said: tuple[list[Round], list[Round]] = [], []
        for number, own in enumerate(said):
            batch.add(BatchText(rounds(number, chance, batch), own.append, lambda _: None))
        while batch.texts:
            batch.step()
        return tuple(tuple(tokens_of(own)) for own in said)

    one, other = (distribution_of(lambda chance, n=n: (*tokens_of(rounds(n, chance, None)),)) for n in (0, 1))  # type: ignore[misc]
    product = {(a, b): p * q for a, p in one.items() for b, q in other.items()}
    assert distribution_of(lambda chance: together(Batch(), chance)) == product
    wrong = FAULTS["outputs for the wrong text"]
    assert distribution_of(lambda chance: together(Planted(wrong), chance)) != product
