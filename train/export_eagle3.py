"""An EAGLE-3 head in the words of another trainer, for the servers that read those.

python train/export_eagle3.py head=runs/eagle3 target=MODEL dialect=speculators out_dir=runs/served
"""

from conf import entry
from train.settings.eagle3 import ExportHeadConfig


@entry("export_eagle3", ExportHeadConfig)
def main(config: ExportHeadConfig) -> None:
    # Imported once the config is known to be good: torch and transformers take seconds.
    from train.head_export import export_head

    export_head(config)


if __name__ == "__main__":
    main()
