"""Save a target of any readable format (GGUF, .bin) as safetensors: `python data_prep/convert_target.py target=…`."""

from outrider.commands import script

main = script("convert_target", "outrider.data_prep.targets:convert_target")

if __name__ == "__main__":
    main()
