"""The whole pipeline in one command: a target, its drafters, and one comparison of all of them."""

import re
from collections.abc import Sequence

from outrider.base.words import quote_value
from outrider.commands import config_for, run_script
from outrider.train.settings.pipeline import REMOVED, PipelineConfig

# steps.NAME.KEY=VALUE, or ~steps.NAME.KEY; before it + or ++, as Hydra's command lines have them.
_STEP_OPTION = re.compile(r"\A(~?)\+{0,2}steps\.(\w+)\.([^=]+)(?:=(.*))?\Z", re.DOTALL)


def collect_step_options(arguments: Sequence[str]) -> list[str]:
    """`arguments` with steps.NAME.KEY=VALUE and ~steps.NAME.KEY, which takes an option back, as values of `more`, the
    user's options beside the experiment's `steps`; {KEY:VALUE} keeps dots in KEY. outrider/cli.py names it."""

    def as_value(match: re.Match[str]) -> str:
        tilde, step_name, key, value = match.groups()
        return f"++more.{step_name}={{{key}:{quote_value(REMOVED) if tilde else value}}}"

    return [_STEP_OPTION.sub(as_value, argument) for argument in arguments]


def carry_out_steps(config: PipelineConfig) -> None:
    """Plan the steps, check the options of all, then run the steps in turn."""
    from outrider.train.pipeline_run import check_steps, plan_steps, run_pipeline

    steps = plan_steps(config, config_for)
    check_steps(config, steps)
    run_pipeline(config, steps)


if __name__ == "__main__":
    run_script("pipeline")
