"""The output of a chat: a terminal with colours and a status line, or plain text."""

import os
import shutil
import unicodedata
from collections.abc import Mapping
from typing import TextIO

DRAFTED, OWN = "drafted", "own"  # the origin of a token: drafted and accepted, or the target's own
_COLOURS = {DRAFTED: "\x1b[32m", OWN: "\x1b[34m"}
_RESET, _DIM = "\x1b[0m", "\x1b[2m"


class Screen:
    """Plain text: the answers, each followed by a line of figures."""

    def __init__(self, out: TextIO):
        self._out = out

    def say(self, text: str, whose: str) -> None:
        """Write a part of an answer; whose: `DRAFTED` or `OWN`."""
        self._write(harmless(text))

    def status(self, text: str) -> None:
        """Show the status line; plain text has none."""

    def note(self, text: str) -> None:
        """Write a line that is not part of the conversation."""
        self._write(f"{text}\n")

    def close(self) -> None:
        """End the output."""

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class Terminal(Screen):
    """Tokens coloured by origin; the last row of the terminal is reserved for the status line."""

    def __init__(self, out: TextIO):
        super().__init__(out)
        self._rows = 0

    def say(self, text: str, whose: str) -> None:
        self._write(f"{_COLOURS[whose]}{harmless(text)}{_RESET}")

    def status(self, text: str) -> None:
        size = shutil.get_terminal_size()
        if size.lines != self._rows:  # on the first call, and after the window was resized
            self._rows = size.lines
            self._write(f"\n\x1b[A\x1b7\x1b[1;{size.lines - 1}r\x1b8")  # scroll only the rows above the last
        self._write(f"\x1b7\x1b[{size.lines};1H\x1b[2K{_DIM}{text[: size.columns - 1]}{_RESET}\x1b8")

    def note(self, text: str) -> None:
        self._write(f"{_DIM}{text}{_RESET}\n")

    def close(self) -> None:
        if self._rows:
            self._write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8")


def open_screen(out: TextIO, environment: Mapping[str, str] = os.environ) -> Screen:
    """A `Terminal` if `out` is one and plain text is not requested (NO_COLOR, TERM=dumb), else a `Screen`."""
    plain = not out.isatty() or environment.get("NO_COLOR") or environment.get("TERM") == "dumb"
    return Screen(out) if plain else Terminal(out)


def harmless(text: str) -> str:
    """`text` with control characters replaced, which could control the terminal; line ends and tabs stay."""
    kept = "\n\t"
    return "".join(c if c in kept or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)
