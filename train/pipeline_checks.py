"""What the steps of a pipeline will be given, looked at before the first one starts: the last may begin hours later."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data_prep.text.given import read_some
from outrider.errors import UserError
from train.pipeline_settings import HERE, STEPS, PipelineConfig, key_of


def check_steps(config: PipelineConfig, config_for: Callable[[str, Sequence[str]], Any]) -> None:
    """Raise `UserError`, naming the step, for options that a command refuses and for what it cannot read.

    That is a file, a target with its tokenizer, or a record, unless an earlier step leaves it. Steps that are done are
    left out. config_for: the settings of a script, by its options.
    """
    for name in config.to_do:
        if not config.debug and (Path(config.out_dir) / STEPS[name].product).exists():
            continue
        options = config.options(name)
        left = {key_of(option) for option in options if HERE in option}

        def wanted(key: str, left: set[str] = left) -> bool:
            return key not in left

        try:
            settings = config_for(STEPS[name].script, config.placed(options))
            settings.require_places(wanted)
            read_some(settings, wanted)
        except UserError as error:
            raise UserError(f"step {name}, before any has run: {error}") from None
