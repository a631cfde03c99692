"""The whole pipeline in one command: a target, its drafters, and one comparison of all of them."""

import re
from collections.abc import Sequence

from outrider.base.words import quoted
from outrider.commands import config_for, entry
from outrider.train.pipeline_settings import BACK, PipelineConfig

_GIVEN = re.compile(r"\+{0,2}steps\.(\w+)\.([^=]+)=(.*)", re.DOTALL)
_TAKEN_BACK = re.compile(r"~steps\.(\w+)\.([^=]+)")


def gathered(words: Sequence[str]) -> list[str]:
    """`words` with steps.NAME.KEY=VALUE and ~steps.NAME.KEY as values of the option `more`."""
    found: list[str] = []
    for word in words:
        if given := _GIVEN.fullmatch(word):
            word = f"++more.{given[1]}={{{given[2]}:{given[3]}}}"
        elif taken := _TAKEN_BACK.fullmatch(word):
            word = f"++more.{taken[1]}={{{taken[2]}:{quoted(BACK)}}}"
        found.append(word)
    return found


@entry("pipeline", PipelineConfig, complete=gathered)
def main(config: PipelineConfig) -> None:
    from outrider.train.pipeline_run import fitted, jobs_of, run_pipeline

    config = fitted(config)
    run_pipeline(config, jobs_of(config, config_for))


if __name__ == "__main__":
    main()
