"""The name of a model, for people and for a server's clients."""

import re
from contextlib import suppress
from pathlib import Path

from outrider.base.errors import UserError
from outrider.base.files import is_local, read_mapping, write_json
from outrider.base.words import escape_controls
from outrider.draft_models.formats.gguf_file import find_gguf, open_gguf

CONFIG_FILE, FIELD = "config.json", "_name_or_path"
_SNAPSHOT = re.compile(r"models--(.+?)--(.+?)/snapshots/[^/]+$")  # of a Hub repository, in the Hub's cache
_HUB_NAME = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*")  # others are paths on the machine where the model was saved


def model_name(source: str) -> str:
    """The name of the model in `source`, a directory, GGUF file or Hub name. Reads no weights, and never fails.

    It is the Hub's name, that of the Hub's snapshot, a GGUF file's general.name, or `FIELD` of `CONFIG_FILE`. A model
    that states none is called as its file or directory.
    """
    if not is_local(source):
        return source
    path = Path(source).expanduser().absolute()
    snapshot_match = _SNAPSHOT.search(path.as_posix())
    if snapshot_match is not None:
        return f"{snapshot_match[1]}/{snapshot_match[2]}"
    stored_name: object = None
    with suppress(UserError, OSError):
        stored_name = _name_in_files(path)
    name = escape_controls(" ".join(stored_name[:200].split())) if isinstance(stored_name, str) else ""
    return name if re.search(r"\w", name) else path.name.removesuffix(".gguf") or source


def write_name(folder: Path, name: str) -> None:
    """State the name of the model in `folder`, a Hugging Face directory."""
    config = read_mapping(folder / CONFIG_FILE, "description of a model", "make the model again")
    write_json(folder / CONFIG_FILE, config | {FIELD: name})


def _name_in_files(path: Path) -> object:
    if (gguf_path := find_gguf(str(path))) is not None:
        return open_gguf(gguf_path).metadata.get("general.name")
    stated_name = read_mapping(path / CONFIG_FILE, "description of a model", remedy="").get(FIELD)  # no error is shown
    return stated_name if isinstance(stated_name, str) and _HUB_NAME.fullmatch(stated_name) else None
