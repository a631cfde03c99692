"""Sessions, each of which runs a target over one text, and the runtime that makes them.

A row is a token that runs in a round of decoding. A pass runs some layers over some rows. Aux hidden states are those
at chosen boundaries of layers; some drafters read them. `TargetSession` runs a target in two halves of its layers,
`WholeSession` a target whose layers cannot run one by one.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from outrider.draft_models.targets.target import Band, Masks, Rotary, RunnableLayers, Target
from outrider.inference.core.cache import KVCache
from outrider.inference.core.rows import RoundRows, RowLayout, unpack
from outrider.inference.core.sampling import top_tokens
from outrider.inference.core.session import Pass, Session, View

if TYPE_CHECKING:
    from outrider.draft_models.targets.attention import KernelChoice
    from outrider.draft_models.targets.stack import LayerStack

REST = "rest"  # the names of `finish`'s passes begin so; passes of one name do the same to rows of any text


def eager_session(
    target: Target, split: int | None, capacity: int, context: int | None = None, together: "Together | None" = None
) -> Session:
    """A session whose passes run eagerly. The arguments after `target`: see `TargetSession`."""
    if target.layered is None:
        return WholeSession(target, capacity, context)
    return TargetSession(target.layered, split, capacity, context, together)


class TargetSession(Session):
    """Runs a model over one text in two halves, layers [0, split) and [split, L).

    A drafter that shares the target's first layers feeds rows through the first half while it drafts; `finish` then
    runs only the second half over all rows, so no layer computes a row twice. Other drafters use split = 0, where
    the first half is the embedding. With split None, for a drafter's own model, all layers are in the first half.

    Aux hidden states (`aux_layers`) need split = 0. `round` and `fed` of `Session` are the rows since the last commit,
    and their tokens. capacity: positions that the caches can hold; context: positions that the text may reach; None:
    `capacity`. together: runs each pass jointly with those of other texts (`Batch`); None: a pass runs alone.
    """

    def __init__(
        self,
        layers: RunnableLayers,
        split: int | None,
        capacity: int,
        context: int | None = None,
        together: "Together | None" = None,
    ):
        self.layers, self.together = layers, together
        self.device, self.dtype = layers.device, layers.dtype
        self.split = len(layers.layers) if split is None else split
        self.capacity = capacity
        self.context = capacity if context is None else context
        self.first_cache = KVCache(range(self.split), capacity)
        self.second_cache = KVCache(range(self.split, len(layers.layers)), capacity)
        self.base = 0  # committed positions
        layers.reserve(capacity)
        self.start_round()

    def start_round(self) -> None:
        super().start_round()
        self._hidden: list[Tensor] = []  # of each call of `feed`, [1, n, d]
        self._view: TextView | None = None  # of the last pass

    @property
    def stack(self) -> "LayerStack":
        """The layered target that the halves run; a session of a head's own layers has none."""
        return cast("LayerStack", self.layers.layered)

    def require_layers(self) -> "TargetSession":
        return self

    def draft_session(self, model: Target) -> Session:
        return eager_session(model, None, self.capacity, self.context, self.together)

    def draft_layers_session(self, layers: RunnableLayers) -> "TargetSession":
        """A session of the same size for a drafter's own layers, run by `run_rows`."""
        return TargetSession(layers, None, self.capacity, self.context, self.together)

    @property
    def vocabulary(self) -> int:
        return int(self.stack.config.vocab_size)

    @property
    def hidden(self) -> Tensor:
        """The rows' hidden states between the halves [1, rows, d]."""
        if len(self._hidden) > 1:
            self._hidden = [torch.cat(self._hidden, dim=1)]
        return self._hidden[0]

    def feed(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        """Add rows (see `Session.feed`), through the first half."""
        layout = self._add(parents)
        (hidden,) = self._run("first", self._first_half, tokens, layout, self.first_cache)
        self.fed.append(tokens)
        self._remember(hidden, layout.start)
        return hidden

    def extend(self, tokens: Tensor, parents: Sequence[int], logit_count: int) -> tuple[Tensor, Tensor]:
        def whole_pass(tokens: Tensor, view: View) -> tuple[Tensor, Tensor]:  # see `Session.extend`; `fed` gets none
            (hidden,) = self._first_half(tokens, view)
            return hidden, self.stack.draft_logits(view.logit_rows(hidden))

        hidden, logits = self._run("whole", whole_pass, tokens, self._add(parents), self.first_cache, logit_count)
        return hidden[0], logits[0, -logit_count:]

    def finish(self, rows: Sequence[int] | None = None, *, last_only: bool = False) -> Tensor:
        """Run the second half over `rows` (see `Session.finish`)."""
        self.second_cache.keep(self.base, ())  # drops the entries of an earlier call in this round
        self.finished = range(self.rows) if rows is None else rows
        row_count = len(self.finished)
        runs_all = row_count == self.rows
        hidden = self.hidden if runs_all else self.hidden[:, list(self.finished)]
        chosen_rows = self.round if runs_all else self.round.select(self.finished)
        logit_count = 1 if last_only else row_count

        def second_half(hidden: Tensor, view: View) -> tuple[Tensor, ...]:
            stack = self.stack
            stack_args = (hidden, self.split, len(stack.layers), view.rotary, view.masks())
            extra_outputs = []
            if self.aux_layers:
                hidden, aux_hidden = stack.run_with_aux(*stack_args, self.aux_layers, view.cache)
                extra_outputs.append(torch.cat(aux_hidden, dim=-1))
            else:
                hidden = stack.run(*stack_args, view.cache)
            logits = stack.logits(view.logit_rows(hidden))
            if self.top_count:
                extra_outputs.append(top_tokens(logits, self.top_count))
            return hidden, logits, *extra_outputs

        pass_name = REST + (f", aux_hidden at {self.aux_layers}" if self.aux_layers else "")
        pass_name += f", {self.top_count} top tokens" if self.top_count else ""
        layout = chosen_rows.layout(self.base, 0, row_count)
        hidden, logits, *self.extras = self._run(pass_name, second_half, hidden, layout, self.second_cache, logit_count)
        self._last_hidden = hidden[0]
        return logits[0, -logit_count:]

    def run_rows(
        self, name: str, pass_: Pass, x: Tensor, parents: Sequence[int], logit_count: int | None = None
    ) -> tuple[Tensor, ...]:
        """Add rows as `feed` does and run a pass over their input x [1, n, …]; all layers must be in the first half.

        For a drafter's own model, in a separate session from the target's. name, logit_count: as in `run_draft_layers`.
        """
        return self._run(name, pass_, x, self._add(parents), self.first_cache, logit_count)

    def run_draft_layers(
        self, name: str, pass_: Pass, x: Tensor, start: int, cache: KVCache, logit_count: int | None = None
    ) -> tuple[Tensor, ...]:
        """A pass of a drafter's own layers over x [1, n, …], of rows start, …; rows below 0 are committed ones.

        name: the pass's name; passes of one name do the same to rows of any text. Its keys and values are appended to
        `cache`. Its outputs are valid until the next call. logit_count: of `View.logit_rows`; None: every row.
        """
        return self._run(name, pass_, x, self._layout(start, start + x.shape[1]), cache, logit_count)

    def draft_cache(self, owner: object, layers: range) -> KVCache:
        """An empty cache for a drafter's own layers. `GraphedSession` overrides this: one for each `owner`."""
        return KVCache(layers, self.capacity)

    def content(self) -> Sequence[tuple[Tensor, Tensor]]:
        return [*self.first_cache.content(), *self.second_cache.content()]

    def commit(self, rows: Sequence[int]) -> None:
        self.first_cache.keep(self.base, rows)
        if self.second_cache.layers:  # none for a drafter's own model
            indices = self.indices_of(rows)  # among the rows of the last `finish`
            self.second_cache.keep(self.base, indices)
            self.target_hidden = self._last_hidden[indices[-1] : indices[-1] + 1]
        self.base += len(rows)
        self.start_round()

    def _add(self, parents: Sequence[int]) -> RowLayout:
        start = self.rows
        self.round.add(parents)
        return self._layout(start, self.rows)

    def _layout(self, start: int, stop: int) -> RowLayout:
        """The layout of rows start..stop−1 of this round; reuses the last pass's if it is of the same rows."""
        last = None if self._view is None else self._view.layout
        if last is not None and (last.start, last.stop) == (start, stop) and last.base == self.base:
            return last
        return self.round.layout(self.base, start, stop)

    def _remember(self, hidden: Tensor, first_row: int) -> None:
        """Keep hidden states of rows first_row, … for the property `hidden`. Only `GraphedSession` uses `first_row`."""
        self._hidden.append(hidden)

    def _run(
        self, name: str, pass_: Pass, x: Tensor, layout: RowLayout, cache: KVCache, logit_count: int | None = None
    ) -> tuple[Tensor, ...]:
        """Run a pass over the rows of `layout`, whose keys and values are appended to `cache`."""
        # The last pass's view serves again if a drafter's layer runs over the rows that were just fed.
        if self._view is None or self._view.layout is not layout:
            self._view = TextView(self, layout)
        view = self._view
        view.cache, view.logit_count = cache, layout.stop - layout.start if logit_count is None else logit_count
        if self.together is None or not cache.layers:  # a pass without layers, as the embedding, runs alone
            outputs = pass_(x, view)
        else:
            outputs = self.together((id(self.layers), self.split, name), pass_, x, view)
        cache.length += layout.stop - layout.start
        return outputs

    def _first_half(self, tokens: Tensor, view: View) -> tuple[Tensor]:
        hidden = self.stack.embed(tokens[None], view.positions)
        if self.split:
            hidden = self.stack.run(hidden, 0, self.split, view.rotary, view.masks(), view.cache)
        return (hidden,)


class TextView:
    """What a pass sees of its rows of one text: rotary tables and masks are built on first use."""

    cache: KVCache  # the session sets both for each pass
    logit_count: int  # the number of `logit_rows`

    def __init__(self, session: TargetSession, layout: RowLayout):
        self.layout, self._layers = layout, session.layers
        self.positions = layout.positions(session.device)
        self._masks: Masks | None = None

    @cached_property
    def rotary(self) -> Rotary:
        if (span := self.layout.span) is None:
            return self._layers.rotary(self.positions)
        cos_sin_pairs = ((cos[None, span], sin[None, span]) for cos, sin in self._layers.tables)
        return Rotary(self.positions, tuple(cos_sin_pairs))  # consecutive positions are a slice of the tables

    def masks(self) -> Masks:
        if self._masks is None:
            self._masks = self.layout.masks(self._layers.windows, self._layers.device, self._layers.dtype)
        return self._masks

    def logit_rows(self, hidden: Tensor) -> Tensor:
        return hidden[:, hidden.shape[1] - self.logit_count :]


# (kind, pass, x, view): runs a pass over rows x [1, n, …] or [n], possibly as one with passes of that kind over other
# texts. A kind is the identity of the layers, the split and the pass's name.
Together = Callable[[tuple[int, int, str], Pass, Tensor, TextView], tuple[Tensor, ...]]


class WholeSession(Session):
    """Runs a model by its own forward.

    `feed` only records rows, and `finish` runs all of them. So nothing of the target is computed while drafting, and
    drafters read only tokens, `target_hidden` and the top tokens of rows.
    """

    def __init__(self, lm: Target, capacity: int, context: int | None = None):
        self.lm = lm
        self.device, self.dtype = lm.device, lm.dtype
        self.capacity = capacity
        self.context = capacity if context is None else context
        self.cache = lm.cache(capacity)
        self.base = 0
        self.start_round()

    @property
    def vocabulary(self) -> int:
        return int(self.lm.config.vocab_size)

    def start_round(self) -> None:
        super().start_round()
        self._last_hidden: Tensor | None = None

    def draft_session(self, model: Target) -> Session:
        return eager_session(model, None, self.capacity, self.context)

    def feed(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        """Record rows (see `Session.feed`); returns their tokens, as there are no hidden states between two halves."""
        self.round.add(parents)
        self.fed.append(tokens)
        return tokens[None]

    def extend(self, tokens: Tensor, parents: Sequence[int], logit_count: int) -> tuple[Tensor, Tensor]:
        self.feed(tokens, parents)  # then the whole model, for these rows alone (see `Session.extend`)
        self.finished = range(self.rows)
        hidden, logits = self._run(self.round, tokens)
        return hidden, logits[-logit_count:]

    def finish(self, rows: Sequence[int] | None = None, *, last_only: bool = False) -> Tensor:
        self.cache.keep(self.base, ())
        self.finished = range(self.rows) if rows is None else rows
        chosen_rows = self.round if len(self.finished) == self.rows else self.round.select(self.finished)
        self._last_hidden, logits = self._run(chosen_rows, self.tokens[list(self.finished)], last_only)
        if self.top_count:
            self.extras = [top_tokens(logits, self.top_count)[None]]
        return logits

    def _run(self, rows: RoundRows, tokens: Tensor, last_only: bool = False) -> tuple[Tensor, Tensor]:
        """Hidden states and logits of the last rows of `rows`, whose tokens are `tokens` (see `Target.rows`)."""
        hidden, logits = [], []
        first_row = len(rows) - len(tokens)
        for start in range(0, len(tokens), Band.BLOCK):  # a mask of a whole long text would be quadratic in its length
            block_tokens = tokens[start : start + Band.BLOCK]
            row_slice = slice(first_row + start, first_row + start + len(block_tokens))
            sees_row = torch.from_numpy(unpack(rows.ancestors[row_slice], row_slice.stop)).to(tokens.device)
            visible = torch.cat([sees_row.new_ones(len(block_tokens), self.base), sees_row], dim=1)  # [rows, positions]
            positions = self.base + torch.tensor(rows.depths[row_slice], device=tokens.device)
            block_hidden, block_logits = self.lm.rows(block_tokens, positions, visible, self.cache, last_only=last_only)
            hidden.append(block_hidden)
            logits.append(block_logits)
        return torch.cat(hidden), logits[-1] if last_only else torch.cat(logits)

    def content(self) -> Sequence[tuple[Tensor, Tensor]]:
        return self.cache.content()

    def commit(self, rows: Sequence[int]) -> None:
        if not self.finished:  # the text that a drafter starts with, whose logits nobody has requested
            self.finish(last_only=True)
        indices = self.indices_of(rows)
        self.cache.keep(self.base, indices)
        if self._last_hidden is not None:
            self.target_hidden = self._last_hidden[indices[-1] : indices[-1] + 1]
        self.base += len(rows)
        self.start_round()


class Runtime:
    """Makes the sessions of generations. This one runs every pass eagerly: the reference, and the runtime on a CPU.

    captures: CUDA graphs captured so far; capture time is excluded from decode time.
    """

    name, captures = "eager", 0

    def choose_kernels(self, targets: Sequence[Target], positions: int) -> "tuple[KernelChoice, ...]":
        """The attention kernels for `prepare`, if there is a choice: measured on texts of up to `positions` tokens."""
        return ()

    def prepare(self, positions: int, kernels: "Sequence[KernelChoice]") -> None:
        """Called before the first session: texts have up to `positions` tokens; `kernels` are used."""

    def forget_idle(self) -> None:
        """Free what is kept for further texts of models that draft no more."""

    def session(self, target: Target, split: int | None, capacity: int, context: int | None = None) -> Session:
        """As `eager_session(target, split, capacity, context)`."""
        return eager_session(target, split, capacity, context)
