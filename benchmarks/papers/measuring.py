"""Measure rows on prompts: by replay if the text does not depend on the draft, else by decoding; results are kept.

The text of a greedy target is the same whatever is drafted. So the target decodes it once, and drafters draft along it:
the same rounds as in decoding, without the target's passes. One sampled text is used in the same way for drafts that
are verified by drawing the target's token (see `replays`).
"""

import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from outrider.base.files import read_json, write_json
from outrider.base.streams import Streams
from outrider.draft_models.targets.stack import require_layers
from outrider.draft_models.targets.target import Target
from outrider.inference.core.cache import KVCache
from outrider.inference.core.decode import autoregressive, cut, decode_rounds, speculative
from outrider.inference.core.drafter import Drafter
from outrider.inference.core.rounds import Generation, collect
from outrider.inference.core.sampling import Sampler
from outrider.inference.core.session import Session
from outrider.inference.core.target_session import Runtime, TargetSession
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.drafters.skip_layers.drafter import SkipLayersDraftModel
from outrider.inference.loading.drafters import Drafters, new_drafter
from outrider.inference.loading.generation_config import TextSettings
from outrider.inference.measure.arms import Turn as Prompted
from outrider.inference.measure.arms import make_arms, run_arms
from outrider.inference.measure.replay import RecordedSelector, RecordedSession
from outrider.inference.settings.kinds import KINDS
from outrider.inference.settings.method import AUTOREGRESSIVE, MethodConfig
from outrider.inference.settings.sampling import GREEDY, SamplingConfig
from papers.claims import Row, Table, quantity
from papers.watching import Watched

STRETCH = 64  # tokens, of `late_64` and so on
COUNTS_FILE = "counts.jsonl"
FAITHFUL = ("early_exit", "eagle3", "small_lm", "skip_layers", "prompt_lookup", "ngrams")  # a replay has their inputs


@dataclass(frozen=True)
class Asked:
    """A prompt's ids; answer: what a greedy target says, where that was recorded."""

    id: str
    category: str
    ids: tuple[int, ...]
    answer: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Bench:
    """What decodes. stack: None where answers were recorded and no target is there. tokens: new ones at most.

    others: further models, by where they lie (see `Row.other`).
    answers: the file that keeps what the target says to them. timed_tokens: of an answer that is timed; 0: all.
    """

    stack: Target | None
    drafters: Drafters
    vocabulary: int
    tokens: int
    eos: Collection[int] = ()
    runtime: Runtime = field(default_factory=Runtime)
    others: Mapping[str, Any] = field(default_factory=dict)
    answers: Path | None = None
    timed_tokens: int = 0

    def drafters_of(self, row: Row) -> Drafters:
        """The models of a row's method."""
        if not row.other:
            return self.drafters
        assert row.method is not None
        return {**self.drafters, row.method.source: self.others[row.other]}

    def budget(self, asked: Asked) -> int:
        """New tokens at most; a recorded answer is replayed whole."""
        return self.tokens if self.stack is not None or asked.answer is None else max(self.tokens, len(asked.answer))


def continued(
    bench: Bench, row: Row, asked: Asked, *, live: bool = False, selector: TokenSelector | None = None
) -> Generation:
    """The prompt continued by a row's method, its structure watched. None: a `selector` that verifies no blocks."""
    assert row.method is not None
    streams = Streams(0, asked.id).within(key_of(row))
    drafter = new_drafter(row.method, bench.drafters_of(row), streams, row.sampling.temperature > 0)
    if isinstance(drafter, ModelDrafter):
        drafter.structure = Watched(drafter.structure, bench.eos)
    if replays(row.method, row.sampling) and not live:
        return replayed(bench, drafter, asked, row.sampling)
    assert bench.stack is not None
    coins = streams.of("verify") if row.sampling.temperature else None
    naive = row.method.verify == "naive"
    given = selector or TokenSelector(sampler_of(bench, asked, row.sampling), coins, "naive" if naive else "exact")
    options: dict[str, Any] = {"eos": bench.eos, "selector": given, "runtime": bench.runtime}
    decoded = collect(speculative(bench.stack, drafter, asked.ids, max_new_tokens=bench.budget(asked), **options))
    return replace(decoded, totals=dict(drafter.totals))


