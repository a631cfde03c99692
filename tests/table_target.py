"""A target that is a table: the next token depends on the last one alone, and its law can be written down.

All above the model is what ships: `make_arms`, sources, structures, stop rules, verification. A round costs a few
hundred microseconds, so that laws can be tested on tens of thousands of draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from inference.core.sampling import successors
from inference.core.session import TargetSession

CPU = torch.device("cpu")


class TableModel:
    """A model for `TableSession`: in the place of a target, a small LM or an exit layer.

    rows [V][V]: the law of the next token after each one. exit_layer: where it is an exit layer.
    """

    device, dtype, exit_layer, window = CPU, torch.float32, 1, None
    layers: Sequence[Any] = (None,)  # how many there are is asked of an exit
    draft_tokens: Any = None
    own_tokens: Any = None

    def __init__(self, rows: Sequence[Sequence[float]]):
        self.law = torch.tensor(rows, dtype=torch.float64)
        self.table = self.law.log().float()
        self.config = SimpleNamespace(vocab_size=len(self.law), max_position_embeddings=10**9)

    def run(self, hidden: Tensor, *_: Any) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[..., 0].long()]

    def own_logits(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden)

    draft_logits = own_logits


class TableHead(TableModel):
    """The same in the place of an EAGLE-3 head."""

    reading = SimpleNamespace(taps=(1,), hidden=1)

    def embed(self, tokens: Tensor) -> Tensor:
        return tokens[..., None]

    def features(self, taps: Tensor) -> Tensor:
        return taps

    def run_embedded(self, embedding: Tensor, *_: Any) -> Tensor:
        return embedding


@dataclass
class Length:
    """As much of a cache as sources look at."""

    length: int = 0

    def keep(self, base: int, rows: Sequence[int]) -> None:
        self.length = base + len(rows)


@dataclass
class TableSession:
    """As much of a `TargetSession` as decoding and sources use of it. A hidden state [1] is the token's id."""

    stack: TableModel
    split: int
    capacity: int
    context: int
    base: int = 0
    rows: int = 0
    taps: tuple[int, ...] = ()
    successors: int = 0
    first: Length = field(default_factory=Length)
    rest: Length = field(default_factory=Length)
    _fed: list[Tensor] = field(default_factory=list)
    _last: Tensor = field(init=False)  # the last committed token

    @property
    def vocabulary(self) -> int:
        return len(self.stack.table)

    @property
    def tokens(self) -> Tensor:
        if len(self._fed) > 1:
            self._fed = [torch.cat(self._fed)]
        return self._fed[0]

    @property
    def hidden(self) -> Tensor:
        return self.tokens[None, :, None]

    @property
    def target_hidden(self) -> Tensor:
        return self._last[:, None]

    def feed(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        self._fed.append(tokens)
        self.rows += len(parents)
        return tokens[None, :, None]

    def extend(self, tokens: Tensor, parents: Sequence[int], wanted: int) -> tuple[Tensor, Tensor]:
        return self.feed(tokens, parents)[0], self.stack.own_logits(tokens[-wanted:, None])

    def run_rows(self, name: str, pass_: Any, x: Tensor, parents: Sequence[int]) -> tuple[Tensor, ...]:
        self.feed(x[0, :, 0], parents)
        return self.run_beside(name, pass_, x, 0, self.first)

    def tapped(self, rows: Sequence[int]) -> Tensor:
        return self.hidden[:, list(rows)]

    def finish(self, rows: Sequence[int] | None = None, *, last_only: bool = False) -> Tensor:
        tokens = self.tokens if rows is None else self.tokens[list(rows)]
        self._finished = range(self.rows) if rows is None else rows
        logits = self.stack.table[tokens[-1:] if last_only else tokens]
        if self.successors:
            self._beside_logits = [successors(logits, self.successors)[None]]
        return logits

    def commit(self, rows: Sequence[int]) -> None:
        self._last = self.tokens[rows[-1] : rows[-1] + 1]
        self.base += len(rows)
        self.rows, self._fed = 0, []

    def beside(self, model: TableModel) -> "TableSession":
        return TableSession(model, 1, self.capacity, self.context)

    prefill, run_tree, path = TargetSession.prefill, TargetSession.run_tree, TargetSession.path
    recycled = TargetSession.recycled

    def cache_beside(self, owner: object, layers: range) -> Length:
        return Length()

    def run_beside(self, name: str, pass_: Any, x: Tensor, start: int, cache: Length) -> tuple[Tensor, ...]:
        view = SimpleNamespace(masks=lambda: {None: None}, rotary=None, last=lambda hidden, count: hidden[:, -count:])
        cache.length += x.shape[1]
        return pass_(x, view)

    def close(self) -> None:
        pass


class TableRuntime:
    """A `Runtime` of such sessions."""

    name, captures = "table", 0

    def session(self, stack: Any, split: int, capacity: int, context: int | None = None) -> TableSession:
        return TableSession(stack, split, capacity, context or capacity)
