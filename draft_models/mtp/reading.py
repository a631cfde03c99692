"""The interpretation of an MTP head's tensors: sizes, and everything in which families and engines differ.

The head is a decoder layer of the target's kind. Its sizes and its rope are the target's; the tensors show the rest.

In most families the first step reads the target's hidden state after its final norm, and a later step the head's output
after the head's own norm (vLLM's qwen3_next_mtp.py; deepseek_mtp.py since its pull request 45895; llama.cpp for Qwen
since its 24025). In vLLM's older DeepSeek and GLM only the latter is taken before its norm, in llama.cpp's DeepSeek and
GLM both are. For MiMo vLLM reads the hidden state before the target's norm (mimo.py norms in `compute_logits`), as
speculators trains, and SGLang after it. MiMo's fc reads [hidden state; embedding], the others' the reverse.
"""

from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedConfig

from outrider.base.errors import UserError
from outrider.base.settings import require_defaults
from outrider.draft_models.eagle3.reading import Reading, new_reading
from outrider.draft_models.heads.sizes import Shapes

_OF_OFFSET_NORMS = ("qwen3_next", "qwen3_5")  # beginnings of model types whose norms multiply by 1 + their weight
_ATTENTION = "layers.0.self_attn."


@dataclass(frozen=True, kw_only=True)
class MtpReading(Reading):
    """How the tensors of a head are read. The same tensors may fit several readings. Raises `UserError`.

    `taps` has one boundary, the number of the target's layers: the input of the target's final norm.
    """

    hidden_first: bool = False  # fc reads [hidden state; embedding]
    target_norm: bool = True  # the target's final norm is applied to its hidden state
    norm_offset: bool = False  # the head's norms multiply by 1 + their weight
    norm_output: bool = True  # the next step reads the head's output after the head's norm
    own_head: bool = False
    eagle_only: ClassVar[tuple[str, ...]] = (  # fields that only EAGLE-3 heads use
        "tap_norms", "joint_norm", "embedding_norm", "norm_before_residual", "final_norm", "draft_ids",
    )  # fmt: skip

    def check_fields(self) -> None:  # after those of `HeadSizes` and `Reading` (see `Settings`)
        require_defaults(self, self.eagle_only, "only EAGLE-3 heads are read with it")
        self.require("taps", len(self.taps) == 1, "one boundary")


def read_shapes(shapes: Shapes, target: PreTrainedConfig, spelling: str) -> MtpReading:
    """The reading of a head of these `shapes`, by their names here, for a target of config `target`.

    spelling: how its files name tensors: "qwen", "mimo", "deepseek", "speculators" or "gguf". Raises `UserError` if
    such a target has no such head.
    """
    config = target.get_text_config()
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if "rope_theta" not in rope:
        raise UserError("the target has no rope, or several: expected one, as its head rotates as its layers do")
    tap_layers, mlp_width = (config.num_hidden_layers,), shapes.get("layers.0.mlp.up_proj.weight", (None,))[0]
    base_fields = vars(new_reading(config, taps=tap_layers, version="3", draft_vocabulary=None, intermediate=mlp_width))
    query_rows = shapes.get(f"{_ATTENTION}q_proj.weight", (0,))[0]
    mtp_fields = {
        "rope": {name: value for name, value in rope.items() if not name.startswith("mrope_")},  # alike for text
        "activation": getattr(config, "hidden_act", None) or "silu",
        "attention_bias": f"{_ATTENTION}q_proj.bias" in shapes,
        "output_bias": f"{_ATTENTION}o_proj.bias" in shapes,
        "head_norms": f"{_ATTENTION}q_norm.weight" in shapes,
        "output_gate": query_rows == 2 * base_fields["heads"] * base_fields["head_dim"],
        "own_embedding": "embed_tokens.weight" in shapes,
        "own_head": "lm_head.weight" in shapes,
        "norm_output": True,
        "hidden_first": spelling == "mimo",
        "target_norm": spelling not in ("mimo", "speculators"),
        "norm_offset": spelling != "gguf" and config.model_type.startswith(_OF_OFFSET_NORMS),  # its converter adds 1
    }
    return MtpReading(**{**base_fields, **mtp_fields})
