"""A small target and its drafters in the shape of a large one, with the same logits: real acceptance at a 7B's cost.

    python benchmarks/inflate_target.py --target runs/smollm2/fetch --shape 7b --out runs/smollm2_7b \
        --early-exit drafters/smollm2/eesd --small-lm drafters/smollm2/small_lm

**Every table made with such a target says so in its first line** (`first_line` in OUT/inflated.json): what is accepted
is the small target's; the cost of a pass is the large shape's. A real 7B may accept another share.

OUT/target, OUT/early_exit and OUT/small_lm are ordinary directories. Calibration heads are left out.

- Width: the residual stream is the narrow one, followed by zeros. A norm over more numbers sees a mean square that is
  d/D as large, so its weights are scaled by √(d/D) and its epsilon by d/D.
- Rotary pairs: pair i of a head of d dimensions turns at θ^(−2i/d). In a head of D = m·d dimensions pair m·i turns at
  exactly this frequency with the same θ.
- Scores are divided by √D instead of √d, so queries are scaled by √(D/d).
- Heads: a key/value head is copied to as many groups of the wide model as its query heads need. Other heads are 0.
- Further layers stand after the given ones and add 0. So an exit after N layers stays where it is.
- The vocabulary and the context do not change. So a head of 49,152 tokens stays larger than Llama-2's of 32,000.
- Weights whose input is always 0 are copies of the target's own, not zeros, so that no device gains from zeros. Only
  the embedding and the output of attention are padded with zeros.

In float32 the logits differ by rounding. In 16 bits every scaled weight (norms, queries) is rounded once more.
The shape 7b is Llama-2-7B's. No known 1B model has the 30 layers of SmolLM2-135M, so 1b is 32 layers of width 2048.
The small LM becomes as large as llama-68m, with which papers draft for Llama-2-7B (--small-shape 68m).

What cannot be inflated is refused: architectures other than Llama, Mistral and Qwen2; ropes whose frequencies depend on
the head's size in another way (yarn, longrope, dynamic), and partial ones; heads whose size does not divide the wide
one's.
"""

import argparse
import copy
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.base.errors import UserError
from outrider.base.files import require_writable, write_json
from outrider.base.words import listed
from outrider.commands import reported
from outrider.draft_models.draft_vocabulary import TOKENS_FILE
from outrider.draft_models.early_exit.checkpoint import empty_drafter, from_pretrained, read_meta, save_pretrained
from outrider.draft_models.formats.save_model import save_parts
from outrider.draft_models.small_lm.model import TRAINING_FILE
from outrider.draft_models.targets.model_files import empty_model, load_causal_lm
from outrider.draft_models.targets.model_spec import RESCALING_ROPE, key_heads
from outrider.draft_models.targets.open_target import load_tokenizer, open_target, read_config, stored_dtype
from outrider.draft_models.targets.settings import EARLY_EXIT, SMALL_LM, TARGET

