"""Commands as they are typed, without a process for each."""

import sys
from collections.abc import Callable
from unittest.mock import patch


def status_of(main: Callable[[], None], *words: str) -> int:
    """The exit status of the command `main` whose name and options are `words`."""
    with patch.object(sys, "argv", [*words]):
        try:
            main()
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0
