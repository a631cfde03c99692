"""A target split over the processes of a group: heads, the inner rows of MLPs and the vocabulary (tensor parallelism).

Of two matrices in a row, the first is split by its outputs and the second by its inputs (Shoeybi et al. 2019,
Megatron-LM, §3). Each process has its part of what is between them, and one sum over the processes follows:

    hidden ─┬─ q, k, v [own heads] ─ attention ─ o [own inputs] ─ sum ─┬─ gate, up [own rows] ─ down [own inputs] ─ sum
            └────────────────────────────────────────────────── + ─────┘

Which matrices these are is transformers' own plan for the architecture (`base_model_tp_plan`). That the split model is
the whole one is proven with random weights when a target is opened (`prove_split`).
"""

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from draft_models.targets.attention import stock_attention
from draft_models.targets.empty_models import anatomy, anatomy_of, decoder_layers, empty_layers, empty_model
from draft_models.targets.stored_tensors import Part
from outrider.errors import UserError, reason
from outrider.groups import Group

EXACT = 1e-4  # see `proof.EXACT`
OWN = "own"  # what a wrapper calls the layer it has a part of; not in the names of stored tensors


def _plan(path: str, outputs: str, inputs: str) -> dict[str, str]:
    """A plan for layers at `path` that splits some linear layers by their outputs and some by their inputs."""
    split = dict.fromkeys(outputs.split(), "colwise") | dict.fromkeys(inputs.split(), "rowwise")
    return {f"{path}.*.{name}": style for name, style in split.items()}


_LLAMA = _plan(
    "layers",
    "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj",
    "self_attn.o_proj mlp.down_proj",
)
PLANS: dict[str, dict[str, str]] = {  # of architectures that transformers has none for
    "hunyuan_v1_dense": _LLAMA,
    "opt": _plan("decoder.layers", "self_attn.q_proj self_attn.k_proj self_attn.v_proj fc1", "self_attn.out_proj fc2"),
    "stablelm": _LLAMA,
}
_KEYS = re.compile(r"\.(k_proj|query_key_value|qkv_proj)$")  # what makes keys, as architectures call it
UNSPLIT = {"replicated_with_grad_allreduce", "replicate"}  # a norm of every head by itself: each process has it whole


class SplitInputs(nn.Module):
    """A linear layer of whose inputs each process has a part. The products are added up, and then the bias once."""

    def __init__(self, linear: nn.Linear, group: Group, *, cut_input: bool):
        super().__init__()
        self.group, self.cut_input = group, cut_input
        self.own = linear
        self.bias = linear.bias
        linear.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., own inputs], or with `cut_input` all of them → [..., outputs]."""
        if self.cut_input:
            x = x.chunk(self.group.size, -1)[self.group.rank]
        summed = self.group.add(self.own(x))
        return summed if self.bias is None else summed + self.bias


class SplitOutputs(nn.Module):
    """A linear layer of whose outputs each process computes a part, and which gives all of them: a head, as a rule."""

    def __init__(self, linear: nn.Linear, group: Group, outputs: int):
        super().__init__()
        self.own, self.group, self.outputs = linear, group, outputs

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] → [..., outputs]."""
        return self.group.side_by_side(self.own(x))[..., : self.outputs]


def whole_head(head: Any) -> tuple[Tensor, Tensor | None]:
    """Weight [V, d] and bias [V] of a head, whole. Of a split one all of the group's processes call this."""
    if not isinstance(head, SplitOutputs):
        return head.weight, head.bias
    own, gather = head.own, head.group.side_by_side
    weight = gather(own.weight.T).T[: head.outputs]
    return weight, None if own.bias is None else gather(own.bias[None])[0, : head.outputs]


def whole_embedding(embedding: Any, vocabulary: int) -> Tensor:
    """Weight [V, d] of an embedding, whole. Of a split one all of the group's processes call this."""
    if not isinstance(embedding, SplitEmbedding):
        weight: Tensor = embedding.weight
        return weight
    return embedding.group.side_by_side(embedding.weight.T).T[:vocabulary].contiguous()


