"""A small target and its drafters in the shape of a large one, with the same logits: real acceptance at a 7B's cost.

    python benchmarks/inflate_target.py --target runs/smollm2/fetch --shape 7b --out runs/smollm2_7b \
        --early-exit drafters/smollm2/eesd --small-lm drafters/smollm2/small_lm --check mt_bench.jsonl

**Every table made with such a target says so in its first line** (`first_line` in OUT/inflated.json): what is accepted
is the small target's, what a pass costs is the large shape's. It is not a 7B's acceptance.

OUT/target, OUT/early_exit, OUT/small_lm and OUT/eagle3 are ordinary directories. N-gram tables need no change.

- Width: the residual stream is the narrow one, followed by zeros. A norm over more numbers sees a mean square that is
  d/D as large, so its weights are scaled by √(d/D) and its epsilon by d/D.
- Rotary pairs: pair i of a head of d dimensions turns at θ^(−2i/d). In a head of D = m·d dimensions pair m·i turns at
  exactly this frequency with the same θ.
- Scores are divided by √D instead of √d, so queries are scaled by √(D/d).
- Heads: a key/value head is repeated for as many groups of the wide model as its query heads fill. Other heads are 0.
- Further layers stand after the given ones and add 0. So an exit after N layers and the taps of an EAGLE-3 head keep
  their numbers.
- The vocabulary and the context stay: the tokenizer does. A head of 49,152 tokens is larger than Llama-2's of 32,000.
- Weights whose input is always 0 are copies of the target's own, not zeros, so that no device gains from zeros. Only
  the embedding and the output of attention are padded with zeros.

In float32 the logits differ by rounding. In 16 bits every scaled weight (norms, queries) is rounded once more.

The shape 7b is Llama-2-7B's. No known 1B model has the 30 layers of SmolLM2-135M, so 1b is 32 layers of width 2048.
The small LM becomes as large as llama-68m, with which papers draft for Llama-2-7B (--small-shape 68m).

What cannot be inflated is refused: architectures other than Llama, Mistral, Qwen2 and Qwen3; ropes whose frequencies
depend on the head's size in another way (yarn, longrope, dynamic), and partial ones; heads whose size does not divide
the wide one's; EAGLE-3 heads of another width than their target's.

--check decodes the first prompts with both targets, and prints the largest difference of logits and how many rounds are
the same: their tokens, and how many were drafted and accepted. It holds the inflated target and its drafters in memory.
In 16 bits rounds may differ, as those of two runtimes do.
"""

import argparse
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.base.errors import UserError
from outrider.base.files import read_mapping, require_writable, write_json
from outrider.base.streams import Streams
from outrider.base.words import listed
from outrider.commands import reported
from outrider.data_prep.text.chat import render_prompt
from outrider.data_prep.text.prompts import read_prompts
from outrider.draft_models.calibration import META_FILE as CALIBRATION_FILE
from outrider.draft_models.calibration import drafter_digest, load_calibration, save_calibration
from outrider.draft_models.calibration_head import CalibrationHead
from outrider.draft_models.draft_vocabulary import TOKENS_FILE
from outrider.draft_models.eagle3.checkpoint import make_head, open_head, save_head
from outrider.draft_models.early_exit.checkpoint import empty_drafter, from_pretrained, read_meta, save_pretrained
from outrider.draft_models.formats.convert import fetched, find_original, write_safetensors
from outrider.draft_models.formats.torch_files import CONFIG_FILE, SAFETENSORS, FolderModel, Original, Stored
from outrider.draft_models.small_lm.model import TRAINING_FILE
from outrider.draft_models.targets.fingerprint import model_identity
from outrider.draft_models.targets.model_spec import RESCALING_ROPE, key_heads
from outrider.draft_models.targets.open_target import OpenTarget, open_target, read_config, stored_dtype
from outrider.draft_models.targets.settings import EAGLE3, EARLY_EXIT, HEAD_FOLDER, SMALL_LM, TARGET
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.loading.targets import new_drafter
from outrider.inference.settings.kinds import KINDS
from outrider.inference.settings.method import MethodConfig, StopConfig, StructureConfig

