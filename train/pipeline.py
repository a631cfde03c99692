"""The whole pipeline in one command: a target, its drafters, and one comparison of all of them."""

import re
from collections.abc import Sequence

from outrider.base.words import quoted
from outrider.commands import config_for, entry
from outrider.train.pipeline_settings import BACK, PipelineConfig

_OF_STEP = re.compile(r"\A(~?)\+{0,2}steps\.(\w+)\.([^=]+)(?:=(.*))?\Z", re.DOTALL)


def gathered(words: Sequence[str]) -> list[str]:
    """`words` with steps.NAME.KEY=VALUE and ~steps.NAME.KEY as values of the option `more`."""

    def as_value(match: re.Match[str]) -> str:
        back, name, key, value = match.groups()
        return f"++more.{name}={{{key}:{quoted(BACK) if back else value}}}"

    return [_OF_STEP.sub(as_value, word) for word in words]


@entry("pipeline", PipelineConfig, complete=gathered)
def main(config: PipelineConfig) -> None:
    from outrider.train.pipeline_run import fitted, jobs_of, run_pipeline

    config = fitted(config)
    run_pipeline(config, jobs_of(config, config_for))


if __name__ == "__main__":
    main()
