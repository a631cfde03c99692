"""The interpretation of an EAGLE-3 head's tensors: everything in which trainers of such heads differ.

`new_reading` is the reading of a head to be trained, with the target's sizes. `HeadSizes` has what all draft heads
have: widths, layers, vocabularies, and taps, the target's layers whose hidden states (aux hidden states) are read.
"""

from dataclasses import dataclass

from transformers import PreTrainedConfig

from outrider.base.errors import require
from outrider.draft_models.heads.sizes import HeadSizes, sizes_for


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

    def check_fields(self) -> None:  # after that of `HeadSizes` (see `Settings`)
        # The third argument is the field's value.
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
    """The reading of a one-layer head for `target`, a config (see `sizes_for`).

    version: 3, or 3.1, which norms aux hidden states and outputs of steps. Raises `UserError` for impossible values.
    """
    is_version_3_1 = str(version) == "3.1"
    sizes = sizes_for(target, taps, layers=1, draft_vocabulary=draft_vocabulary, intermediate=intermediate)
    return Reading(**sizes, tap_norms=is_version_3_1, norm_output=is_version_3_1)
