"""Batches on a CPU with AMX: a step is one compiled call through all layers.

Every row has its own slot in one buffer of keys and values, and its results do not depend on other rows. Finished rows
are dropped without a copy.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from outrider.base.errors import UserError
from outrider.draft_models.targets.model_files import layer_stack
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.engines.cpu.at_once import LayersAtOnce, PanelLinear, fits_panels
from outrider.inference.engines.cpu.by_amx import has_amx
from outrider.inference.engines.fused_layers import FusedLayer, fuse_layers

_ROOM = 256  # maximum number of positions added at a time


class CompiledSteps:
    """A target's compiled decoding step: one more token of each row → logits.

    It holds a second copy of the layers' weights, in the order in which they are read. limit: the maximum number of
    positions of a text.
    """

    def __init__(self, stack: LayerStack, layers: LayersAtOnce):
        self._stack, self._layers = stack, layers
        self.limit = context_limit(stack.config)

    @classmethod
    def of(cls, model: PreTrainedModel) -> "CompiledSteps | None":
        """The compiled step of `model`, whose linear layers are as loaded; None if it is not known to be faster.

        On processors without AMX, 40 rows take about as long with vector kernels as with a library.
        """
        if model.device.type != "cpu" or not has_amx():
            return None
        steps = cls.without_asking(model)
        return steps if steps is not None and steps.way == "amx" else None

    @classmethod
    def without_asking(cls, model: PreTrainedModel) -> "CompiledSteps | None":
        """The compiled step wherever it can run, whether or not it is faster."""
        try:
            stack = layer_stack(model)
        except UserError:  # its layers cannot be run individually
            return None
        rotary = len(stack.spec.tables) == 1 and stack.embed_positions is None
        if not rotary or set(stack.windows) != {None}:
            return None
        fuse_layers(stack)
        layers = list(stack.layers)
        together = LayersAtOnce.of(layers) if all(isinstance(layer, FusedLayer) for layer in layers) else None
        if together is None:
            return None
        stack.layers = nn.ModuleList()  # frees their fused weights
        if fits_panels(stack.head):
            stack.head = PanelLinear(stack.head)
        return cls(stack, together)

    @property
    def way(self) -> str:
        """The multiply kernel, see `inference.engines.cpu.layout`."""
        return self._layers.layout.way

    def __call__(self, tokens: Tensor, kept: Tensor, slots: Tensor) -> Tensor:
        """Logits float32 [R, V] after tokens [R], whose keys and values are written to `kept` (see `run_each`)."""
        positions = slots[:, 1]
        self._stack.reserve(kept.shape[-2])
        hidden = self._stack.embed(tokens[None], positions[None])
        cos, sin = self._stack.rotary(positions[None]).tables[0]
        hidden = self._layers.run_each(hidden[0], (cos[0], sin[0]), kept, slots)
        # Separate calls: the combined one exists for some numbers of rows only and may round differently.
        return self._stack.logits_after_norm(self._stack.norm(hidden)).float()


class CompiledBatch:
    """See `inference.batch.batch_state.BatchState`."""

    def __init__(self, steps: CompiledSteps, cache: DynamicCache, mask: Tensor, budget: int):
        """cache: of left-padded prompts with mask [B, n]; it is emptied."""
        self._steps = steps
        lengths = mask.sum(-1)
        self._slots = torch.stack([torch.arange(len(mask)), lengths], dim=1)  # [B, 2]: where in `_kept`, how long
        self._left = budget
        self._kept = _without_padding(cache, lengths)

    def feed(self, tokens: Tensor) -> Tensor:
        """See `BatchState.feed`."""
        if int(self._slots[:, 1].max()) == self._kept.shape[-2]:
            self._make_room()
        logits = self._steps(tokens, self._kept, self._slots)
        self._slots[:, 1] += 1
        self._left -= 1
        return logits

    def should_shrink(self, rows: int, left: int) -> bool:
        """See `BatchState.should_shrink`: every dropped row saves work."""
        return left < rows

    def keep(self, rows: Tensor) -> None:
        """See `BatchState.keep`."""
        self._slots = self._slots[rows]

    def _make_room(self) -> None:
        """Add positions, and keep only the remaining rows."""
        self._kept = nn.functional.pad(self._kept[:, :, self._slots[:, 0]], (0, 0, 0, min(self._left, _ROOM)))
        self._slots[:, 0] = torch.arange(len(self._slots))


def can_be_compiled(steps: CompiledSteps | None, cache: DynamicCache, positions: int) -> bool:
    """Whether there are `steps` for texts of up to `positions` positions, and the cache keeps all keys."""
    return steps is not None and positions <= steps.limit and all(type(layer) is DynamicLayer for layer in cache.layers)


def _without_padding(cache: DynamicCache, lengths: Tensor) -> Tensor:
    """Keys and values [L, 2, B, G, positions, D] from a cache of left-padded rows, each row starting at position 0."""
    layers: list[Any] = list(cache.layers)
    rows, heads, width, size = layers[0].keys.shape
    longest = int(lengths.max())
    kept = layers[0].keys.new_zeros(len(layers), 2, rows, heads, longest, size)
    # Each row is rotated: its padding moves after its own entries, where nothing is read before it is overwritten.
    places = (torch.arange(longest) + (width - lengths)[:, None]) % width
    index = places[:, None, :, None].expand(rows, heads, longest, size)
    for number, layer in enumerate(layers):
        for part, padded in enumerate((layer.keys, layer.values)):
            torch.gather(padded, 2, index, out=kept[number, part])
        layer.keys = layer.values = None
    return kept