def sampler_of(bench: Bench, asked: Asked, sampling: SamplingConfig) -> Sampler | None:
    device = torch.device("cpu") if bench.stack is None else bench.stack.device
    return TextSettings(bench.budget(asked), bench.eos, sampling).sampler(asked.ids, device)


@torch.inference_mode()
def replayed(bench: Bench, drafter: Drafter, asked: Asked, sampling: SamplingConfig = GREEDY) -> Generation:
    """The recorded answer as the target would have decoded it with `drafter`, of a method that `replays`."""
    answer, budget = answer_of(bench, asked, sampling), bench.budget(asked)
    eos = bench.eos if bench.stack is not None else {answer[-1]}
    context = len(asked.ids) + budget
    sizes = (drafter.split, context + drafter.max_rows + 1, context)
    if bench.stack is None:
        session: Session = RecordedSession(*sizes, vocabulary=bench.vocabulary)
    else:
        skips = isinstance(drafter, ModelDrafter) and isinstance(drafter.model, SkipLayersDraftModel)
        session = (RecordedKeys if skips else RecordedStates)(bench.stack, (*asked.ids, *answer), *sizes)
    selector = RecordedText(cut(answer, eos, budget), sampler_of(bench, asked, sampling))
    decoded = collect(decode_rounds(session, drafter, selector, asked.ids, budget, eos, time.perf_counter))
    return replace(decoded, totals=dict(drafter.totals))


def answer_of(bench: Bench, asked: Asked, sampling: SamplingConfig = GREEDY) -> tuple[int, ...]:
    """What the target says to a prompt: recorded, or decoded once, one sample of it, and kept in `bench.answers`."""
    if asked.answer is not None and sampling == GREEDY:
        return asked.answer
    name = said_under(asked, sampling)
    kept = read_json(bench.answers, "answers", "remove it") if bench.answers and bench.answers.exists() else {}
    if name not in kept:
        assert bench.stack is not None
        coins = Streams(0, asked.id).of("answer", name)
        selector = TokenSelector(sampler_of(bench, asked, sampling), coins)
        options: dict[str, Any] = {"eos": bench.eos, "selector": selector, "runtime": bench.runtime}
        kept[name] = collect(autoregressive(bench.stack, asked.ids, max_new_tokens=bench.tokens, **options)).tokens
        if bench.answers:
            write_json(bench.answers, kept)
    return tuple(kept[name])


def said_under(asked: Asked, sampling: SamplingConfig) -> str:
    """What an answer is kept under: the prompt's id, and how it was sampled."""
    return asked.id if sampling == GREEDY else f"{asked.id} {json.dumps(chosen(sampling), sort_keys=True)}"


def counts_of(generation: Generation) -> dict[str, float]:
    """The sums of one generation that quantities are made of."""
    rounds = generation.rounds
    found: Counter[str] = Counter(generation.totals)
    found["rounds"], found["output"] = len(rounds), len(generation.tokens)
    for r in rounds:
        found.update(tokens=len(r.tokens), drafted=r.drafted, accepted=r.accepted, depth=r.depth)
    found["by_source"] = generation.totals.get("drafted_by_source", found["drafted"])
    place = 1
    for r in rounds:
        found[f"late_rounds_{place // STRETCH * STRETCH}"] += 1
        found[f"late_tokens_{place // STRETCH * STRETCH}"] += len(r.tokens)
        place += len(r.tokens)
    return {key: float(amount) for key, amount in found.items()}


