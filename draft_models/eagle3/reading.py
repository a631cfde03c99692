"""The interpretation of an EAGLE-3 head's tensors: everything in which trainers of such heads differ.

`new_reading` is the reading of a head to be trained, with the target's sizes.
"""

from dataclasses import dataclass

from transformers import PreTrainedConfig

from outrider.base.errors import require
from outrider.draft_models.heads.sizes import HeadSizes, default_aux_layers, rope_base
from outrider.draft_models.targets.model_spec import context_limit, key_heads


@dataclass(frozen=True, kw_only=True)
class Reading(HeadSizes):
    """How the tensors of a head are read (EAGLE-3, arXiv 2503.01840). The same tensors may fit several readings.

    Raises `UserError` naming a field with an impossible value.
    """

    fc_bias: bool = False
    output_gate: bool = False  # a sigmoid gate multiplies the output of attention (Qwen3-Next)
    tap_norms: bool = False  # every aux hidden state is normed before fc (EAGLE-3.1, "fc_norm")
    joint_norm: bool = False  # their concatenation is normed ("norm_before_fc")
    embedding_norm: bool = True  # the embedding is normed before attention ("use_input_layernorm_in_first_layer")
    norm_before_residual: bool = False  # the residual stream of the first layer begins with the normed feature
    final_norm: bool = True  # there is a norm before the head ("use_last_layernorm")
    norm_output: bool = False  # the next step gets the output of that norm (EAGLE-3.1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not (self.tap_norms and self.joint_norm), "tap_norms", True, "false where joint_norm is true")
        require(self.final_norm or not self.norm_output, "norm_output", True, "false where final_norm is false")


def new_reading(
    target: PreTrainedConfig,
    *,
    taps: tuple[int, ...],
    version: str,
    draft_vocabulary: int | None,
    intermediate: int | None,
) -> Reading:
    """The reading of a one-layer head with the hidden size of `target`, a config; it shares the target's embedding.

    taps: boundaries, empty for `default_aux_layers`. version: 3, or 3.1, which norms aux hidden states and outputs of
    steps. draft_vocabulary: number of tokens it has logits for, None for all. intermediate: width of its MLP, None for
    the target's. Raises `UserError` for impossible values.
    """
    heads, width = target.num_attention_heads, target.hidden_size
    newer = str(version) == "3.1"
    return Reading(
        taps=taps or default_aux_layers(target.num_hidden_layers),
        target_hidden=width,
        hidden=width,
        intermediate=intermediate or getattr(target, "intermediate_size", None) or 4 * width,
        layers=1,
        heads=heads,
        key_heads=key_heads(target),
        head_dim=getattr(target, "head_dim", None) or width // heads,
        epsilon=getattr(target, "rms_norm_eps", None) or 1e-5,
        activation="silu",
        vocabulary=target.vocab_size,
        draft_vocabulary=draft_vocabulary or target.vocab_size,
        rope={"rope_type": "default", "rope_theta": rope_base(target)},
        max_positions=context_limit(target),
        windows=(None,),
        tap_norms=newer,
        norm_output=newer,
    )
