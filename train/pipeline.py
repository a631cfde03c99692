"""The whole pipeline in one command: a target, its drafters, and one comparison of all of them."""

from outrider.commands import config_for, entry
from outrider.train.pipeline_settings import PipelineConfig


@entry("pipeline", PipelineConfig)
def main(config: PipelineConfig) -> None:
    from outrider.train.pipeline_run import check_steps, fitted, run_pipeline

    config = fitted(config)
    run_pipeline(config, more=check_steps(config, config_for))


if __name__ == "__main__":
    main()