def timed(bench: Bench, rows: Mapping[str, Row], asked: Asked, turn: int, *, cold: bool) -> dict[str, dict[str, float]]:
    """Seconds of all rows with a method, by key. They take turns with plain decoding; `turn` decides which begins.

    cold: nothing was timed before; all decode once without a clock.
    """
    found: dict[str, dict[str, float]] = {}
    assert bench.stack is not None
    for sampling in dict.fromkeys(row.sampling for row in rows.values()):
        alike = {key: row for key, row in rows.items() if row.sampling == sampling and row.method}
        own = {key: row.method for key, row in alike.items() if row.method is not None}
        text = TextSettings(bench.timed_tokens or bench.tokens, bench.eos, sampling)
        arms: dict[str, Any] = {}
        for other in dict.fromkeys(row.other for row in alike.values()):
            mine = {key: method for key, method in own.items() if alike[key].other == other}
            drafters = bench.drafters_of(alike[next(iter(mine))])
            arms |= make_arms(bench.stack, drafters, mine, None, text, runtime=bench.runtime)
        for arm in arms.values() if cold else ():
            arm(asked.ids, Streams(0, asked.id))
        (result,) = run_arms(arms, [Prompted(asked.id, asked.category, asked.ids)], repeats=1, turn=turn)
        done = result.generations
        plain = done[AUTOREGRESSIVE]
        each = plain.decode_seconds / max(1, len(plain.tokens) - 1)
        for name in own:
            rounds, seconds = done[name].rounds, done[name].decode_seconds
            parts = {f"{part}_seconds": sum(getattr(r, f"{part}_seconds") for r in rounds)
                     for part in ("draft", "verify", "structure")}  # fmt: skip
            new = len(done[name].tokens) - 1
            found[name] = {
                "seconds": seconds, "timed": new, "timed_rounds": len(rounds), "plain_seconds": new * each,
                "other_seconds": seconds - parts["draft_seconds"] - parts["verify_seconds"], **parts,
            }  # fmt: skip
    return found


def replays(method: MethodConfig, sampling: SamplingConfig) -> bool:
    """Whether drafts and their acceptance depend on the text alone.

    Under sampling they do if verification draws the target's token and accepts a candidate that equals it: then the
    text holds the drawn tokens. Sampled candidates are verified by rejection, unless verification is naive.
    """
    shape = method.structure
    drawn = shape.kind == "chain" or (shape.kind == "k_config" and shape.draw != "top_k")
    rejects = KINDS[method.source].shaped and sampling.temperature > 0 and drawn and method.verify != "naive"
    known = method.source in FAITHFUL and not method.ngrams.recycle  # which reads the target's logits
    return known and not rejects and sampling.repetition_penalty in (None, 1.0)


class RecordedText(RecordedSelector):
    """Chooses what was recorded; a drafter sees the `sampler` that the text was drawn with."""

    def __init__(self, recorded: Sequence[int], sampler: Sampler | None):
        TokenSelector.__init__(self, sampler, random.Random())  # which is never asked
        self._recorded, self._position = recorded, 0


class RecordedStates(TargetSession):
    """Runs the layers that a drafter shares. The last hidden states are recalled, by each row's position in the text.

    A row that is not of the text gets the states of a row that is. No drafter reads them, as the row is not committed.
    """

    def __init__(self, target: Target, text: tuple[int, ...], split: int, capacity: int, context: int):
        super().__init__(require_layers(target), split, capacity, context)
        self.second_cache = KVCache(range(0), capacity)
        self._target, self._text = target, text

    def finish(self, rows: Sequence[int] | None = None, *, last_only: bool = False) -> Tensor:
        self.finished = range(self.rows) if rows is None else rows
        places = [min(self.base + self.round.depths[row], len(self._text) - 1) for row in self.finished]
        if self.aux_layers:
            self.extras = [states_of(self._target, self._text, self.aux_layers)[1][:, places]]
        return self.hidden.new_empty(len(places), 0)

    @property
    def target_hidden(self) -> Tensor:  # type: ignore[override]
        """Read when a drafter asks for it, which most do not."""
        last = min(self.base, len(self._text)) - 1
        return states_of(self._target, self._text, self.aux_layers)[0][last : last + 1]


class RecordedKeys(RecordedStates):
    """Recalls the keys and values of all layers too, for drafters that run some of them after the text."""

    def __init__(self, target: Target, text: tuple[int, ...], split: int, capacity: int, context: int):
        super().__init__(target, text, split, capacity, context)
        self.second_cache = KVCache(range(len(self.layers.layers)), capacity)

    def commit(self, rows: Sequence[int]) -> None:
        """The text's own keys and values take the place of the draft's."""
        self.base += len(rows)
        self.second_cache.keep(0, ())
        for layer, (keys, values) in enumerate(states_of(self._target, self._text, self.aux_layers)[2]):
            self.second_cache.update(keys[:, :, : self.base], values[:, :, : self.base], layer)
        self.second_cache.length += self.base
        self.start_round()


class _Read(TargetSession):
    @property
    def states(self) -> Tensor:
        """The last hidden states of the rows that ran last [n, d]."""
        return self._last_hidden


