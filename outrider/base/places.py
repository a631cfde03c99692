"""`Place`: the type of an option that is the path of a file or a directory."""

import os
from dataclasses import dataclass
from pathlib import Path

from outrider.base.errors import UserError
from outrider.base.files import is_local
from outrider.base.settings import Named


@dataclass(frozen=True)
class Place(Named):
    """The path of a file or directory that must exist (see `Settings.require_places`).

    hub: whether a Hub name is accepted too, which is not checked. besides: words that are accepted too. holds: patterns
    of file names, one of which a directory has; none: it must be a file. begins: the possible first bytes of a file;
    none: it must be a directory.
    """

    hub: bool = False
    besides: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    begins: tuple[bytes, ...] = ()

    def require(self, key: str, value: str) -> None:
        """Raise `UserError` if `value` is a local path that does not exist, or of something else at first sight."""
        elsewhere = value in self.besides or (self.hub and not is_local(value))
        if not elsewhere and (fault := self._fault(value)):
            raise UserError(f"{key}={value}: {fault}; give {self.what}")

    def _fault(self, path: str) -> str:
        """What is wrong with a path; nothing is read of a pipe."""
        if os.path.isdir(path):
            if any(any(Path(path).glob(pattern)) for pattern in self.holds):
                return ""
            return f"a directory without {' or '.join(self.holds)}" if self.holds else "a directory"
        if not os.path.isfile(path):
            return "" if os.path.exists(path) else "no such directory or file"
        with open(path, "rb") as file:
            start = file.read(4)
        return "an empty file" if not start else "" if start.startswith(self.begins) else "another kind of file"
