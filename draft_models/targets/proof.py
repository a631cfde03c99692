"""The check of a target or drafter at load.

`prove_weights` compares a model's tensors with those that transformers loads from the same place. `prove_layers`
compares the logits of a model that is run layer by layer with the logits of its own forward. `prove_rows` compares, for
a model that only runs as a whole, the logits of a tree with the logits of each path.

Logits are compared over a prompt and a small tree. The cache drops one branch before it gets the follower:

    prompt ─ root ┬ dropped
                  └ kept ─ follower
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from outrider.base.errors import UserError, reason
from outrider.base.progress import track_progress
from outrider.draft_models.targets import model_files
from outrider.draft_models.targets.attention import stock_attention
from outrider.draft_models.targets.coded import CodedEmbedding
from outrider.draft_models.targets.model_spec import LayerCall, context_limit
from outrider.draft_models.targets.narrowed import draft_vocabulary_of
from outrider.draft_models.targets.stack import WholeModel
from outrider.draft_models.targets.target import Target

# Allowed root mean square of a difference between logits, as a share of their standard deviation. In float32, rounding
# stays below a tenth of it; an ignored quirk, a wrong position or a visible sibling exceeds it by far.
EXACT = 1e-4
HALVES = (torch.bfloat16, torch.float16)
LARGEST_COPY = 2 * 2**30  # bytes: of a larger model no second copy is made
LONGEST_WINDOW = 4096  # tokens of the largest sliding window that a text is made to exceed
FEW_TOKENS = 4096  # vocabulary size of a model of 16 bits while it is compared
SHORT = 12  # tokens of a text that exceeds no window


class NotByLayersError(UserError):
    """A model that this toolkit cannot run layer by layer; its own forward may still do."""


def prove_weights(model: PreTrainedModel, layer_indices: Sequence[int], reference: PreTrainedModel, label: str) -> None:
    """Raise `UserError` unless every tensor of `model` has the type and the bits that it has in `reference`: the target
    as transformers loads it, or its first layers. layer_indices: the target's layers in `model`."""
    expected_tensors = reference.state_dict()
    layer_pattern = re.compile(rf"(?<={re.escape(model_files.spec_of(model).layers)}\.)\d+")
    for key, tensor in model.state_dict().items():
        target_key = layer_pattern.sub(lambda match: str(layer_indices[int(match[0])]), key, count=1)
        expected = expected_tensors.get(target_key, tensor)  # `reference` may lack later layers, which are not compared
        raw_bytes = [side.to(tensor.device).flatten().view(torch.uint8) for side in (tensor, expected)]
        if expected.dtype != tensor.dtype or not torch.equal(*raw_bytes):
            raise UserError(
                f"{label}: {target_key} is another tensor than the one that transformers loads from the same place, so "
                "the two would run different models; save the model again by transformers' save_pretrained"
            )


def prove_layers(model: PreTrainedModel, name: str, largest: int = LARGEST_COPY, vocabulary: int = FEW_TOKENS) -> None:
    """Raise `NotByLayersError` unless a `LayerStack` of `model` agrees with its own forward (see `_logit_gap`).

    Both compute in float32, at every size: in 16 bits no bound would tell a fault from rounding. A text that exceeds a
    window is long. If the float32 weights have more than `largest` bytes, such a text runs through one layer of each
    kind only. name: the model's option and value, for the message. vocabulary: see `_compute_in_float32`.
    """
    short_length, *long_lengths = _prompt_lengths(model.config, model_files.layer_stack(model).windows)
    float32_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    for length in track_progress([short_length, *long_lengths], f"comparing {name} with its own forward", "texts"):
        tested_model = model if length == short_length or float32_bytes <= largest else _one_of_each_kind(model)
        try:
            with _compute_in_float32(tested_model, vocabulary), stock_attention(tested_model, "eager"):
                ids = _probe_tokens(tested_model, length)
                expected_logits = _path_logits(tested_model, ids)
            with _compute_in_float32(tested_model, vocabulary):
                logit_gap, gap_location = _logit_gap(model_files.layer_stack(tested_model), expected_logits, ids)
        except Exception as error:  # any error of an architecture whose code does not support this
            raise NotByLayersError(f"{name}: cannot be run layer by layer ({reason(error)})") from None
        if not logit_gap <= EXACT:  # also true for NaN
            raise NotByLayersError(
                f"{name}: run layer by layer its logits differ from its own forward's by {logit_gap:.2g} of their "
                f"spread at {gap_location} (rounding: up to {EXACT:.0e}), so its forward has an unknown step. "
                "Drafters that need no layers of it are not affected (prompt lookup, n-grams, small LMs)"
            )


