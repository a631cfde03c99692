"""Batches on a CPU that multiplies by AMX: a step is one compiled call through all layers.

Every row has its own place in one buffer of keys and values, and its numbers depend on no other row. Those that have
ended leave without a copy.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from draft_models.targets.anatomy import context_limit
from draft_models.targets.empty_models import layer_stack
from draft_models.targets.stack import LayerStack
from inference.engines.cpu.at_once import LayersAtOnce, PanelLinear, fits_panels
from inference.engines.cpu.by_amx import has_amx
from inference.engines.fused_layers import FusedLayer, fuse_layers
from outrider.errors import UserError

_ROOM = 256  # positions that are added at a time, at most


class CompiledSteps:
    """A target's way from one more token of each row to logits.

    Its layers' weights are there a second time, in the order in which they are read. limit: the positions that a text
    may reach.
    """

    def __init__(self, stack: LayerStack, layers: LayersAtOnce):
        self._stack, self._layers = stack, layers
        self.limit = context_limit(stack.config)

    @classmethod
    def of(cls, model: PreTrainedModel) -> "CompiledSteps | None":
        """For `model`, whose linear layers are as they were loaded; None where it is not known to be faster.

        On processors without AMX 40 rows by vectors take about as long as by a library.
        """
        if model.device.type != "cpu" or not has_amx():
            return None
        steps = cls.without_asking(model)
        return steps if steps is not None and steps.way == "amx" else None

    @classmethod
    def without_asking(cls, model: PreTrainedModel) -> "CompiledSteps | None":
        """The same wherever it can run, however fast."""
        try:
            stack = layer_stack(model)
        except UserError:  # its layers cannot be run by themselves
            return None
        rotary = len(stack.anatomy.tables) == 1 and stack.embed_positions is None
        if not rotary or set(stack.windows) != {None}:
            return None
        fuse_layers(stack)
        layers = list(stack.layers)
        together = LayersAtOnce.of(layers) if all(isinstance(layer, FusedLayer) for layer in layers) else None
        if together is None:
            return None
        stack.layers = nn.ModuleList()  # else their joined weights would stay
        if fits_panels(stack.head):
            stack.head = PanelLinear(stack.head)
        return cls(stack, together)

    @property
    def way(self) -> str:
        """As what it multiplies, see `inference.engines.cpu.layout`."""
        return self._layers.layout.way

    def __call__(self, tokens: Tensor, kept: Tensor, seats: Tensor) -> Tensor:
        """Logits float32 [R, V] after tokens [R], whose keys and values go to `kept`; both as in `run_each`."""
        positions = seats[:, 1]
        self._stack.reserve(kept.shape[-2])
        hidden = self._stack.embed(tokens[None], positions[None])
        cos, sin = self._stack.rotary(positions[None]).tables[0]
        hidden = self._layers.run_each(hidden[0], (cos[0], sin[0]), kept, seats)
        # Not in one call, which there is for some numbers of rows only and may round otherwise.
        return self._stack.logits_after_norm(self._stack.norm(hidden)).float()


class CompiledBatch:
    """See `data_prep.responses.batch_state.BatchState`."""

    def __init__(self, steps: CompiledSteps, cache: DynamicCache, mask: Tensor, budget: int):
        """cache: of left-padded prompts, whose mask is [B, n]; it is emptied."""
        self._steps = steps
        lengths = mask.sum(-1)
        self._seats = torch.stack([torch.arange(len(mask)), lengths], dim=1)
        self._left = budget
        self._kept = _without_padding(cache, lengths)

    def feed(self, tokens: Tensor) -> Tensor:
        """See `BatchState.feed`."""
        if int(self._seats[:, 1].max()) == self._kept.shape[-2]:
            self._make_room()
        logits = self._steps(tokens, self._kept, self._seats)
        self._seats[:, 1] += 1
        self._left -= 1
        return logits

    def should_shrink(self, rows: int, left: int) -> bool:
        """See `BatchState.should_shrink`: a row less is less to do."""
        return left < rows

    def keep(self, rows: Tensor) -> None:
        """See `BatchState.keep`."""
        self._seats = self._seats[rows]

    def _make_room(self) -> None:
        """More positions, and only the rows that are left."""
        self._kept = nn.functional.pad(self._kept[:, :, self._seats[:, 0]], (0, 0, 0, min(self._left, _ROOM)))
        self._seats[:, 0] = torch.arange(len(self._seats))


def can_be_compiled(steps: CompiledSteps | None, cache: DynamicCache, positions: int) -> bool:
    """Whether there are `steps` for prompts and answers of up to so many positions, and a cache that keeps all keys."""
    return steps is not None and positions <= steps.limit and all(type(layer) is DynamicLayer for layer in cache.layers)


def _without_padding(cache: DynamicCache, lengths: Tensor) -> Tensor:
    """Keys and values [L, 2, B, G, positions, D] of a cache of left-padded rows, each row from position 0 on."""
    layers: list[Any] = list(cache.layers)
    rows, heads, width, size = layers[0].keys.shape
    longest = int(lengths.max())
    kept = layers[0].keys.new_zeros(len(layers), 2, rows, heads, longest, size)
    # What comes before a row's own is padding's, and lies behind it here, where nothing looks before it is written.
    places = (torch.arange(longest) + (width - lengths)[:, None]) % width
    index = places[:, None, :, None].expand(rows, heads, longest, size)
    for number, layer in enumerate(layers):
        for part, padded in enumerate((layer.keys, layer.values)):
            torch.gather(padded, 2, index, out=kept[number, part])
        layer.keys = layer.values = None
    return kept
