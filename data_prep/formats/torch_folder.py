"""A model in a Hugging Face directory: safetensors or .bin files; fp8 weights are dequantised."""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from data_prep.formats.original import CONFIG_FILE, HEAD, Stored
from data_prep.formats.torch_files import PICKLES, Kind
from outrider.errors import UserError
from outrider.files import read_mapping, write_json

SCALES = "_scale_inv"  # suffix to the name of an fp8 weight: the factors of its blocks
# The files next to the weights that describe a model and its tokenizer.
DESCRIPTIONS = (
    CONFIG_FILE, "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*",
    "merges.txt", "chat_template*", "*.model", "*.tiktoken",
)  # fmt: skip


@dataclass(frozen=True)
class FolderModel:
    """The model in `folder`, whose weights are files of `kind`; `source` is its name."""

    source: str
    folder: Path
    kind: Kind

    @property
    def files(self) -> Mapping[str, Path]:
        """The files of its weights and its descriptions."""
        names = [*(path.name for path in self._descriptions()), *self._by_file()]
        return {name: self.folder / name for name in names if (self.folder / name).exists()}

    @property
    def quantised(self) -> bool:
        """Whether its weights are fp8 with one scale per block, according to config.json."""
        return is_block_fp8(self.folder / CONFIG_FILE)

    def tensors(self) -> Mapping[str, Stored]:
        """Its tensors by name; fp8 tensors become float32 when read. Raises `UserError`."""
        found: dict[str, Stored] = {}
        by_file = self._by_file()
        for file, names in by_file.items():
            path = str(self.folder / file)
            if not Path(path).exists():
                raise self.kind.missing(self.source, file)
            held = self.kind.open_file(path)
            expected = [name for name in names or held if name in held or name != HEAD or self.kind is not PICKLES]
            elsewhere = [name for other, inside in by_file.items() if other != file for name in inside]
            self.kind.require(path, held, expected, elsewhere)  # an index may list a tied head as a separate tensor
            found |= {name: held[name] for name in expected}
        scaled = {name for name in found if name + SCALES in found}
        block = self._block() if scaled else (0, 0)
        for name in scaled:
            weight, scales = found[name], found[name + SCALES]
            read = partial(_unscaled, weight, scales, block, f"{self.source}: {name}")
            found[name] = Stored(torch.float32, weight.shape, read)
        return {name: one for name, one in found.items() if not name.endswith(SCALES)}

    def describe(self, folder: Path) -> None:
        """Copy everything except the weights, and remove quantization_config from config.json if they are fp8."""
        for path in self._descriptions():
            shutil.copyfile(path, folder / path.name)
        if self.quantised:
            described = read_mapping(self.folder / CONFIG_FILE, "description of a model", "fetch the model again")
            del described["quantization_config"]
            write_json(folder / CONFIG_FILE, described)

    def _descriptions(self) -> list[Path]:
        files = [path for path in self.folder.iterdir() if path.is_file()]
        return sorted(path for path in files if any(fnmatch(path.name, one) for one in DESCRIPTIONS))

    def _by_file(self) -> dict[str, list[str]]:
        """The tensors in each file according to the index; an empty list for a single file, which goes before one."""
        index = self.folder / self.kind.index
        if (self.folder / self.kind.single).exists() or not index.exists():
            return {self.kind.single: []}
        found: dict[str, list[str]] = {}
        for name, file in self.kind.file_of(index).items():
            found.setdefault(file, []).append(name)
        return found

    def _block(self) -> tuple[int, int]:
        """Rows and columns per scale, from config.json. Raises `UserError`."""
        quantised = _quantisation(self.folder / CONFIG_FILE)
        block = quantised.get("weight_block_size")
        if not isinstance(block, list) or len(block) != 2 or not all(isinstance(one, int) and one > 0 for one in block):
            raise UserError(
                f"{self.source}: has scales of fp8 weights, but quantization_config.weight_block_size={block!r} in "
                "config.json: expected rows and columns; give the model in another format"
            )
        return block[0], block[1]


def require_plain(source: str, names: Iterable[str]) -> None:
    """Raise `UserError` if `names` of unconverted tensors contain scales of fp8 weights."""
    if any(name.endswith(SCALES) for name in names):
        raise UserError(f"{source}: has scales of fp8 weights, of which its config.json does not speak; fetch it again")


def is_block_fp8(config: Path) -> bool:
    """Whether a config.json declares fp8 weights with one scale per block."""
    try:
        if b"fp8" not in config.read_bytes():
            return False
        quantised = _quantisation(config)
    except (OSError, ValueError, UserError):  # a later read reports what is wrong with it
        return False
    return quantised.get("quant_method") == "fp8" and bool(quantised.get("weight_block_size"))


def _quantisation(config: Path) -> Mapping[str, object]:
    described = read_mapping(config, "description of a model", "fetch the model again") if config.exists() else {}
    quantised = described.get("quantization_config")
    return quantised if isinstance(quantised, dict) else {}


def _unscaled(weight: Stored, scales: Stored, block: tuple[int, int], what: str) -> Tensor:
    return unscaled(weight.read(), scales.read(), block, what)


def unscaled(weight: Tensor, scales: Tensor, block: tuple[int, int], what: str) -> Tensor:
    """weight [n, m] times the scale of each of its blocks, in float32.

    scales: [⌈n / block rows⌉, ⌈m / block columns⌉]; the last blocks may be partial. Raises `UserError` naming `what`.
    """
    expected = [-(-size // one) for size, one in zip(weight.shape, block, strict=True)]
    if list(scales.shape) != expected:
        raise UserError(f"{what}: scales of shape {list(scales.shape)}: expected {expected}; fetch the model again")
    rows = scales.float().repeat_interleave(block[0], 0)[: weight.shape[0]]
    return weight.float() * rows.repeat_interleave(block[1], 1)[:, : weight.shape[1]]
