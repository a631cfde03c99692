"""Save a target of any readable format (GGUF, .bin) as safetensors: `python data_prep/convert_target.py target=…`."""

from outrider.commands import entry
from outrider.data_prep.settings import ConvertConfig


@entry("convert_target", ConvertConfig)
def main(config: ConvertConfig) -> None:
    from outrider.data_prep.targets import convert_target  # heavy, so only once the config is known to be good

    return convert_target(config)


if __name__ == "__main__":
    main()
