"""The Python API of Outrider (`load`), and the utilities that all folders use.

The utilities: errors, settings, files, run directories, processes, random streams. Importing this package is quick:
`load` and its dependencies, such as torch, are imported on first use.
"""

from typing import TYPE_CHECKING

from outrider.base.errors import UserError
from outrider.base.large_imports import import_large

if TYPE_CHECKING:
    from outrider.api.model import Model, load
    from outrider.inference.settings.method import preset

__all__ = ["Model", "UserError", "load", "preset"]


def __getattr__(name: str) -> object:  # Python calls this for a name that the module lacks
    if name not in __all__:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    return getattr(import_large("outrider.api.model"), name)  # has all that `__all__` names but `UserError`