RECORD = "inflated.json"
LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3")
SHARD = 5 * 10**8  # bytes of a file of weights; about twice as much and twice the largest tensor are in memory


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
    "68m": Shape(768, 2, 12, 12, 64, 3072),
    "tiny-test": Shape(168, 6, 12, 4, 32, 224),
}

# --- arithmetic ---------------------------------------------------------------------------------------------------

# By the name of a part: what its outputs and its inputs are. A norm has no inputs, and its outputs are the stream's.
OUTPUTS_AND_INPUTS = {
    "q_proj": ("queries", "stream"), "k_proj": ("keys", "stream"), "v_proj": ("keys", "stream"),
    "o_proj": ("stream", "queries"), "gate_proj": ("mlp", "stream"), "up_proj": ("mlp", "stream"),
    "down_proj": ("stream", "mlp"), "fc": ("stream", "stream"), "lm_head": ("tokens", "stream"),
    "head": ("tokens", "stream"), "embed_tokens": ("tokens", "stream"), "q_norm": ("head", ""), "k_norm": ("head", ""),
}  # fmt: skip
STREAM_NORMS = ("input_layernorm", "post_attention_layernorm", "norm", "hidden_norm", "fc_norm", "input_norm")
OUTPUTS_AND_INPUTS |= dict.fromkeys(STREAM_NORMS, ("stream", ""))


def epsilon(narrow: Shape, wide: Shape, given: float) -> float:
    """The epsilon of the norms."""
    return given * narrow.width / wide.width


def factors(narrow: Shape, wide: Shape, head_norms: bool) -> dict[str, float]:
    """Factors of weights by part; 1 for all others. head_norms: queries and keys are normed per head (Qwen3).

    Such a norm has the epsilon of the others, whose share of its mean square is right if its input is scaled.
    """
    norm, head = math.sqrt(narrow.width / wide.width), math.sqrt(narrow.head_dim / wide.head_dim)
    found = dict.fromkeys(STREAM_NORMS, norm)
    if head_norms:
        return found | {"q_proj": norm / head, "k_proj": norm / head, "q_norm": 1.0, "k_norm": head}
    return found | {"q_proj": 1 / head}