@lru_cache(maxsize=4)
@torch.inference_mode()
def states_of(
    target: Target, text: tuple[int, ...], aux_layers: tuple[int, ...]
) -> tuple[Tensor, Tensor, Sequence[tuple[Tensor, Tensor]]]:
    """Of one pass over `text`: the last hidden states [n, d], the aux ones [1, n, layers · d], the keys and values."""
    session = _Read(require_layers(target), 0, len(text))
    session.aux_layers = aux_layers
    session.prefill(text)
    aux = session.extras[0] if aux_layers else session.states[None, :, :0]
    return session.states, aux, session.content()


def key_of(row: Row) -> str:
    """What a row's counts are kept under: rows that decode alike share them."""
    own: Any = [chosen(row.method), chosen(row.sampling)] if row.method else [row.measure.__name__, row.name]  # type: ignore[union-attr]
    what = [*own, row.other] if row.other else own
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def chosen(settings: Any) -> dict[str, Any]:
    """The fields that are not at their defaults, plain: a new option leaves the keys of rows that do not use it."""
    found = {}
    for own in fields(settings):
        value = getattr(settings, own.name)
        default = own.default if own.default_factory is MISSING else own.default_factory()
        if value != default:
            found[own.name] = chosen(value) if is_dataclass(value) else value
    return found


def runnable(tables: Sequence[Table]) -> list[Row]:
    """The rows to measure. Some may decode alike (see `key_of`), also on other prompts."""
    rows = [row for table in tables if not table.never for row in table.rows if not row.never]
    return [row for row in rows if row.method or row.measure]


def with_a_clock(tables: Sequence[Table]) -> set[str]:
    """The keys of the rows whose time a claim is about."""
    found = set()
    for table in tables:
        named = {(*term.partition("@")[::2], claim.quantity) for claim in table.claims for term in claim.terms}
        asked = {row for row, other, default in named if "seconds" in quantity(other or default).needs}
        found |= {key_of(row) for row in runnable([table]) if row.name in asked and row.method}
    return found


def about(asked: Asked, rows: Sequence[Row]) -> dict[str, Row]:
    """Those of `rows` that a prompt counts for, by key."""
    return {key_of(row): row for row in rows if row.category in ("", asked.category)}


def read_counts(folder: Path) -> dict[tuple[str, str], dict[str, float]]:
    """What was measured, by key and prompt. A line that was cut off is none."""
    path = folder / COUNTS_FILE
    found: dict[tuple[str, str], dict[str, float]] = {}
    for line in path.read_text().split("\n")[:-1] if path.exists() else ():
        kept = json.loads(line)
        found.setdefault((kept["key"], kept["prompt"]), {}).update(kept["counts"])
    return found


def measure_all(
    bench: Bench, tables: Sequence[Table], prompts: Sequence[Asked], folder: Path, *, minutes: float | None,
    timed_prompts: int,
) -> None:  # fmt: skip
    """Every row on every prompt that `folder` does not have yet, prompt by prompt.

    minutes: no prompt begins later, but for the first. timed_prompts: take times too, on so many, of the rows whose
    time a claim is about.
    """
    began, rows, done, cold = time.monotonic(), runnable(tables), read_counts(folder), True
    clocked, keys = {asked.id for asked in prompts[:timed_prompts]}, with_a_clock(tables)
    with (folder / COUNTS_FILE).open("a") as file:

        def keep(key: str, asked: Asked, counts: Mapping[str, float]) -> None:
            file.write(json.dumps({"key": key, "prompt": asked.id, "counts": counts}) + "\n")
            file.flush()

        for turn, asked in enumerate(tqdm(prompts, desc="measure", unit="prompt", disable=None)):
            mine = about(asked, rows)
            todo = {key: row for key, row in mine.items() if (key, asked.id) not in done}
            untimed = {key: row for key, row in mine.items() if asked.id in clocked and key in keys
                       and "seconds" not in done.get((key, asked.id), {})}  # fmt: skip
            if (todo or untimed) and turn and minutes is not None and time.monotonic() - began > 60 * minutes:
                break
            for key, row in todo.items():
                counts = row.measure(bench, row, asked) if row.measure else counts_of(continued(bench, row, asked))
                keep(key, asked, counts)
            if untimed:
                for key, seconds in timed(bench, untimed, asked, turn, cold=cold).items():
                    keep(key, asked, seconds)
                cold = False
