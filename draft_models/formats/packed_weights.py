"""Weights stored as integers of 4 or 8 bits in words of 32, with a scale for each group of inputs.

A weight is scale · (code − zero). GPTQ: AutoGPTQ's qlinear modules (zeros are stored less 1 unless "gptq_v2"). AWQ: the
"gemm" version of AutoAWQ. compressed-tensors: its "pack-quantized" format, whose codes are shifted to begin at 0.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from outrider.base.errors import UserError

if TYPE_CHECKING:
    from outrider.draft_models.formats.gguf_codes import CodedRows
    from outrider.draft_models.formats.stored_tensors import Stored

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the code of each of eight outputs is in a word


class Packing(NamedTuple):
    """How weights are packed. method: the name in config.json; from_one: whether zeros are stored less 1.

    weight, scale, zero, group_of: the suffixes of a layer's tensors; the last two may be missing.
    """

    method: str
    bits: int
    from_one: bool
    weight: str
    scale: str
    zero: str
    group_of: str


def packing_of(quantised: Mapping[str, object]) -> Packing | None:
    """The packing that a `quantization_config` describes; None if it is none that is read here."""
    method, bits = quantised.get("quant_method"), quantised.get("bits")
    if method == "compressed-tensors":
        bits = _bits(quantised.get("config_groups"))
    if not isinstance(bits, int) or bits not in (4, 8):
        return None
    if method == "compressed-tensors" and quantised.get("format") == "pack-quantized":
        return Packing(method, bits, False, ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx")
    gemm = str(quantised.get("version", "gemm")).lower() == "gemm"
    if method == "gptq" or (method == "awq" and bits == 4 and gemm):
        from_one = method == "gptq" and quantised.get("checkpoint_format", "gptq") != "gptq_v2"
        return Packing(method, bits, from_one, ".qweight", ".scales", ".qzeros", ".g_idx")
    return None


def _bits(groups: object) -> object:
    """The bits of the integer weights of `config_groups`; None if they differ, or some are no integers."""
    parts = [*groups.values()] if isinstance(groups, dict) else []
    weights = [part.get("weights") if isinstance(part, dict) else None for part in parts]
    ints = [kind.get("num_bits") for kind in weights if isinstance(kind, dict) and kind.get("type", "int") == "int"]
    return ints[0] if ints and ints == ints[:1] * len(parts) else None


class PackedLayer(NamedTuple):
    """A layer's tensors by their suffixes. name: the layer's, after that of the model."""

    packing: Packing
    parts: "Mapping[str, Stored]"
    name: str

    @property
    def shape(self) -> list[int]:
        """[out, in] of its weight."""
        (rows, columns), many = self.parts[self.packing.weight].shape, 32 // self.packing.bits
        if self.packing.method == "gptq":
            return [columns, rows * many]
        return [columns * many, rows] if self.packing.method == "awq" else [rows, columns * many]

    def read(self) -> Tensor:
        """Its weight, float32 [out, in]. Raises `UserError`."""
        codes, zeros, scales, group = self._parts()
        return (codes - zeros[:, group]).float() * scales[:, group]

    def codes(self) -> "CodedRows | None":
        """Its rows in blocks of `CODE_KINDS`; None if a group's inputs are apart, or a scale is no float16."""
        from outrider.draft_models.formats.gguf_codes import CodedRows  # compiles: only where it is used

        codes, zeros, scales, group = self._parts()
        inputs, size = codes.shape[1], codes.shape[1] // scales.shape[1]
        several = 128 if self.packing.bits == 4 and size % 128 == 0 else 32
        if size % several or not torch.equal(scales.half().float(), scales):
            return None
        if not torch.equal(group, torch.arange(inputs) // size):
            return None
        numbers = torch.stack([scales, zeros.float()], -1).half().repeat_interleave(size // several, 1)
        blocks = codes.to(torch.uint8).unflatten(1, (-1, several))
        if self.packing.bits == 4:
            blocks = blocks[..., : several // 2] | blocks[..., several // 2 :] << 4
        kind = f"int{self.packing.bits}" + (" by 128" if several == 128 else "")
        return CodedRows(kind, torch.cat([numbers.view(torch.uint8), blocks], -1).flatten(1).numpy())

    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(codes [out, in], zeros and float32 scales [out, groups], the group of each input [in])."""
        packing, tensors = self.packing, {suffix: stored.read() for suffix, stored in self.parts.items()}
        packed, scales, zeros = tensors[packing.weight], tensors[packing.scale].float(), tensors.get(packing.zero)
        if packing.method == "compressed-tensors":
            codes = _unpack_words(packed, packing)
            zero = torch.tensor(2 ** (packing.bits - 1)) if zeros is None else _unpack_words(zeros.mT, packing).mT
        else:
            assert zeros is not None  # see `packed_layers`
            codes = _unpack_words(packed.mT, packing) if packing.method == "gptq" else _unpack_words(packed, packing).mT
            scales, zero = scales.mT, _unpack_words(zeros, packing).mT + packing.from_one
        (outputs, inputs), groups = codes.shape, scales.shape[-1]
        if scales.shape != (outputs, groups) or zero.shape not in (scales.shape, ()) or inputs % max(1, groups):
            raise UserError(
                f"{self.name}: scales {[*scales.shape]} and zeros {[*zero.shape]} for a weight {[outputs, inputs]}: "
                "expected one for each output and group of inputs; fetch the model again"
            )
        group = tensors.get(packing.group_of, torch.arange(inputs) // (inputs // groups)).long()
        return codes, zero.expand(scales.shape), scales, group


def packed_layers(packing: Packing, tensors: "Mapping[str, Stored]", source: str) -> dict[str, PackedLayer]:
    """The layers with packed weights among `tensors`, by name. Raises `UserError` for one without scales."""
    layers = {}
    needed = {packing.scale} if packing.method == "compressed-tensors" else {packing.scale, packing.zero}
    for name in [key.removesuffix(packing.weight) for key in tensors if key.endswith(packing.weight)]:
        parts = {suffix: tensors[name + suffix] for suffix in packing[3:] if name + suffix in tensors}
        if needed - parts.keys() or len(parts[packing.weight].shape) != 2:
            raise UserError(f"{source}: {name}: expected packed rows, {' and '.join(sorted(needed))}; fetch it again")
        layers[name] = PackedLayer(packing, parts, f"{source}: {name}")
    return layers


def _unpack_words(packed: Tensor, packing: Packing) -> Tensor:
    """The integers in words of 32 bits [n, m]: [n, m · 32 / bits]."""
    codes = (packed[:, :, None] >> torch.arange(0, 32, packing.bits, dtype=torch.int32)) & (2**packing.bits - 1)
    return (codes[:, :, list(AWQ_ORDER)] if packing.method == "awq" else codes).flatten(1)