class SplitEmbedding(nn.Module):
    """An embedding of which each process has the rows of its part of the vocabulary."""

    def __init__(self, embedding: nn.Embedding, group: Group):
        super().__init__()
        self.own, self.group = embedding, group

    @property
    def weight(self) -> Tensor:
        """The rows here: their device and dtype are the model's."""
        return self.own.weight

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] → [..., d]."""
        rows = self.own.weight.shape[0]
        place = ids - self.group.rank * rows
        here = (place >= 0) & (place < rows)
        return self.group.add(torch.where(here[..., None], self.own(place.clamp(0, rows - 1)), 0))


def split_model(model: PreTrainedModel, group: Group, *, vocabulary: bool = True) -> dict[str, Part]:
    """Make `model` this process's part of it: the parts of its tensors, by their names in the whole model.

    vocabulary: split embedding and head too. Training wants them whole, for it computes losses without logits.
    Works on models with weights, and on the meta device. Raises `UserError` where the architecture cannot be split.
    """
    config, parts = model.config, anatomy_of(model)
    styles = dict(_styles(model))
    require_dividing(config, group.size)
    if vocabulary:
        styles |= {parts.embed: "vocabulary", parts.head: "colwise_gather_output"}
    found: dict[str, Part] = {}
    model.group = group  # type: ignore[assignment]
    modules = dict(model.named_modules())
    for name, style in styles.items():
        if style in UNSPLIT:
            continue
        module = modules.get(name)
        if isinstance(module, nn.Linear | nn.Embedding) and style in _MAKERS:
            replacement, cuts = _MAKERS[style](module, group)
            model.set_submodule(name, replacement)
        elif module is not None and style == "moe_tp_experts":
            module.register_forward_hook(lambda _module, _inputs, output: group.add(output))
            cuts = {}
        elif module is None and style in _EXPERTS:
            cuts = _cut_experts(model, name, style, group)
        else:
            what = f"{style!r} of {name if module is None else f'{type(module).__name__} {name}'}"
            raise UserError(f"tensor_parallel={group.size}: {config.model_type!r} cannot be split here ({what})")
        found |= {f"{name}.{tensor}" if tensor else name: part for tensor, part in cuts.items()}
    for name in {name.rpartition(".")[0] for name, style in styles.items() if style == "colwise"}:
        _count_own_heads(model.get_submodule(name), group.size)
    return found


# Of experts that are stored one by one, or all in one as some architectures have it: dimension and pieces by name.
_STORED = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), (0, 1)), **dict.fromkeys(("down_proj", "w2"), (1, 1)),
    "input_linear": (1, 2), "output_linear": (2, 1), "gate_up_proj": (1, 2),
}  # fmt: skip
_EXPERT = re.compile(r"\.(experts\.(\d+\.)?|block_sparse_moe\.)(?P<last>\w+?)(\.weight)?$")


def split_kind(
    model: PreTrainedModel, cuts: Mapping[str, Part], stored: Iterable[str], group: Group, *, vocabulary: bool
) -> tuple[type[PreTrainedModel], dict[str, Part]]:
    """A class like `model`'s whose models are split from the start, and the parts of the tensors that are `stored`.

    For weights that transformers puts together: it then puts parts together. cuts: what `split_model` made of `model`.
    """
    kind, parts = type(model), anatomy_of(model)

    class Split(kind):  # type: ignore[valid-type, misc]
        def __init__(self, config: PreTrainedConfig, *args: Any, **options: Any):
            super().__init__(config, *args, **options)
            self.anatomy = parts
            split_model(self, group, vocabulary=vocabulary)

    found = {}
    for name in stored:
        expert = _EXPERT.search(name)
        if name in cuts:
            found[name] = cuts[name]
        elif expert is not None and expert["last"] in _STORED:
            dim, pieces = _STORED[expert["last"]]
            found[name] = Part(dim, group.rank, group.size, pieces)
    return Split, found


def whole_name(name: str) -> str:
    """The name in the whole model of a tensor of a split one."""
    return name.replace(f".{OWN}.", ".")


def own_layer(module: nn.Module) -> Any:
    """What this process has of a layer that may be split."""
    return module.own if isinstance(module, SplitInputs | SplitOutputs | SplitEmbedding) else module


def own_heads(config: PreTrainedConfig, size: int) -> tuple[int, int]:
    """Query heads and key heads of one of `size` processes: its part, or all where matrices are split but no heads."""
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return (heads // size, key_heads // size) if _splits_heads(config) else (heads, key_heads)


def _splits_heads(config: PreTrainedConfig) -> bool:
    return any(_KEYS.search(name) and style == "colwise" for name, style in (_plan_of(config) or {}).items())


def require_dividing(config: PreTrainedConfig, size: int) -> None:
    """Raise `UserError` where the heads or the inner rows of MLPs do not divide by `size`."""
    heads = ("num_attention_heads", "num_key_value_heads") if _splits_heads(config) else ()
    for name in (*heads, "intermediate_size", "ffn_dim"):
        count = getattr(config, name, None)
        if isinstance(count, int) and count % size:
            raise UserError(f"tensor_parallel={size}: the target has {name}={count}, which {size} does not divide")


def _plan_of(config: PreTrainedConfig) -> dict[str, str] | None:
    return getattr(config, "base_model_tp_plan", None) or PLANS.get(config.model_type)


def _styles(model: PreTrainedModel) -> Mapping[str, str]:
    """How every split module of the layers is split, by transformers' name of the style. Raises `UserError`."""
    plan = _plan_of(model.config)
    if not plan:
        kind = model.config.model_type
        raise UserError(f"tensor_parallel: nobody has said how {kind!r} is split; give it one process")
    patterns = [
        (re.compile(re.escape(f"{model.base_model_prefix}.{pattern}").replace(r"\*", r"\d+")), style)
        for pattern, style in plan.items()
    ]
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    return {name: style for name in names for pattern, style in patterns if pattern.fullmatch(name)}


