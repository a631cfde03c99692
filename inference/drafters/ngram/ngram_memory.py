"""Memory of n-gram drafters across texts (ngrams.keep): contexts, recycled logits, weights.

A generation works on a copy. Its state is adopted when the next generation starts with another prompt. So several runs
of one prompt (a warm-up, a repeat) all start from the state before it, and none sees its own answer.

A file belongs to one target, tokenizer and learning configuration. Only one process can open it at a time. It is
written when decoding ends, and at the start of a generation if the last write is more than a minute ago. The least
used contexts are dropped until it is no larger than ngrams.keep_mb.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from draft_models.ngrams.kept import contexts_of, fault_of_contexts, from_arrays, map_of, most_used
from draft_models.ngrams.overlay import ContextMap, new_map
from draft_models.ngrams.recycled import Recycled, new_recycled
from draft_models.ngrams.table import TrigramTable
from inference.drafters.ngram.ngram_mixing import new_weights
from inference.settings.method import NgramConfig
from outrider.errors import UserError, require
from outrider.files import parse_json, require_writable, sealed, unsealed, write_atomically
from outrider.run_dirs import changes, system_lock
from outrider.settings import listed

_FORMAT = 1
_RECYCLED_CONTEXT = 2  # the target's rows are indexed by their last token and by their last two
_EVERY = 60.0  # least seconds between two writes during decoding
_LEAVES = 0.9  # share of the limit that pruning leaves, so that the limit is not reached again at once
_BYTES = (32, 12)  # in the file, per context and per successor
_TRUST = 0.99  # λ is clipped to 1 − _TRUST … _TRUST between texts: a source that was always right may become wrong
_NOTES = "ngrams_memory"  # the file's metadata key of what it belongs to, as JSON


class Learnt(NamedTuple):
    """known: contexts with their successors. recycled: the target's rows. shares: λ of the mixture, float64 [S, C]."""

    known: ContextMap
    recycled: Recycled
    shares: np.ndarray

    @property
    def bytes_beside_contexts(self) -> int:
        """The size of a file without its contexts."""
        return sum(array.nbytes for array in (*self.recycled[1:], self.shares))


def nothing(table: TrigramTable, config: NgramConfig) -> Learnt:
    """The initial state of learning."""
    if config.evidence == "table":
        return Learnt(new_map(), new_recycled(0, 0), np.empty((0, 0)))
    recycled = new_recycled(_RECYCLED_CONTEXT, config.recycle)
    weights = new_weights(config.longest, recycled.longest, table.suffixes is not None)
    return Learnt(new_map(1 << 14), recycled, weights.prior)


def carried(shares: np.ndarray) -> np.ndarray:
    """λ at the start of the next text, bounded: a source that was always right may be wrong there."""
    return shares.clip(1 - _TRUST, _TRUST)


def _copy(learnt: Learnt) -> Learnt:
    known = ContextMap(*(array.copy() for array in learnt.known))
    recycled = Recycled(learnt.recycled.longest, *(array.copy() for array in learnt.recycled[1:]))
    return Learnt(known, recycled, learnt.shares.copy())


