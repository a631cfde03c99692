"""The whole pipeline in one command: a target, its drafters, and one comparison of all of them.

python train/pipeline.py experiment=demo               # a laptop's CPU, 12 minutes
python train/pipeline.py experiment=smollm2_demo       # a real chat model and existing drafters, 10 minutes
python train/pipeline.py experiment=auto target=MODEL  # a chat model, drafters of every kind; `outrider auto` chooses
python train/pipeline.py experiment=gpu_validation     # one GPU, 25 minutes
"""

from conf import config_for, entry
from train.pipeline_settings import PipelineConfig


@entry("pipeline", PipelineConfig)
def main(config: PipelineConfig) -> None:
    from train.pipeline_run import check_steps, run_pipeline

    check_steps(config, config_for)
    run_pipeline(config)


if __name__ == "__main__":
    main()
