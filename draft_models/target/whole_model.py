"""A causal LM of any architecture in transformers, run by its own forward over the rows of a draft tree.

Whether it can be is found out by trying (`require_rows`), not by its name.
"""

import inspect
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from draft_models.target.model_files import load_causal_lm
from outrider.errors import UserError

# Allowed root mean square of a difference between float32 logits, as a share of their standard deviation: rounding
# stays below a tenth of it, and even in an untrained model a wrong position or the sight of a sibling goes beyond.
TOLERANCE = 1e-4


class RowCache(Cache):
    """Keys and values of one sequence, as transformers' models expect them, of which any rows may be kept."""

    def __init__(self, capacity: int):
        super().__init__(layer_class_to_replicate=partial(_RowLayer, capacity))  # type: ignore[arg-type]  # is called

    def keep(self, base: int, rows: Sequence[int]) -> None:
        """Keep the first `base` positions and, after them in this order, positions base + r for r in `rows`."""
        for layer in self.layers:
            assert isinstance(layer, _RowLayer)
            layer.keep(base, rows)


class _RowLayer(DynamicLayer):
    """A layer of a `RowCache`, in buffers [1, heads, capacity, head_dim] that are allocated on first use."""

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        states = (key_states, value_states)
        self._buffers = tuple(t.new_empty((*t.shape[:2], self.capacity, t.shape[3])) for t in states)

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        stop = self.length + key_states.shape[2]
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.length : stop] = new
        return self._show(stop)

    def get_seq_length(self) -> int:
        return self.length

    def keep(self, base: int, rows: Sequence[int]) -> None:
        stop = base + len(rows)
        if self.is_initialized:
            if list(rows) != list(range(len(rows))):
                for buffer in self._buffers:
                    buffer[:, :, base:stop] = buffer[:, :, torch.tensor(rows, device=buffer.device) + base]
            self._show(stop)

    def _show(self, length: int) -> tuple[Tensor, Tensor]:
        self.length = length
        keys, values = (buffer[:, :, :length] for buffer in self._buffers)
        self.keys, self.values = keys, values
        return keys, values


class PlainLM(nn.Module):
    """`model` with the little that drafting needs of it: rows at given positions that see given rows."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model.requires_grad_(False).eval()
        self.config: PreTrainedConfig = model.config
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are."""
        return self.model.dtype

    def rows(
        self, tokens: Tensor, positions: Tensor, visible: Tensor, cache: RowCache, *, last_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Feed tokens [n] at positions [n] after what `cache` holds; visible bool [n, cached + n].

        Returns the last hidden states [n, d], after the model's final norm where transformers reports them so, and
        next-token logits [n, V]. With `last_only` the logits are those of the last row, [1, V].
        """
        mask = torch.zeros(visible.shape, dtype=self.model.dtype, device=self.device)
        mask.masked_fill_(~visible, torch.finfo(mask.dtype).min)
        out = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=mask[None, None],
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=True,
            **({"logits_to_keep": 1} if last_only and self._keeps_logits else {}),
        )
        return out.hidden_states[-1][0], out.logits[0, -1:] if last_only else out.logits[0]


def load_plain_lm(
    source: str, config: PreTrainedConfig, revision: str | None, dtype: torch.dtype, device: torch.device | str
) -> PlainLM:
    """The causal LM in `source`, frozen. Raises `UserError` where it cannot be loaded or cannot run a tree."""
    refusal = f"small_lm={source}: architecture {config.model_type!r} cannot draft trees"
    try:
        kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    except (KeyError, ValueError) as error:
        raise UserError(f"{refusal}: its layers are unknown to transformers' cache ({error})") from None
    evicting = sorted(kind.__name__ for kind in kinds - {DynamicLayer})
    if evicting:
        raise UserError(
            f"{refusal}: its layers do not keep every key and value ({', '.join(evicting)}), so rejected rows could "
            "not be taken back. Use a drafter with full attention in all layers"
        )
    lm = _load(source, revision, torch.float32)  # in 16 bits the check could not tell rounding from a mistake
    try:
        require_rows(lm)
    except UserError as error:
        raise UserError(f"{refusal}: {error}. Use a drafter of another architecture") from None
    if dtype != torch.float32:
        lm = _load(source, revision, dtype)
    return lm.to(device)


def _load(source: str, revision: str | None, dtype: torch.dtype) -> PlainLM:
    return PlainLM(load_causal_lm(source, revision, role="small_lm", dtype=dtype))


@torch.inference_mode()
def require_rows(lm: PlainLM) -> None:
    """Raise `UserError` unless `lm` (float32) gives a branching tree its paths' logits, and forgets what is not kept.

    A root with two children is fed at once after a short prompt. Then one child is dropped, and a token is fed after
    the other. Every logit row is compared with the model's own forward over that path as plain text:

        prompt ─ root ┬ child        compared with the forward over: prompt root child
                      └ kept ─ token                              and: prompt root kept token

    A window that a forward applies unasked shows only in a text longer than it. Drafts suffer from it, no text does.
    """
    ids = torch.linspace(0, lm.config.get_text_config().vocab_size - 1, 10, device=lm.device).long()
    prompt, tree, follower = ids[:6], ids[6:9], ids[9:]
    seen = torch.ones(1, 9, dtype=torch.bool, device=lm.device)
    own = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool, device=lm.device)
    cache = RowCache(len(ids))
    try:
        lm.rows(prompt, torch.arange(6, device=lm.device), seen[:, :6].expand(6, 6).tril(), cache)
        visible = torch.cat([seen[:, :6].expand(3, 6), own], dim=1)
        _, logits = lm.rows(tree, torch.tensor([6, 7, 7], device=lm.device), visible, cache)
        cache.keep(6, [0, 2])
        _, last = lm.rows(follower, torch.tensor([8], device=lm.device), seen, cache)
        first, second = ids[[*range(7), 7]], ids[[*range(7), 8, 9]]
        alone = [lm.model(input_ids=path[None], use_cache=False).logits[0] for path in (first, second)]
    except Exception as error:  # whatever the code of an architecture raises that was not made for this
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise UserError(f"its forward does not take a 4-D mask, positions and a cache ({reason})") from None
    got, expected = torch.cat([logits, last]), torch.cat([alone[0][6:], alone[1][7:]])
    difference = float((got - expected).square().mean().sqrt() / expected.std())
    if not difference <= TOLERANCE:  # a NaN is not
        raise UserError(
            f"its logits for a tree differ from those of each path alone by {difference:.1g} of their spread "
            f"(rounding: up to {TOLERANCE:.0e}), so it does not go by the given mask and positions"
        )
