"""The methods of commands that measure some: those that follow from the given drafters."""

import os
from collections.abc import Sequence

from outrider.commands.composing import value_of
from outrider.inference.settings.kinds import PROMPT_LOOKUP, presets_of


def with_methods(options: Sequence[str], *, fixed: bool = False) -> list[str]:
    """`options` and, if they choose no method, that of every given drafter, or prompt lookup without a drafter.

    fixed: see `presets_of`. Raises `UserError` for a drafter's directory that cannot be read.
    """
    indices = [index for index, option in enumerate(options) if "=" in option and not option.startswith("-")]
    settings = {options[index].partition("=")[0].lstrip("+~"): value_of(options[index]) for index in indices}
    keys = {key.split(".")[0].split("@")[0] for key in settings}
    if keys & {"method", "experiment"}:
        return [*options]
    drafters = {key: os.path.expanduser(value) for key, value in settings.items() if isinstance(value, str)}
    presets = presets_of(drafters, fixed=fixed)
    if not presets and "drafters" in keys:
        return [*options]
    presets = presets or [PROMPT_LOOKUP.name]
    end = indices[-1] + 1 if indices else 0  # Hydra takes no option after a flag and its value
    return [*options[:end], f"method=[{','.join(presets)}]", *options[end:]]