@contextmanager
def _compute_in_float32(model: PreTrainedModel, max_tokens: int) -> Iterator[None]:
    """Context manager: a `model` of 16 bits computes in float32, and its vocabulary is cut to `max_tokens` tokens,
    unless it has a draft vocabulary (logits of some tokens). The tensors of a decoder layer are float32 only while the
    layer runs, so one layer at a time takes more memory."""
    if next(model.parameters()).dtype not in HALVES:
        yield
        return
    embed, config = model.get_input_embeddings(), model.config.get_text_config()
    assert isinstance(embed, nn.Embedding | CodedEmbedding)
    row_count = config.vocab_size if draft_vocabulary_of(model) else min(max_tokens, config.vocab_size)
    layers = model_files.decoder_layers(model)
    layer_tensor_ids = {id(tensor) for tensor in _half_tensors(layers)}
    vocab_tensor_ids = {id(weight) for part in (embed, model.get_output_embeddings()) for weight in part.parameters()}
    outer_tensors = [tensor for tensor in _half_tensors(model) if id(tensor) not in layer_tensor_ids]
    half_data = {tensor: tensor.data for tensor in outer_tensors}
    padding_idx, vocab_size = embed.padding_idx, config.vocab_size
    with ExitStack() as undo:
        for layer in layers:
            undo.enter_context(_runs_in_float32(layer))
        try:
            embed.padding_idx, config.vocab_size = None, row_count
            for tensor, data in half_data.items():
                tensor.data = (data[:row_count] if id(tensor) in vocab_tensor_ids else data).float()
            yield
        finally:
            embed.padding_idx, config.vocab_size = padding_idx, vocab_size
            for tensor, data in half_data.items():
                tensor.data = data


