"""Write docs/options.md: every option of every command, from the settings themselves.

python docs/make_options.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from conf import register
from conf.options import markdown
from data_prep.python_docs.settings import PromptsConfig
from data_prep.responses.settings import GenerateConfig
from data_prep.settings import ConvertConfig, FetchConfig, TrigramConfig
from inference.chat.settings import ChatConfig
from inference.evaluate.compare_settings import CompareConfig
from inference.settings import EvaluateConfig
from train.eagle3_settings import Eagle3Config, ExportHeadConfig
from train.pipeline_settings import PipelineConfig
from train.settings import CalibrateConfig, EesdConfig, FinetuneConfig, ShipConfig, ToyTargetConfig

PAGE = Path(__file__).parent / "options.md"
COMMANDS: dict[str, tuple[str, type]] = {
    "evaluate_checkpoint": ("inference/evaluate_checkpoint.py", EvaluateConfig),
    "compare_reports": ("inference/compare_reports.py", CompareConfig),
    "eesd": ("train/eesd.py", EesdConfig),
    "calibrate": ("train/calibrate.py", CalibrateConfig),
    "finetune_drafter": ("train/finetune_drafter.py", FinetuneConfig),
    "eagle3": ("train/eagle3.py", Eagle3Config),
    "build_trigrams": ("data_prep/build_trigrams.py", TrigramConfig),
    "generate_responses": ("data_prep/generate_responses.py", GenerateConfig),
    "write_prompts": ("data_prep/write_prompts.py", PromptsConfig),
    "convert_target": ("data_prep/convert_target.py", ConvertConfig),
    "fetch_target": ("data_prep/fetch_target.py", FetchConfig),
    "toy_target": ("train/toy_target.py", ToyTargetConfig),
    "export_eagle3": ("train/export_eagle3.py", ExportHeadConfig),
    "ship_drafters": ("train/ship_drafters.py", ShipConfig),
    "pipeline": ("train/pipeline.py", PipelineConfig),
    "chat": ("outrider/chat.py", ChatConfig),
}


def page() -> str:
    """What the page should be."""
    for name, (_, schema) in COMMANDS.items():
        register(name, schema)
    return markdown(COMMANDS)


if __name__ == "__main__":
    PAGE.write_text(page())
