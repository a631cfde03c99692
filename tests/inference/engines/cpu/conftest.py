"""The instruction sets by which bfloat16s are multiplied."""

from collections.abc import Callable, Sequence

import pytest

from outrider.inference.engines.cpu import layout

Choosing = Callable[[Sequence[str], str], None]


@pytest.fixture
def choosing(monkeypatch: pytest.MonkeyPatch) -> Choosing:
    """Sets the ways that this processor has, and the fastest of them."""

    def set_ways(ways: Sequence[str], fastest: str) -> None:
        monkeypatch.setattr(layout, "ways", lambda: ways)
        monkeypatch.setattr(layout, "seconds_of_product", lambda tried, kept: 2.0 - (tried == fastest))

    return set_ways


@pytest.fixture(params=["floats", "pairs", "amx"])
def way(request: pytest.FixtureRequest, choosing: Choosing) -> str:
    """The way that is taken for bfloat16s; skips if the processor lacks it."""
    if request.param not in layout.ways():
        pytest.skip("this processor has no such instructions")
    choosing(("floats", request.param), request.param)
    return str(request.param)
