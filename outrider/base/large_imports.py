"""Imports of large libraries."""

import gc
from importlib import import_module
from types import ModuleType

from outrider.base.limits import limit_threads


def import_large(name: str) -> ModuleType:
    """The module `name`, imported while Python's garbage collector rests.

    torch and transformers make a million objects that stay. The collector would look through them again and again: a
    fifth of the time of an import, and seconds of loading a model. So `freeze` lets it pass over them afterwards too.
    """
    limit_threads()  # before torch is imported, which reads the limit then
    gc_was_enabled = gc.isenabled()
    gc.collect()  # garbage would stay, too
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        if gc_was_enabled:
            gc.enable()
