"""The entry point for formats: the location of any model as safetensors, converted if necessary."""

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from transformers.utils import cached_file, has_file

from data_prep.formats.gguf_file import find_gguf, open_gguf
from data_prep.formats.original import AS_WRITTEN, CONFIG_FILE, TOKENIZER_FILE, Original
from data_prep.formats.torch_files import PICKLES, SAFETENSORS, Kind
from data_prep.formats.torch_folder import DESCRIPTIONS, FolderModel, is_block_fp8
from outrider.errors import UserError, reason
from outrider.files import is_local, read_mapping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def as_safetensors(source: str, revision: str | None = None) -> tuple[str, str | None]:
    """(directory or Hub name, revision) from which the model in `source` is read: its own, or those of a conversion.

    A GGUF file, .bin files and fp8 weights are converted once, into a cache (see `data_prep.formats.cache`). Raises
    `UserError` if they cannot be converted.
    """
    original = find_original(source, revision)
    if original is None:
        return source, revision
    from data_prep.formats.cache import cached  # the conversion is not needed for safetensors

    return str(cached(original)), None


def was_quantised(source: str, revision: str | None = None) -> bool:
    """Whether the stored weights of the model in `source` are quantised, and so dequantised by the conversion."""
    original = find_original(source, revision)
    return original is not None and original.quantised


def find_original(source: str, revision: str | None = None) -> Original | None:
    """The model in `source` if it must be converted; None for safetensors, and if there is no model.

    source: a GGUF file, a directory or a Hub name; a conversion fetches all its files. Raises `UserError`.
    """
    if (gguf := find_gguf(source)) is not None:
        from data_prep.formats.gguf_model import GgufModel

        return GgufModel(source, gguf)
    if not is_local(source):
        return _on_hub(source, revision)
    folder = Path(source)
    kind = _kind(lambda name: (folder / name).exists(), folder / CONFIG_FILE)
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


def located(source: str, revision: str | None, file: str) -> str | None:
    """The local path of a file of a directory or Hub repository, fetched if necessary; None if it does not exist."""
    return cached_file(
        source,
        file,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


def fetched(source: str, revision: str | None, kind: Kind) -> Path:
    """The local directory of a model whose weights are of `kind`. Raises `UserError` if it cannot be fetched."""
    from huggingface_hub import snapshot_download

    if is_local(source):
        return Path(source)
    index = located(source, revision, kind.index)
    weights = {kind.single} if index is None else {kind.index, *kind.file_of(Path(index)).values()}
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=[*DESCRIPTIONS, *sorted(weights)]))
    except Exception as error:  # any error of the Hub's client
        raise UserError(f"{source}: cannot be fetched ({reason(error)})") from None


@lru_cache
def _on_hub(source: str, revision: str | None) -> FolderModel | None:
    config, kind = located(source, revision, CONFIG_FILE), None
    if config is not None:
        with suppress(OSError):  # a later read reports why the Hub cannot be reached
            kind = _kind(partial(has_file, source, revision=revision), Path(config))
    return None if kind is None else FolderModel(source, fetched(source, revision, kind), kind)


def _kind(has: Callable[[str], bool], config: Path) -> Kind | None:
    """The kind of weight files to convert; None if there are plain safetensors or no weights."""
    kind = next((kind for kind in (SAFETENSORS, PICKLES) if has(kind.index) or has(kind.single)), None)
    return kind if kind is PICKLES or is_block_fp8(config) else None