RECORD = "inflated.json"
LIKE_LLAMA = ("llama", "mistral", "qwen2")


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-like model. heads: of queries."""

    width: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    mlp: int


SHAPES = {
    "7b": Shape(4096, 32, 32, 32, 128, 11008),
    "1b": Shape(2048, 32, 16, 8, 128, 2816),
    "1.5b": Shape(2048, 32, 16, 8, 128, 5376),
    "0.5b": Shape(1024, 32, 16, 8, 64, 4096),
    "68m": Shape(768, 2, 12, 12, 64, 3072),
    "tiny-test": Shape(168, 6, 12, 4, 32, 224),
}

# --- arithmetic ---------------------------------------------------------------------------------------------------

# The kinds of a part's outputs and inputs, by its name. A norm has no inputs, and its outputs are those of the stream.
OUTPUTS_AND_INPUTS = {
    "q_proj": ("queries", "stream"), "k_proj": ("keys", "stream"), "v_proj": ("keys", "stream"),
    "o_proj": ("stream", "queries"), "gate_proj": ("mlp", "stream"), "up_proj": ("mlp", "stream"),
    "down_proj": ("stream", "mlp"), "lm_head": ("tokens", "stream"), "head": ("tokens", "stream"),
    "embed_tokens": ("tokens", "stream"),
}  # fmt: skip
NORMS = ("input_layernorm", "post_attention_layernorm", "norm")
OUTPUTS_AND_INPUTS |= dict.fromkeys(NORMS, ("stream", ""))
WRITTEN = ("embed_tokens", "o_proj")  # to the stream; a head without a query reads the values of another


def inside(groups: Tensor, places: Tensor, size: int) -> Tensor:
    """The places of `groups` [G] of `size` each, in each of which `places` [n] apply: [G · n]; −1: none."""
    missing = (groups[:, None] < 0) | (places < 0)
    return torch.where(missing, -1, groups[:, None] * size + places).flatten()


@dataclass(frozen=True)
class Inflation:
    """How the weights of a model of shape `narrow` become those of one of shape `wide`."""

    narrow: Shape
    wide: Shape

    def require_fits(self, role: str) -> "Inflation":
        """Itself. Raises `UserError` if the shape `wide` does not hold the model; role: option and value of it."""
        narrow, wide = self.narrow, self.wide
        copies = math.ceil(narrow.heads // narrow.key_heads / (wide.heads // wide.key_heads))
        fits = {
            "width": wide.width >= narrow.width,
            "layers": wide.layers >= narrow.layers,
            "mlp": wide.mlp >= narrow.mlp,
            "head_dim": wide.head_dim % narrow.head_dim == 0,
            "key_heads": wide.key_heads >= narrow.key_heads * copies,
        }
        if wrong := [name for name, fit in fits.items() if not fit]:
            raise UserError(
                f"{role}: {narrow} does not fit into {wide}: {listed(wrong)}; expected a shape at least as large whose "
                "head_dim is a multiple, and with a key head for every group of query heads; give a larger one"
            )
        return self

    # -- the steps; without any one of them the logits would change

    def epsilon(self, given: float) -> float:
        """The epsilon of the norms."""
        return given * self.narrow.width / self.wide.width

    def factor(self, part: str) -> float:
        """The factor on the weights of a part."""
        if part == "q_proj":
            return math.sqrt(self.wide.head_dim / self.narrow.head_dim)
        return math.sqrt(self.narrow.width / self.wide.width) if part in NORMS else 1.0

    def pairs(self) -> Tensor:
        """[D]: each wide head dimension's place in the narrow head, or −1. i and i + D/2 are a rotary pair."""
        narrow, wide = self.narrow.head_dim, self.wide.head_dim
        places = torch.full((2, wide // 2), -1)
        places[:, :: wide // narrow] = torch.arange(narrow).view(2, -1)
        return places.flatten()

    def heads(self) -> tuple[Tensor, Tensor]:
        """For each query head [H'] and key head [K'] of the wide model: its number in the narrow model, or −1."""
        narrow, wide = self.narrow, self.wide
        share, group = narrow.heads // narrow.key_heads, wide.heads // wide.key_heads
        queries, keys = torch.full((wide.heads,), -1), torch.full((wide.key_heads,), -1)
        for head in range(narrow.heads):
            key, place = divmod(head, share)
            copy, slot = divmod(place, group)
            at = key * math.ceil(share / group) + copy
            keys[at], queries[at * group + slot] = key, head
        return queries, keys

    def widened(self, block: Tensor, outputs: Tensor, inputs: Tensor) -> Tensor:
        """`block` [o, i] widened to [O, I]; outputs [O], inputs [I]: the places in `block` of each output and input.

        Outputs marked −1 are 0. Inputs marked −1 are always 0, so their weights may be copies of others.
        """
        rows, columns = (
            torch.where(places < 0, torch.arange(len(places)) % size, places)
            for places, size in zip((outputs, inputs), block.shape, strict=True)
        )
        return block[rows][:, columns].masked_fill_((outputs < 0)[:, None] & (inputs >= 0), 0)

    def silenced(self, outputs: Tensor) -> Tensor:
        """The outputs of a part of a layer that adds 0."""
        return torch.full_like(outputs, -1)

    # -- the steps applied to a tensor

    @cached_property
    def _places(self) -> dict[str, Tensor]:
        """For each kind of outputs and inputs: the place in the narrow model of each one of the wide model, or −1."""
        narrow, wide = self.narrow, self.wide
        queries, keys = (inside(heads, self.pairs(), narrow.head_dim) for heads in self.heads())
        found = {"queries": queries, "keys": keys}
        for name, least, most in (("stream", narrow.width, wide.width), ("mlp", narrow.mlp, wide.mlp)):
            found[name] = torch.where(torch.arange(most) < least, torch.arange(most), -1)
        return found

    def ends(self, name: str, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The places of the outputs and of the inputs of tensor `name`. Raises `UserError` for an unknown one."""
        outputs, inputs = OUTPUTS_AND_INPUTS.get(part_of(name), ("", ""))
        if not outputs or len(shape) > 2:
            raise UserError(f"tensor {name}: not of a Llama-like layer; only such models can be inflated")
        one = torch.zeros(1, dtype=torch.long)
        return self._places.get(outputs, torch.arange(shape[0])), self._places[inputs] if len(shape) == 2 else one

    def apply(self, name: str, tensor: Tensor, *, silent: bool = False) -> Tensor:
        """The wide tensor, in float32; integers stay. silent: that of a layer which adds 0."""
        if not tensor.is_floating_point():
            return tensor
        outputs, inputs = self.ends(name, tensor.shape)
        outputs = self.silenced(outputs) if silent else outputs
        scaled = tensor.float() * self.factor(part_of(name))
        made = self.widened(scaled.reshape(len(scaled), -1), outputs, inputs)
        if part_of(name) in WRITTEN:
            made[:, inputs < 0] = 0
        return made if tensor.ndim > 1 else made[:, 0]


def part_of(name: str) -> str:
    """The part of a layer in the name of a tensor, as "q_proj"."""
    return next((word for word in reversed(name.split(".")[:-1]) if not word.isdecimal()), "")


def require_frequencies(rope: Mapping[str, Any], narrow: int, wide: int, limit: int, role: str) -> None:
    """Raise `UserError` unless the pairs that `Inflation.pairs` chooses turn as fast as those of the narrow head."""
    if rope.get("rope_type") not in RESCALING_ROPE:
        mine, theirs = (_rotary(rope, size, limit) for size in (narrow, wide))
        chosen = theirs.inv_freq[:: wide // narrow]
        same = mine.attention_scaling == theirs.attention_scaling and torch.equal(mine.inv_freq, chosen)
        if same and len(chosen) == narrow // 2:
            return
    raise UserError(
        f"{role}: rope_parameters={dict(rope)}: expected a rope whose frequencies are the same in a head of {wide} as "
        f"in one of {narrow} dimensions (default, linear or llama3, of the whole head); this one cannot be inflated"
    )


def _rotary(rope: Mapping[str, Any], head_dim: int, limit: int) -> LlamaRotaryEmbedding:
    sizes = {"hidden_size": head_dim, "num_attention_heads": 1, "head_dim": head_dim}
    return LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(rope), max_position_embeddings=limit))


# --- models -------------------------------------------------------------------------------------------------------


def made_of(given: PreTrainedModel, change: Inflation, dtype: torch.dtype) -> PreTrainedModel:
    """The wide model, in `dtype`; layers that add 0 are made of the first one's weights."""
    config, wide = copy.deepcopy(given.config), change.wide
    sizes = {
        "hidden_size": wide.width, "intermediate_size": wide.mlp, "num_hidden_layers": wide.layers,
        "num_attention_heads": wide.heads, "num_key_value_heads": wide.key_heads, "head_dim": wide.head_dim,
        "rms_norm_eps": change.epsilon(config.rms_norm_eps),
    }  # fmt: skip
    if kinds := getattr(config, "layer_types", None):
        sizes["layer_types"] = [*kinds, *["full_attention"] * (wide.layers - len(kinds))]
    config.update(sizes)
    made, weights, found = empty_model(config), dict(given.named_parameters()), dict[str, Tensor]()
    for name, _ in made.named_parameters():
        silent = name not in weights
        one = weights[re.sub(r"\blayers\.\d+\.", "layers.0.", name) if silent else name]
        found[name] = change.apply(name, one, silent=silent).to(dtype)
    made.load_state_dict(found, strict=False, assign=True)
    made.tie_weights()
    made.generation_config = given.generation_config
    return made


def shape_of(config: PreTrainedConfig) -> Shape:
    """The shape of a Llama-like model."""
    heads, width = config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or width // heads
    return Shape(width, config.num_hidden_layers, heads, key_heads(config), head_dim, config.intermediate_size)


def inflate_model(
    source: str, to: Path, wide: Shape, dtype: torch.dtype | None, role: str,
    inflation: type[Inflation] = Inflation,
) -> Inflation:  # fmt: skip
    """Write the causal LM in `source` to `to` in shape `wide`; dtype: None for its own. Raises `UserError`."""
    config = read_config(source, role=role)
    if config.model_type not in LIKE_LLAMA:
        raise UserError(f"{role}={source}: model_type={config.model_type!r}: expected one of {', '.join(LIKE_LLAMA)}")
    change = inflation(shape_of(config), wide).require_fits(f"{role}={source}")
    rope: Any = config.rope_parameters
    limit = config.max_position_embeddings
    require_frequencies(rope, change.narrow.head_dim, wide.head_dim, limit, f"{role}={source}")
    given = load_causal_lm(source, role=role, dtype=stored_dtype(config)).requires_grad_(False)
    save_parts(to, made_of(given, change, dtype or given.dtype), load_tokenizer(source, role=role))
    return change


# --- drafters -----------------------------------------------------------------------------------------------------


def inflate_early_exit(
    source: Path, to: Path, before: str, after: str, change: Inflation, dtype: torch.dtype | None = None
) -> None:
    """Write the early-exit drafter in `source`, of the target `before`, for `after`, which is inflated by `change`.

    dtype: of what is written; None: its own. Raises `UserError` if it is another target's.
    """
    narrow, wide, meta = open_target(before), open_target(after), read_meta(source)
    drafter = from_pretrained(source, narrow.config, narrow.fingerprint, dtype=torch.float32)
    kept: torch.dtype = dtype or getattr(torch, meta.dtype)
    weights = {name: change.apply(name, one) for name, one in drafter.state_dict().items()}
    made = empty_drafter(meta, wide.config)
    made.load_state_dict(weights, assign=True)
    save_pretrained(to, made, wide.fingerprint, meta.training | {"inflated_from": str(source)}, kept)


def inflate_small_lm(
    source: Path, to: Path, wide: Shape, dtype: torch.dtype | None = None, inflation: type[Inflation] = Inflation
) -> None:
    """Write the small LM in `source`, a directory, in shape `wide`. Raises `UserError`."""
    inflate_model(str(source), to, wide, dtype, SMALL_LM, inflation=inflation)
    for name in (TOKENS_FILE, TRAINING_FILE):
        if (source / name).exists():
            shutil.copyfile(source / name, to / name)


def inflate(
    target: str, shape: Shape, out: Path, *, dtype: torch.dtype | None = None, small_shape: Shape | None = None,
    early_exit: Path | None = None, small_lm: Path | None = None,
    inflation: type[Inflation] = Inflation,
) -> dict[str, Any]:  # fmt: skip
    """Write the target and the given drafters to `out`; returns the record there.

    Raises `UserError`, also if `out` holds anything.
    """
    if any(require_writable(out, "--out").iterdir()):
        raise UserError(f"--out={out}: not empty; give a new directory")
    change = inflate_model(target, out / TARGET, shape, dtype, TARGET, inflation)
    if early_exit is not None:
        inflate_early_exit(early_exit, out / EARLY_EXIT, target, str(out / TARGET), change, dtype)
    if small_lm is not None:
        inflate_small_lm(small_lm, out / SMALL_LM, small_shape or shape, dtype)
    name = next((name for name, one in SHAPES.items() if one == shape), str(shape))
    drafters = {EARLY_EXIT: early_exit, SMALL_LM: small_lm}
    record = {
        "first_line": f"Inflated: what is accepted is {target}'s, what a pass costs is the shape {name}'s.",
        "target": target, "shape": vars(shape),
        "drafters": {name: str(path) for name, path in drafters.items() if path is not None},
    }  # fmt: skip
    write_json(out / RECORD, record)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--small-shape", choices=SHAPES, default="68m", help="of the small LM")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of all weights; default: as given")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--early-exit", type=Path, help="directory of such a drafter")
    parser.add_argument("--small-lm", type=Path, help="directory of such a drafter")
    options = parser.parse_args()
    with reported():
        record = inflate(
            options.target, SHAPES[options.shape], options.out, small_shape=SHAPES[options.small_shape],
            dtype=getattr(torch, options.dtype) if options.dtype else None,
            early_exit=options.early_exit, small_lm=options.small_lm,
        )  # fmt: skip
        print(record["first_line"])


if __name__ == "__main__":
    main()
