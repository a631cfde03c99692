"""A target that is a table: the next token depends on the last one alone, and its distribution can be written down.

All above the model is what ships: `make_arms`, sources, structures, stop rules, verification. A round costs a few
hundred microseconds, so that distributions can be tested on tens of thousands of draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from outrider.inference.core.sampling import top_tokens
from outrider.inference.core.session import Session
from outrider.inference.core.target_session import Runtime

CPU = torch.device("cpu")


class TableModel:
    """A model for `TableSession`: in the place of a target, a small LM or an exit layer.

    rows [V][V]: the distribution of the next token after each one. exit_layer: where it is an exit layer.
    """

    device, dtype, exit_layer, window = CPU, torch.float32, 1, None
    layers: Sequence[Any] = (None,)  # how many there are is asked of an exit
    draft_tokens: Any = None
    parallel = 0
    draft_vocabulary: Any = None

    def __init__(self, rows: Sequence[Sequence[float]]):
        self.distributions = torch.tensor(rows, dtype=torch.float64)
        self.table = self.distributions.log().float()
        self.config = PreTrainedConfig(vocab_size=len(self.distributions), max_position_embeddings=10**9)

    @property
    def predicted(self) -> Tensor | None:
        return None if self.draft_vocabulary is None else self.draft_vocabulary.tokens

    def run(self, hidden: Tensor, *_: Any) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[..., 0].long()]

    def draft_logits(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden)


class TableHead(TableModel):
    """The same in the place of an EAGLE-3 head."""

    reading = SimpleNamespace(taps=(1,), hidden=1)

    def embed(self, tokens: Tensor) -> Tensor:
        return tokens[..., None]

    def features(self, aux: Tensor) -> Tensor:
        return aux

    def run(self, embedding: Tensor, *_: Any) -> Tensor:
        return embedding


class TableBlock(TableModel):
    """The same in the place of a block drafter with a Markov head: its rows say half of the logits, the token before
    the drafted one the other half."""

    reading = SimpleNamespace(
        taps=(1,), windows=(None,), spans=[(None, False)], sample_from_anchor=True, block=3, drafted=3, mask_token=0
    )

    def embed(self, tokens: Tensor) -> Tensor:
        return tokens[..., None]

    def features(self, aux: Tensor) -> Tensor:
        return aux

    def store_context(self, *_: Any) -> None:
        return

    def draft_logits(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden) / 2

    def bias(self, logits: Tensor, tokens: Tensor) -> Tensor:
        return logits + self.table[tokens].clamp(min=-30) / 2

    def evidence(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return hidden


@dataclass
class Length:
    """As much of a cache as sources look at."""

    length: int = 0

    def keep(self, base: int, rows: Sequence[int]) -> None:
        self.length = base + len(rows)


class TableSession(Session):
    """A session of a table. A hidden state [1] is the token's id."""

    device, dtype = CPU, torch.float32

    def __init__(self, model: TableModel, capacity: int, context: int):
        self.model, self.capacity, self.context = model, capacity, context
        self.base = 0
        self.first_cache, self.second_cache = Length(), Length()
        self.start_round()

    @property
    def stack(self) -> TableModel:
        return self.model

    @property
    def vocabulary(self) -> int:
        return len(self.model.table)

    @property
    def hidden(self) -> Tensor:
        return self.tokens[None, :, None]

    def require_layers(self) -> "TableSession":
        return self

    def feed(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        self.round.add(parents)
        self.fed.append(tokens)
        return tokens[None, :, None]

    def extend(self, tokens: Tensor, parents: Sequence[int], logit_count: int) -> tuple[Tensor, Tensor]:
        return self.feed(tokens, parents)[0], self.model.draft_logits(tokens[-logit_count:, None])

    def run_rows(
        self, name: str, pass_: Any, x: Tensor, parents: Sequence[int], logit_count: int | None = None
    ) -> tuple[Tensor, ...]:
        self.feed(x if x.dim() == 1 else x[0, :, 0], parents)
        return self.run_draft_layers(name, pass_, x, 0, self.first_cache, logit_count)

    def aux_hidden(self, rows: Sequence[int]) -> Tensor:
        return self.hidden[:, list(rows)]

    def finish(self, rows: Sequence[int] | None = None, *, last_only: bool = False) -> Tensor:
        self.finished = range(self.rows) if rows is None else rows
        tokens = self.tokens[list(self.finished)]
        logits = self.model.table[tokens[-1:] if last_only else tokens]
        if self.top_count:
            self.extras = [top_tokens(logits, self.top_count)[None]]
        return logits

    def commit(self, rows: Sequence[int]) -> None:
        self.target_hidden = self.tokens[rows[-1] : rows[-1] + 1, None]
        self.base += len(rows)
        self.start_round()

    def draft_session(self, model: TableModel) -> "TableSession":
        return TableSession(model, self.capacity, self.context)

    draft_layers_session = draft_session

    def draft_cache(self, owner: object, layers: range) -> Length:
        return Length()

    def run_draft_layers(
        self, name: str, pass_: Any, x: Tensor, start: int, cache: Length, logit_count: int | None = None
    ) -> tuple[Tensor, ...]:
        view = SimpleNamespace(
            masks=lambda: {None: None},
            positions=None,
            rotary=None,
            cache=cache,
            logit_rows=lambda hidden: hidden[:, -(logit_count or len(x[0])) :],
        )
        cache.length += x.shape[min(x.dim() - 1, 1)]
        return pass_(x, view)


class TableRuntime(Runtime):
    """A `Runtime` of such sessions."""

    name, captures = "table", 0

    def session(self, target: Any, split: int | None, capacity: int, context: int | None = None) -> TableSession:
        return TableSession(target, capacity, context or capacity)
