"""Names that are gone: each is refused, and the error says why."""

import pytest

from conf.options import settings_of
from outrider.errors import UserError
from outrider.words import GONE, did_you_mean


@pytest.mark.parametrize("name", GONE)
def test_the_suggestion_for_a_name_that_is_gone_is_why(name: str) -> None:
    assert GONE[name] in did_you_mean(name, [name[:-1], f"{name}s"])


def test_a_method_that_is_gone_says_why() -> None:
    with pytest.raises(UserError, match=r"small_lm/fused: no such method; fused is gone: one tree .* There are"):
        settings_of("small_lm/fused")
