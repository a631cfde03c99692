"""What is refused: a call, and the words that its error must have."""

from collections.abc import Callable
from typing import Any

import pytest

from outrider.base.errors import UserError


def refusal(words: str, call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """The text of the UserError that `call(*arguments, **options)` ends with; the pattern `words` occurs in it."""
    with pytest.raises(UserError, match=words) as raised:
        call(*arguments, **options)
    return str(raised.value)