class Memory:
    """A file of learnt state, open in this process."""

    def __init__(self, path: Path, notes: Mapping[str, object], limit: float, learnt: Learnt, lock: FileLock):
        """notes: what the file belongs to. limit: the file's maximum size in bytes."""
        self.path, self.notes, self.limit, self._lock = path, dict(notes), limit, lock
        self._before = learnt
        self._last: tuple[bytes, Callable[[], Learnt]] | None = None  # the prompt's digest, and the state learnt since
        self._saved = time.monotonic()

    def begin(self, prompt: Sequence[int], learnt: Callable[[], Learnt]) -> Learnt:
        """The state to start from. learnt: returns the state after this text; called when the next text begins."""
        digest = hashlib.sha256(np.asarray(prompt, np.int64).tobytes()).digest()
        if self._last is not None and self._last[0] != digest:
            self._before = self._within_limit(self._last[1]())
        self._last = (digest, learnt)
        if time.monotonic() - self._saved > _EVERY:
            self._write(self._before)
        return _copy(self._before)

    def save(self) -> None:
        """Write everything, the last text included. Raises `UserError`."""
        self._write(self._before if self._last is None else self._within_limit(self._last[1]()))

    def close(self) -> None:
        """Save, and release the file."""
        self.save()
        self._lock.release()

    def _within_limit(self, learnt: Learnt) -> Learnt:
        known, others = learnt.known, learnt.bytes_beside_contexts
        taken = sum(count * size for count, size in zip(known.used.tolist(), _BYTES, strict=True))
        if taken + others <= self.limit:
            return learnt
        kept = most_used(contexts_of(known), _LEAVES * self.limit - others)
        # Counts are halved, so that contexts seen often long ago are dropped in favour of recent ones.
        return learnt._replace(known=map_of(kept._replace(seen=np.maximum(1, kept.seen // 2))))

    def _write(self, learnt: Learnt) -> None:
        arrays = _arrays(learnt)
        notes = json.dumps(sealed({"belongs": self.notes, "arrays": _digests(arrays)}))
        write_atomically(self.path, save(arrays, {_NOTES: notes}))
        self._saved = time.monotonic()


def _arrays(learnt: Learnt) -> dict[str, np.ndarray]:
    recycled = {f"recycled_{name}": getattr(learnt.recycled, name) for name in Recycled._fields[1:]}
    return {**contexts_of(learnt.known)._asdict(), **recycled, "shares": np.ascontiguousarray(learnt.shares)}


def _digests(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}


# ------------------------------------------------------------------------------------------------------- open files

_open: dict[Path, Memory] = {}  # by file: all drafters of a process share one memory


def memory_of(path: str) -> Memory:
    """The memory that `open_memory` has opened."""
    return _open[Path(path).resolve()]


def open_memory(config: NgramConfig, table: TrigramTable, target: Mapping[str, Any]) -> Memory:
    """The memory in config.keep; empty if the file does not exist yet.

    target: the target's identity, JSON-able. Raises `UserError` if the file belongs to another target, tokenizer or
    learning configuration, is damaged, cannot be written, or is open in another process.
    """
    assert config.keep is not None
    path = Path(config.keep).resolve()
    notes = {"format": _FORMAT, "tokenizer": table.tokenizer, "target": target, "learning": _learning(config, table)}
    if path in _open:
        _require_same(path, _open[path].notes, notes)
        same = _open[path].limit == config.keep_mb * 1e6
        require(same, "ngrams.keep_mb", config.keep_mb, f"what it was when {path} was opened")
        return _open[path]
    require_writable(path.parent, "ngrams.keep")
    lock = system_lock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"ngrams.keep={path}: open in another process; wait for it, or give another file") from None
    except (OSError, NotImplementedError) as error:  # as in `only_run`
        raise UserError(f"ngrams.keep={path}: cannot be locked ({error}); give a file elsewhere") from None
    try:
        learnt = nothing(table, config)
        least = 2 * learnt.bytes_beside_contexts / 1e6  # the same size again for contexts
        room = f"more than {least:.3g}, half of which is not contexts"
        require(config.keep_mb > least, "ngrams.keep_mb", config.keep_mb, room)
        if path.exists():
            limit = max(table.vocabulary, target.get("vocab_size") or 0)
            learnt = _read(path, notes, learnt, limit)
    except UserError:
        lock.release()
        raise
    _open[path] = Memory(path, notes, config.keep_mb * 1e6, learnt, lock)
    return _open[path]


def save_all() -> None:
    """Write every memory that is open. Raises `UserError`."""
    for memory in _open.values():
        memory.save()


def close(path: str) -> None:
    """Save the memory in `path` and release the file; does nothing if it is not open."""
    memory = _open.pop(Path(path).resolve(), None)
    if memory is not None:
        memory.close()


def _learning(config: NgramConfig, table: TrigramTable) -> dict[str, object]:
    read = {"table": ("order", "adapt", "increment", "max_probability"), "mixed": ("longest", "decay", "recycle")}
    own = {name: getattr(config, name) for name in read[config.evidence]}
    return {"evidence": config.evidence, "suffixes": table.suffixes is not None, **own}


def _require_same(path: Path, found: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    differ = [f"{name}: {old} there, {new} here" for name, old, new in changes(found, wanted)]
    if differ:
        raise UserError(f"ngrams.keep={path}: was learnt with another {listed(differ, 3)}; give another file")


def _read(path: Path, notes: Mapping[str, object], empty: Learnt, vocabulary: int) -> Learnt:
    """Read the file. Raises `UserError`."""
    try:
        with safe_open(path, "numpy") as file:
            written = unsealed(parse_json((file.metadata() or {}).get(_NOTES, "")))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        if written["arrays"] != _digests(arrays):
            raise ValueError("its sha256 does not fit the rest")
        belongs = written["belongs"]
        if not isinstance(belongs, dict):
            raise ValueError("it does not say what it belongs to")
    except (OSError, SafetensorError, UserError, ValueError, KeyError) as error:
        raise _damaged(path, str(error)) from None
    _require_same(path, belongs, notes)
    try:
        contexts = from_arrays(arrays)
        recycled = Recycled(empty.recycled.longest, *(arrays[f"recycled_{name}"] for name in Recycled._fields[1:]))
        shares = arrays["shares"]
    except (ValueError, KeyError) as error:
        raise _damaged(path, str(error)) from None
    # First of all, because compiled code uses these numbers as indices without bounds checks.
    fault = fault_of_contexts(contexts, vocabulary) or _fault_of_others(recycled, shares, empty, vocabulary)
    if fault:
        raise _damaged(path, fault)
    return Learnt(map_of(contexts), recycled, shares)


def _fault_of_others(recycled: Recycled, shares: np.ndarray, empty: Learnt, vocabulary: int) -> str:
    """The reason why the arrays other than contexts cannot be used, or ""; empty: a state of the expected shapes."""
    alike = zip((*recycled[1:], shares), (*empty.recycled[1:], empty.shares), strict=True)
    if any(one.shape != other.shape or one.dtype != other.dtype for one, other in alike):
        return "arrays of other shapes"
    if (recycled.tokens < 0).any() or (recycled.tokens >= vocabulary).any() or (recycled.seen < 0).any():
        return "recycled rows of tokens that are not in the vocabulary, or of less than no occurrences"
    if not all(((array >= 0) & (array <= 1)).all() for array in (recycled.probs, shares)):  # false for NaN
        return "probabilities that are not between 0 and 1"
    return ""


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"ngrams.keep={path}: damaged, or no memory of n-grams ({why}); remove it, or give another file")
