"""A drafter as a serving engine loads it: an early exit as an ordinary causal LM, a head in another trainer's format.

outrider export checkpoint=runs/eesd engine=llama_cpp out_dir=runs/served
python train/export.py checkpoint=runs/eagle3 target=MODEL engine=vllm out_dir=runs/served
"""

from outrider.commands import entry
from outrider.train.settings.export import ExportConfig


@entry("export", ExportConfig)
def main(config: ExportConfig) -> None:
    # Imported once the config is known to be good: torch and transformers take seconds.
    from outrider.train.exporting import export_drafter

    export_drafter(config)


if __name__ == "__main__":
    main()
