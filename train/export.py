"""A drafter as serving engines load it: an early exit as an ordinary causal LM, a head in another trainer's format.

outrider export checkpoint=runs/eesd out_dir=runs/served
python train/export.py checkpoint=runs/eagle3 target=MODEL dialect=speculators out_dir=runs/served
"""

from conf import entry
from train.settings.export import ExportConfig


@entry("export", ExportConfig)
def main(config: ExportConfig) -> None:
    # Imported once the config is known to be good: torch and transformers take seconds.
    from train.exporting import export_drafter

    export_drafter(config)


if __name__ == "__main__":
    main()
