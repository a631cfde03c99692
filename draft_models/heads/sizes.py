"""The sizes of a draft head, and the part of its reading that all kinds of heads share.

A reading says how a head's tensors are read. config.json declares it, and the user may correct it (`apply_changes`). An
aux hidden state is a target's hidden state that a head reads at a boundary: i is the output of the first i layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from outrider.base.errors import UserError, require
from outrider.base.settings import Count, Positive, Settings
from outrider.draft_models.targets.model_spec import RESCALING_ROPE, context_limit, key_heads
from outrider.draft_models.targets.settings import ReadingChanges

AS_DECLARED = ReadingChanges()
Shapes = Mapping[str, tuple[int, ...]]  # of the tensors in a file, by their names in the module of the head


@dataclass(frozen=True, kw_only=True)
class HeadSizes(Settings):
    """How the tensors of a head are read, where all kinds of heads agree. The same tensors may fit several readings.

    Raises `UserError` naming a field with an impossible value.
    """

    taps: tuple[Annotated[int, Ge(0)], ...]  # the boundaries of the target's layers that the head reads
    target_hidden: Count  # width of an aux hidden state
    hidden: Count
    intermediate: Count
    layers: Count
    heads: Count
    key_heads: Count
    head_dim: Count
    epsilon: Positive  # of every norm
    activation: str
    vocabulary: Count  # tokens of the target
    draft_vocabulary: Count  # number of tokens that it has logits for
    rope: dict[str, Any]  # as transformers' rope_parameters
    max_positions: Count  # as its trainer wrote it; only some ropes use it, and it is often less than the head supports
    windows: tuple[int | None, ...]  # for each layer: how many positions it sees, its own included; null: all
    attention_bias: bool = False
    output_bias: bool = True  # where attention has biases, its output projection has one too (not in Qwen2)
    mlp_bias: bool = False
    head_norms: bool = False  # queries and keys are normed per head (Qwen3)
    own_embedding: bool = False  # false: it shares the target's embedding
    own_head: bool = True  # false: its logits use rows of the target's head, whatever its file has
    draft_ids: Literal["offset", "index"] = "offset"  # the target's id of draft token i is i + d2t[i], or d2t[i]

    def check_fields(self) -> None:
        is_ascending = list(self.taps) == sorted(set(self.taps))
        self.require("taps", bool(self.taps) and is_ascending, "boundaries in ascending order")
        self.require("activation", self.activation in ACT2FN, "a name that transformers knows")
        self.require("key_heads", self.heads % self.key_heads == 0, f"a divisor of heads={self.heads}")
        limit_text = f"at most vocabulary={self.vocabulary}"
        self.require("draft_vocabulary", self.draft_vocabulary <= self.vocabulary, limit_text)
        self.require("windows", len(self.windows) == self.layers, f"one for each of {self.layers} layers")
        is_same_width = self.hidden == self.target_hidden
        expected = f"target_hidden={self.target_hidden}, or an embedding of its own"
        self.require("hidden", self.own_embedding or is_same_width, expected)
        expected = f"true, as hidden={self.hidden} is not target_hidden={self.target_hidden}"
        require(self.own_head or is_same_width, "own_head", False, expected)
        kind = self.rope.get("rope_type")
        require(kind not in RESCALING_ROPE, "rope_type", kind, "a rope that is the same for texts of any length")
        require(self.rotary_dim % 2 == 0, "partial_rotary_factor", self._rotary_share, "an even part of head_dim")

    @property
    def _rotary_share(self) -> float:
        return float(self.rope.get("partial_rotary_factor", 1.0))

    @property
    def rotary_dim(self) -> int:
        """The number of leading dimensions of a head that rotate."""
        return int(self.head_dim * self._rotary_share)


Sizes = TypeVar("Sizes", bound=HeadSizes)


def apply_changes(reading: Sizes, changes: ReadingChanges, target: PreTrainedConfig) -> Sizes:
    """`reading` with `changes`, for a target of config `target`. Raises `UserError` if the result is impossible."""
    overrides = changes.overrides  # a new dict
    rope_choice, theta = overrides.pop("rope", None), overrides.pop("rope_theta", None)
    unknown_names = overrides.keys() - {field.name for field in fields(reading)}
    if unknown_names:
        raise UserError(f"reading.{min(unknown_names)}: this kind of head has no such reading; leave it out")
    rope_parameters = dict(reading.rope)
    if rope_choice == "plain":
        rope_parameters = {"rope_type": "default", "rope_theta": rope_parameters["rope_theta"]}
    elif rope_choice == "target":
        rope_parameters = dict(getattr(target, "rope_parameters", None) or {})
        if "rope_theta" not in rope_parameters:
            raise UserError("reading.rope=target: the target has no rope, or several; give reading.rope_theta")
    if theta is not None:
        rope_parameters["rope_theta"] = theta
    try:
        return replace(reading, **overrides, rope=rope_parameters)
    except UserError as error:
        raise UserError(f"reading.{error}") from None


def require_fitting_target(reading: HeadSizes, config: PreTrainedConfig, where: str) -> None:
    """Raise `UserError` unless a head of this `reading` fits a target of `config`; where: the option, "eagle3=PATH"."""
    for head_key, key, trained_size, target_size in (
        ("target_hidden_size", "hidden_size", reading.target_hidden, config.hidden_size),
        ("vocab_size", "vocab_size", reading.vocabulary, config.vocab_size),
    ):
        if trained_size != target_size:
            raise UserError(
                f"{where}: made for a target with {key}={trained_size} ({head_key}), this one has {key}={target_size}; "
                "give the target that it was trained for, or a head for this one"
            )
    if reading.taps[-1] > config.num_hidden_layers:
        raise UserError(
            f"{where}: taps the target at the boundaries {list(reading.taps)}, but expected are 0 to "
            f"{config.num_hidden_layers} (its layers); give the target that it was trained for"
        )


def default_aux_layers(n_layers: int) -> tuple[int, ...]:
    """A low, a middle and a high boundary: EAGLE's own three, or the nearest ones if the target is too small."""
    return tuple(sorted({2, n_layers // 2, n_layers - 3} if n_layers >= 7 else {1, n_layers // 2, n_layers - 1}))


def rope_base(target: PreTrainedConfig) -> float:
    """The base of the target's rotary embedding if it has a single one; else the usual base."""
    theta = (getattr(target, "rope_parameters", None) or {}).get("rope_theta")
    return float(theta) if isinstance(theta, int | float) else 10000.0


def sizes_for(
    target: PreTrainedConfig, taps: tuple[int, ...], layers: int, draft_vocabulary: int | None, intermediate: int | None
) -> dict[str, Any]:
    """The sizes of a head to be trained with the hidden size of `target`, a config; it shares the target's embedding.

    taps: boundaries, empty for `default_aux_layers`. draft_vocabulary: number of tokens it has logits for, None for
    all. intermediate: width of its MLP, None for the target's.
    """
    head_count, hidden_size = target.num_attention_heads, target.hidden_size
    return {
        "taps": taps or default_aux_layers(target.num_hidden_layers),
        "target_hidden": hidden_size,
        "hidden": hidden_size,
        "intermediate": intermediate or getattr(target, "intermediate_size", None) or 4 * hidden_size,
        "layers": layers,
        "heads": head_count,
        "key_heads": key_heads(target),
        "head_dim": getattr(target, "head_dim", None) or hidden_size // head_count,
        "epsilon": getattr(target, "rms_norm_eps", None) or 1e-5,
        "activation": "silu",
        "vocabulary": target.vocab_size,
        "draft_vocabulary": draft_vocabulary or target.vocab_size,
        "rope": {"rope_type": "default", "rope_theta": rope_base(target)},
        "max_positions": context_limit(target),
        "windows": (None,) * layers,
    }