@contextmanager
def _runs_in_float32(layer: nn.Module) -> Iterator[None]:
    """Context manager: the tensors of 16 bits in `layer` are float32 during its forward."""
    half_data: dict[Tensor, Tensor] = {}

    def widen(*_: object) -> None:
        half_data.update({tensor: tensor.data for tensor in _half_tensors(layer)})
        for tensor, data in half_data.items():
            tensor.data = data.float()

    def restore(*_: object) -> None:
        for tensor, data in half_data.items():
            tensor.data = data
        half_data.clear()

    hooks = [layer.register_forward_pre_hook(widen), layer.register_forward_hook(restore, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _half_tensors(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers of 16 bits in `module`, each once."""
    return [tensor for tensor in chain(module.parameters(), module.buffers()) if tensor.dtype in HALVES]


def _one_of_each_kind(model: PreTrainedModel) -> PreTrainedModel:
    """`model` with the first layer of every kind only, in their order; they share its weights. Layers are of the same
    kind if they are called in the same way, have the same entries in the config's lists, and consist of the same
    modules with the same switches: bools, strings and None."""
    index_of_kind: dict[tuple[LayerCall, str, str], int] = {}
    layer_settings = model_files.settings_by_layer(model.config).values()
    layer_calls = zip(model_files.decoder_layers(model), model_files.spec_of(model).calls, strict=True)
    for index, (layer, call) in enumerate(layer_calls):
        module_kinds = [
            (type(module), sorted(item for item in vars(module).items() if type(item[1]) in (bool, str, type(None))))
            for module in layer.modules()
        ]
        index_of_kind.setdefault((call, str([entries[index] for entries in layer_settings]), str(module_kinds)), index)
    memo: dict[int, object] = {id(weight): nn.Parameter(weight.data, False) for weight in model.parameters()}
    return model_files.pick_layers(model, list(index_of_kind.values()), memo)


def prove_rows(lm: WholeModel) -> None:
    """Raise `UserError` unless `lm` (float32) gives each path of a tree its own logits, and forgets dropped tokens. One
    text exceeds every number that the config calls a window: a forward may apply a window besides the given mask."""
    config_items = lm.config.to_dict().items()
    windows = [value for name, value in config_items if "window" in name and type(value) is int]
    for length in _prompt_lengths(lm.config, windows):
        try:
            ids = _probe_tokens(lm.model, length)
            logit_gap, gap_location = _logit_gap(lm, _path_logits(lm.model, ids), ids)
        except UserError:
            raise
        except Exception as error:  # any error of an architecture whose code does not support this
            cause = f"{type(error).__name__}: {reason(error)}"
            raise UserError(f"its forward does not take a 4-D mask, positions and a cache ({cause})") from None
        if not logit_gap <= EXACT:
            raise UserError(
                f"its logits for a tree differ from those of each path alone by {logit_gap:.1g} of their spread at "
                f"{gap_location} (rounding: up to {EXACT:.0e}), so it does not go by the given mask and positions"
            )


def require_all_kept(config: PreTrainedConfig) -> None:
    """Raise `UserError` unless every layer of a model keeps every key and value: only these can be rolled back."""
    try:
        layer_types = {type(layer) for layer in DynamicCache(config=config).layers}
    except (KeyError, ValueError) as error:
        raise UserError(f"its layers are unknown to transformers' cache ({error})") from None
    evicting_names = sorted(layer_type.__name__ for layer_type in layer_types - {DynamicLayer})
    if evicting_names:
        raise UserError(f"its layers do not keep every key and value ({', '.join(evicting_names)})")


def _prompt_lengths(config: PreTrainedConfig, windows: Sequence[int | None]) -> list[int]:
    """Lengths of the prompts: a short one, and one that exceeds all `windows` up to `LONGEST_WINDOW`."""
    long_lengths = [window + SHORT for window in windows if window is not None and 0 < window <= LONGEST_WINDOW]
    max_length = context_limit(config) - 4  # root, dropped, kept, follower
    return sorted({min(length, max_length) for length in (SHORT, max([SHORT, *long_lengths]))})


def _probe_tokens(model: PreTrainedModel, length: int) -> Tensor:
    """Random ids [length + 4]: a prompt of `length` tokens, then root, dropped, kept and follower."""
    vocab_size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(length)
    return torch.randint(vocab_size, (length + 4,), generator=generator).to(model.device)


@torch.inference_mode()
def _path_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits [length + 4, V] of the model's own forward at `_probe_tokens`, each after its path as text."""
    *prompt, root, dropped, kept, follower = range(len(ids))
    paths = [[*prompt, root, dropped, dropped], [*prompt, root, kept, follower]]  # dropped once more: of equal length
    logits_of_dropped, logits_of_kept = model(input_ids=ids[torch.tensor(paths)], use_cache=False).logits
    if torch.cat([logits_of_dropped, logits_of_kept]).isnan().any():
        raise UserError("its logits are no numbers (NaN), so its weights are damaged: save or fetch it again")
    return torch.cat([logits_of_dropped[:-1], logits_of_kept[len(prompt) + 1 :]])


@torch.inference_mode()
def _logit_gap(target: Target, ref_logits: Tensor, ids: Tensor) -> tuple[float, str]:
    """The largest difference of the logits of `target.rows` from `ref_logits` [length + 4, V], and its location. The
    prompt is fed in one pass, the root and its two children in a second, and the follower in a third. Logits are the
    second output of `rows`."""
    prompt_len, cache = len(ids) - 4, target.cache(len(ids))
    indices = torch.arange(len(ids), device=ids.device)
    visible = torch.ones(prompt_len, prompt_len, dtype=torch.bool, device=ids.device).tril()
    logits = [target.rows(ids[:prompt_len], indices[:prompt_len], visible, cache)[1]]
    tree_mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool, device=ids.device)
    visible = torch.cat([tree_mask.new_ones(3, prompt_len), tree_mask], dim=1)
    positions = indices[[prompt_len, prompt_len + 1, prompt_len + 1]]  # root, then two siblings
    logits.append(target.rows(ids[prompt_len:-1], positions, visible, cache)[1])
    cache.keep(prompt_len, [0, 2])  # root and kept
    logits.append(target.rows(ids[-1:], indices[[prompt_len + 2]], tree_mask.new_ones(1, prompt_len + 3), cache)[1])
    gaps = (torch.cat(logits) - ref_logits).float().square().mean(-1).sqrt() / ref_logits.float().std()  # [length + 4]
    index = int(gaps.argmax())
    in_text = index < prompt_len + 2  # prompt, root and dropped, in this order
    return float(gaps[index]), f"token {index + 1} of a text of {prompt_len + 2}" if in_text else "a branch of a tree"
