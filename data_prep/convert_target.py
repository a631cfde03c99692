"""Save a target of any readable format (GGUF, .bin) as safetensors: `python data_prep/convert_target.py target=…`."""

if __name__ == "__main__":
    from outrider.commands import run_script

    run_script("convert_target")
