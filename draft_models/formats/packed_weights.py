"""Weights stored as integers of 4 or 8 bits in words of 32 bits, with a scale for each group of inputs.

A weight is scale · (code − zero): the stored integer is its code. Example: a word 0x76543210 has the eight codes 0, 1,
…, 7 of 4 bits. Three methods are read. Of a layer [out, in] with c codes in a word they store these shapes:

                    codes           zeros              scales
GPTQ                [in / c, out]   [groups, out / c]  [groups, out]  AutoGPTQ's; zeros less 1 unless "gptq_v2"
AWQ                 [in, out / c]   [groups, out / c]  [groups, out]  AutoAWQ's "gemm", words in `AWQ_ORDER`
compressed-tensors  [out, in / c]   [out / c, groups]  [out, groups]  its "pack-quantized", codes shifted to begin at 0

`packing_of` reads the method from config.json. `packed_layers` gathers the tensors of each layer, as `Stored` (a tensor
in a file; `read` loads it). A `PackedLayer` is then read as floats (`read`), or as blocks for products (`codes`).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from outrider.base.errors import UserError

if TYPE_CHECKING:
    from outrider.draft_models.formats.gguf_codes import CodedRows
    from outrider.draft_models.formats.stored_tensors import Stored

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the indices in a word of the codes of eight outputs: output 1 has the fifth


class Packing(NamedTuple):
    """How weights are packed.

    weight, scale, zero, group_of: the suffixes of a layer's tensors. A layer may lack the zeros (then each is the
    middle of the codes) and the group of each input [in] (then groups are adjacent inputs).
    """

    method: str  # in config.json
    bits: int  # of a code
    zeros_less_one: bool  # a zero z is stored as z − 1
    weight: str
    scale: str
    zero: str
    group_of: str

    @property
    def suffixes(self) -> tuple[str, ...]:
        return self.weight, self.scale, self.zero, self.group_of


def packing_of(quant_config: Mapping[str, object]) -> Packing | None:
    """The packing that a `quantization_config` describes; None if it is none that is read here."""
    method, bits = quant_config.get("quant_method"), quant_config.get("bits")
    if method == "compressed-tensors":
        bits = _read_bits(quant_config.get("config_groups"))
    if not isinstance(bits, int) or bits not in (4, 8):
        return None
    if method == "compressed-tensors" and quant_config.get("format") == "pack-quantized":
        # False: zeros are stored as they are.
        return Packing(method, bits, False, ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx")
    is_gemm = str(quant_config.get("version", "gemm")).lower() == "gemm"
    if method == "gptq" or (method == "awq" and bits == 4 and is_gemm):
        zeros_less_one = method == "gptq" and quant_config.get("checkpoint_format", "gptq") != "gptq_v2"
        return Packing(method, bits, zeros_less_one, ".qweight", ".scales", ".qzeros", ".g_idx")
    return None


def runs_as_stored(quant_config: Mapping[str, object]) -> bool:
    """Whether a CPU can multiply the integers as they are stored (see `PackedLayer.codes`), by the description."""
    config_groups = quant_config.get("config_groups")
    groups = [*config_groups.values()] if isinstance(config_groups, dict) else [{"weights": quant_config}]
    specs = [spec for group in groups if isinstance(group, dict) and isinstance(spec := group.get("weights"), dict)]
    are_adjacent = not any(spec.get("desc_act") or spec.get("actorder") in ("group", "dynamic") for spec in specs)
    group_sizes = [size for spec in specs if isinstance(size := spec.get("group_size"), int) and size > 0]
    return packing_of(quant_config) is not None and are_adjacent and not any(size % 32 for size in group_sizes)


def _read_bits(config_groups: object) -> object:
    """The bits of the integer weights of `config_groups`; None if they differ, or some are no integers."""
    groups = [*config_groups.values()] if isinstance(config_groups, dict) else []
    specs = [group.get("weights") if isinstance(group, dict) else None for group in groups]
    bit_widths = [spec.get("num_bits") for spec in specs if isinstance(spec, dict) and spec.get("type", "int") == "int"]
    return bit_widths[0] if bit_widths and bit_widths == bit_widths[:1] * len(groups) else None


class PackedLayer(NamedTuple):
    """A layer's tensors by their suffixes. name: the layer's, after that of the model."""

    packing: Packing
    parts: "Mapping[str, Stored]"
    name: str

    @property
    def shape(self) -> list[int]:
        """[out, in] of its weight."""
        (rows, columns), codes_per_word = self.parts[self.packing.weight].shape, 32 // self.packing.bits
        if self.packing.method == "gptq":
            return [columns, rows * codes_per_word]
        return [columns * codes_per_word, rows] if self.packing.method == "awq" else [rows, columns * codes_per_word]

    def read(self) -> Tensor:
        """Its weight, float32 [out, in]. Raises `UserError`."""
        codes, zeros, scales, group_ids = self._unpack()
        return ((codes - zeros[:, group_ids]).float() * scales[:, group_ids]).contiguous()  # AWQ stores it transposed

    def codes(self) -> "CodedRows | None":
        """Its rows in blocks of integers; None if a group's inputs are not adjacent, or a scale is no float16.

        A group of 32 · n or (with 4 bits) 128 · n inputs is n blocks with the same scale and zero. A block is a float16
        scale, a float16 zero, and the codes. Of 4 bits, byte i has code i and, in its upper bits, code i + size / 2.
        """
        from outrider.draft_models.formats.gguf_codes import CodedRows  # compiles: only where it is used

        codes, zeros, scales, group_ids = self._unpack()
        input_count, group_size = codes.shape[1], codes.shape[1] // scales.shape[1]
        block_size = 128 if self.packing.bits == 4 and group_size % 128 == 0 else 32
        if group_size % block_size or not torch.equal(scales.half().float(), scales):
            return None
        if not torch.equal(group_ids, torch.arange(input_count) // group_size):
            return None
        factors = torch.stack([scales, zeros.float()], -1).half()  # [out, groups, 2]
        factors = factors.repeat_interleave(group_size // block_size, 1)  # [out, blocks, 2]
        blocks = codes.to(torch.uint8).unflatten(1, (-1, block_size))  # [out, blocks, codes]
        if self.packing.bits == 4:
            blocks = blocks[..., : block_size // 2] | blocks[..., block_size // 2 :] << 4
        kind_name = f"int{self.packing.bits}" + (" by 128" if block_size == 128 else "")
        return CodedRows(kind_name, torch.cat([factors.view(torch.uint8), blocks], -1).flatten(1).numpy())

    def _unpack(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(codes [out, in], zeros and float32 scales [out, groups], the group of each input [in])."""
        packing, tensors = self.packing, {suffix: stored.read() for suffix, stored in self.parts.items()}
        packed, scales, zeros = tensors[packing.weight], tensors[packing.scale].float(), tensors.get(packing.zero)
        if packing.method == "compressed-tensors":
            codes = _unpack_words(packed, packing)
            zero = torch.tensor(2 ** (packing.bits - 1)) if zeros is None else _unpack_words(zeros.mT, packing).mT
        else:
            assert zeros is not None  # `packed_layers` refuses such a layer
            codes = _unpack_words(packed.mT, packing) if packing.method == "gptq" else _unpack_words(packed, packing).mT
            scales, zero = scales.mT, _unpack_words(zeros, packing).mT + packing.zeros_less_one
        (out_dim, in_dim), n_groups = codes.shape, scales.shape[-1]
        if scales.shape != (out_dim, n_groups) or zero.shape not in (scales.shape, ()) or in_dim % max(1, n_groups):
            raise UserError(
                f"{self.name}: scales {[*scales.shape]} and zeros {[*zero.shape]} for a weight {[out_dim, in_dim]}: "
                "expected one for each output and group of inputs; fetch the model again"
            )
        group_ids = tensors.get(packing.group_of, torch.arange(in_dim) // (in_dim // n_groups)).long()
        return codes, zero.expand(scales.shape), scales, group_ids


def packed_layers(packing: Packing, tensors: "Mapping[str, Stored]", source: str) -> dict[str, PackedLayer]:
    """The layers with packed weights among `tensors`, by name. Raises `UserError` for one without scales."""
    layers = {}
    suffixes = {packing.scale} if packing.method == "compressed-tensors" else {packing.scale, packing.zero}
    for name in [key.removesuffix(packing.weight) for key in tensors if key.endswith(packing.weight)]:
        by_suffix = {suffix: tensors[name + suffix] for suffix in packing.suffixes if name + suffix in tensors}
        if suffixes - by_suffix.keys() or len(by_suffix[packing.weight].shape) != 2:
            raise UserError(f"{source}: {name}: expected packed rows, {' and '.join(sorted(suffixes))}; fetch it again")
        layers[name] = PackedLayer(packing, by_suffix, f"{source}: {name}")
    return layers


def _unpack_words(packed: Tensor, packing: Packing) -> Tensor:
    """The integers in words of 32 bits [n, m]: [n, m · 32 / bits]."""
    codes = (packed[:, :, None] >> torch.arange(0, 32, packing.bits, dtype=torch.int32)) & (2**packing.bits - 1)
    return (codes[:, :, list(AWQ_ORDER)] if packing.method == "awq" else codes).flatten(1)