@torch.inference_mode()
def prove_split(config: PreTrainedConfig, group: Group, device: torch.device | str = "cpu") -> None:
    """Raise `UserError` unless a model of `config` gives the same logits split over `group` as whole.

    One layer of each kind in their real shape, with random weights that are the same on every process: the target's
    own need not be read whole for it. The vocabulary is a small one that does not divide.
    """
    small = copy.deepcopy(config)
    small.vocab_size, small.pad_token_id = 16 * group.size + 1, None
    model = _random_layers(small, device)
    ids = torch.arange(0, small.vocab_size, 2, device=device)[None]
    with stock_attention(model, "eager"):
        whole = model(input_ids=ids, use_cache=False).logits
        split_model(model, group)
        try:
            split = model(input_ids=ids, use_cache=False).logits
        except Exception as error:  # whatever the code of an architecture raises that was not made for this
            said = reason(error)
            raise UserError(f"tensor_parallel={group.size}: {config.model_type!r} cannot be split ({said})") from None
    difference = float((split - whole).square().mean().sqrt() / whole.std())
    if not difference <= EXACT:  # a NaN is not
        raise UserError(
            f"tensor_parallel={group.size}: split, {config.model_type!r} gives logits that differ by {difference:.2g} "
            f"of their spread from the whole model's (rounding: up to {EXACT:.0e}); give it one process"
        )


def _random_layers(config: PreTrainedConfig, device: torch.device | str) -> PreTrainedModel:
    """A float32 model of the first layer of each kind."""
    every: Any = decoder_layers(empty_model(config))
    kinds: dict[Any, int] = {}
    for index, call in enumerate(anatomy(config).calls):
        kinds.setdefault((repr(every[index]), call), index)
    model = empty_layers(config, [*kinds.values()])
    generator = torch.Generator(device).manual_seed(0)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            value = torch.randn(parameter.shape, generator=generator, device=device)
            value = value / parameter.shape[-1] ** 0.5 if value.ndim > 1 else 1 + value / 10
            module.register_parameter(name, nn.Parameter(value, requires_grad=False))
    model.tie_weights()
    return model.eval().to(device)  # the rope buffers


def _count_own_heads(attention: nn.Module, size: int) -> None:
    """Tell a module that keeps the number of heads to itself how many are here (OPT's does)."""
    for name in {"num_heads", "num_key_value_heads"} & vars(attention).keys():
        setattr(attention, name, getattr(attention, name) // size)


Made = tuple[nn.Module, dict[str, Part]]


def _by_outputs(linear: nn.Linear, group: Group, pieces: int = 1) -> Made:
    cut = Part(0, group.rank, group.size, pieces)
    parts = {"weight": cut} | ({} if linear.bias is None else {"bias": cut})
    return _cut(linear, parts), parts


def _gathered(linear: nn.Linear, group: Group) -> Made:
    own, parts = _by_outputs(linear, group)
    assert isinstance(own, nn.Linear)
    return SplitOutputs(own, group, linear.out_features), parts


def _by_inputs(linear: nn.Linear, group: Group, *, cut_input: bool = False) -> Made:
    parts = {"weight": Part(1, group.rank, group.size)}
    return SplitInputs(_cut(linear, parts), group, cut_input=cut_input), parts


def _cut(linear: nn.Linear, parts: Mapping[str, Part]) -> nn.Linear:
    cut = copy.copy(linear)  # of its class and with its hooks, but with parameters of its own
    cut._parameters = dict(linear._parameters)
    for name, part in parts.items():
        own = part.of(getattr(linear, name).detach())
        cut._parameters[name] = nn.Parameter(own, requires_grad=getattr(linear, name).requires_grad)
    cut.out_features, cut.in_features = cut.weight.shape
    return cut


def _by_vocabulary(embedding: nn.Embedding, group: Group) -> Made:
    part = Part(0, group.rank, group.size)
    cut = copy.copy(embedding)
    cut._parameters = dict(embedding._parameters)
    cut._parameters["weight"] = nn.Parameter(part.of(embedding.weight.detach()), requires_grad=False)
    cut.num_embeddings, cut.padding_idx = cut.weight.shape[0], None
    return SplitEmbedding(cut, group), {"weight": part}


def _cut_experts(model: nn.Module, name: str, style: str, group: Group) -> dict[str, Part]:
    """Cut the matrices [experts, outputs, inputs] of a mixture, which are one parameter of it."""
    dim, pieces = _EXPERTS[style]
    part = Part(dim, group.rank, group.size, pieces)
    path, _, last = name.rpartition(".")
    whole = model.get_parameter(name)
    own = nn.Parameter(part.of(whole.detach()), requires_grad=whole.requires_grad)
    model.get_submodule(path).register_parameter(last, own)
    return {"": part}


_EXPERTS = {"packed_colwise": (1, 2), "colwise": (1, 1), "rowwise": (2, 1)}  # the dimension, its pieces
_MAKERS: dict[str, Callable[..., Made]] = {
    "colwise": _by_outputs,
    "packed_colwise": lambda linear, group: _by_outputs(linear, group, pieces=2),
    "rowwise": _by_inputs,
    "colwise_gather_output": _gathered,
    "rowwise_split_input": lambda linear, group: _by_inputs(linear, group, cut_input=True),
    "vocabulary": _by_vocabulary,
}
