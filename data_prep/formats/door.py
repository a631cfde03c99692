"""The entry point for formats: the location of any model as safetensors, converted if necessary."""

import os
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from transformers.utils import cached_file, has_file

from data_prep.formats.gguf_file import find_gguf, open_gguf
from data_prep.formats.torch_files import (
    AS_WRITTEN,
    CONFIG_FILE,
    DESCRIPTIONS,
    PICKLES,
    SAFETENSORS,
    TOKENIZER_FILE,
    FolderModel,
    Kind,
    Original,
    is_block_fp8,
)
from outrider.errors import UserError, reason
from outrider.files import is_local, read_mapping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def as_safetensors(source: str, revision: str | None = None, *, weights: bool = True) -> tuple[str, str | None]:
    """(directory or Hub name, revision) from which the model in `source` is read: its own, or those of a conversion.

    A GGUF file, .bin files and fp8 weights are converted once, into a cache (see `data_prep.formats.convert`). Raises
    `UserError` if they cannot be converted. weights: see `as_described`.
    """
    original = find_original(source, revision, weights=weights)
    if original is None:
        return source, revision
    from data_prep.formats.convert import cached  # the conversion is not needed for safetensors

    return str(cached(original, weights=weights)), None


def as_described(source: str, revision: str | None = None) -> tuple[str, str | None]:
    """The same for config, generation config and tokenizer alone: no weights are converted or fetched for them."""
    return as_safetensors(source, revision, weights=False)


def was_quantised(source: str, revision: str | None = None) -> bool:
    """Whether the stored weights of the model in `source` are quantised, and so dequantised by the conversion."""
    original = find_original(source, revision, weights=False)
    return original is not None and original.quantised


def find_original(source: str, revision: str | None = None, *, weights: bool = True) -> Original | None:
    """The model in `source` if it must be converted; None for safetensors, and if there is no model.

    source: a GGUF file, a directory or a Hub name. weights: whether its weights are fetched, too. Raises `UserError`.
    """
    if (gguf := find_gguf(source)) is not None:
        from data_prep.formats.gguf_model import GgufModel

        return GgufModel(source, gguf)
    if not is_local(source):
        return _on_hub(source, revision, weights)
    folder = Path(source)
    kind = _kind(lambda name: os.path.exists(folder / name), folder / CONFIG_FILE)
    return None if kind is None else FolderModel(source, folder, kind)


def tokenizer_alone(source: str) -> "PreTrainedTokenizerBase | None":
    """The tokenizer of a GGUF file, without converting its weights; None for other formats. Raises `UserError`."""
    if (gguf := find_gguf(source)) is None:
        return None
    from data_prep.formats.gguf_tokenizer import gguf_tokenizer

    return gguf_tokenizer(open_gguf(gguf))


def is_as_written(source: str, revision: str | None) -> bool:
    """Whether a conversion wrote the tokenizer in `source`: then it is loaded as written, not by its architecture."""
    file = located(source, revision, TOKENIZER_FILE)
    said = read_mapping(file, "description of a tokenizer", "fetch the model again") if file else {}
    return said.get(AS_WRITTEN) is True


def located(source: str, revision: str | None, file: str, *, fetch: bool = True) -> str | None:
    """The local path of a file of a directory or Hub repository; None if it does not exist or the Hub is not reached.

    fetch: fetch a missing file. Raises `UserError` if the Hub refuses to give it.
    """
    try:
        return cached_file(
            source, file, revision=revision, local_files_only=not fetch, _raise_exceptions_for_missing_entries=False
        )
    except Exception as error:  # any error of the Hub's client
        raise UserError(f"{source}: {file} cannot be fetched ({reason(error)})") from None


def fetched(source: str, revision: str | None, kind: Kind, *, weights: bool = True) -> Path:
    """The local directory of a model whose weights are of `kind`. Raises `UserError` if it cannot be fetched.

    weights: whether they are fetched, too, or only its descriptions.
    """
    from huggingface_hub import snapshot_download

    if is_local(source):
        return Path(source)
    wanted = [*DESCRIPTIONS]
    if weights:
        index = None if _has(source, revision, kind.single) else located(source, revision, kind.index)
        wanted += [kind.single] if index is None else sorted({kind.index, *kind.file_of(Path(index)).values()})
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=wanted))
    except Exception as error:  # any error of the Hub's client
        raise UserError(f"{source}: cannot be fetched ({reason(error)})") from None


@lru_cache
def _on_hub(source: str, revision: str | None, weights: bool) -> FolderModel | None:
    config = located(source, revision, CONFIG_FILE)
    kind = _kind(partial(_has, source, revision), Path(config)) if config is not None else None
    return None if kind is None else FolderModel(source, fetched(source, revision, kind, weights=weights), kind)


def _has(source: str, revision: str | None, file: str) -> bool:
    """Whether a Hub repository has a file; as far as is known on this machine if the Hub's client fails."""
    try:
        return has_file(source, file, revision=revision)
    except Exception:  # any of its errors: a later read reports why the Hub cannot be reached
        return has_file(source, file, revision=revision, local_files_only=True)


def _kind(has: Callable[[str], bool], config: Path) -> Kind | None:
    """The kind of weight files to convert; None if there are plain safetensors or no weights."""
    kind = next((kind for kind in (SAFETENSORS, PICKLES) if has(kind.index) or has(kind.single)), None)
    return kind if kind is PICKLES or is_block_fp8(config) else None
