"""Records of facts about the files of a large model, such as its fingerprint, which take seconds to compute.

A record is a JSON file in the cache. Its name is a digest of everything that its content depends on.
"""

import hashlib
import json
import zlib
from contextlib import suppress
from pathlib import Path

import torch
import transformers

from outrider.base.errors import UserError
from outrider.base.files import package_version, read_json, write_atomically
from outrider.draft_models.formats.convert import cache_folder, stamp_of
from outrider.draft_models.targets.tensor_files import TensorFiles

SMALLEST = 2**29  # bytes of files that are worth a record
# Of this package's code: a record that other code wrote has another name, and is not read.
_CODE_CRC = zlib.crc32(b"".join(path.read_bytes() for path in sorted(Path(__file__).parents[1].glob("*/*.py"))))


class FileRecord:
    """The record of a fact about the model in `files`. conditions: the fact's name, and what else it depends on.

    Files are identified by path, size and time. A model of less than `SMALLEST` bytes has no record. A model some of
    whose files are not on this machine has none either.
    """

    def __init__(self, files: TensorFiles, *conditions: object):
        self._path: Path | None = None
        paths = files.paths() or []
        if sum(path.stat().st_size for path in paths) >= SMALLEST:
            stamp = stamp_of({path.name: path for path in paths})
            versions = package_version(), _CODE_CRC, torch.__version__, transformers.__version__
            key_text = json.dumps([versions, torch.backends.cpu.get_cpu_capability(), stamp, conditions], default=str)
            self._path = cache_folder() / "records" / hashlib.sha256(key_text.encode()).hexdigest()[:32]

    def read(self) -> object:
        """The content; None without a record."""
        with suppress(UserError):
            return self._path and read_json(self._path, "record", "remove it")
        return None

    def write(self, content: object) -> None:
        """Keep `content`, JSON-able and not None, where the cache can be written."""
        if self._path is not None:
            with suppress(OSError, UserError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self._path, json.dumps(content).encode())