def pair_places(narrow: int, wide: int) -> Tensor:
    """[wide]: which of the `narrow` dimensions of a head each of the `wide` ones is; −1: none. i and i + D/2 turn."""
    places = torch.full((2, wide // 2), -1)
    places[:, :: wide // narrow] = torch.arange(narrow).view(2, -1)
    return places.flatten()


def head_places(narrow: Shape, wide: Shape) -> tuple[Tensor, Tensor]:
    """Which query head [H'] and which key head [K'] of the narrow model each of the wide one's is; −1: none."""
    share, group = narrow.heads // narrow.key_heads, wide.heads // wide.key_heads
    queries, keys = torch.full((wide.heads,), -1), torch.full((wide.key_heads,), -1)
    for head in range(narrow.heads):
        key, place = divmod(head, share)
        copy, slot = divmod(place, group)
        at = key * math.ceil(share / group) + copy
        keys[at], queries[at * group + slot] = key, head
    return queries, keys


def inside(groups: Tensor, places: Tensor, size: int) -> Tensor:
    """The places of `groups` [G] of `size` each, in each of which `places` [n] apply: [G · n]; −1: none."""
    missing = (groups[:, None] < 0) | (places < 0)
    return torch.where(missing, -1, groups[:, None] * size + places).flatten()


def widened(block: Tensor, outputs: Tensor, inputs: Tensor) -> Tensor:
    """block [o, i] in [O, I], whose outputs and inputs are those of `block` at `outputs` [O] and `inputs` [I].

    An output that is none (−1) is 0. An input that is none is always 0, and its weights are copies of others.
    """
    rows, columns = (
        torch.where(places < 0, torch.arange(len(places)) % size, places)
        for places, size in zip((outputs, inputs), block.shape, strict=True)
    )
    return block[rows][:, columns].masked_fill_((outputs < 0)[:, None] & (inputs >= 0), 0)


@dataclass(frozen=True)
class Inflation:
    """How the weights of a model of shape `narrow` become those of one of shape `wide`."""

    narrow: Shape
    wide: Shape
    head_norms: bool = False

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

    @cached_property
    def _places(self) -> dict[str, Tensor]:
        narrow, wide = self.narrow, self.wide
        head = pair_places(narrow.head_dim, wide.head_dim)
        queries, keys = (inside(heads, head, narrow.head_dim) for heads in head_places(narrow, wide))
        return {"head": head, "queries": queries, "keys": keys}

    @cached_property
    def _factors(self) -> dict[str, float]:
        return factors(self.narrow, self.wide, self.head_norms)

    def places(self, kind: str, size: int) -> Tensor:
        """Which of the `size` numbers of the narrow model each of the wide one's is; −1: none.

        kind: of `OUTPUTS_AND_INPUTS`. A head of EAGLE-3 reads several streams after one another.
        """
        sizes = {"stream": (self.narrow.width, self.wide.width), "mlp": (self.narrow.mlp, self.wide.mlp)}
        if kind not in sizes:
            return self._places.get(kind, torch.arange(size))
        narrow, wide = sizes[kind]
        index = torch.arange(wide)
        return inside(torch.arange(size // narrow), torch.where(index < narrow, index, -1), narrow)

    def ends(self, name: str, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The places of the outputs and of the inputs of tensor `name`. Raises `UserError` for an unknown one."""
        outputs, inputs = OUTPUTS_AND_INPUTS.get(part_of(name), ("", ""))
        if not outputs or len(shape) > 2:
            raise UserError(f"tensor {name}: not of a Llama-like layer; only such models can be inflated")
        one = torch.zeros(1, dtype=torch.long)
        return self.places(outputs, shape[0]), self.places(inputs, shape[1]) if len(shape) == 2 else one

    def shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The wide shape of tensor `name`."""
        return tuple(map(len, self.ends(name, shape)))[: len(shape)]

    def apply(self, name: str, tensor: Tensor, *, silent: bool = False) -> Tensor:
        """The wide tensor, in float32; integers stay. silent: that of a layer which adds 0."""
        if not tensor.is_floating_point():
            return tensor
        outputs, inputs = self.ends(name, tensor.shape)
        outputs = torch.full_like(outputs, -1) if silent else outputs
        scaled = tensor.float() * self._factors.get(part_of(name), 1.0)
        made = widened(scaled.reshape(len(scaled), -1), outputs, inputs)
        if part_of(name) in (
            "embed_tokens",
            "o_proj",
        ):  # written to the stream; a head of no query reads other's values
            made[:, inputs < 0] = 0
        return made.reshape(self.shape(name, tensor.shape))


def part_of(name: str) -> str:
    """The part of a layer in the name of a tensor: "q_proj", or "fc_norm" of "fc_norm.0.weight"."""
    return next((word for word in reversed(name.split(".")[:-1]) if not word.isdecimal()), "")


def require_frequencies(rope: Mapping[str, Any], narrow: int, wide: int, limit: int, role: str) -> None:
    """Raise `UserError` unless the pairs that `pair_places` chooses turn as fast as those of the narrow head."""
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


@dataclass(frozen=True)
class Inflated:
    """A model that is inflated as it is written, one file of weights after the other."""

    inner: Original
    change: Inflation

    @property
    def source(self) -> str:
        return self.inner.source

    @property
    def files(self) -> Mapping[str, Path]:
        return self.inner.files

    @property
    def quantised(self) -> bool:
        return self.inner.quantised

    def tensors(self) -> Mapping[str, Stored]:
        """The tensors of all layers; those of layers that add 0 are made of the first one's."""
        given = {name: one for name, one in self.inner.tensors().items() if not name.endswith("inv_freq")}
        found = {name: self._wide(name, one) for name, one in given.items()}
        for layer in range(self.change.narrow.layers, self.change.wide.layers):
            for name, one in given.items():
                if (other := re.sub(r"(^|\.)layers\.0\.", rf"\g<1>layers.{layer}.", name)) != name:
                    found[other] = self._wide(name, one, silent=True)
        return found

    def _wide(self, name: str, stored: Stored, silent: bool = False) -> Stored:
        read = partial(_read, self.change, name, stored, silent)
        return Stored(stored.dtype, self.change.shape(name, stored.shape), read)

    def describe(self, folder: Path) -> None:
        """Everything else, with the sizes of the wide shape in config.json."""
        self.inner.describe(folder)
        described, wide = (
            read_mapping(folder / CONFIG_FILE, "description of a model", "fetch it again"),
            self.change.wide,
        )
        given: Any = described.get("rms_norm_eps", 1e-6)
        described |= {
            "hidden_size": wide.width, "intermediate_size": wide.mlp, "num_hidden_layers": wide.layers,
            "num_attention_heads": wide.heads, "num_key_value_heads": wide.key_heads, "head_dim": wide.head_dim,
            "rms_norm_eps": epsilon(self.change.narrow, wide, given),
        }  # fmt: skip
        if isinstance(kinds := described.get("layer_types"), list):
            described["layer_types"] = [*kinds, *["full_attention"] * (wide.layers - len(kinds))]
        write_json(folder / CONFIG_FILE, described)


def _read(change: Inflation, name: str, stored: Stored, silent: bool) -> Tensor:
    return change.apply(name, stored.read(), silent=silent)


def shape_of(config: PreTrainedConfig) -> Shape:
    """The shape of a Llama-like model."""
    heads, width = config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or width // heads
    return Shape(width, config.num_hidden_layers, heads, key_heads(config), head_dim, config.intermediate_size)


def inflate_model(
    source: str, to: Path, wide: Shape, dtype: torch.dtype | None, role: str, revision: str | None = None
) -> Inflation:
    """Write the causal LM in `source` to `to` in shape `wide`; dtype: None for its own. Raises `UserError`."""
    config = read_config(source, revision, role=role)
    if config.model_type not in LIKE_LLAMA:
        raise UserError(f"{role}={source}: model_type={config.model_type!r}: expected one of {', '.join(LIKE_LLAMA)}")
    inner = find_original(source, revision) or FolderModel(source, fetched(source, revision, SAFETENSORS), SAFETENSORS)
    narrow, head_norms = shape_of(config), any(part_of(name) == "q_norm" for name in inner.tensors())
    change = Inflation(narrow, wide, head_norms).require_fits(f"{role}={source}")
    rope: Any = config.rope_parameters
    limit = config.max_position_embeddings
    require_frequencies(rope, narrow.head_dim, wide.head_dim, limit, f"{role}={source}")
    kept = dtype or stored_dtype(config)
    write_safetensors(Inflated(inner, change), to, dtype=kept, shard_bytes=SHARD, remedy="give --out elsewhere")
    return change


# --- drafters -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A target, and the same one inflated by `change`; dtype: of what is written."""

    before: OpenTarget
    after: OpenTarget
    change: Inflation
    dtype: torch.dtype | None


def inflate_early_exit(source: Path, to: Path, pair: Pair) -> None:
    """Write the early-exit drafter in `source` for the inflated target. Raises `UserError` if it is another's."""
    drafter = from_pretrained(source, pair.before.config, pair.before.fingerprint, dtype=torch.float32)
    meta = read_meta(source)
    dtype: torch.dtype = pair.dtype or getattr(torch, meta.dtype)
    weights = {name: _placed(pair.change.apply(name, one), dtype) for name, one in drafter.state_dict().items()}
    wide = empty_drafter(meta, pair.after.config).assign(weights)
    training = meta.training | {"inflated_from": str(source)}
    save_pretrained(to, wide, pair.after.fingerprint, training, dtype)
    digests = meta.weights_sha256, read_meta(to).weights_sha256
    inflate_calibration(source, to, "", pair, pair.change, *digests)


def inflate_small_lm(source: Path, to: Path, pair: Pair, wide: Shape) -> None:
    """Write the small LM in `source`, a directory, in shape `wide`. Raises `UserError`."""
    change = inflate_model(str(source), to, wide, pair.dtype, SMALL_LM)
    for name in (TOKENS_FILE, TRAINING_FILE):
        if (source / name).exists():
            shutil.copyfile(source / name, to / name)
    digests = [drafter_digest(open_tensors(str(folder))) for folder in (source, to)]
    inflate_calibration(source, to, HEAD_FOLDER, pair, change, *digests)


def inflate_eagle3(source: Path, to: Path, pair: Pair) -> None:
    """Write the EAGLE-3 head in `source` for the inflated target, in a dialect that names its taps."""
    stored = open_head(str(source), pair.before.config)
    given, wide, role = stored.reading, pair.change.wide, f"eagle3={source}"
    if given.hidden != given.target_hidden:
        raise UserError(f"{role}: hidden_size={given.hidden}: expected the target's, {given.target_hidden}")
    narrow = Shape(given.hidden, given.layers, given.heads, given.key_heads, given.head_dim, given.intermediate)
    change = Inflation(narrow, replace(wide, layers=given.layers), given.head_norms).require_fits(role)
    require_frequencies(given.rope, given.head_dim, wide.head_dim, given.max_positions, role)
    reading = replace(
        given, target_hidden=wide.width, hidden=wide.width, intermediate=wide.mlp, heads=wide.heads,
        key_heads=wide.key_heads, head_dim=wide.head_dim, epsilon=epsilon(narrow, wide, given.epsilon),
    )  # fmt: skip
    found = stored.weights()
    dtype = pair.dtype or found["fc.weight"].dtype
    head = make_head(reading, {name: _placed(change.apply(name, one), dtype) for name, one in found.items()}, role)
    save_head(
        to,
        head,
        "speculators" if stored.dialect == "speculators" else "specforge",
        pair.after.config,
        pair.after.source,
        made_here=stored.made_here,
    )
    digests = [drafter_digest(open_tensors(str(folder))) for folder in (source, to)]
    inflate_calibration(source, to, HEAD_FOLDER, pair, change, *digests)


def inflate_calibration(
    source: Path, to: Path, folder: str, pair: Pair, change: Inflation, before: str, after: str
) -> None:
    """Write the calibration head of the drafter in `source`, if it has one, for that in `to`, inflated by `change`.

    It reads the residual streams of target and drafter. before, after: the digests that heads are bound to.
    """
    file = source / folder / CALIBRATION_FILE
    if not file.exists():
        return
    given = load_calibration(source, before, target=model_identity(pair.before.files), folder=folder)
    head = CalibrationHead(pair.change.wide.width, change.wide.width)
    weights = given.state_dict()
    for name, one in (("target", pair.change), ("draft", change)):
        weights[name] = torch.nn.functional.pad(weights[name], (0, one.wide.width - one.narrow.width))
    head.load_state_dict(weights)
    facts = read_mapping(file, "description of a calibration head", "calibrate the drafter again")
    facts |= {"target": model_identity(pair.after.files)}
    save_calibration(require_writable(to / folder), head, after, facts)


def _placed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def inflate(
    target: str, shape: Shape, out: Path, *, dtype: torch.dtype | None = None, small_shape: Shape | None = None,
    revision: str | None = None, **drafters: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """Write the target and the given drafters, by the names of their folders, to `out`; returns the record there.

    Raises `UserError`, also if `out` holds anything.
    """
    if any(require_writable(out, "--out").iterdir()):
        raise UserError(f"--out={out}: not empty; give a new directory")
    change = inflate_model(target, out / TARGET, shape, dtype, TARGET, revision)
    pair = Pair(open_target(target, revision), open_target(str(out / TARGET)), change, dtype)
    kinds: dict[str, Callable[[Path, Path], None]] = {
        EARLY_EXIT: partial(inflate_early_exit, pair=pair),
        SMALL_LM: partial(inflate_small_lm, pair=pair, wide=small_shape or shape),
        EAGLE3: partial(inflate_eagle3, pair=pair),
    }
    given = {name: path for name, path in drafters.items() if path is not None}
    for name, path in given.items():
        kinds[name](path, out / name)
    name = next((name for name, one in SHAPES.items() if one == shape), str(shape))
    record = {
        "first_line": f"Inflated: what is accepted is {target}'s, what a pass costs is the shape {name}'s.",
        "target": target, "shape": vars(shape), "drafters": {name: str(path) for name, path in given.items()},
    }  # fmt: skip
    write_json(out / RECORD, record)
    return record


# --- check --------------------------------------------------------------------------------------------------------

METHODS = {
    "chain of 4": MethodConfig(stop=StopConfig(rule="fixed", max_draft=4)),
    "tree of 12": MethodConfig(structure=StructureConfig(kind="opt_tree", nodes=12, delta=0.0, max_depth=6)),
}
Places = Mapping[str, Path | str]  # the target and its drafters, by the names of their folders
Rounds = dict[str, list[tuple[int, ...]]]  # by method: tokens, drafted, accepted and depth of every round


@torch.inference_mode()
def logits_of(stack: LayerStack, text: Sequence[int]) -> Tensor:
    """Next-token logits [n, V] after every token of `text`, in float32."""
    tokens, count = torch.tensor(text), len(text)
    visible = torch.ones(count, count, dtype=torch.bool).tril()
    return stack.rows(tokens, torch.arange(count), visible, stack.cache(count))[1].float()


def run_of(
    where: Places, prompts: Sequence[Sequence[int]], tokens: int, dtype: torch.dtype, texts: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[Tensor], Rounds]:
    """Greedy texts after `prompts`, logits after `texts` (of none: its own), and rounds by drafter and method."""
    target = open_target(str(where[TARGET]))
    stack = target.stack(dtype=dtype)
    said = [
        [*prompt, *(token for r in autoregressive(stack, prompt, max_new_tokens=tokens) for token in r.tokens)]
        for prompt in prompts
    ]
    rounds: Rounds = {}
    for name in (name for name in where if name != TARGET):
        plugin = KINDS[name].load_plugin()
        model = plugin.load(str(where[name]), target, {}, dtype=dtype, device="cpu")
        plugin.prepare(model, stack)
        for title, method in METHODS.items():
            found = rounds[f"{name}, {title}"] = []
            for prompt in prompts:
                drafter = new_drafter(replace(method, source=name), {name: model}, Streams(0))
                for r in speculative(stack, drafter, prompt, max_new_tokens=tokens):
                    found.append((*r.tokens, r.drafted, r.accepted, r.depth))
    return said, [logits_of(stack, text) for text in texts or said], rounds


def check(
    before: Places, after: Places, prompts: Sequence[Sequence[int]], tokens: int, dtype: torch.dtype
) -> dict[str, Any]:
    """What differs between a target with its drafters and the inflated ones, on `prompts` of token ids."""
    texts, expected, rounds = run_of(before, prompts, tokens, dtype, ())
    said, found, others = run_of(after, prompts, tokens, dtype, texts)
    pairs = list(zip(found, expected, strict=True))
    same = {
        name: [sum(a == b for a, b in zip(rounds[name], others[name], strict=False)), len(rounds[name])]
        for name in rounds
    }
    return {
        "logits": max(float((a - b).abs().max()) for a, b in pairs),
        "logits_spread": float(torch.cat(expected).std()),
        "texts": [sum(a == b for a, b in zip(said, texts, strict=True)), len(texts)],
        "rounds": same,
        "accepted": {name: [sum(r[-2] for r in one[name]) for one in (rounds, others)] for name in rounds},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--revision")
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--small-shape", choices=SHAPES, default="68m", help="of the small LM")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of all weights; default: as given")
    parser.add_argument("--out", type=Path, required=True)
    kinds = (EARLY_EXIT, SMALL_LM, EAGLE3)
    for name in kinds:
        parser.add_argument(f"--{name.replace('_', '-')}", type=Path, help="directory of such a drafter")
    parser.add_argument("--check", metavar="PROMPTS", help="compare with the original on these prompts")
    parser.add_argument("--num-prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=24, help="of an answer of the check")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype) if options.dtype else None
    drafters = {name: getattr(options, name) for name in kinds if getattr(options, name) is not None}
    with reported():
        record = inflate(
            options.target, SHAPES[options.shape], options.out, dtype=dtype, small_shape=SHAPES[options.small_shape],
            revision=options.revision, **drafters,
        )  # fmt: skip
        print(record["first_line"], flush=True)
        if options.check:
            before = {TARGET: options.target, **drafters}
            after = {name: options.out / name for name in before}
            opened = open_target(options.target)
            asked = read_prompts(options.check, limit=options.num_prompts)
            prompts = [render_prompt([p.turns[0]], opened.tokenizer, "auto" if p.chat else "none") for p in asked]
            record["check"] = check(before, after, prompts, options.tokens, dtype or stored_dtype(opened.config))
            write_json(options.out / RECORD, record)
            print("\n".join(f"{name}: {value}" for name, value in record["check"].items()))


if __name__ == "__main__":
    main()
